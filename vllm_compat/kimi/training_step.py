"""One forward pass of EAGLE-3 training: unroll the chains with the text's tokens, sum every step's loss."""

from __future__ import annotations

import torch
from torch import nn

from .dataset import Batch
from .draft import Draft
from .losses import TeacherHead, step_stats
from .target import TargetHead
from .ttt import Chains
from .vocab import VocabMap

# Columns of the statistics tensor, sums over positions: chain positions, positions with a loss, KL, accepted
# probability mass, argmax agreement with the target, chains whose every token so far is the text's.
POSITIONS, SCORED, KL, MASS, AGREE, PREFIX = range(6)


class TrainingStep(nn.Module):
    """The head and the frozen teacher; `forward(batch)` -> KL sums with gradient [K], statistics [K, 6].

    Training-time test (EAGLE-3): step k sees the head's own stream of step k-1 but the *text's* token, as in
    all six public trainers. While the head drafts what the text says, that is also what happens when it is
    served.
    """

    draft_ids: torch.Tensor

    def __init__(self, draft: Draft, target: TargetHead, vocab: VocabMap, steps: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.draft = draft
        self.steps = steps
        self.teacher = TeacherHead(target, vocab, dtype)
        self.register_buffer("draft_ids", vocab.draft_ids, persistent=False)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        draft, ids = self.draft, batch.token_ids
        teacher = self.teacher(batch.finals)
        chains = Chains(draft, ids, batch.features, batch.rows, batch.starts)
        alive = torch.arange(len(batch.rows), device=ids.device)
        prefix = torch.ones_like(alive, dtype=torch.bool)
        sums, statistics = [], []
        for k in range(self.steps):
            if k:
                kept = (batch.depth[alive] > k).nonzero().flatten()
                chains.keep(kept)
                alive, prefix = alive[kept], prefix[kept]
                chains.advance(ids[chains.rows, chains.starts + 1 + k])
            text = self.draft_ids[ids[chains.rows, chains.starts + 2 + k]]
            stats = step_stats(draft.lm_head, draft.norm(chains.hidden), teacher, batch.teacher[alive, k], text)
            prefix = prefix & stats.hits
            sums.append(stats.kl_sum)
            with torch.no_grad():
                row = (
                    torch.tensor(len(alive)),
                    stats.scored,
                    stats.kl_sum,
                    stats.mass,
                    stats.agree,
                    prefix.sum(),
                )
                statistics.append(torch.stack([value.detach().double().to(ids.device) for value in row]))
        return torch.stack(sums), torch.stack(statistics)


def weighted_loss(kl_sums: torch.Tensor, scored: torch.Tensor, decay: float) -> torch.Tensor:
    """sum_k decay^k * mean KL of step k / sum_k decay^k, the mean over the positions that carry a loss.

    `kl_sums` [K], `scored` [K] (of all ranks together under torchrun). Dividing by the weights' sum keeps the
    value comparable between settings of ttt_steps.
    """
    weights = decay ** torch.arange(len(kl_sums), device=kl_sums.device, dtype=torch.float32)
    return (weights * kl_sums / scored.clamp(min=1).to(kl_sums.dtype)).sum() / weights.sum()


def summarise(statistics: torch.Tensor, decay: float) -> dict[str, object]:
    """JSON-able numbers from summed statistics [K, 6].

    loss: as `weighted_loss`, over everything summed. kl, acceptance (probability mass), agreement: one number
    per step.
    in_vocab: share of positions whose target token can be drafted. acceptance_length: 1 + mean number of
    leading steps that draft the text's tokens, over all chains.
    """
    rows = statistics.double().cpu()
    positions, scored = rows[:, POSITIONS].clamp(min=1), rows[:, SCORED]
    kl = rows[:, KL] / scored.clamp(min=1)
    return {
        "loss": float(weighted_loss(rows[:, KL], scored, decay)),
        "kl": kl.tolist(),
        "acceptance": (rows[:, MASS] / positions).tolist(),
        "agreement": (rows[:, AGREE] / positions).tolist(),
        "in_vocab": float(scored.sum() / positions.sum()),
        "acceptance_length": float(1 + rows[:, PREFIX].sum() / positions[0]),
    }

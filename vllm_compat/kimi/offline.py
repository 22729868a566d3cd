"""Acceptance length of a head without an engine: replay greedy speculative decoding over stored rows.

Definition. *Acceptance length = tokens emitted per target step, the bonus token included, with k drafts.* The
rows must be the target's own greedy text, so that the target accepts a draft exactly while it equals the row.

At a position t whose token x_{t+1} the target has emitted, the head drafts k tokens from the target's aux
states up to t, with its own stream and its own tokens after the first (`ttt.Chains`, the arithmetic of vLLM's
proposer). With `a` of them right the target emits a + 1 tokens and the replay goes on at t + a + 1, as
serving does. The answer's first token comes
from the prefill and is no step; drafts beyond the end of the row are not counted.

What can differ from a served measurement: bfloat16 ties, rows cut by max_tokens, and vLLM's counters going on
behind `<|im_end|>` within the last step of an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from vllm_compat.errors import DataError

from .dataset import BatchOrder, Samples, collate
from .draft import Draft
from .target import TargetHead
from .ttt import Chains
from .vocab import VocabMap

if TYPE_CHECKING:
    from .config import Config
    from .store import Store


@torch.no_grad()
def estimate_acceptance(
    draft: Draft, vocab: VocabMap, samples: Samples, num_draft_tokens: int, batch_tokens: int = 8192
) -> dict[str, Any]:
    """Replay all rows of `samples` on the device and in the dtype of `draft`.

    Returns:
        acceptance_length: 1 + accepted / steps, as vLLM's own counters give it (every step emits a bonus
            token).
        tokens_per_step: emitted tokens / steps; lower, because a row's last step may end without room for the
            bonus.
        per_position: list of k, share of steps in which draft 1, 2, … was accepted.
        all_positions_length: 1 + mean accepted over *every* answer position instead of those that serving
            visits.
        steps, drafted, accepted, rows: counts.

    DataError when no row has a token to draft.
    """
    accepted_by_row: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    for rows in BatchOrder(tuple(samples.lengths), batch_tokens, seed=0).epoch(0):
        accepted_by_row += _accepted(draft, vocab, [samples[i] for i in rows], num_draft_tokens)
    steps = accepted = emitted = 0
    reached = torch.zeros(num_draft_tokens, dtype=torch.int64)
    everywhere = []
    for starts, counts, remaining in accepted_by_row:
        everywhere.append(counts)
        position = {int(t): i for i, t in enumerate(starts)}
        t = int(starts[0])
        while t in position:
            count, left = int(counts[position[t]]), int(remaining[position[t]])
            steps, accepted, emitted = steps + 1, accepted + count, emitted + min(count + 1, left)
            reached[:count] += 1
            t += count + 1
    if not steps:
        raise DataError(
            asked="estimating the acceptance length",
            needed="rows with at least two answer tokens",
            found=f"none in {len(samples)} rows",
        )
    return {
        "acceptance_length": 1 + accepted / steps,
        "tokens_per_step": emitted / steps,
        "per_position": (reached / steps).tolist(),
        "all_positions_length": 1 + float(torch.cat(everywhere).double().mean()),
        "num_draft_tokens": num_draft_tokens,
        "steps": steps,
        "drafted": steps * num_draft_tokens,
        "accepted": accepted,
        "rows": len(accepted_by_row),
    }


def estimate_stage(cfg: Config, sample_ids: Sequence[str] | None = None) -> dict[str, Any]:
    """`estimate_acceptance` of <run>/export over <run>/extract/heldout, or over the rows `sample_ids` of it.

    The weights are the exported ones (rounded to export.dtype), the arithmetic is float32 on the CPU.
    """
    from .export import load_exported
    from .store import Store

    if cfg.train.threads:
        torch.set_num_threads(cfg.train.threads)
    target = TargetHead.load(cfg.target.model)
    draft, vocab = load_exported(cfg.run_dir / "export", target)
    store = Store(cfg.run_dir / "extract" / "heldout")
    samples: Samples = store if sample_ids is None else _Chosen(store, set(sample_ids))
    made: dict[str, Any] = estimate_acceptance(draft, vocab, samples, cfg.evaluate.num_draft_tokens)
    return made


class _Chosen:
    """Some rows of a store."""

    def __init__(self, store: Store, sample_ids: set[str]) -> None:
        self._store = store
        self._places = [i for i, name in enumerate(store.ids) if name in sample_ids]
        if len(self._places) != len(sample_ids):
            raise DataError(
                asked=f"estimating on {len(sample_ids)} held-out rows",
                found=f"{len(self._places)} of them in {store.path}",
                advice="extract the held-out rows again",
            )

    @property
    def lengths(self) -> list[int]:
        return [self._store.lengths[i] for i in self._places]

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> Any:
        return self._store[self._places[index]]


def _accepted(
    draft: Draft, vocab: VocabMap, samples: list[Any], drafts: int
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Per row with chains: starts, accepted drafts, remaining answer tokens (drafts + 1 at most)."""
    batch = collate(samples, drafts + 1).to(draft.fc.weight.device, draft.fc.weight.dtype)
    if len(batch.rows) == 0:
        return []
    target_ids = vocab.target_ids.to(batch.token_ids.device)
    chains = Chains(draft, batch.token_ids, batch.features, batch.rows, batch.starts)
    alive = torch.arange(len(batch.rows), device=target_ids.device)
    accepted = torch.zeros_like(alive)
    for k in range(drafts):
        proposed = target_ids[draft.logits(chains.hidden).argmax(-1)]
        # A chain goes on while it is right and the row has a token to compare with.
        room = batch.depth[alive] > k
        text = batch.token_ids[chains.rows, (chains.starts + 2 + k).clamp(max=batch.token_ids.shape[1] - 1)]
        kept = (room & (proposed == text)).nonzero().flatten()
        alive = alive[kept]
        accepted[alive] += 1
        if k + 1 == drafts or len(alive) == 0:
            break
        chains.keep(kept)
        chains.advance(proposed[kept])
    rows = batch.rows.cpu()
    columns = [column.cpu() for column in (batch.starts, accepted, batch.depth)]
    return [
        (columns[0][rows == i], columns[1][rows == i], columns[2][rows == i])
        for i in range(len(samples))
        if bool((rows == i).any())
    ]

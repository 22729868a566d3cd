"""The loss of a draft step, and what it says about acceptance.

Forward KL from the target to the head over the draft vocabulary: KL(p || q), p = softmax of the target's
logits *renormalised to the draft vocabulary*, q = softmax of the head's. Its gradient is that of soft-target
cross-entropy.

A position whose most likely target token lies outside the draft vocabulary teaches nothing usable (the head
can only be rejected there): it carries no loss, as in EAGLE, SpecForge and TorchSpec. It is not forgotten: it
counts in every acceptance number, with agreement 0. The loss is the mean over the positions that carry it, so
its scale does not depend on how much of a batch is prompt or padding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.utils.checkpoint import checkpoint

from .target import TargetHead
from .vocab import VocabMap

# Logits held at once; more positions go through lm_head in blocks, recomputed in the backward pass.
_MAX_LOGITS = 1 << 26


@dataclass(frozen=True)
class Teacher:
    """The target's answer at P positions.

    logits: float32 [P, Vd] over the draft vocabulary; log_total: float32 [P], log-sum-exp over the *whole*
    vocabulary; in_vocab: bool [P], the target's most likely token can be drafted.
    """

    logits: torch.Tensor
    log_total: torch.Tensor
    in_vocab: torch.Tensor


class TeacherHead(torch.nn.Module):
    """norm + lm_head of the target, frozen, on the device of the training."""

    norm: torch.Tensor
    lm_head: torch.Tensor
    target_ids: torch.Tensor
    t2d: torch.Tensor

    def __init__(self, target: TargetHead, vocab: VocabMap, dtype: torch.dtype) -> None:
        super().__init__()
        self.target = target
        self.register_buffer("norm", target.norm.to(dtype), persistent=False)
        self.register_buffer("lm_head", target.lm_head.to(dtype), persistent=False)
        self.register_buffer("target_ids", vocab.target_ids, persistent=False)
        self.register_buffer("t2d", vocab.t2d, persistent=False)

    @torch.no_grad()
    def forward(self, final_states: torch.Tensor) -> Teacher:
        """States after the last layer before the final norm, [P, H]."""
        head = TargetHead(self.target.config, self.lm_head, self.norm, self.lm_head, self.target.eps)
        block = max(1, _MAX_LOGITS // len(self.lm_head))
        logits, totals, inside = [], [], []
        for states in final_states.split(block):
            whole = head.logits(states)
            logits.append(whole[:, self.target_ids])
            totals.append(whole.logsumexp(-1))
            inside.append(self.t2d[whole.argmax(-1)])
        return Teacher(torch.cat(logits), torch.cat(totals), torch.cat(inside))


@dataclass(frozen=True)
class StepStats:
    """Sums over the positions of one draft step. `kl_sum` carries the gradient, the others do not.

    scored: positions with a loss; mass: sum of sum_v min(p_full(v), q(v)), the probability that a token
    *sampled* from the head is accepted; agree: the head's most likely token is the target's; hits: bool [m],
    the head's most likely token is the one in the text.
    """

    kl_sum: torch.Tensor
    scored: torch.Tensor
    mass: torch.Tensor
    agree: torch.Tensor
    hits: torch.Tensor


def step_stats(
    head: torch.nn.Module, normed: torch.Tensor, teacher: Teacher, index: torch.Tensor, text_ids: torch.Tensor
) -> StepStats:
    """Loss and acceptance of one step.

    Args:
        head: The draft's lm_head, [.., H] -> [.., Vd].
        normed: [m, H], after the draft's final norm.
        teacher: The target's answers.
        index: int64 [m], each position's row of `teacher`.
        text_ids: int64 [m], the text's own token as a *draft* id (-1: cannot be drafted).
    """
    block = max(1, _MAX_LOGITS // teacher.logits.shape[1])
    if len(normed) <= block:
        return _block_stats(head, normed, teacher, index, text_ids)
    parts = []
    for i in range(0, len(normed), block):
        cut = slice(i, i + block)
        parts.append(
            checkpoint(_block_stats, head, normed[cut], teacher, index[cut], text_ids[cut], use_reentrant=False)
        )

    def total(name: str) -> torch.Tensor:
        return torch.stack([getattr(part, name) for part in parts]).sum(0)

    return StepStats(
        kl_sum=total("kl_sum"),
        scored=total("scored"),
        mass=total("mass"),
        agree=total("agree"),
        hits=torch.cat([part.hits for part in parts]),
    )


def _block_stats(
    head: torch.nn.Module, normed: torch.Tensor, teacher: Teacher, index: torch.Tensor, text_ids: torch.Tensor
) -> StepStats:
    log_q = head(normed).float().log_softmax(-1)
    target_logits, valid = teacher.logits[index], teacher.in_vocab[index]
    log_p = target_logits.log_softmax(-1)
    divergence = (log_p.exp() * (log_p - log_q)).sum(-1)
    with torch.no_grad():
        full = (target_logits - teacher.log_total[index, None]).exp()
        best = log_q.argmax(-1)
        agree = (best == target_logits.argmax(-1)) & valid
        mass = torch.minimum(full, log_q.exp()).sum()
    # where, not a product: a masked position may be infinite, and 0 * inf is NaN.
    kl_sum = torch.where(valid, divergence, 0.0).sum()
    return StepStats(kl_sum, valid.sum(), mass, agree.sum(), best == text_ids)

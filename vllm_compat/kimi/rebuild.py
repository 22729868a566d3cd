"""What stored final states say the next tokens are. Of the target, three tensors are enough: no engine, no vLLM."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from .shards import Sample
from .target import TargetHead

_BLOCK = 1 << 26  # log-probabilities held at once: 256 MiB


@dataclass(frozen=True)
class Predicted:
    """Of n final states: log-probabilities of the tokens asked for [n, k], the likeliest token [n], and its own [n]."""

    asked: torch.Tensor
    best: torch.Tensor
    best_logprob: torch.Tensor


def predict(head: TargetHead, finals: torch.Tensor, asked: torch.Tensor) -> Predicted:
    """Final norm and lm_head of final states [n, H], at token ids `asked`, int64 [n, k]."""
    block = max(1, _BLOCK // len(head.lm_head))
    parts = []
    for states, ids in zip(finals.split(block), asked.split(block), strict=True):
        logprobs = head.logits(states.float()).log_softmax(-1)
        best = logprobs.max(-1)
        parts.append((logprobs.gather(1, ids), best.indices, best.values))
    return Predicted(*(torch.cat(column) for column in zip(*parts, strict=True)))


def kept_positions(sample: Sample) -> torch.Tensor:
    """int64: the tokens of a row that have a next one and whose final state is stored."""
    return sample.hidden_states[:-1, -1].isfinite().all(-1).nonzero().flatten()


@dataclass(frozen=True)
class StoredCheck:
    """How well the stored final states predict the rows' own answers.

    agreement: share of loss tokens that are the likeliest by the state before them. 1 but for rounding where the target
    wrote them at temperature 0. logprob: mean natural log-probability of a loss token.
    """

    rows: int
    loss_tokens: int
    agreement: float
    logprob: float


def check_stored(samples: Iterable[Sample], head: TargetHead) -> StoredCheck:
    """`samples`: some rows of a store. `head`: in float32."""
    rows = tokens = 0
    agree = logprob = 0.0
    for sample in samples:
        rows += 1
        at = kept_positions(sample)
        at = at[sample.loss_mask[at + 1].bool()]
        if len(at) == 0:
            continue
        following = sample.token_ids[at + 1].long()
        found = predict(head, sample.hidden_states[at, -1], following[:, None])
        tokens += len(at)
        agree += float((found.best == following).sum())
        logprob += float(found.asked.sum())
    return StoredCheck(rows, tokens, agree / max(1, tokens), logprob / max(1, tokens))

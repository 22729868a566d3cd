"""Stored samples -> batches of draft chains.

Alignment (positions of one row; x = tokens, g = aux states, f = state after the last layer, m = loss mask): a
chain starts at t when m[t+1] and m[t+2], that is, x_{t+1} was emitted by the target and x_{t+2} is to be
drafted. Those are exactly the positions at which vLLM drafts: the answer's first token is always the target's
own. Step k predicts x_{t+2+k}, its teacher is the target's distribution given x_{<=t+1+k},
softmax(lm_head(norm(f_{t+1+k}))), and a chain ends before the first x_{t+2+k} that carries no loss, so no
step crosses a turn or a row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import count
from typing import Any, NamedTuple, Protocol

import torch

from vllm_compat.errors import DataError


class Sample(Protocol):
    """store.Sample: hidden_states [T, aux + 1, H], boundaries ascending, the final state last."""

    sample_id: str
    token_ids: torch.Tensor
    loss_mask: torch.Tensor
    hidden_states: torch.Tensor


class Samples(Protocol):
    """A random-access collection of samples, as store.Store."""

    @property
    def lengths(self) -> Sequence[int]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


@dataclass(frozen=True)
class Batch:
    """B rows padded to T tokens, M chains over them, P teacher positions.

    token_ids int64 [B, T]; features [B, T, aux * H]; finals [P, H]; rows, starts, depth int64 [M] (depth =
    steps the chain lasts, 1 … K); teacher int64 [M, K] (row of `finals` for step k; 0 beyond the depth).
    """

    sample_ids: tuple[str, ...]
    tokens: int
    token_ids: torch.Tensor
    features: torch.Tensor
    finals: torch.Tensor
    rows: torch.Tensor
    starts: torch.Tensor
    depth: torch.Tensor
    teacher: torch.Tensor

    def to(self, device: torch.device, dtype: torch.dtype) -> Batch:
        """Tensors on `device`; states in `dtype`."""
        moved: dict[str, torch.Tensor] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, torch.Tensor):
                kind = dtype if value.is_floating_point() else None
                moved[field.name] = value.to(device=device, dtype=kind, non_blocking=True)
        return replace(self, **moved)


def chain_starts(loss_mask: torch.Tensor, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Start positions t and depths (1 … steps) of a row's chains, both int64 [m]."""
    mask = loss_mask.bool()
    length = len(mask)
    if length < 3:
        return torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
    starts = (mask[1:-1] & mask[2:]).nonzero().flatten()
    padded = torch.cat((mask, torch.zeros(steps, dtype=torch.bool)))
    ahead = padded[starts[:, None] + 2 + torch.arange(steps)]
    return starts, ahead.long().cumprod(-1).sum(-1)


def collate(samples: Sequence[Sample], steps: int) -> Batch:
    """Pad rows to the longest and list their chains."""
    longest = max(len(sample.token_ids) for sample in samples)
    layers, hidden = samples[0].hidden_states.shape[1:]
    token_ids = torch.zeros(len(samples), longest, dtype=torch.int64)
    features = torch.zeros(len(samples), longest, (layers - 1) * hidden, dtype=samples[0].hidden_states.dtype)
    finals: list[torch.Tensor] = []
    rows, starts, depths, teachers = [], [], [], []
    offset = 0
    for row, sample in enumerate(samples):
        length = len(sample.token_ids)
        token_ids[row, :length] = sample.token_ids
        features[row, :length] = sample.hidden_states[:, :-1].flatten(1)
        start, depth = chain_starts(sample.loss_mask, steps)
        positions = start[:, None] + 1 + torch.arange(steps)
        alive = torch.arange(steps) < depth[:, None]
        wanted, place = positions[alive].unique(return_inverse=True)
        teacher = torch.zeros_like(positions)
        teacher[alive] = place + offset
        finals.append(sample.hidden_states[wanted, -1])
        offset += len(wanted)
        rows.append(torch.full_like(start, row))
        starts.append(start)
        depths.append(depth)
        teachers.append(teacher)
    return Batch(
        sample_ids=tuple(sample.sample_id for sample in samples),
        tokens=sum(len(sample.token_ids) for sample in samples),
        token_ids=token_ids,
        features=features,
        finals=torch.cat(finals),
        rows=torch.cat(rows),
        starts=torch.cat(starts),
        depth=torch.cat(depths),
        teacher=torch.cat(teachers),
    )


class Planned(NamedTuple):
    """A batch to come: its epoch, its place in it, its rows, and whether it is the epoch's last."""

    epoch: int
    position: int
    rows: tuple[int, ...]
    last: bool


@dataclass(frozen=True)
class BatchOrder:
    """Which rows make which batch: a function of (seed, epoch) alone, so that a resumed run goes on exactly.

    Rows are shuffled, cut into windows, sorted by length within a window (little padding), packed up to
    `batch_tokens` padded tokens, and the batches shuffled again. With `world` > 1 rank r takes every world-th
    batch: no two ranks read the same one. The last, incomplete round is filled up from the front, so that all ranks
    take equally many steps; with `fill` off it stays incomplete, and each row is read exactly once.
    """

    lengths: tuple[int, ...]
    batch_tokens: int
    seed: int
    rank: int = 0
    world: int = 1
    window: int = 32
    fill: bool = True

    def epoch(self, epoch: int) -> list[list[int]]:
        """Row indices per batch."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        order = torch.randperm(len(self.lengths), generator=generator).tolist()
        mean = max(1.0, sum(self.lengths) / max(1, len(self.lengths)))
        window = self.window * max(1, math.ceil(self.batch_tokens / mean))
        batches: list[list[int]] = []
        for i in range(0, len(order), window):
            batches.extend(self._pack(sorted(order[i : i + window], key=lambda row: (self.lengths[row], row))))
        batches = [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]
        if self.world > 1 and self.fill:
            batches += [batches[i % len(batches)] for i in range(-len(batches) % self.world)]
        return batches[self.rank :: self.world]

    def walk(self, epoch: int, position: int) -> Iterator[Planned]:
        """Every batch from a place on, without end."""
        for number in count(epoch):
            batches = self.epoch(number)
            first = position if number == epoch else 0
            for at in range(first, len(batches)):
                yield Planned(number, at, tuple(batches[at]), at + 1 == len(batches))

    def _pack(self, rows: list[int]) -> Iterator[list[int]]:
        """Ascending lengths, so the row being added is the longest and sets the padded width."""
        batch: list[int] = []
        for row in rows:
            if batch and (len(batch) + 1) * self.lengths[row] > self.batch_tokens:
                yield batch
                batch = []
            batch.append(row)
        if batch:
            yield batch


def require_chains(samples: Samples) -> None:
    """DataError when no row has a chain. Reads rows until one has: normally the first, not a terabyte."""
    for index in range(len(samples)):
        if len(chain_starts(samples[index].loss_mask, 1)[0]):
            return
    raise DataError(
        asked="training a draft head",
        needed="rows with at least two neighbouring loss tokens",
        found=f"none in {len(samples)} rows: the loss masks are (nearly) all zero",
        advice="check in the stage 'prepare' that the chat template's markers are those of this tokenizer",
    )

"""Reading a store as a data set: shuffled, by several processes and ranks, resumable at any batch."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from store_samples import sample, write

from vllm_compat.kimi.dataset import BatchOrder
from vllm_compat.kimi.loader import Batches
from vllm_compat.kimi.store import Store

ROWS = 60


@pytest.fixture
def store(tmp_path: Path) -> Store:
    write(tmp_path / "store", 0, ROWS)
    return Store(tmp_path / "store")


def order(store: Store, **options: Any) -> BatchOrder:
    return BatchOrder(tuple(store.lengths), batch_tokens=20, seed=3, **options)


def content(batch: Any) -> list[Any]:
    return [batch.sample_ids, batch.token_ids.tolist(), batch.features.float().tolist(), batch.finals.float().tolist()]


@pytest.mark.parametrize("workers", [0, 3])
def test_workers_change_nothing_and_any_batch_can_be_the_first(store: Store, workers: int) -> None:
    """Two epochs: every row once in each, shuffled differently; the same after a stop at any batch."""
    plan = order(store)
    per_epoch = len(plan.epoch(0))
    together = per_epoch + len(plan.epoch(1))
    expected = [sample_ids for epoch in (0, 1) for sample_ids in _ids(store, plan.epoch(epoch))]
    batches = Batches(store, plan, 2, workers)
    seen, states = [], []
    for _, batch in islice(batches, together):
        states.append(batches.state_dict())
        seen.append(batch)
    assert expected == [list(batch.sample_ids) for batch in seen]
    for half in (expected[:per_epoch], expected[per_epoch:]):
        assert sorted(store.ids) == sorted(name for names in half for name in names)
    assert expected[:per_epoch] != expected[per_epoch:]
    assert {"epoch": 0, "position": 1} == states[0]
    assert {"epoch": 1, "position": 0} == states[per_epoch - 1]
    for stop in (0, per_epoch // 2, per_epoch - 1, per_epoch) if workers == 0 else (per_epoch // 2,):
        again = Batches(store, plan, 2, workers)
        again.load_state_dict(states[stop])
        (_, following), *_ = islice(again, 1)
        assert content(seen[stop + 1]) == content(following)


def _ids(store: Store, batches: list[list[int]]) -> list[list[str]]:
    return [[store.ids[row] for row in rows] for rows in batches]


@pytest.mark.parametrize("world", [2, 3, 7])
def test_ranks_are_disjoint_and_together_complete(store: Store, world: int) -> None:
    """Each row is read by exactly one rank; with `fill` all ranks take equally many steps."""
    read = [
        [row for planned in _first_epoch(order(store, rank=rank, world=world, fill=False)) for row in planned]
        for rank in range(world)
    ]
    assert sorted(row for rows in read for row in rows) == list(range(ROWS))
    steps = {len(order(store, rank=rank, world=world).epoch(0)) for rank in range(world)}
    assert len(steps) == 1


def _first_epoch(plan: BatchOrder) -> list[tuple[int, ...]]:
    made = []
    for planned in plan.walk(0, 0):
        made.append(planned.rows)
        if planned.last:
            return made
    raise AssertionError


def test_a_worker_gives_the_stored_bytes(store: Store) -> None:
    """Through shared memory, from its own map of the file."""
    (planned, batch), *_ = islice(Batches(store, order(store), 2, workers=1), 1)
    for at, row in enumerate(planned.rows):
        expected = sample(int(store.ids[row].split("-")[1].split("/")[0]))
        length = len(expected.token_ids)
        assert torch.equal(expected.hidden_states[:, :-1].flatten(1), batch.features[at, :length])

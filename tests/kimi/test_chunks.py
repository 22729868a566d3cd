"""States of requests: put together by position, sent as what they are, and not kept longer than they are needed."""

from __future__ import annotations

import gc
import pickle
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from vllm_compat.capture.chunks import Chunk, Chunks, RequestStates
from vllm_compat.capture.staging import Rows, Shared, Staging
from vllm_compat.capture.states import CapturedStates, Joined

H = 1024


def step(rows: int, first: float = 0) -> list[torch.Tensor]:
    """Three boundaries [rows, H] of different values."""
    return [torch.arange(rows * H, dtype=torch.float32).reshape(rows, H) + first + 1e6 * layer for layer in range(3)]


def test_chunks_are_put_together() -> None:
    """By position; one computed twice counts as it was computed last, and what is beyond the end is dropped."""
    first, second, again = (torch.full((4, 1, 2), value) for value in (1.0, 2.0, 3.0))
    chunks = tuple(Chunk(start, Rows(states)) for start, states in ((0, first), (4, second), (2, again)))
    made = RequestStates((5,), 7, chunks)
    assert [1, 1, 3, 3, 3, 3, 2] == made.tensor()[:, 0, 0].tolist()
    assert 7 * 2 * 4 == made.nbytes


def test_a_worker_process_sends_states_only() -> None:
    """The request's rows, not the step's, and nothing that would wait for a GPU when it is pickled."""
    (one, _) = Staging(torch.device("cpu")).fetch(step(3), [1, 2])
    states = RequestStates((1, 2, 3), 1, (Chunk(0, one),))
    sent = pickle.dumps(states.arrived())
    assert len(sent) < 2 * states.nbytes
    assert torch.equal(states.tensor(), pickle.loads(sent).tensor())


def test_a_long_answer_does_not_keep_the_rows_of_its_neighbours() -> None:
    """Memory of a step is freed when most of its requests are gone; nothing of those that run is lost or changed."""
    staging, chunks = Staging(torch.device("cpu")), Chunks(spare=64 << 10)
    memory: list[weakref.ref[Any]] = []
    largest, expected = 0, []
    for at in range(400):
        names = ["long", *(f"short {at // 4} {n}" for n in range(7))]
        chunks.tidy()
        fetched = staging.fetch(step(len(names), at), [1] * len(names))
        memory.append(weakref.ref(fetched[0].states.untyped_storage()))
        expected.append(fetched[0].states.clone())
        for name, rows in zip(names, fetched, strict=True):
            chunks.add(name, Chunk(at if name == "long" else at % 4, rows))
        del fetched, rows
        if at % 4 == 3:
            for name in names[1:]:
                assert len(chunks.pop(name)) == 4
        gc.collect()
        largest = max(largest, sum(reference() is not None for reference in memory))
    row = 3 * H * 4
    # 64 KiB to spare are 6 rows; four steps are running, and as much again may be left of others.
    assert largest <= 4 + 4 + 2
    left = chunks.pop("long")
    assert torch.equal(torch.cat(expected), RequestStates((1, 2, 3), 400, tuple(left)).tensor())
    assert 400 * row == sum(chunk.rows.states.nbytes for chunk in left)
    assert (0, 0, 0) == (len(chunks), chunks._shared, chunks._kept)


def test_rows_that_are_moved_keep_their_places() -> None:
    """Also where a position was computed again, and beside chunks that have memory of their own."""
    chunks = Chunks(spare=0)

    for start, value, alone in ((0, 1.0, False), (2, 2.0, False), (4, 3.0, True), (6, 4.0, False), (5, 5.0, False)):
        both = torch.full((5, 1, 2), value)
        shared = None if alone else Shared(both.nbytes, both.nbytes)
        chunks.add("a", Chunk(start, Rows(both[:2], shared)))
        if not alone:
            chunks.add("gone", Chunk(start, Rows(both[2:], shared)))
    before = RequestStates((0,), 8, tuple(chunks._of["a"])).tensor()
    chunks.pop("gone")
    chunks.add("other", Chunk(0, Rows(torch.zeros(1, 1, 2), Shared(16, 16))))
    chunks.tidy()
    assert [1, 1, 2, 2, 3, 5, 5, 4] == before[:, 0, 0].tolist()
    assert torch.equal(before, RequestStates((0,), 8, tuple(moved := chunks.pop("a"))).tensor())
    assert all(chunk.rows.owned for chunk in moved)
    assert [(0, 4), (4, 2), (6, 2), (5, 2)] == [(chunk.start, chunk.count) for chunk in moved]


class Part:
    """States that come when they are told to."""

    def __init__(self, states: torch.Tensor) -> None:
        self.states, self.go, self.asked = states, threading.Event(), 0

    def tensor(self) -> torch.Tensor:
        self.asked += 1
        assert self.go.wait(30)
        return self.states


def captured(name: str, part: Any) -> CapturedStates:
    return CapturedStates(name, (1, 2), (0,), part.states.nbytes, Joined([part]))


def test_threads_wait_for_their_own_request_only() -> None:
    """One that asks for states that are there is not held up by one whose states are still to come."""
    slow, quick = Part(torch.zeros(2, 1, 4)), Part(torch.ones(2, 1, 4))
    quick.go.set()
    waits, there = captured("waits", slow), captured("there", quick)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(lambda: waits.hidden_states)
        while not slow.asked:
            pass
        assert torch.equal(quick.states, threads.submit(lambda: there.hidden_states).result(10))
        assert not first.done()
        second = threads.submit(lambda: waits.hidden_states)
        slow.go.set()
        assert first.result(10) is second.result(10)
    assert slow.asked == 1


def test_states_are_pickled_as_they_are() -> None:
    """Whether they were asked for before or not."""
    part = Part(torch.rand(2, 1, 4))
    part.go.set()
    states = captured("a", part)
    for _ in range(2):
        sent = pickle.loads(pickle.dumps(states))
        assert ("a", (1, 2), (0,)) == (sent.request_id, sent.token_ids, sent.layers)
        assert torch.equal(part.states, sent.hidden_states)
    assert part.asked == 1

"""Who makes which shard when several make them: nothing is lost or doubled, whoever dies."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_compat import StoreError
from vllm_compat.kimi.claims import ATTEMPTS, Claims
from vllm_compat.kimi.rows import Row


def row(number: int, tokens: int) -> Row:
    return Row(f"c{number}/0", f"c{number}", 0, [1] * tokens, 1, [1] * tokens, "original")


def rows(*lengths: int) -> list[Row]:
    return [row(number, tokens) for number, tokens in enumerate(lengths)]


def test_claims_are_the_shards_of_a_single_writer() -> None:
    """A shard is full with the row that reaches its size, and the last one has what is left."""
    claims = Claims(rows(5, 6, 20, 3, 3), shard_bytes=100, token_bytes=10, first=7)
    taken = [claims.take("a") for _ in range(4)]

    assert [(7, ["c0/0", "c1/0"]), (8, ["c2/0"]), (9, ["c3/0", "c4/0"]), None] == [
        None if claim is None else (claim.number, [one.row_id for one in claim.rows]) for claim in taken
    ]


def test_a_dead_workers_claims_come_first() -> None:
    claims = Claims(rows(1, 1, 1, 1), shard_bytes=1, token_bytes=1)
    for worker in "abab":
        claims.take(worker)
    claims.finish(0)

    assert [2] == claims.give_back("a")
    again = claims.take("c")
    assert again is not None
    assert 2 == again.number
    assert claims.is_held("c", 2)
    assert not claims.is_held("a", 2)
    assert claims.take("c") is None


def test_rows_that_kill_every_worker_are_named() -> None:
    claims = Claims(rows(1, 1), shard_bytes=2, token_bytes=1)
    for attempt in range(ATTEMPTS - 1):
        claims.take(f"w{attempt}")
        claims.give_back(f"w{attempt}")
    claims.take("last")
    with pytest.raises(StoreError, match="shard 0, rows c0/0 to c1/0"):
        claims.give_back("last")


@given(
    st.lists(st.integers(1, 30), max_size=40),
    st.integers(1, 60),
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["take", "finish", "die"]))),
)
def test_every_row_is_done_once_whoever_dies(lengths: list[int], size: int, events: list[tuple[str, str]]) -> None:
    """Any order of taking, finishing and dying, and at the end one worker for the rest."""
    claims = Claims(rows(*lengths), shard_bytes=size, token_bytes=1)
    held: dict[str, list[int]] = {worker: [] for worker in "abcz"}
    contents: dict[int, list[str]] = {}
    done: list[int] = []

    def take(worker: str) -> bool:
        claim = claims.take(worker)
        if claim is not None:
            ids = [one.row_id for one in claim.rows]
            assert ids == contents.setdefault(claim.number, ids)
            held[worker].append(claim.number)
        return claim is not None

    def finish(worker: str) -> None:
        number = held[worker].pop(0)
        claims.finish(number)
        done.append(number)

    deaths = 0
    for worker, event in events:
        if event == "take":
            take(worker)
        elif event == "finish" and held[worker]:
            finish(worker)
        elif event == "die" and deaths < ATTEMPTS - 1:
            deaths += 1
            assert sorted(held[worker]) == claims.give_back(worker)
            held[worker] = []
    for worker in "abc":
        while held[worker]:
            finish(worker)
    while take("z"):
        finish("z")

    assert sorted(done) == list(range(len(contents)))
    assert [one.row_id for one in rows(*lengths)] == [name for number in sorted(contents) for name in contents[number]]

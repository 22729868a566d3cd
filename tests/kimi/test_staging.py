"""Rows of a step on their way to the CPU: cut per request, and left alone between two steps."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from vllm_compat.capture.staging import Gap, Staging

H = 1024


def step(rows: int) -> list[torch.Tensor]:
    """Three boundaries [rows, H] of different values."""
    return [torch.arange(rows * H, dtype=torch.float32).reshape(rows, H) + 1e6 * layer for layer in range(3)]


@pytest.mark.parametrize("counts", [[1], [5, 3], [200, 1, 1, 300, 2], [1, 200], [100, 100], [1] * 40])
def test_rows_are_cut_per_request(counts: list[int]) -> None:
    """Small requests share memory, large ones have their own; padding is left out; the step's buffers may change."""
    seen = step(sum(counts) + 7)
    expected = torch.stack([boundary[: sum(counts)] for boundary in seen], dim=1).split(counts)
    fetched = Staging(torch.device("cpu")).fetch(seen, counts)
    for boundary in seen:
        boundary.zero_()
    assert len(counts) == len(fetched)
    for count, rows, states in zip(counts, fetched, expected, strict=True):
        assert torch.equal(states, rows.arrived())
        own = rows.states.untyped_storage().nbytes() == rows.states.nbytes
        assert own == rows.owned
        if count * 3 * H * 4 >= 1 << 20:
            assert rows.owned


def test_states_are_converted_on_the_way() -> None:
    """As a conversion afterwards would, in the same pass; large and small requests."""
    seen = step(300)
    plain = Staging(torch.device("cpu")).fetch(seen, [290, 3, 7])
    converted = Staging(torch.device("cpu"), torch.bfloat16).fetch(seen, [290, 3, 7])
    for a, b in zip(plain, converted, strict=True):
        assert torch.bfloat16 == b.arrived().dtype
        assert torch.equal(a.arrived().to(torch.bfloat16), b.arrived())


def test_states_made_in_inference_mode_can_be_used() -> None:
    """vLLM's workers run in it; what comes out is a tensor like any other."""
    with torch.inference_mode():
        (rows,) = Staging(torch.device("cpu")).fetch(step(4), [4])
    states = rows.arrived()
    assert not states.is_inference()
    states += 1


def seconds_in(gap: Gap) -> float:
    began = time.monotonic()
    gap.wait()
    return time.monotonic() - began


def test_other_threads_leave_the_gap_between_two_steps_to_the_loop() -> None:
    """Until the next step runs, or not for long; the loop's own thread waits for nothing."""
    with ThreadPoolExecutor(1) as thread:
        gap = Gap(60)
        assert seconds_in(gap) < 1
        waiting = thread.submit(seconds_in, gap)
        time.sleep(0.05)
        assert not waiting.done()
        gap.end()
        assert waiting.result(30) < 30
        assert thread.submit(seconds_in, gap).result(30) < 1
        assert thread.submit(seconds_in, Gap(0.2)).result(30) >= 0.15


def test_the_gap_is_counted_once() -> None:
    """From its beginning, not from when each of many threads or requests comes to it."""
    gap = Gap(0.1)
    time.sleep(0.15)
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(seconds_in, gap).result(30) < 0.08

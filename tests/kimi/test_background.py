"""The thread between engine and store: order, bounded memory, errors."""

from __future__ import annotations

import threading
import time

import pytest

from vllm_compat.kimi.background import Background


def test_items_are_worked_off_in_order_beside_the_caller() -> None:
    """Leaving the context waits for the last one."""
    seen: list[tuple[int, bool]] = []
    caller = threading.get_ident()
    with Background(lambda item: seen.append((item, threading.get_ident() == caller)), max_bytes=10) as background:
        for item in range(100):
            background.put(item, 1)
    assert [(item, False) for item in range(100)] == seen


def test_a_slow_disk_slows_the_engine_down() -> None:
    """What waits never exceeds the bound, whatever the disk does; nothing is lost."""
    done: list[int] = []

    def slow(item: int) -> None:
        time.sleep(0.01)
        done.append(item)

    began = time.monotonic()
    with Background(slow, max_bytes=40) as background:
        for item in range(30):
            background.put(item, 10)
        waited = time.monotonic() - began
    assert list(range(30)) == done
    assert 40 == background.most_bytes
    assert waited > 0.2  # 26 of 30 items of 10 ms had to be done before the last was let in


def test_an_item_larger_than_the_bound_is_let_in_alone() -> None:
    """A single long sample must not wait for ever."""
    done: list[int] = []
    with Background(done.append, max_bytes=5) as background:
        for item in range(3):
            background.put(item, 50)
    assert [0, 1, 2] == done
    assert 50 == background.most_bytes


def test_what_the_store_refuses_stops_the_run() -> None:
    """The error comes out of the next put, and of leaving; later items are not worked on."""
    done: list[int] = []

    def refuses(item: int) -> None:
        if item == 2:
            raise ValueError("sample 2")
        done.append(item)

    def run() -> None:
        with Background(refuses, max_bytes=1) as background:
            for item in range(10):
                background.put(item, 1)

    with pytest.raises(ValueError, match="sample 2"):
        run()
    assert [0, 1] == done
    background = Background(refuses, max_bytes=100)
    with pytest.raises(ValueError, match="sample 2"), background:
        background.put(2, 1)


def test_an_error_of_the_engine_leaves_the_rest_undone() -> None:
    """What waits is dropped, as a killed run would; the thread ends."""
    started, go = threading.Event(), threading.Event()
    done: list[int] = []

    def held(item: int) -> None:
        started.set()
        go.wait(5)
        done.append(item)

    def run() -> None:
        with Background(held, max_bytes=100) as background:
            for item in range(5):
                background.put(item, 1)
            started.wait(5)
            threading.Timer(0.05, go.set).start()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()
    assert [0] == done
    assert not [thread for thread in threading.enumerate() if thread.name == "store-feeder"]

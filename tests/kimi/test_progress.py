"""Progress bars: nested ones share the display, and a log stays clean."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from vllm_compat.kimi.progress import NullProgress, Progress, RichProgress


def use(progress: Progress) -> None:
    """What the stages do: bars inside bars, known and unknown ends, notes, one after the other."""
    for _ in range(2):
        with progress.task("outer", total=3) as outer:
            for i in range(3):
                with progress.task("inner [not markup]", total=None) as inner:
                    inner.advance(2)
                    inner.note(f"loss {i}")
                outer.advance()


def test_null() -> None:
    """Shows nothing, raises nothing."""
    use(NullProgress())


def test_nested_bars_on_a_terminal() -> None:
    """No second live display (rich refuses that before 14.1); what is shown vanishes at the end."""
    stream = io.StringIO()
    use(RichProgress(Console(file=stream, force_terminal=True, width=100)))
    assert "outer" in stream.getvalue()


def test_the_outer_bar_stays_when_the_inner_one_ends() -> None:
    """It is redrawn with what it has to say."""
    stream = io.StringIO()
    progress = RichProgress(Console(file=stream, force_terminal=True, width=100))
    with progress.task("outer", total=3) as outer:
        with progress.task("inner"):
            pass
        outer.note("still here")
        time.sleep(0.5)  # it redraws ten times a second
        assert "still here" in stream.getvalue()


def test_nothing_in_a_log() -> None:
    """A console that is no terminal gets no bars and no empty lines."""
    stream = io.StringIO()
    use(RichProgress(Console(file=stream)))
    assert stream.getvalue() == ""


def test_a_bar_ends_with_its_error() -> None:
    """An exception inside a task ends the display and is passed on."""
    progress = RichProgress(Console(file=io.StringIO(), force_terminal=True))
    with pytest.raises(ZeroDivisionError), progress.task("a", total=1), progress.task("b", total=1):
        _ = 1 // 0
    use(progress)

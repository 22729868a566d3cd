"""Progress bars that a stage can use without knowing whether anybody is looking."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol


class Task(Protocol):
    """One bar. `advance` counts units done; `note` replaces the short text at its end (a loss, a rate)."""

    def advance(self, n: float = 1) -> None: ...

    def note(self, text: str) -> None: ...


class Progress(Protocol):
    """What every stage takes: `with progress.task("extracting", total=rows) as bar: bar.advance(1)`.

    `total` None means that the end is not known (a spinner).
    """

    def task(self, description: str, total: float | None = None) -> AbstractContextManager[Task]: ...


class _NullTask:
    def advance(self, n: float = 1) -> None:
        pass

    def note(self, text: str) -> None:
        pass


class NullProgress:
    """Shows nothing: for tests, libraries and notebooks."""

    @contextmanager
    def task(self, description: str, total: float | None = None) -> Iterator[Task]:  # noqa: ARG002
        yield _NullTask()


class _RichTask:
    def __init__(self, bars: Any, task_id: Any) -> None:
        self._bars, self._id = bars, task_id

    def advance(self, n: float = 1) -> None:
        self._bars.advance(self._id, n)

    def note(self, text: str) -> None:
        self._bars.update(self._id, note=text)


class RichProgress:
    """Bars on a rich console.

    They vanish when a task ends: the pipeline prints one lasting line per stage instead.
    """

    def __init__(self, console: Any) -> None:
        self._console = console

    @contextmanager
    def task(self, description: str, total: float | None = None) -> Iterator[Task]:
        from rich import progress as rich_progress

        columns = (
            rich_progress.TextColumn("  {task.description}"),
            rich_progress.BarColumn(),
            rich_progress.MofNCompleteColumn(),
            rich_progress.TimeElapsedColumn(),
            rich_progress.TimeRemainingColumn(),
            rich_progress.TextColumn("{task.fields[note]}"),
        )
        with rich_progress.Progress(*columns, console=self._console, transient=True) as bars:
            yield _RichTask(bars, bars.add_task(description, total=total, note=""))

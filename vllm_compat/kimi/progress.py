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

    They vanish when they end: the pipeline prints one lasting line per stage instead. Tasks may be nested;
    all share one live display, because rich before 14.1 refuses a second one.
    """

    def __init__(self, console: Any) -> None:
        from rich import progress as rich_progress

        self._bars = rich_progress.Progress(
            rich_progress.TextColumn("  {task.description}"),
            rich_progress.BarColumn(),
            rich_progress.MofNCompleteColumn(),
            rich_progress.TimeElapsedColumn(),
            rich_progress.TimeRemainingColumn(),
            rich_progress.TextColumn("{task.fields[note]}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,  # in a log it would leave empty lines
        )

    @contextmanager
    def task(self, description: str, total: float | None = None) -> Iterator[Task]:
        task_id = self._bars.add_task(description, total=total, note="")
        self._bars.start()
        try:
            yield _RichTask(self._bars, task_id)
        finally:
            self._bars.remove_task(task_id)
            if not self._bars.tasks:
                self._bars.stop()

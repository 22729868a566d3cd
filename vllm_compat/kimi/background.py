"""Work on finished samples beside the engine: a thread waits for their copy from the GPU and stores them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from typing_extensions import Self

Item = TypeVar("Item")


class Background(Generic[Item]):
    """One thread that works off items in order.

    What waits is bounded: `put` blocks while more than `max_bytes` are, so that a disk that is slower than the engine
    slows the engine down instead of filling the memory. (A single larger item is let in when nothing else waits.) What
    `work` raises comes out of the next `put` or of leaving the context; the items after it are not worked on.
    """

    def __init__(self, work: Callable[[Item], None], max_bytes: int) -> None:
        self._work = work
        self._max = max_bytes
        self._waiting: deque[tuple[Item, int]] = deque()
        self._bytes = 0
        self._most = 0
        self._error: BaseException | None = None
        self._ended = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="store-feeder", daemon=True)
        self._thread.start()

    @property
    def most_bytes(self) -> int:
        """The most that ever waited, the item in work included."""
        return self._most

    def put(self, item: Item, nbytes: int) -> None:
        """Hand an item over; blocks while there is no room."""
        with self._changed:
            self._changed.wait_for(lambda: self._error or not self._bytes or self._bytes + nbytes <= self._max)
            self._raise()
            self._waiting.append((item, nbytes))
            self._bytes += nbytes
            self._most = max(self._most, self._bytes)
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._ended)
                if not self._waiting:
                    return
                item, nbytes = self._waiting.popleft()
            error: BaseException | None = None
            try:
                self._work(item)
            except BaseException as raised:  # noqa: BLE001 - raised again where the items come from
                error = raised
            del item  # its memory is free before the next one is let in
            with self._changed:
                self._bytes -= nbytes
                self._error = error
                self._changed.notify_all()
                if error is not None:
                    return

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait until everything is worked off; after an error, until the item in work is."""
        with self._changed:
            self._ended = True
            if kind is not None:
                self._waiting.clear()
            self._changed.notify_all()
        self._thread.join()
        if kind is None:
            self._raise()

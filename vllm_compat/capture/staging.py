"""Rows of a step on their way to the CPU: copied beside the next step, waited for by whoever reads them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

#: Chunks of at least so many bytes get a tensor of their own, which is handed out without another copy.
_OWN = 1 << 20
#: Steps whose rows may be on their way at once: more would pile up in device memory where the bus is the slower one.
_STEPS = 2
#: Seconds that other threads leave the loop to itself between two steps; it needs a few milliseconds.
_GAP = 0.02


class Gap:
    """The time between two steps, when the device waits for the loop, and the loop should not have to wait for the GIL.

    Threads that would work on the rows of the last step wait here until the next one runs on the device; not for long,
    since there may be no next one, and not at all in the thread that made this, which is the loop's.
    """

    def __init__(self, seconds: float = _GAP) -> None:
        self._loop = threading.get_ident()
        self._over = threading.Event()
        self._until = time.monotonic() + seconds

    def end(self) -> None:
        """The next step runs."""
        self._over.set()

    def wait(self) -> None:
        """Until then."""
        if threading.get_ident() != self._loop:
            self._over.wait(max(0.0, self._until - time.monotonic()))


class _Copy:
    """The rows of one step in device memory, and where they go; copied when somebody says so, once."""

    def __init__(self, stacked: torch.Tensor, stream: Any, hosts: list[tuple[int, torch.Tensor]]) -> None:
        self._gap = Gap()
        self._stacked: torch.Tensor | None = stacked
        self._hosts = hosts
        self._stream = stream
        self._ready = torch.cuda.Event()
        self._ready.record(torch.cuda.current_stream(stacked.device))
        self._done = torch.cuda.Event()
        self._lock = threading.Lock()

    def launch(self) -> None:
        """Queue the copies, unless that was done; from any thread."""
        self._gap.end()
        with self._lock:
            stacked = self._stacked
            if stacked is None:
                return
            with torch.inference_mode(False), torch.no_grad(), torch.cuda.stream(self._stream):
                self._stream.wait_event(self._ready)
                for start, host in self._hosts:
                    host.copy_(stacked[start : start + len(host)], non_blocking=True)
                self._done.record(self._stream)
            # Its memory is not given to another step before the copies are done.
            stacked.record_stream(self._stream)
            self._stacked = None
            self._hosts = []

    def wait(self) -> None:
        """Until the rows are there; the GIL is free meanwhile."""
        self._gap.wait()
        self.launch()
        self._done.synchronize()


@dataclass
class Shared:
    """A piece of memory in which several requests have rows.

    Attributes:
        nbytes: Its size.
        left: Bytes of requests that still count, for who keeps the books.
    """

    nbytes: int
    left: int


@dataclass(frozen=True)
class Rows:
    """Rows of one request and one step.

    Attributes:
        states: [n, L, H] in CPU memory, to be read after ``arrived``. Pinned where they come from a CUDA device.
        shared: The memory they are in, if it holds others too.
    """

    states: torch.Tensor
    shared: Shared | None = None
    _copy: _Copy | None = None

    @property
    def owned(self) -> bool:
        """Whether the memory holds nothing else."""
        return self.shared is None

    def arrived(self) -> torch.Tensor:
        """The states, once they are all there."""
        if self._copy is not None:
            self._copy.wait()
        return self.states


class Staging:
    """Brings what a step computed to the CPU.

    From a CUDA device the rows are copied on a stream of their own into pinned memory, while the next step runs;
    nothing waits for them here. Not earlier: the step's sampled tokens go the same way, a few bytes that the scheduler
    waits for, and the device copies in the order in which copies are queued. So they are queued behind the next forward
    pass, or by whoever asks for them first; other threads than the loop's ask when that pass runs (see ``Gap``). Pinned
    memory comes from PyTorch's caching host allocator, which reuses a block when its tensor is gone and the copy into
    it done: in steady state nothing is allocated, and what is held is what nobody has popped yet.

    Args:
        device: Where the rows are.
        dtype: What they are converted to on the way; None leaves them as they are.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype | None = None) -> None:
        self._dtype = dtype
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._last: _Copy | None = None
        self._on_their_way: deque[_Copy] = deque()

    def fetch(self, seen: Sequence[torch.Tensor], counts: Sequence[int]) -> list[Rows]:
        """Per request its rows.

        Args:
            seen: One tensor [>= sum(counts), H] per boundary; may be overwritten as soon as this returns, by work
                queued on the current stream.
            counts: Rows of each request, in row order; padding follows.
        """
        total = sum(counts)
        # vLLM's workers run in inference mode, whose tensors nobody could train on or change.
        with torch.inference_mode(False), torch.no_grad():
            if self._stream is None:
                return self._split([boundary[:total].cpu() for boundary in seen], counts)
            return self._stage(self._stacked(seen, 0, total), counts)

    def launch(self) -> None:
        """Start the copies of the last step. Call it when the device has work, and nothing to hand over soon."""
        if self._last is None:
            return
        while len(self._on_their_way) >= _STEPS:
            self._on_their_way.popleft().wait()
        self._last.launch()
        self._on_their_way.append(self._last)
        self._last = None

    def _stacked(self, seen: Sequence[torch.Tensor], start: int, count: int) -> torch.Tensor:
        """[count, L, H] of rows from ``start`` on, converted in the same pass."""
        first = seen[0]
        made = torch.empty((count, len(seen), *first.shape[1:]), dtype=self._dtype or first.dtype, device=first.device)
        for index, boundary in enumerate(seen):
            made[:, index].copy_(boundary[start : start + count])
        return made

    def _split(self, seen: Sequence[torch.Tensor], counts: Sequence[int]) -> list[Rows]:
        """On the CPU: a copy per request, or one for many small ones."""
        row = len(seen) * seen[0][:1].nbytes
        made: list[Rows] = []
        for start, group in _groups(counts, row):
            made += _parts(self._stacked(seen, start, sum(group)), group, None)
        return made

    def _stage(self, stacked: torch.Tensor, counts: Sequence[int]) -> list[Rows]:
        self.launch()
        groups = _groups(counts, stacked[:1].nbytes)
        hosts = [
            (start, torch.empty((sum(group), *stacked.shape[1:]), dtype=stacked.dtype, pin_memory=True))
            for start, group in groups
        ]
        self._last = _Copy(stacked, self._stream, list(hosts))
        return [
            rows
            for (_, host), (_, group) in zip(hosts, groups, strict=True)
            for rows in _parts(host, group, self._last)
        ]


def _parts(stacked: torch.Tensor, counts: list[int], copy: _Copy | None) -> list[Rows]:
    """Per request its rows of a group."""
    shared = Shared(stacked.nbytes, stacked.nbytes) if len(counts) > 1 else None
    return [Rows(part, shared, copy) for part in stacked.split(counts)]


def _groups(counts: Sequence[int], row_bytes: int) -> list[tuple[int, list[int]]]:
    """(first row, rows of each request) of what is copied together: a large request alone, small neighbours at once."""
    made: list[tuple[int, list[int]]] = []
    at, open_group = 0, False
    for count in counts:
        large = count * row_bytes >= _OWN
        if large or not open_group:
            made.append((at, [count]))
        else:
            made[-1][1].append(count)
        open_group = not large
        at += count
    return made

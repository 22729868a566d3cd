"""States of requests, chunk by chunk as the steps bring them, and put together when a request is done."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from vllm_compat.capture.staging import Rows

#: Bytes that requests which are gone may take up before the rows of the others are moved out of the same memory.
_SPARE = 64 << 20


@dataclass(frozen=True)
class Chunk:
    """Rows that one step computed of one request, from position ``start`` on."""

    start: int
    rows: Rows

    @property
    def count(self) -> int:
        return len(self.rows.states)

    @property
    def end(self) -> int:
        return self.start + self.count


@dataclass(frozen=True)
class RequestStates:
    """States of a finished request at this stage's boundaries, on their way to the CPU or there."""

    layers: tuple[int, ...]
    num_tokens: int
    chunks: tuple[Chunk, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the states, once put together."""
        return self.num_tokens * int(self.chunks[0].rows.states[:1].nbytes)

    def tensor(self) -> torch.Tensor:
        """[num_tokens, L, H], in memory of its own. Waits until all of them are there."""
        first = self.chunks[0]
        if len(self.chunks) == 1 and first.rows.owned and first.count == self.num_tokens:
            return first.rows.arrived()
        states: torch.Tensor | None = None
        for chunk in self.chunks:
            rows = chunk.rows.arrived()
            if states is None:
                states = rows.new_empty((self.num_tokens, *rows.shape[1:]))
            # Later chunks win: after a preemption, or a rejected draft, a position is computed again.
            end = min(chunk.end, self.num_tokens)
            states[chunk.start : end] = rows[: end - chunk.start]
        assert states is not None
        return states

    def arrived(self) -> RequestStates:
        """The same states, all there: what a worker process can send."""
        return RequestStates(self.layers, self.num_tokens, (Chunk(0, Rows(self.tensor())),))


@dataclass
class Chunks:
    """Chunks of the requests that are running.

    Small rows of one step share memory, which is freed when the last of their requests is gone. One long answer would
    keep all that its neighbours brought; so it moves out when they are more than what is still running.
    """

    spare: int = _SPARE
    _of: dict[str, list[Chunk]] = field(default_factory=dict)
    #: Bytes in shared memory: of requests that are running; of others, which these keep.
    _shared: int = 0
    _kept: int = 0

    def __len__(self) -> int:
        """Requests of which there are any."""
        return len(self._of)

    def add(self, request_id: str, chunk: Chunk) -> None:
        self._of.setdefault(request_id, []).append(chunk)
        if chunk.rows.shared is not None:
            self._shared += chunk.rows.states.nbytes

    def pop(self, request_id: str) -> list[Chunk]:
        """Those of a request that is gone, in the order in which they were computed."""
        chunks = self._of.pop(request_id, [])
        self._leave(chunks)
        return chunks

    def ends(self) -> dict[str, int]:
        """Request id -> how far it was computed."""
        return {name: max(chunk.end for chunk in chunks) for name, chunks in self._of.items()}

    def clear(self) -> None:
        self._of.clear()
        self._shared = self._kept = 0

    def _leave(self, chunks: Iterable[Chunk]) -> None:
        for chunk in chunks:
            shared, nbytes = chunk.rows.shared, chunk.rows.states.nbytes
            if shared is None:
                continue
            self._shared -= nbytes
            shared.left -= nbytes
            # With the last one goes what the others had left behind.
            self._kept += nbytes if shared.left else nbytes - shared.nbytes

    def tidy(self) -> None:
        """Free what requests that are gone still take up, once it is much: a byte of theirs is paid for by one copy."""
        if self._kept <= max(self.spare, self._shared):
            return
        for chunks in self._of.values():
            moved = _merged(chunks)
            self._leave(chunks)
            chunks[:] = moved


def _merged(chunks: Sequence[Chunk]) -> list[Chunk]:
    """The same rows; those in shared memory in memory of their own, neighbours together."""
    groups: list[list[Chunk]] = [[chunk] for chunk in chunks[:1]]
    for before, chunk in pairwise(chunks):
        if before.rows.shared is None or chunk.rows.shared is None or before.end != chunk.start:
            groups.append([])
        groups[-1].append(chunk)
    # A worker's inference mode would make tensors that nobody could change.
    with torch.inference_mode(False), torch.no_grad():
        return [
            group[0]
            if group[0].rows.shared is None
            else Chunk(group[0].start, Rows(torch.cat([chunk.rows.arrived() for chunk in group])))
            for group in groups
        ]

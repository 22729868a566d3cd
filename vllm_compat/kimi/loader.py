"""Batches read ahead of whoever trains on them: by a thread, or by worker processes that map the same store."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, Dataset

from .dataset import Batch, BatchOrder, Planned, Samples, collate

_AHEAD = 2  # batches that a thread, or a worker each, has ready


class Batches:
    """The batches of `order`, from a place on and without end, in an order that the workers have no part in.

    Args:
        samples: A store; each worker maps its files anew.
        order: Which rows make which batch, of this rank.
        steps: Draft steps, for `collate`.
        workers: Processes; 0 for a thread of this one.

    `state_dict` after n batches, loaded into another one, gives batch n + 1 next: batches that were read ahead do not
    count. They are read again.
    """

    def __init__(self, samples: Samples, order: BatchOrder, steps: int, workers: int = 0) -> None:
        self.samples, self.order, self.steps, self.workers = samples, order, steps, workers
        self._next = (0, 0)

    def state_dict(self) -> dict[str, int]:
        """epoch, and position: batches of it that have been given out."""
        return dict(zip(("epoch", "position"), self._next, strict=True))

    def load_state_dict(self, state: dict[str, int]) -> None:
        """The inverse; counts for the next `iter`."""
        self._next = state["epoch"], state["position"]

    def __iter__(self) -> Iterator[tuple[Planned, Batch]]:
        for planned, batch in read_ahead(self.samples, self.order.walk(*self._next), self.steps, self.workers):
            self._next = (planned.epoch + 1, 0) if planned.last else (planned.epoch, planned.position + 1)
            yield planned, batch


def read_ahead(
    samples: Samples, planned: Iterable[Planned], steps: int, workers: int
) -> Iterator[tuple[Planned, Batch]]:
    """Each planned batch with its content, in order."""
    if workers == 0:
        yield from _by_thread(_Read(samples, steps), iter(planned))
        return
    # Not fork: the parent has threads, of torch and of CUDA, and a lock that one of them holds would stay locked.
    yield from DataLoader(
        _Read(samples, steps),
        batch_size=None,
        sampler=planned,
        num_workers=workers,
        prefetch_factor=_AHEAD,
        collate_fn=_as_it_is,
        multiprocessing_context="forkserver",
    )


class _Read(Dataset[Any]):
    def __init__(self, samples: Samples, steps: int) -> None:
        self._samples, self._steps = samples, steps

    def __getitem__(self, planned: Planned) -> tuple[Planned, Batch]:
        return planned, collate([self._samples[i] for i in planned.rows], self._steps)


def _by_thread(read: _Read, planned: Iterator[Planned]) -> Iterator[tuple[Planned, Batch]]:
    with ThreadPoolExecutor(1, "batch-reader") as pool:
        pending: deque[Future[tuple[Planned, Batch]]] = deque(
            pool.submit(read.__getitem__, p) for p in islice(planned, _AHEAD)
        )
        try:
            while pending:
                ready = pending.popleft().result()
                pending.extend(pool.submit(read.__getitem__, p) for p in islice(planned, 1))
                yield ready
        finally:
            for future in pending:
                future.cancel()


def _as_it_is(item: Any) -> Any:
    return item

"""Writing a store of samples so that a crash at any point loses no published shard and doubles no sample.

A shard is written beside, fsynced and renamed, then the index the same way. Killed in between, the next
writer finds a complete shard without an index entry and adopts it after checking its checksum; whatever is half
written still has its temporary name and is removed. What was only in memory is not in `.done`, so the caller
makes it again.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from vllm_compat.errors import StoreError

from .codec import Encoded, encode
from .files import TEMPORARY_PREFIX, fsync_directory, lock, write_json
from .sample_check import Refusals, fitting, not_finite
from .shard_file import check_data, open_shards, read_shard, write_shard
from .shards import FORMAT, INDEX, Provenance, Sample, Shard, damaged, read_index, shard_name

if TYPE_CHECKING:
    from typing_extensions import Self

LOCK = "writer.lock"
SET_ASIDE = ".damaged"
#: Shards written at once: the kernel lets one thread at a time write to a file, at 2.4 GB/s on a machine with H200s,
#: whose prefill makes 4.5 GB/s of states.
WRITERS = max(1, min(3, (os.cpu_count() or 1) // 4))


class StoreWriter:
    """Opens a store for writing, or resumes one.

    A context manager; only a clean exit publishes what is buffered.

    shard_bytes: a shard is written once so many bytes of hidden states are buffered. Threads write it, and up to
    `writers` at once, while the next one fills; when that is full before the disk is done with the oldest, `add` waits.
    So memory holds writers + 1 shards at most, whatever the disk does, and `.waited` counts the seconds.

    max_bad: so many samples with a NaN or infinite state are left out, and listed in `refused.jsonl`, before one is an
    error. They are not tried again by the next run; remove the file for that.

    StoreError: another writer has the store, its provenance differs, or an indexed shard is missing or cut; from `add`,
    `flush` and `close` also what a thread ran into. `.done` holds the ids on disk, and those refused; `.recovered`
    sentences on what a crash had left and what was done about it.
    """

    def __init__(
        self, path: str | Path, provenance: Provenance, shard_bytes: int, max_bad: int = 0, *, writers: int = WRITERS
    ) -> None:
        self.path, self.provenance, self.shard_bytes = Path(path), provenance, shard_bytes
        self.recovered: list[str] = []
        self.waited = 0.0
        self._buffered: list[Sample] = []
        self._buffered_bytes = 0
        self._full: deque[_Full] = deque()  # by number
        self._writers = writers
        self._lock = lock(self.path / LOCK, f"writing to the store {self.path}")
        self._publishing = threading.Lock()
        self._threads = ThreadPoolExecutor(writers, "store-writer")
        try:
            self.shards = resume(self.path, self.provenance, self.recovered)
            self.done = {place.id for shard in self.shards for place in shard.samples}
            self._refusals = Refusals(self.path, max_bad)
            self.done |= self.refused.keys()
            self._added: set[str] = set()
            self._number = next_number(self.path, self.shards)
        except BaseException:
            os.close(self._lock)
            raise

    @property
    def refused(self) -> dict[str, str]:
        """Samples that were left out, with the reason."""
        return self._refusals.reasons

    def add(self, sample: Sample) -> None:
        """Check and buffer one sample, handing a full shard to a thread.

        The tensors are taken over, not copied: do not change them afterwards. (A view of something bigger is copied.)

        StoreError names a sample that is refused: an id that is here already, a wrong shape or dtype, NaN or
        infinity (unless `max_bad` allows for one more).
        """
        sample = self._checked(sample)
        bad = not_finite(sample, self.provenance)
        if bad is not None:
            self._refusals.add(sample.sample_id, bad)
            self.done.add(sample.sample_id)
            return
        self._added.add(sample.sample_id)
        self._buffered.append(sample)
        self._buffered_bytes += sample.hidden_states.nbytes
        if self._buffered_bytes >= self.shard_bytes:
            self._hand_over()

    def flush(self) -> None:
        """Publish what is buffered, and wait for it.

        On an error (full disk) nothing on disk changes and the buffer stays: a later call tries again.
        """
        if self._buffered:
            self._hand_over()
        self._settle(0)

    def close(self) -> None:
        """Publish the rest and let go of the store. Calling it again does nothing."""
        if self._lock >= 0:
            try:
                self.flush()
            finally:
                self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error the buffered samples may be part of what went wrong: they are left to the next run.
        self.close() if kind is None else self._release()

    def _release(self) -> None:
        if self._lock >= 0:
            self._threads.shutdown()  # what is being written was complete before: it is published, or it fails
            os.close(self._lock)
            self._lock = -1

    def _hand_over(self) -> None:
        self._settle(self._writers - 1)
        full = _Full(self._number, [*self._buffered])
        self._number += 1
        self._buffered, self._buffered_bytes = [], 0
        self._full.append(full)
        full.job = self._threads.submit(self._write, full)

    def _settle(self, most: int) -> None:
        """Wait until at most so many shards are being written; StoreError when one could not be.

        Those that could not before are tried again first. A full disk is one error, however many shards it meets.
        """
        for full in self._full:
            full.job = full.job or self._threads.submit(self._write, full)
        while len(self._full) > most:
            error = self._wait_for(self._full[0])
            if error is not None:
                for full in self._full:
                    self._wait_for(full)
                raise error
            self._full.popleft()

    def _wait_for(self, full: _Full) -> BaseException | None:
        """Until a shard is written, or could not be: then its error, and no job."""
        if full.job is None:
            return None
        began = time.monotonic()
        error = full.job.exception()
        self.waited += time.monotonic() - began
        if error is not None:
            full.job = None
        return error

    def _write(self, full: _Full) -> None:
        """In a thread: what is full becomes a shard."""
        for i, sample in enumerate(full.samples):
            if isinstance(sample, Sample):
                full.samples[i] = encode(sample, self.provenance)  # one after the other, so that memory only falls
        samples = [sample for sample in full.samples if isinstance(sample, Encoded)]
        publish_shard(self.path, self.provenance, self.shards, samples, full.number, self._publishing)
        with self._publishing:
            self.done |= {sample.sample_id for sample in samples}
        full.samples = []

    def _checked(self, sample: Sample) -> Sample:
        if self._lock < 0:
            raise StoreError(f"adding sample {sample.sample_id!r} to {self.path}", found="the writer is closed")
        is_there = sample.sample_id in self._added or sample.sample_id in self.done
        return fitting(sample, self.provenance, self.path, is_there=is_there)


@dataclass
class _Full:
    """A shard on its way to the disk. job: None when it could not be written."""

    number: int
    samples: list[Sample | Encoded]
    job: Future[None] | None = None


def publish_shard(
    path: Path,
    provenance: Provenance,
    shards: list[Shard],
    samples: Sequence[Encoded],
    number: int,
    publishing: AbstractContextManager[Any],
) -> None:
    """Write a shard and then the index; into `shards`, which is in the order of the numbers.

    `publishing` is held while index and `shards` change. On a StoreError (full disk) nothing on disk has changed.
    """
    file = path / shard_name(number)
    try:
        shard = write_shard(file, samples, provenance)
        with publishing:
            try:
                shards[:] = index_with(path, provenance, shards, shard)
            except OSError:
                # What failed may have come after the index was renamed, and then it stands.
                if shard.file not in {entry["file"] for entry in read_index(path)[1]}:
                    file.unlink()  # or the next try would write its samples a second time
                raise
    except OSError as error:
        raise StoreError(
            f"writing {file.name} ({sum(sample.counts[1] for sample in samples)} tokens) to {path}",
            needed=f"about {sum(t.nbytes for sample in samples for t in sample.tensors.values())} free bytes",
            found=str(error),
            advice="make room and run the stage again: it goes on after the last complete shard",
        ) from error


def write_index(path: Path, provenance: Provenance, shards: Sequence[Shard]) -> None:
    """Atomically. It lists shards, not samples: it is written anew with every shard, and must stay small."""
    entries = [shard.to_json() for shard in shards]
    write_json(path / INDEX, {"format": FORMAT, "provenance": provenance.to_json(), "shards": entries})


def index_with(path: Path, provenance: Provenance, shards: Sequence[Shard], shard: Shard) -> list[Shard]:
    """Write the index with one more shard; all of them, in the order of the numbers."""
    more = sorted([*shards, shard], key=lambda one: one.file)
    write_index(path, provenance, more)
    return more


def resume(path: Path, provenance: Provenance | None, recovered: list[str]) -> list[Shard]:
    """The shards of a store that is locked, once what a crash left is tidied up; `recovered` gets a sentence for each.

    StoreError: other provenance (None: any), or an indexed shard that is missing or cut.
    """
    for leftover in path.glob(f"{TEMPORARY_PREFIX}*"):
        leftover.unlink()
        recovered.append(f"removed the unfinished {leftover.name}")
    if not (path / INDEX).exists() and provenance is not None:  # new, or its index was lost
        write_index(path, provenance, [])
    there, shards = open_shards(path)
    _check_provenance(path, there, provenance or there)
    known = {place.id for shard in shards for place in shard.samples}
    indexed = {shard.file for shard in shards}
    for file in sorted(path.glob("shard-*.safetensors")):
        if file.name not in indexed:
            _adopt(file, there, shards, known, recovered)
    return shards


def set_aside(file: Path) -> None:
    """Rename a damaged shard: out of the store's way, and still there."""
    file.rename(file.with_name(file.name + SET_ASIDE))
    fsync_directory(file.parent)


def _check_provenance(path: Path, there: Provenance, ours: Provenance) -> None:
    if there != ours:
        raise StoreError(
            f"resuming the store {path}",
            needed="the same provenance as what is stored (stored / this run)",
            found=there.differences(ours),
            advice="use another run directory, or remove this store if its states are no longer wanted",
        )


def _adopt(file: Path, provenance: Provenance, shards: list[Shard], known: set[str], recovered: list[str]) -> None:
    path = file.parent
    try:
        there, shard = read_shard(file)
        check_data(file, there, shard)
        twice = known & {place.id for place in shard.samples}
        if twice:
            raise damaged(path, file.name, f"samples that are in the index already: {sorted(twice)[:5]}")
    except StoreError as error:
        set_aside(file)
        recovered.append(f"set aside {file.name}: {error.found}")
        return
    _check_provenance(path, there, provenance)
    shards[:] = index_with(path, provenance, shards, shard)
    known |= {place.id for place in shard.samples}
    recovered.append(f"adopted {file.name} ({len(shard.samples)} samples)")


def next_number(path: Path, shards: Sequence[Shard]) -> int:
    """One more than any number in use, damaged files included, so that no name ever means two things."""
    names = [file.name for file in path.glob("shard-*")] + [shard.file for shard in shards]
    return max((int(name.split("-")[1].split(".")[0]) for name in names), default=-1) + 1

"""Writing a store of samples so that a crash at any point loses no published shard and doubles no sample.

A shard is written beside, fsynced and renamed, then the index the same way. Killed in between, the next
writer finds a complete shard without an index entry and adopts it after checking its checksum; whatever is half
written still has its temporary name and is removed. What was only in memory is not in `.done`, so the caller
makes it again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from vllm_compat.errors import StoreError

from .codec import Encoded, encode
from .files import TEMPORARY_PREFIX, fsync_directory, lock, write_json
from .sample_check import Refusals, fitting, not_finite
from .shard_file import check_data, open_shards, read_shard, write_shard
from .shards import FORMAT, INDEX, Provenance, Sample, Shard, damaged, shard_name

if TYPE_CHECKING:
    from typing_extensions import Self

LOCK = "writer.lock"
SET_ASIDE = ".damaged"


class StoreWriter:
    """Opens a store for writing, or resumes one.

    A context manager; only a clean exit publishes what is buffered.

    shard_bytes: a shard is written once so many bytes of hidden states are buffered. A thread writes it while the next
    one fills; when that is full before the disk is done, `add` waits. So memory holds two shards at most, whatever the
    disk does, and `.waited` counts the seconds.

    max_bad: so many samples with a NaN or infinite state are left out, and listed in `refused.jsonl`, before one is an
    error. They are not tried again by the next run; remove the file for that.

    StoreError: another writer has the store, its provenance differs, or an indexed shard is missing or cut; from `add`,
    `flush` and `close` also what the thread ran into. `.done` holds the ids on disk, and those refused; `.recovered`
    sentences on what a crash had left and what was done about it.
    """

    def __init__(self, path: str | Path, provenance: Provenance, shard_bytes: int, max_bad: int = 0) -> None:
        self.path, self.provenance, self.shard_bytes = Path(path), provenance, shard_bytes
        self.recovered: list[str] = []
        self.waited = 0.0
        self._buffered: dict[str, Sample] = {}
        self._buffered_bytes = 0
        self._full: list[Sample | Encoded] = []  # of the shard that is being written, or could not be
        self._job: Future[None] | None = None
        self._lock = lock(self.path / LOCK, f"writing to the store {self.path}")
        self._thread = ThreadPoolExecutor(1, "store-writer")
        try:
            self.shards = resume(self.path, self.provenance, self.recovered)
            self.done = {place.id for shard in self.shards for place in shard.samples}
            self._refusals = Refusals(self.path, max_bad)
            self.done |= self.refused.keys()
        except BaseException:
            os.close(self._lock)
            raise

    @property
    def refused(self) -> dict[str, str]:
        """Samples that were left out, with the reason."""
        return self._refusals.reasons

    def add(self, sample: Sample) -> None:
        """Check and buffer one sample, handing a full shard to the thread.

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
        self._buffered[sample.sample_id] = sample
        self._buffered_bytes += sample.hidden_states.nbytes
        if self._buffered_bytes >= self.shard_bytes:
            self._hand_over()

    def flush(self) -> None:
        """Publish what is buffered, and wait for it.

        On an error (full disk) nothing on disk changes and the buffer stays: a later call tries again.
        """
        self._settle()
        if self._full:
            self._start()
            self._settle()
        if self._buffered:
            self._hand_over()
            self._settle()

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
            self._thread.shutdown()  # what is being written was complete before: it is published, or it fails
            os.close(self._lock)
            self._lock = -1

    def _hand_over(self) -> None:
        self._settle()
        if self._full:  # it failed before
            self._start()
            self._settle()
        self._full = list(self._buffered.values())
        self._buffered, self._buffered_bytes = {}, 0
        self._start()

    def _start(self) -> None:
        self._job = self._thread.submit(self._write)

    def _settle(self) -> None:
        """Wait for the shard that is being written; StoreError when that failed."""
        if self._job is not None:
            began = time.monotonic()
            wait([self._job])
            self.waited += time.monotonic() - began
            job, self._job = self._job, None
            job.result()

    def _write(self) -> None:
        """In the thread: `_full` becomes a shard."""
        for i, sample in enumerate(self._full):
            if isinstance(sample, Sample):
                self._full[i] = encode(sample, self.provenance)  # one after the other, so that memory only falls
        samples = [sample for sample in self._full if isinstance(sample, Encoded)]
        publish_shard(self.path, self.provenance, self.shards, samples)
        self.done |= {sample.sample_id for sample in samples}
        self._full = []

    def _checked(self, sample: Sample) -> Sample:
        if self._lock < 0:
            raise StoreError(f"adding sample {sample.sample_id!r} to {self.path}", found="the writer is closed")
        here = sample.sample_id in self.done or sample.sample_id in self._buffered
        # A copy of the list: the thread empties it.
        here = here or any(item.sample_id == sample.sample_id for item in list(self._full))
        return fitting(sample, self.provenance, self.path, is_there=here)


def publish_shard(path: Path, provenance: Provenance, shards: list[Shard], samples: Sequence[Encoded]) -> None:
    """Write a shard and then the index; append to `shards`. On a StoreError (full disk) nothing on disk has changed."""
    file = path / shard_name(next_number(path, shards))
    try:
        shard = write_shard(file, samples, provenance)
        try:
            write_index(path, provenance, [*shards, shard])
        except OSError:
            file.unlink()  # or the next try would write its samples a second time
            raise
        shards.append(shard)
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
    shards.append(shard)
    known |= {place.id for place in shard.samples}
    write_index(path, provenance, shards)
    recovered.append(f"adopted {file.name} ({len(shard.samples)} samples)")


def next_number(path: Path, shards: Sequence[Shard]) -> int:
    """One more than any number in use, damaged files included, so that no name ever means two things."""
    names = [file.name for file in path.glob("shard-*")] + [shard.file for shard in shards]
    return max((int(name.split("-")[1].split(".")[0]) for name in names), default=-1) + 1

"""Writing a store of samples so that a crash at any point loses no published shard and doubles no sample.

A shard is written beside, fsynced and renamed, then the index the same way. Killed in between, the next
writer finds a complete shard without an index entry and adopts it after checking its CRC; whatever is half
written still has its temporary name and is removed. What was only in memory is not in `.done`, so the caller
makes it again.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from vllm_compat.errors import StoreError

from .files import TEMPORARY_PREFIX, fsync_directory, lock, publish, sha256_file, temporary_path, write_json
from .shards import (
    DTYPES,
    FORMAT,
    INDEX,
    TENSORS,
    Provenance,
    Sample,
    check_size,
    crc_of,
    damaged,
    read_index,
    read_shard,
)

if TYPE_CHECKING:
    from typing_extensions import Self

LOCK = "writer.lock"
_SET_ASIDE = ".damaged"


class StoreWriter:
    """Opens a store for writing, or resumes one.

    A context manager; only a clean exit publishes what is buffered.

    shard_bytes: a shard is published once so many bytes of hidden states are buffered (the memory that it
    costs is twice that). StoreError: another writer has the store, its provenance differs, or an indexed
    shard is missing or cut. `.done` holds the ids on disk, `.recovered` sentences on what a crash had left
    and what was done about it.
    """

    def __init__(self, path: str | Path, provenance: Provenance, shard_bytes: int) -> None:
        self.path, self.provenance, self.shard_bytes = Path(path), provenance, shard_bytes
        self.recovered: list[str] = []
        self._buffered: dict[str, Sample] = {}
        self._buffered_bytes = 0
        self._lock = lock(self.path / LOCK, f"writing to the store {self.path}")
        try:
            self._shards = self._resume()
            self.done = {item["id"] for shard in self._shards for item in shard["samples"]}
        except BaseException:
            os.close(self._lock)
            raise

    def add(self, sample: Sample) -> None:
        """Check and buffer one sample (a copy), publishing a shard when full.

        StoreError names a sample that is refused: an id that is here already, a wrong shape or dtype, NaN or
        infinity.
        """
        sample = self._checked(sample)
        self._buffered[sample.sample_id] = sample
        self._buffered_bytes += sample.hidden_states.nbytes
        if self._buffered_bytes >= self.shard_bytes:
            self.flush()

    def flush(self) -> None:
        """Publish what is buffered as one shard.

        On an error (full disk) nothing on disk changes and the buffer stays.
        """
        if not self._buffered:
            return
        samples, start = [], 0
        for sample in self._buffered.values():
            samples.append({"id": sample.sample_id, "start": start, "length": len(sample.token_ids)})
            start += len(sample.token_ids)
        tensors = {name: torch.cat([getattr(sample, name) for sample in self._buffered.values()]) for name in TENSORS}
        path = self.path / f"shard-{_next_number(self.path, self._shards):06d}.safetensors"
        provenance = json.dumps(self.provenance.to_json())
        metadata = {"samples": json.dumps(samples), "crc32": crc_of(tensors), "provenance": provenance}
        temporary = temporary_path(path)
        try:
            save_file(tensors, temporary, metadata)
            checksum, size = sha256_file(temporary), temporary.stat().st_size
            publish(temporary, path)
            self._shards.append({"file": path.name, "bytes": size, "sha256": checksum, "samples": samples})
            self._buffered, self._buffered_bytes = {}, 0
            self.done |= {item["id"] for item in samples}
            _write_index(self.path, self.provenance, self._shards)
        except (OSError, SafetensorError) as error:
            raise StoreError(
                f"writing {path.name} ({start} tokens) to {self.path}",
                needed=f"about {sum(t.nbytes for t in tensors.values())} free bytes",
                found=str(error),
                advice="make room and run the stage again: it goes on after the last complete shard",
            ) from error
        finally:
            temporary.unlink(missing_ok=True)

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
            os.close(self._lock)
            self._lock = -1

    def _checked(self, sample: Sample) -> Sample:
        if self._lock < 0:
            raise StoreError(f"adding sample {sample.sample_id!r} to {self.path}", found="the writer is closed")
        p = self.provenance
        states = sample.hidden_states
        shape = (len(sample.token_ids), len(p.layers), p.hidden_size)
        problems = {
            "its id is in the store already": sample.sample_id in self.done or sample.sample_id in self._buffered,
            "it has no tokens": shape[0] == 0,
            f"hidden_states is {tuple(states.shape)}, not {shape}": tuple(states.shape) != shape,
            f"hidden_states is {states.dtype}, not {DTYPES[p.dtype]}": states.dtype != DTYPES[p.dtype],
            f"token_ids is {sample.token_ids.dtype}, not int32": sample.token_ids.dtype != torch.int32,
            f"loss_mask is {sample.loss_mask.dtype}, not uint8": sample.loss_mask.dtype != torch.uint8,
            f"loss_mask has {len(sample.loss_mask)} entries": len(sample.loss_mask) != shape[0],
        }
        wrong = [text for text, is_so in problems.items() if is_so]
        if not wrong and not torch.isfinite(states).all():
            bad = (~torch.isfinite(states)).any(-1).nonzero()[0].tolist()
            wrong = [f"a state is NaN or infinite, first at token {bad[0]}, boundary {p.layers[bad[1]]}"]
        if wrong:
            raise StoreError(f"adding sample {sample.sample_id!r} to {self.path}", found="; ".join(wrong))
        copies = (t.detach().to("cpu", copy=True).contiguous() for t in (sample.token_ids, sample.loss_mask, states))
        return Sample(sample.sample_id, *copies)

    def _resume(self) -> list[dict[str, Any]]:
        for leftover in self.path.glob(f"{TEMPORARY_PREFIX}*"):
            leftover.unlink()
            self.recovered.append(f"removed the unfinished {leftover.name}")
        if not (self.path / INDEX).exists():  # new, or its index was lost: see _adopt
            _write_index(self.path, self.provenance, [])
        there, shards = read_index(self.path)
        self._check_provenance(there)
        for shard in shards:
            check_size(self.path, shard)
        known = {item["id"] for shard in shards for item in shard["samples"]}
        indexed = {shard["file"] for shard in shards}
        for file in sorted(self.path.glob("shard-*.safetensors")):
            if file.name not in indexed:
                self._adopt(file, shards, known)
        return shards

    def _check_provenance(self, there: Provenance) -> None:
        if there != self.provenance:
            raise StoreError(
                f"resuming the store {self.path}",
                needed="the same provenance as what is stored (stored / this run)",
                found=there.differences(self.provenance),
                advice="use another run directory, or remove this store if its states are no longer wanted",
            )

    def _adopt(self, file: Path, shards: list[dict[str, Any]], known: set[str]) -> None:
        try:
            there, entry = read_shard(file)
            twice = known & {item["id"] for item in entry["samples"]}
            if twice:
                raise damaged(self.path, file.name, f"samples that are in the index already: {sorted(twice)[:5]}")
        except StoreError as error:
            _set_aside(file)
            self.recovered.append(f"set aside {file.name}: {error.found}")
            return
        self._check_provenance(there)
        shards.append(entry)
        known |= {item["id"] for item in entry["samples"]}
        _write_index(self.path, self.provenance, shards)
        self.recovered.append(f"adopted {file.name} ({len(entry['samples'])} samples)")


def repair(path: str | Path) -> list[str]:
    """Set damaged shards aside, so that the next extract makes their samples anew.

    Reads every byte. A damaged shard becomes `….damaged` (nothing is deleted) and leaves the index. Returns
    one sentence per shard that was set aside.
    """
    path = Path(path)
    provenance, shards = read_index(path)
    held = lock(path / LOCK, f"repairing the store {path}")
    try:
        kept, said = [], []
        for shard in shards:
            try:
                check_size(path, shard)
                if read_shard(path / shard["file"]) != (provenance, shard):
                    raise damaged(path, shard["file"], "checksum or samples differ from the index")
                kept.append(shard)
            except StoreError as error:
                said.append(f"{shard['file']} ({len(shard['samples'])} samples): {error.found}")
        if said:
            _write_index(path, provenance, kept)
            for shard in shards:
                if shard not in kept and (path / shard["file"]).exists():
                    _set_aside(path / shard["file"])
        return said
    finally:
        os.close(held)


def _write_index(path: Path, provenance: Provenance, shards: list[dict[str, Any]]) -> None:
    write_json(path / INDEX, {"format": FORMAT, "provenance": provenance.to_json(), "shards": shards})


def _next_number(path: Path, shards: list[dict[str, Any]]) -> int:
    """One more than any number in use, damaged files included, so that no name ever means two things."""
    names = [file.name for file in path.glob("shard-*")] + [shard["file"] for shard in shards]
    return max((int(name.split("-")[1].split(".")[0]) for name in names), default=-1) + 1


def _set_aside(file: Path) -> None:
    file.rename(file.with_name(file.name + _SET_ASIDE))
    fsync_directory(file.parent)

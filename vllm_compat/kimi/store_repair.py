"""What is done to a store whose files are not what was written: damaged shards go aside, a lost index is made again."""

from __future__ import annotations

import os
from pathlib import Path

from vllm_compat.errors import StoreError

from .files import lock
from .shard_file import check_data, read_shard
from .shards import INDEX, Shard, check_size, damaged, read_index
from .store_writer import LOCK, resume, set_aside, write_index


def repair(path: str | Path) -> list[str]:
    """Make a store whole, so that the next extract makes what is missing.

    Reads every byte. A damaged shard becomes `….damaged` (nothing is deleted) and leaves the index; a complete shard
    that is not in the index enters it; an index that is lost or unreadable is made again. Returns a sentence for each.

    StoreError: somebody is writing there, or there is not one readable shard to tell what the store is.
    """
    path = Path(path)
    if not path.is_dir():
        raise StoreError(f"repairing the store {path}", found="no such directory")
    held = lock(path / LOCK, f"repairing the store {path}")
    try:
        said = _remake_index(path)
        provenance, entries = read_index(path)
        kept: list[Shard] = []
        bad: list[str] = []
        for entry in entries:
            try:
                check_size(path, entry["file"], entry["bytes"])
                there, shard = read_shard(path / entry["file"], entry["header_sha256"])
                if (there, shard.to_json()) != (provenance, entry):
                    raise damaged(path, entry["file"], f"it does not belong to this {INDEX}")
                check_data(path / entry["file"], provenance, shard)
                kept.append(shard)
            except StoreError as error:
                bad.append(entry["file"])
                said.append(f"set aside {entry['file']} ({entry['samples']} samples): {error.found}")
        if bad:
            write_index(path, provenance, kept)
            for file in bad:
                if (path / file).exists():
                    set_aside(path / file)
        resume(path, None, said)
        return said
    finally:
        os.close(held)


def _remake_index(path: Path) -> list[str]:
    """An empty index with the provenance of the first readable shard, if there is no readable index."""
    try:
        read_index(path)
    except StoreError as no_index:
        for file in sorted(path.glob("shard-*.safetensors")):
            try:
                provenance, _ = read_shard(file)
            except StoreError:  # it will be set aside
                continue
            write_index(path, provenance, [])
            return [f"made {INDEX} again: {no_index.found}"]
        raise
    return []

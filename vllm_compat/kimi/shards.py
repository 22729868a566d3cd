"""A directory of samples: sharded safetensors, an index with checksums, one writer, any number of readers.

    shard-000000.safetensors   token_ids [S] int32, loss_mask [S] uint8, hidden_states [S, L, H];
                               S = tokens of the shard. Its metadata holds the samples, the provenance and a
                               CRC of the tensors: a shard explains itself, a lost index can be made again.
    index.json                 format, provenance, and per shard: file, bytes, sha256, samples [{id, start,
    length}] writer.lock                flock'ed while somebody writes

This file holds what reader (`store.py`) and writer (`store_writer.py`) agree on. Hidden states are
boundaries, ascending, the final one (before the last norm) last.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from vllm_compat.errors import StoreError

from .files import sha256_file

FORMAT = 1
INDEX = "index.json"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
TENSORS = ("token_ids", "loss_mask", "hidden_states")


@dataclass(frozen=True)
class Sample:
    """One row with its states.

    `token_ids` int32 [T], loss_mask uint8 [T], hidden_states [T, L, H] in the store's dtype.
    """

    sample_id: str
    token_ids: torch.Tensor
    loss_mask: torch.Tensor
    hidden_states: torch.Tensor


@dataclass(frozen=True)
class Provenance:
    """Where the states of a store come from. Two stores with different provenance must not be mixed.

    layers: boundary ids in the order of the L axis, the final one (= num_hidden_layers) last.
    model_fingerprint: sha256 over config.json and the safetensors headers. rows_fingerprint: sha256 of the
    rows.
    """

    layers: tuple[int, ...]
    hidden_size: int
    num_hidden_layers: int
    dtype: str
    model_fingerprint: str
    vllm_version: str
    distribution: str
    runner: str
    created_with: str
    rows_fingerprint: str
    convention: str = "boundary"
    final_norm_applied: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        ascending = self.layers == tuple(sorted(set(self.layers)))
        if not self.layers or not ascending or self.layers[-1] != self.num_hidden_layers:
            raise StoreError(
                f"a store of boundaries {list(self.layers)}",
                needed=f"ascending ids, each once, the final boundary {self.num_hidden_layers} last",
                advice=f"boundary {self.num_hidden_layers} is the state after all {self.num_hidden_layers}"
                " layers, not the input of the last one",
            )
        if self.convention != "boundary" or self.dtype not in DTYPES:
            raise StoreError(
                f"a store with convention {self.convention!r} and dtype {self.dtype!r}",
                needed="convention 'boundary' and a dtype among " + ", ".join(DTYPES),
            )

    def to_json(self) -> dict[str, Any]:
        """JSON-able dict, all fields."""
        return {**dataclasses.asdict(self), "layers": list(self.layers)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Provenance:
        """The inverse; StoreError when a field is missing or unknown (another format, an edited file)."""
        names = {item.name for item in dataclasses.fields(cls)}
        if set(value) != names:
            raise StoreError(
                "reading the provenance of a store",
                needed="the fields " + ", ".join(sorted(names)),
                found=f"missing: {sorted(names - set(value))}, unknown: {sorted(set(value) - names)}",
            )
        return cls(**value)

    def differences(self, other: Provenance) -> str:
        """`field: mine / theirs` for each field that differs; empty when equal."""
        mine, theirs = self.to_json(), other.to_json()
        return "; ".join(f"{key}: {mine[key]} / {theirs[key]}" for key in mine if mine[key] != theirs[key])


def read_index(path: Path) -> tuple[Provenance, list[dict[str, Any]]]:
    """Provenance and shard entries of the store at `path`.

    StoreError when there is none or its format is another.
    """
    try:
        index = json.loads((path / INDEX).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise StoreError(f"the store {path}", needed=INDEX, found="no such file", advice="run extract") from error
    except ValueError as error:
        raise StoreError(f"the store {path}", needed=f"{INDEX} in JSON", found=str(error)) from error
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        found = index.get("format") if isinstance(index, dict) else type(index).__name__
        raise StoreError(f"the store {path}", needed=f"format {FORMAT}", found=f"format {found}")
    return Provenance.from_json(index["provenance"]), index["shards"]


def check_size(path: Path, shard: Mapping[str, Any]) -> None:
    """StoreError when the shard is missing or is not as long as the index says."""
    try:
        size = (path / shard["file"]).stat().st_size
    except FileNotFoundError as error:
        raise damaged(path, shard["file"], "missing") from error
    if size != shard["bytes"]:
        cut = "truncated: " if size < shard["bytes"] else ""
        raise damaged(path, shard["file"], f"{cut}{size} bytes, the index says {shard['bytes']}")


def read_samples(file: Path) -> list[dict[str, Any]]:
    """The list of samples in a shard's own metadata; StoreError unless the file is a complete shard."""
    try:
        with safe_open(str(file), framework="pt") as handle:
            metadata = handle.metadata()
            samples: list[dict[str, Any]] = json.loads(metadata["samples"])
            metadata["crc32"], metadata["provenance"]  # KeyError: a safetensors file, but none of ours
            return samples
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise damaged(file.parent, file.name, f"unreadable: {error}") from error


def check_shapes(file: Path, provenance: Provenance) -> None:
    """StoreError when a shard's tensors are not what its samples and the provenance say."""
    total = sum(item["length"] for item in read_samples(file))
    needed = {
        "token_ids": ((total,), torch.int32),
        "loss_mask": ((total,), torch.uint8),
        "hidden_states": ((total, len(provenance.layers), provenance.hidden_size), DTYPES[provenance.dtype]),
    }
    with safe_open(str(file), framework="pt") as handle:
        names = handle.keys()
        found = {name: tuple(handle.get_slice(name).get_shape()) for name in names}
        if found != {name: shape for name, (shape, _) in needed.items()}:
            raise damaged(file.parent, file.name, f"tensors {found}")
        for name, (_, dtype) in needed.items():
            one = handle.get_slice(name)[0:1]
            if one.dtype != dtype:
                raise damaged(file.parent, file.name, f"{name} is {one.dtype}, not {dtype}")


def read_shard(file: Path) -> tuple[Provenance, dict[str, Any]]:
    """Provenance and index entry of a shard, made from the file alone; StoreError unless it is whole."""
    samples = read_samples(file)
    with safe_open(str(file), framework="pt") as handle:
        metadata = handle.metadata()
    provenance = Provenance.from_json(json.loads(metadata["provenance"]))
    check_shapes(file, provenance)
    if crc_of(load_file(file)) != metadata["crc32"]:
        raise damaged(file.parent, file.name, "its tensors do not match the CRC in its metadata")
    entry = {"file": file.name, "bytes": file.stat().st_size, "sha256": sha256_file(file), "samples": samples}
    return provenance, entry


def crc_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """CRC-32 of a shard's tensors, hex: cheap (7 GB/s) and enough to tell a whole shard from a broken one."""
    crc = 0
    for name in TENSORS:
        crc = zlib.crc32(memoryview(tensors[name].contiguous().view(torch.uint8).numpy().reshape(-1)), crc)
    return f"{crc:08x}"


def damaged(path: Path, file: str, what: str) -> StoreError:
    """The error for a shard that is not what it should be."""
    return StoreError(
        f"shard {file} of {path}",
        needed="the shard as it was written",
        found=what,
        advice="restore a copy; or set it aside with `vllm-compat kimi verify --repair` and extract again",
    )

"""A directory of samples: sharded safetensors, a small index with checksums, one writer, any number of readers.

    shard-000000.safetensors   tensors of all its samples, one after the other; its metadata lists the samples. A shard
                               explains itself: a lost index can be made again. See `shard_file.py`
    index.json                 format, provenance, and per shard: file, bytes, checksum, header_sha256, samples, tokens
    writer.lock                flock'ed while somebody writes

This file holds what reader (`store.py`) and writer (`store_writer.py`) agree on. docs/store.md is for readers without
this library.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vllm_compat.errors import StoreError

FORMAT = 2
INDEX = "index.json"
FP8 = "float8_e4m3fn"
#: Name of a store's dtype -> the dtype in which samples are given to it and come out of it.
DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    FP8: torch.bfloat16,
}
#: Where final states are stored: at all tokens, or where the next token carries loss.
FINALS = ("all", "loss")


@dataclass(frozen=True)
class Sample:
    """One row with its states.

    `token_ids` int32 [T], loss_mask uint8 [T], hidden_states [T, L, H] in ``DTYPES[provenance.dtype]``, the final state
    last. Where a store keeps no final state, reading gives NaN for it.
    """

    sample_id: str
    token_ids: torch.Tensor
    loss_mask: torch.Tensor
    hidden_states: torch.Tensor


class Place(NamedTuple):
    """Where a sample is in its shard: rows of the tensors by token, and rows of `final_states`."""

    id: str
    start: int
    length: int
    final_start: int
    final_length: int


class Shard(NamedTuple):
    """What the index and the shard's own header say.

    checksum: of all bytes after the header (`shard_file.py`). header_sha256: of the header, which holds the former.
    quantisation: sums of squares per aux boundary, of the error and of the states (`fp8.py`); None unless the store is
    in fp8.
    """

    file: str
    bytes: int
    checksum: str
    header_sha256: str
    samples: tuple[Place, ...]
    quantisation: dict[str, list[float]] | None = None

    @property
    def tokens(self) -> int:
        return sum(place.length for place in self.samples)

    def to_json(self) -> dict[str, Any]:
        """Its entry in the index: the samples are counted there, and listed in the shard."""
        return {**self._asdict(), "samples": len(self.samples), "tokens": self.tokens}


@dataclass(frozen=True)
class Provenance:
    """Where the states of a store come from. Two stores with different provenance must not be mixed.

    layers: boundary ids in the order of the L axis, the final one (= num_hidden_layers) last.
    dtype: of the stored states; with float8_e4m3fn the final state is kept in bfloat16, for the teacher's sake.
    finals: "all", or "loss": only where the next token carries loss. model_fingerprint: sha256 over config.json and the
    safetensors headers. rows_fingerprint: sha256 of the rows. way: how they were captured (docs/capture.md).
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
    finals: str = "all"
    convention: str = "boundary"
    final_norm_applied: bool = False
    way: str = "hooks"

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
        if self.convention != "boundary" or self.dtype not in DTYPES or self.finals not in FINALS:
            raise StoreError(
                f"a store with convention {self.convention!r}, dtype {self.dtype!r}, finals {self.finals!r}",
                needed=f"convention 'boundary', a dtype among {', '.join(DTYPES)}, finals {' or '.join(FINALS)}",
            )

    @property
    def splits_finals(self) -> bool:
        """Whether final states are a tensor of their own, `final_states`, and not the last row of `hidden_states`."""
        return self.dtype == FP8 or self.finals != "all"

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
    """Provenance and shard entries (`Shard.to_json`) of the store at `path`.

    StoreError when there is none or its format is another.
    """
    try:
        index = json.loads((path / INDEX).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise StoreError(f"the store {path}", needed=INDEX, found="no such file", advice="run extract") from error
    except ValueError as error:
        raise StoreError(
            f"the store {path}",
            needed=f"{INDEX} in JSON",
            found=str(error),
            advice=f"make it again from the shards: `vllm-compat kimi store repair {path}`",
        ) from error
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        found = index.get("format") if isinstance(index, dict) else type(index).__name__
        raise StoreError(
            f"the store {path}", needed=f"format {FORMAT}", found=f"format {found}", advice="extract it again"
        )
    return Provenance.from_json(index["provenance"]), index["shards"]


def check_size(path: Path, file: str, size: int) -> None:
    """StoreError when the shard is missing or is not as long as the index says."""
    try:
        found = (path / file).stat().st_size
    except FileNotFoundError as error:
        raise damaged(path, file, "missing") from error
    if found != size:
        cut = "truncated: " if found < size else ""
        raise damaged(path, file, f"{cut}{found} bytes, the index says {size}")


def damaged(path: Path, file: str, what: str) -> StoreError:
    """The error for a shard that is not what it should be."""
    return StoreError(
        f"shard {file} of {path}",
        needed="the shard as it was written",
        found=what,
        advice=f"restore a copy; or set it aside with `vllm-compat kimi store repair {path}` and extract again",
    )


def shard_name(number: int) -> str:
    """Of the file of the shard with that number."""
    return f"shard-{number:06d}.safetensors"


def final_positions(loss_mask: torch.Tensor, finals: str) -> torch.Tensor:
    """int32 [F]: the tokens of a row whose final states are stored.

    "loss": where the next token carries loss, since the state at t is the teacher of token t + 1.
    """
    if finals == "all":
        return torch.arange(len(loss_mask), dtype=torch.int32)
    return loss_mask[1:].nonzero().flatten().to(torch.int32)


def placed(samples: Sequence[tuple[str, int, int]]) -> tuple[Place, ...]:
    """Places of samples (id, tokens, final states) that follow one another."""
    made, start, final_start = [], 0, 0
    for name, length, finals in samples:
        made.append(Place(name, start, length, final_start, finals))
        start, final_start = start + length, final_start + finals
    return tuple(made)

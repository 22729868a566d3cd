"""Reading a store of samples; the format is described in docs/store.md, the writer is in `store_writer.py`."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from vllm_compat.errors import StoreError

from .codec import decode, layout
from .shard_file import check_data, open_shards
from .shards import Place, Provenance, Sample, Shard, check_size, damaged
from .store_repair import repair
from .store_writer import StoreWriter

__all__ = ["Provenance", "Sample", "Store", "StoreWriter", "repair"]

_OPEN_SHARDS = 32  # memory-mapped shards kept open per reader


class Store:
    """Read access to a store, as of the moment it was opened; somebody may be writing to it.

    `store[i]` and `store.by_id(id)` map only the sample's own bytes. StoreError when there is no store, or
    when a shard is missing, cut, or its header is not what was written; `verify()` also checks every byte.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.provenance, self.shards = open_shards(self.path)
        #: Samples before each shard.
        self._before = [0, *accumulate(len(shard.samples) for shard in self.shards)]
        self._by_id: dict[str, int] = {}
        for shard in self.shards:
            for place in shard.samples:
                if place.id in self._by_id:
                    raise damaged(self.path, shard.file, f"sample {place.id!r}, which another shard has too")
                self._by_id[place.id] = len(self._by_id)
        self._names = list(layout(self.provenance).items())
        self._open: OrderedDict[str, Any] = OrderedDict()

    def __len__(self) -> int:
        return self._before[-1]

    def __iter__(self) -> Iterator[Sample]:
        return (self[i] for i in range(len(self)))

    @property
    def ids(self) -> Sequence[str]:
        """Sample ids in the order of the index."""
        return list(self._by_id)

    @property
    def lengths(self) -> Sequence[int]:
        """Tokens per sample, in the order of `ids`."""
        return [place.length for shard in self.shards for place in shard.samples]

    @property
    def num_tokens(self) -> int:
        """Tokens in the whole store."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def quantisation_error(self) -> list[float] | None:
        """Per aux boundary, the size of the error relative to that of the states (root mean squares); fp8 only."""
        sums = [shard.quantisation for shard in self.shards if shard.quantisation is not None]
        if not sums:
            return None
        error, power = (torch.tensor([item[key] for item in sums]).sum(0) for key in ("error", "power"))
        return [round(value, 5) for value in (error / power).sqrt().tolist()]

    def __getitem__(self, i: int) -> Sample:
        shard, place = self.place(i)
        return decode(place.id, self.raw(shard, place), self.provenance)

    def place(self, i: int) -> tuple[Shard, Place]:
        """Where sample number i is; negative numbers count from the end."""
        i = range(len(self))[i]
        at = bisect_right(self._before, i) - 1
        return self.shards[at], self.shards[at].samples[i - self._before[at]]

    def raw(self, shard: Shard, place: Place) -> dict[str, torch.Tensor]:
        """A sample's tensors as they are stored; views of the mapped file."""
        rows = (
            slice(place.start, place.start + place.length),
            slice(place.final_start, place.final_start + place.final_length),
        )
        try:
            handle = self._handle(shard.file)
            return {name: handle.get_slice(name)[rows[final]] for name, (_, _, final) in self._names}
        except (SafetensorError, OSError) as error:
            raise damaged(self.path, shard.file, f"unreadable at sample {place.id!r}: {error}") from error

    def by_id(self, sample_id: str) -> Sample:
        """The sample of that id; StoreError when it is not here."""
        if sample_id not in self._by_id:
            raise StoreError(f"sample {sample_id!r} of {self.path}", found=f"{len(self)} other samples")
        return self[self._by_id[sample_id]]

    def verify(self) -> dict[str, int]:
        """Read every byte and compare checksums. StoreError names the shard.

        Returns the number of shards, samples, tokens and bytes that were checked.
        """
        for shard in self.shards:
            check_size(self.path, shard.file, shard.bytes)
            check_data(self.path / shard.file, self.provenance, shard)
        total = sum(shard.bytes for shard in self.shards)
        return {"shards": len(self.shards), "samples": len(self), "tokens": self.num_tokens, "bytes": total}

    def _handle(self, file: str) -> Any:
        if file not in self._open:
            self._open[file] = safe_open(str(self.path / file), framework="pt")
            if len(self._open) > _OPEN_SHARDS:
                self._open.popitem(last=False)
        self._open.move_to_end(file)
        return self._open[file]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": OrderedDict()}  # for data loader workers: a map is a process's own

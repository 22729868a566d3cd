"""Reading a store of samples; the format is described in `shards.py`, the writer is in `store_writer.py`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from vllm_compat.errors import StoreError

from .files import sha256_file
from .shards import TENSORS, Provenance, Sample, check_shapes, check_size, damaged, read_index, read_samples
from .store_writer import StoreWriter, repair

__all__ = ["Provenance", "Sample", "Store", "StoreWriter", "repair"]

_OPEN_SHARDS = 32  # memory-mapped shards kept open per reader


class Store:
    """Read access to a store, as of the moment it was opened; somebody may be writing to it.

    `store[i]` and `store.by_id(id)` map only the sample's own bytes. StoreError when there is no store, or
    when a shard is missing or not the size that the index says; `verify()` also checks every byte.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.provenance, self.shards = read_index(self.path)
        self._places = [(shard, item) for shard in self.shards for item in shard["samples"]]
        self._by_id = {item["id"]: i for i, (_, item) in enumerate(self._places)}
        self._open: OrderedDict[str, Any] = OrderedDict()
        for shard in self.shards:
            check_size(self.path, shard)

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Sample]:
        return (self[i] for i in range(len(self)))

    @property
    def ids(self) -> Sequence[str]:
        """Sample ids in the order of the index."""
        return list(self._by_id)

    @property
    def lengths(self) -> Sequence[int]:
        """Tokens per sample, in the order of `ids`."""
        return [item["length"] for _, item in self._places]

    @property
    def num_tokens(self) -> int:
        """Tokens in the whole store."""
        return sum(self.lengths)

    def __getitem__(self, i: int) -> Sample:
        shard, item = self._places[i]
        span = slice(item["start"], item["start"] + item["length"])
        try:
            handle = self._handle(shard["file"])
            # A slice is a view of the whole mapped shard; a copy can go to another process.
            parts = [handle.get_slice(name)[span].clone() for name in TENSORS]
        except (SafetensorError, OSError) as error:
            raise damaged(self.path, shard["file"], f"unreadable at sample {item['id']!r}: {error}") from error
        return Sample(item["id"], *parts)

    def by_id(self, sample_id: str) -> Sample:
        """The sample of that id; StoreError when it is not here."""
        if sample_id not in self._by_id:
            raise StoreError(f"sample {sample_id!r} of {self.path}", found=f"{len(self)} other samples")
        return self[self._by_id[sample_id]]

    def verify(self) -> dict[str, int]:
        """Read every byte.

        Sizes, checksums, and whether each shard agrees with the index. StoreError names the shard.

        Returns the number of shards, samples, tokens and bytes that were checked.
        """
        seen: set[str] = set()
        for shard in self.shards:
            file = shard["file"]
            check_size(self.path, shard)
            checksum = sha256_file(self.path / file)
            if checksum != shard["sha256"]:
                raise damaged(self.path, file, f"checksum {checksum}, the index says {shard['sha256']}")
            if read_samples(self.path / file) != shard["samples"]:
                raise damaged(self.path, file, "its own list of samples differs from the index")
            twice = seen & {item["id"] for item in shard["samples"]}
            if twice:
                raise damaged(self.path, file, f"samples that another shard has too: {sorted(twice)[:5]}")
            seen |= {item["id"] for item in shard["samples"]}
            check_shapes(self.path / file, self.provenance)
        total = sum(shard["bytes"] for shard in self.shards)
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

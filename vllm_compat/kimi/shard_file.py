"""One shard: a safetensors file that is written in one pass, straight from the memory of its samples.

    8 bytes      length N of the header, little-endian
    N bytes      the header: JSON, padded with spaces to a multiple of 8
    the rest     the tensors, each the rows of all samples, one after the other

The header's `__metadata__` holds `samples`, `provenance`, `quantisation` (fp8 only) and `checksum`: the SHA-256 of the
XXH3-128s of each 8 MiB of the rest. So threads share the work of one file, and it is little work: prefill on a GPU
makes 5 GB/s of states, of which SHA-256 does 1 to 2 on a core, and XXH3 more than memory gives. It finds damage, not
forgery. With the writer of safetensors a shard would be concatenated first, copied to bytes, and read again for its
checksum.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from .codec import Encoded, layout
from .files import publish, temporary_path
from .shards import INDEX, Place, Provenance, Shard, check_size, damaged, placed, read_index

#: safetensors' names.
_DTYPES = {
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
}
_PIECE = 8 << 20  # bytes hashed and written at once; part of the format
_VIEWS = 512  # buffers per call of the system, which takes 1024
READERS = max(2, min(8, (os.cpu_count() or 2) // 2))
_WRITERS = 2  # one writes, which a file lets one do at a time, and one hashes


def write_shard(path: Path, samples: Sequence[Encoded], provenance: Provenance) -> Shard:
    """Write beside, fsync, rename. OSError: nothing is left behind."""
    places = placed([sample.counts for sample in samples])
    quantisation = _quantisation(samples)
    metadata = {
        "samples": json.dumps([place._asdict() for place in places], ensure_ascii=False),
        "provenance": json.dumps(provenance.to_json()),
        "checksum": "0" * 64,
        **({} if quantisation is None else {"quantisation": json.dumps(quantisation)}),
    }
    rows = (sum(place.length for place in places), sum(place.final_length for place in places))
    header = _header(provenance, rows, metadata)
    temporary = temporary_path(path)
    try:
        with temporary.open("wb") as stream, ThreadPoolExecutor(_WRITERS, "shard-writer") as pool:
            fd, at = stream.fileno(), len(header)
            futures = []
            for piece in _pieces([sample.tensors[name] for name in layout(provenance) for sample in samples]):
                futures.append(pool.submit(_write, fd, piece, at))
                at += sum(map(len, piece))
            checksum = _combined(future.result() for future in futures)
            header = _header(provenance, rows, {**metadata, "checksum": checksum})
            _write_header(fd, header)
        size = temporary.stat().st_size
        publish(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return Shard(path.name, size, checksum, hashlib.sha256(header).hexdigest(), places, quantisation)


def read_shard(file: Path, header_sha256: str | None = None) -> tuple[Provenance, Shard]:
    """What a shard says of itself, from its header alone. StoreError when that is no shard's, or not the one named."""
    try:
        with file.open("rb") as stream:
            length = stream.read(8)
            text = stream.read(min(int.from_bytes(length, "little"), file.stat().st_size))
        own = hashlib.sha256(length + text).hexdigest()
        if header_sha256 not in (None, own):
            raise damaged(file.parent, file.name, f"its header is not what {INDEX} says")
        metadata = json.loads(text)["__metadata__"]
        samples = tuple(Place(**item) for item in json.loads(metadata["samples"]))
        provenance = Provenance.from_json(json.loads(metadata["provenance"]))
        quantisation = json.loads(metadata["quantisation"]) if "quantisation" in metadata else None
        checksum = str(metadata["checksum"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise damaged(file.parent, file.name, f"unreadable: {error!r}") from error
    return provenance, Shard(file.name, file.stat().st_size, checksum, own, samples, quantisation)


def open_shards(path: Path) -> tuple[Provenance, list[Shard]]:
    """What index and headers say; StoreError names the shard that is missing, cut, or has another header."""
    provenance, entries = read_index(path)
    shards = []
    for entry in entries:
        check_size(path, entry["file"], entry["bytes"])
        there, shard = read_shard(path / entry["file"], entry["header_sha256"])
        if shard.to_json() != entry or there != provenance:
            raise damaged(path, entry["file"], f"it does not belong to this {INDEX}")
        shards.append(shard)
    return provenance, shards


def check_data(file: Path, provenance: Provenance, shard: Shard) -> None:
    """Read every byte: StoreError unless checksum, shapes and places are what header and provenance say."""
    with file.open("rb") as stream, ThreadPoolExecutor(READERS, "shard-reader") as pool:
        start = 8 + int.from_bytes(stream.read(8), "little")
        places = range(start, file.stat().st_size, _PIECE)
        checksum = _combined(pool.map(partial(_hash_piece, stream.fileno()), places))
    if checksum != shard.checksum:
        raise damaged(file.parent, file.name, f"its data's checksum is {checksum}, its header says {shard.checksum}")
    if shard.samples != placed([(place.id, place.length, place.final_length) for place in shard.samples]):
        raise damaged(file.parent, file.name, "its samples do not follow one another")
    rows = (shard.tokens, sum(place.final_length for place in shard.samples))
    needed = {name: ((rows[final], *shape), dtype) for name, (dtype, shape, final) in layout(provenance).items()}
    try:
        with safe_open(str(file), framework="pt") as handle:
            found = {name: tuple(handle.get_slice(name).get_shape()) for name in handle.keys()}  # noqa: SIM118
            dtypes = {name: handle.get_slice(name)[0:1].dtype for name in found}
    except SafetensorError as error:
        raise damaged(file.parent, file.name, f"unreadable: {error}") from error
    if needed != {name: (found[name], dtypes[name]) for name in found}:
        raise damaged(file.parent, file.name, f"tensors {found} of {dtypes}")


def _header(provenance: Provenance, rows: tuple[int, int], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for name, (dtype, shape, final) in layout(provenance).items():
        whole = (rows[final], *shape)
        size = torch.Size(whole).numel() * dtype.itemsize
        entries[name] = {"dtype": _DTYPES[dtype], "shape": list(whole), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _pieces(parts: Sequence[torch.Tensor]) -> Iterator[list[memoryview]]:
    """The bytes of contiguous tensors, without a copy, cut where the checksum wants it."""
    piece: list[memoryview] = []
    room = _PIECE
    for part in parts:
        left = memoryview(part.view(torch.uint8).numpy().reshape(-1)) if part.numel() else memoryview(b"")
        while left:
            piece.append(left[:room])
            room -= len(piece[-1])
            left = left[len(piece[-1]) :]
            if not room:
                yield piece
                piece, room = [], _PIECE
    if piece:
        yield piece


def _write(fd: int, piece: Sequence[memoryview], at: int) -> bytes:
    """Write a piece; its XXH3-128."""
    digest = xxhash.xxh3_128()
    for first in range(0, len(piece), _VIEWS):
        views = list(piece[first : first + _VIEWS])
        for view in views:
            digest.update(view)
        while views:  # a write may be short, on a disk that is nearly full for one
            done = os.pwritev(fd, views, at)
            at += done
            while views and done >= len(views[0]):
                done -= len(views.pop(0))
            if views:
                views[0] = views[0][done:]
    return bytes(digest.digest())


def _write_header(fd: int, header: bytes) -> None:
    """All of it: its place is a hole in the file, and may get only a part of it on a disk that is nearly full."""
    at = 0
    while at < len(header):
        at += os.pwrite(fd, header[at:], at)


def _hash_piece(fd: int, at: int) -> bytes:
    return bytes(xxhash.xxh3_128_digest(os.pread(fd, _PIECE, at)))


def _combined(digests: Iterable[bytes]) -> str:
    whole = hashlib.sha256()
    for digest in digests:
        whole.update(digest)
    return whole.hexdigest()


def _quantisation(samples: Sequence[Encoded]) -> dict[str, list[float]] | None:
    errors = [sample.error for sample in samples if sample.error is not None]
    powers = [sample.power for sample in samples if sample.power is not None]
    if not errors:
        return None
    return {"error": torch.stack(errors).sum(0).tolist(), "power": torch.stack(powers).sum(0).tolist()}

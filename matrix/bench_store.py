"""What the store costs beside the disk: bytes per second of writing and reading, as ratios within one run.

    python matrix/bench_store.py [--folder DIR] [--mib 1024] [--write]

Written: samples of the real shape (4 boundaries of 7168 values in bfloat16) through the store, durably (fsync); the
same bytes by safetensors' own `save_file` and an fsync; the same bytes by plain writes and an fsync. Read: every sample
in shuffled order through the data set, beside plain reads of the same files. Each is done `--rounds` times in turn, and
each round begins with another, so that a disk that speeds up or slows down favours none; the medians count. The page
cache is dropped by posix_fadvise before a read, as far as the file system honours it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from vllm_compat.kimi.store import Provenance, Sample, Store, StoreWriter

LAYERS, HIDDEN, TOKENS = (2, 30, 58, 61), 7168, 512
SHARD = 256 << 20
RESULT = Path(__file__).parent / "results" / "bench-store.json"


def provenance(dtype: str, finals: str) -> Provenance:
    """Of states that no model made."""
    return Provenance(
        layers=LAYERS,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS[-1],
        dtype=dtype,
        model_fingerprint="none",
        vllm_version="none",
        distribution="none",
        runner="none",
        created_with="bench",
        rows_fingerprint="none",
        finals=finals,
    )


def make_samples(mib: int) -> list[Sample]:
    """So many MiB of states; a fifth of the tokens carries loss."""
    count = max(2, (mib << 20) // (TOKENS * len(LAYERS) * HIDDEN * 2))
    states = torch.randn(TOKENS, len(LAYERS), HIDDEN).bfloat16()
    ids = torch.zeros(TOKENS, dtype=torch.int32)
    mask = (torch.arange(TOKENS) >= TOKENS * 4 // 5).to(torch.uint8)
    # Memory of its own for each, as captured states have.
    return [Sample(str(i), ids.clone(), mask.clone(), states.clone()) for i in range(count)]


def write_store(folder: Path, samples: list[Sample], dtype: str = "bfloat16", finals: str = "all") -> None:
    """Through the store."""
    with StoreWriter(folder, provenance(dtype, finals), SHARD) as writer:
        for sample in samples:
            writer.add(sample)


def write_safetensors(folder: Path, samples: list[Sample]) -> None:
    """Shard by shard what the store did without: one tensor of all samples, saved and synced."""
    folder.mkdir()
    per_shard = max(1, SHARD // samples[0].hidden_states.nbytes)
    for at in range(0, len(samples), per_shard):
        part = samples[at : at + per_shard]
        names = ("token_ids", "loss_mask", "hidden_states")
        path = folder / f"{at}.safetensors"
        save_file({name: torch.cat([getattr(sample, name) for sample in part]) for name in names}, path)
        sync(path)


def write_raw(folder: Path, samples: list[Sample]) -> None:
    """What the disk takes."""
    folder.mkdir()
    with (folder / "raw").open("wb", buffering=0) as stream:
        for sample in samples:
            stream.write(memoryview(sample.hidden_states.view(torch.uint8).numpy().reshape(-1)))
        os.fsync(stream.fileno())


def read_store(folder: Path) -> None:
    """Every sample, shuffled."""
    store = Store(folder)
    order = list(range(len(store)))
    random.Random(0).shuffle(order)  # noqa: S311
    for i in order:
        _ = store[i].hidden_states


def read_raw(folder: Path) -> None:
    """The shards' bytes, in order."""
    piece = bytearray(8 << 20)
    for path in sorted(folder.glob("shard-*")):
        with path.open("rb", buffering=0) as stream:
            while stream.readinto(piece):
                pass


def sync(path: Path) -> None:
    """Until the disk has it."""
    with path.open("rb") as stream:
        os.fsync(stream.fileno())


def drop_cache(folder: Path) -> None:
    """So that the disk is read."""
    for path in folder.glob("*"):
        with path.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def fresh(parent: Path) -> Iterator[Path]:
    """A folder that is gone afterwards."""
    folder = Path(tempfile.mkdtemp(dir=parent, prefix="bench-store-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def timed(action: Callable[[], None], size: int) -> float:
    """MB per second."""
    began = time.perf_counter()
    action()
    return size / (time.perf_counter() - began) / 1e6


def measure(parent: Path, mib: int, rounds: int) -> dict[str, Any]:
    """Rates in MB/s of captured states (fp8 and finals="loss" store fewer bytes of them), and their ratios."""
    samples = make_samples(mib)
    size = sum(sample.hidden_states.nbytes for sample in samples)
    writers: dict[str, Callable[[Path], None]] = {
        "store": lambda folder: write_store(folder, samples),
        "store, finals where the loss is": lambda folder: write_store(folder, samples, finals="loss"),
        "store, fp8": lambda folder: write_store(folder, samples, "float8_e4m3fn", "loss"),
        "safetensors": lambda folder: write_safetensors(folder, samples),
        "raw": lambda folder: write_raw(folder, samples),
    }
    rates: dict[str, list[float]] = {f"write: {name}": [] for name in writers}
    readers = {"store": read_store, "raw": read_raw}
    rates |= {f"read: {name}": [] for name in readers}
    with fresh(parent) as folder:
        write_raw(folder / "warm", samples)  # memory that the page cache touches for the first time is slow
    for round_ in range(rounds):
        names = [*writers, *writers][round_ % len(writers) :][: len(writers)]
        with fresh(parent) as folder:
            for name in names:
                place = folder / name.replace(",", "")
                rates[f"write: {name}"].append(timed(lambda name=name, place=place: writers[name](place), size))  # type: ignore[misc]
                if name != "store":
                    shutil.rmtree(place)
            for name, read in readers.items():
                drop_cache(folder / "store")
                rates[f"read: {name}"].append(timed(lambda read=read: read(folder / "store"), size))  # type: ignore[misc]
    median = {name: round(statistics.median(values), 1) for name, values in rates.items()}
    written, plain, raw = (median[f"write: {name}"] for name in ("store", "safetensors", "raw"))
    return {
        "shape": {"boundaries": len(LAYERS), "hidden_size": HIDDEN, "tokens": TOKENS, "samples": len(samples)},
        "mb_per_second": median,
        "write_ratio_to_safetensors": round(written / plain, 3),
        "write_ratio_to_raw": round(written / raw, 3),
        "read_ratio_to_raw": round(median["read: store"] / median["read: raw"], 3),
    }


def main() -> None:
    """Print the numbers; --write commits them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    found = measure(given.folder, given.mib, given.rounds)
    machine = {"cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1), "torch": torch.__version__}
    found = {**machine, **found}
    print(json.dumps(found, indent=1))
    if given.write:
        RESULT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

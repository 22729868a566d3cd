"""How fast durable extraction is beside plain prefill: a ratio, measured in one run on the target of the preset tiny.

    nox -s bench-extract                   print it
    nox -s bench-extract -- --write        and write matrix/results/extraction/<release>.json; render.py makes the table

Both sides run the same rows through the same engine and take turns; the first round, in which memory is allocated, does
not count. Plain prefill generates one token per row and captures nothing. Extraction is what `vllm-compat kimi extract`
does: capture, store, fsync, until the index is published. The ratio of a round is plain to extraction seconds; said
is the median. Beside wall time stands the processor time of all threads, which other work on the machine changes less.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from record import RESULTS, provenance

from vllm_compat import installed
from vllm_compat.kimi import extract
from vllm_compat.kimi.config import Config, load_config
from vllm_compat.kimi.prepare import prepare
from vllm_compat.kimi.progress import NullProgress
from vllm_compat.kimi.prompts import load_tokenizer
from vllm_compat.kimi.rows import read_rows
from vllm_compat.kimi.shards import DTYPES
from vllm_compat.kimi.target import load_text_config
from vllm_compat.kimi.target_engine import open_target


def configuration(folder: Path, rows: int) -> Config:
    """The preset, with the answers that the conversations have."""
    preset = load_config("tiny")
    changed = dataclasses.replace(preset.prepare, regenerate=False, max_rows=rows, heldout_fraction=0.0)
    return dataclasses.replace(preset, run_dir=folder, prepare=changed)


def timed(work: Callable[[], Any]) -> tuple[float, float]:
    """Wall and processor seconds of one call."""
    wall, processor = time.monotonic(), time.process_time()
    work()
    return time.monotonic() - wall, time.process_time() - processor


def measure(folder: Path, rows: int, rounds: int) -> dict[str, Any]:
    """Rounds of both sides, in turn."""
    cfg = configuration(folder, rows)
    progress = NullProgress()
    prepare(cfg, load_tokenizer(cfg.target), None, progress)
    path = folder / "prepare" / "train.parquet"
    sent = list(read_rows(path))
    num_layers = int(load_text_config(cfg.target.model)["num_hidden_layers"])
    layers = (*extract.aux_layers(cfg.extract.layers, num_layers), num_layers)
    options = {"max_num_seqs": cfg.extract.max_num_seqs, "max_num_batched_tokens": cfg.extract.max_num_batched_tokens}
    found: dict[str, list[tuple[float, float]]] = {"plain": [], "extraction": []}
    with open_target(cfg.target, **options, **extract.ENGINE_ARGS) as loop:
        for number in range(rounds + 1):
            into = dataclasses.replace(cfg, run_dir=folder / str(number))
            sides = {
                "plain": lambda: extract.plain_prefill(loop, sent),
                "extraction": lambda into=into: extract.extract_rows(
                    into, loop, path, layers, DTYPES[cfg.extract.dtype], progress, "train"
                ),
            }
            for side in sorted(sides, reverse=bool(number % 2)):
                spent = timed(sides[side])
                if number:
                    found[side].append(spent)
    tokens = sum(len(row.input_ids) for row in sent)
    pairs = list(zip(found["plain"], found["extraction"], strict=True))
    return {
        "rows": len(sent),
        "tokens": tokens,
        "layers": list(layers),
        "dtype": cfg.extract.dtype,
        "rounds": rounds,
        "ratio": round(statistics.median(plain[0] / ours[0] for plain, ours in pairs), 4),
        "processor_ratio": round(statistics.median(plain[1] / ours[1] for plain, ours in pairs), 4),
        "ratios": [round(plain[0] / ours[0], 4) for plain, ours in pairs],
        "plain_tokens_per_second": round(tokens / statistics.median(plain[0] for plain, _ in pairs)),
        "tokens_per_second": round(tokens / statistics.median(ours[0] for _, ours in pairs)),
    }


def main(arguments: list[str]) -> int:
    """Measure, print, and write when asked to."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the result into matrix/results/extraction")
    parser.add_argument("--rows", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args(arguments)
    here = installed()
    began = datetime.now(timezone.utc).isoformat()
    with tempfile.TemporaryDirectory() as folder:
        numbers = measure(Path(folder), given.rows, given.rounds)
    print(json.dumps(numbers, indent=1))
    if given.write:
        path = RESULTS / "extraction" / f"{here.version}.json"
        path.parent.mkdir(exist_ok=True)
        result = {
            **provenance(began, datetime.now(timezone.utc).isoformat()),
            "release": here.version,
            "distribution": here.distribution,
            "torch": metadata.version("torch"),
            "threads": torch.get_num_threads(),
            "command": "nox -s bench-extract -- --write",
            "numbers": numbers,
        }
        path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"{path.name} written: now run `python matrix/render.py`")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The generator of speculators, unmodified, in a process of its own: a round for every line that comes in.

    python matrix/speculators_rounds.py rows.json MODEL LAYER_ID…     (bench_extract.py --beside-speculators calls it)

rows.json is a list of token id lists. A round does what data_generation_offline.py does with its defaults: batches of
8, a file per sample, written by 4 threads; it answers "done". Needs vLLM 0.11.0, the only release on which the
unmodified generator runs, and on a CPU one stand-in: it asks how much memory the GPU has.
"""

from __future__ import annotations

import json
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

BATCH = 8
THREADS = 4
GB = 1 << 30


def one_round(generator: Any, rows: list[list[int]], folder: Path) -> None:
    """All rows, into files."""
    import torch

    saved = []
    with ThreadPoolExecutor(THREADS) as threads:
        for start in range(0, len(rows), BATCH):
            for number, made in enumerate(generator.generate(rows[start : start + BATCH])):
                sample = {
                    "input_ids": made["input_ids"],
                    "hidden_states": [state.contiguous() for state in made["hidden_states"]],
                    "loss_mask": torch.ones(len(made["input_ids"]), dtype=torch.int64),
                }
                saved.append(threads.submit(torch.save, sample, folder / f"data_{start + number}.pt"))
    for future in saved:
        future.result()


def main(rows_path: str, model: str, *layer_ids: str) -> None:
    """Rounds until the standard input ends."""
    import torch

    if not torch.cuda.is_available():
        torch.cuda.mem_get_info = lambda *_: (GB, GB)
    from speculators.data_generation import VllmHiddenStatesGenerator

    rows = json.loads(Path(rows_path).read_text())
    longest = max(map(len, rows))
    generator = VllmHiddenStatesGenerator(model, [int(layer) for layer in layer_ids], max_model_len=longest + 1)
    print("ready", flush=True)
    for _ in sys.stdin:
        with tempfile.TemporaryDirectory() as folder:
            one_round(generator, rows, Path(folder))
            print("done", flush=True)
    generator.executor.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""How fast durable extraction is beside plain prefill: a ratio, measured in one run on the target of the preset tiny.

    nox -s bench-extract                   print it
    nox -s bench-extract -- --write        and write matrix/results/extraction/<release>.json; render.py makes the table

Both sides run the same rows through the same engine and take turns; the first round, in which memory is allocated, does
not count. Plain prefill generates one token per row and captures nothing. Extraction is what `vllm-compat kimi extract`
does: capture, store, fsync, until the index is published. The ratio of a round is plain to extraction seconds; said
is the median. Beside wall time stands the processor time of all threads, which other work on the machine changes less.

    nox -s bench-speculators               the same on vLLM 0.11.0, where the unmodified generator of speculators runs:
                                           it takes the same rows, and a turn in every round
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from record import RESULTS, provenance

from vllm_compat import installed
from vllm_compat.kimi import extract
from vllm_compat.kimi.config import Config, aux_layers, load_config
from vllm_compat.kimi.prepare import prepare
from vllm_compat.kimi.progress import NullProgress
from vllm_compat.kimi.prompts import load_tokenizer
from vllm_compat.kimi.rows import Row, read_rows
from vllm_compat.kimi.target import load_text_config


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


def a_llama(folder: Path, tokenizer_from: Path, dtype: str) -> str:
    """A Llama with random weights, about as large as the tiny target; the unmodified generator has no other models."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=1024,
        eos_token_id=2030,
        pad_token_id=2047,
    )
    torch.manual_seed(0)
    model = folder / "llama"
    LlamaForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(model)
    for path in tokenizer_from.iterdir():
        if not (model / path.name).exists() and path.suffix == ".json":
            (model / path.name).symlink_to(path.resolve())
    return str(model)


@contextmanager
def generator_of_speculators(folder: Path, cfg: Config, sent: Sequence[Row], layers: Sequence[int]) -> Iterator[Any]:
    """A function that has the unmodified generator of speculators do one round, in a process of its own."""
    (folder / "rows.json").write_text(json.dumps([list(row.input_ids) for row in sent]), encoding="utf-8")
    # Its id k is the state after k + 1 layers.
    command = [sys.executable, str(Path(__file__).with_name("speculators_rounds.py"))]
    command += [str(folder / "rows.json"), cfg.target.model, *(str(layer - 1) for layer in layers)]
    with (
        (folder / "speculators.log").open("w+", encoding="utf-8") as log,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        to, answers = process.stdin, process.stdout
        assert to is not None
        assert answers is not None

        def until(word: str) -> None:
            for line in answers:
                if line.startswith(word):
                    return
            log.seek(0)
            raise RuntimeError(f"the generator of speculators ended:\n{log.read()[-3000:]}")

        def one_round() -> None:
            print(file=to, flush=True)
            until("done")

        until("ready")
        yield one_round
        to.close()


def measure(folder: Path, rows: int, rounds: int, *, beside_speculators: bool) -> dict[str, Any]:
    """Rounds of all sides, in turn."""
    cfg = configuration(folder, rows)
    if beside_speculators:
        llama = a_llama(folder, Path(cfg.target.model), cfg.target.dtype)
        cfg = dataclasses.replace(cfg, target=dataclasses.replace(cfg.target, model=llama))
    progress = NullProgress()
    prepare(cfg, load_tokenizer(cfg.target), None, progress)
    path = folder / "prepare" / "train.parquet"
    sent = list(read_rows(path))
    num_layers = int(load_text_config(cfg.target.model)["num_hidden_layers"])
    layers = (*aux_layers(cfg.extract.layers, num_layers), num_layers)
    found: dict[str, list[tuple[float, float]]] = {"plain": [], "extraction": [], "speculators": []}
    with ExitStack() as stack:
        loop = stack.enter_context(extract.open_engine(cfg))
        theirs = {}
        if beside_speculators:
            theirs["speculators"] = stack.enter_context(generator_of_speculators(folder, cfg, sent, layers))
        for number in range(rounds + 1):
            into = dataclasses.replace(cfg, run_dir=folder / str(number))
            sides = {
                "plain": lambda: extract.plain_prefill(loop, sent),
                "extraction": lambda into=into: extract.extract_rows(into, loop, path, layers, progress, "train"),
                **theirs,
            }
            for side in sorted(sides, reverse=bool(number % 2)):
                spent = timed(sides[side])
                if number:
                    found[side].append(spent)
    tokens = sum(len(row.input_ids) for row in sent)
    pairs = list(zip(found["plain"], found["extraction"], strict=True))
    theirs_of = {}
    if beside_speculators:
        rounds_of = list(zip(found["speculators"], found["extraction"], strict=True))
        theirs_of = {
            "speculators_tokens_per_second": round(tokens / statistics.median(them[0] for them, _ in rounds_of)),
            "ratio_to_speculators": round(statistics.median(them[0] / ours[0] for them, ours in rounds_of), 2),
        }
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
        **theirs_of,
    }


def main(arguments: list[str]) -> int:
    """Measure, print, and write when asked to."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the result into matrix/results/extraction")
    parser.add_argument("--rows", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--beside-speculators", action="store_true", help="and its unmodified generator")
    given = parser.parse_args(arguments)
    here = installed()
    began = datetime.now(timezone.utc).isoformat()
    with tempfile.TemporaryDirectory() as folder:
        numbers = measure(Path(folder), given.rows, given.rounds, beside_speculators=given.beside_speculators)
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
            "command": f"nox -s bench-{'speculators' if given.beside_speculators else 'extract'} -- --write",
            "numbers": numbers,
        }
        path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"{path.name} written: now run `python matrix/render.py`")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

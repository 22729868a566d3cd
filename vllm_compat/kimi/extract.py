"""extract: rows -> hidden states in a store, at the speed of plain prefill, resumable at any point."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from vllm_compat import CapturedStates, DataError, EngineLoop, capture_hidden_states, make_sampling_params

from .background import Background
from .files import sha256_file
from .one_pass import AnswerStates, folder_of
from .progress import Progress
from .provenance import provenance_of, room_for
from .rows import SPLITS, Row, count_rows, read_rows
from .selfcheck import ROWS, self_check
from .settings import Config, aux_layers
from .shards import DTYPES, Sample
from .store import Store, StoreWriter
from .target import TargetHead
from .target_engine import open_target

#: A cached token leaves no hidden state, and compiled code calls no hooks.
ENGINE_ARGS: dict[str, Any] = {"enable_prefix_caching": False, "enforce_eager": True}


def extract_stage(cfg: Config, progress: Progress) -> dict[str, Any]:
    """Fill <run>/extract/{train,heldout}; rows that a store has already are not computed again.

    Returns the metrics: tokens and tokens per second of durable extraction, plain prefill on the same engine, their
    ratio, and the self-check.
    """
    head = TargetHead.load(cfg.target.model).to("cpu", torch.float32)
    num_layers = int(head.config["num_hidden_layers"])
    layers = (*aux_layers(cfg.extract.layers, num_layers), num_layers)
    paths = {split: cfg.run_dir / "prepare" / f"{split}.parquet" for split in SPLITS}
    _check_lengths(paths, cfg.target.max_model_len)
    dtype = DTYPES[cfg.extract.dtype]
    with open_target(
        cfg.target,
        max_num_seqs=cfg.extract.max_num_seqs,
        max_num_batched_tokens=cfg.extract.max_num_batched_tokens,
        **ENGINE_ARGS,
    ) as loop:
        # Whatever is compiled or allocated on first use is not part of any rate.
        check = None
        if cfg.extract.self_check:
            check = self_check(loop, spread(paths["train"], ROWS), head, layers, dtype).to_json()
        # Before and again after, so that a machine that speeds up or slows down favours neither.
        sample = spread(paths["train"], cfg.extract.baseline_rows)
        plain = [plain_prefill(loop, sample)]
        done = {split: extract_rows(cfg, loop, paths[split], layers, dtype, progress, split) for split in SPLITS}
        plain.append(plain_prefill(loop, sample))
    plain_rate = sum(tokens for tokens, _ in plain) / sum(seconds for _, seconds in plain) if sample else None
    seconds = sum(d["seconds"] for d in done.values())
    tokens = sum(d["tokens"] for d in done.values())
    rate = tokens / seconds if tokens else None
    stores = {split: Store(cfg.run_dir / "extract" / split) for split in SPLITS}
    return {
        "layers": list(layers),
        "way": next(d["way"] for d in done.values()),
        "rows": sum(len(store) for store in stores.values()),
        "tokens": sum(store.num_tokens for store in stores.values()),
        "bytes": sum(shard.bytes for store in stores.values() for shard in store.shards),
        "tokens_this_run": tokens,
        "seconds": round(seconds, 3),
        "tokens_per_second": None if rate is None else round(rate, 1),
        "plain_prefill_tokens_per_second": None if plain_rate is None else round(plain_rate, 1),
        "ratio_to_prefill": None if rate is None or plain_rate is None else round(rate / plain_rate, 4),
        "rows_captured_with_their_answer": sum(d["answered"] for d in done.values()),
        "self_check": check,
        "refused": sum(d["refused"] for d in done.values()),
        "seconds_waited_for_disk": round(sum(d["waited"] for d in done.values()), 3),
        "fp8_relative_error": stores["train"].quantisation_error,
        "recovered": [note for d in done.values() for note in d["recovered"]],
    }


def _check_lengths(paths: dict[str, Path], max_model_len: int) -> None:
    for path in paths.values():
        for row in read_rows(path):
            # One token has to be generated for the engine to accept the request.
            if len(row.input_ids) + 1 > max_model_len:
                raise DataError(
                    f"row {row.row_id} of {path}",
                    needed=f"at most {max_model_len - 1} tokens (target.max_model_len - 1)",
                    found=f"{len(row.input_ids)} tokens",
                    advice="raise target.max_model_len or lower prepare.max_length",
                )


def spread(path: Path, count: int) -> list[Row]:
    """At most ``count`` rows from all over a file: prepare writes first turns first, and they are short."""
    stride = max(1, count_rows(path) // max(1, count))
    return list(islice(read_rows(path), 0, None, stride))[:count]


def _params() -> Any:
    return make_sampling_params(temperature=0.0, max_tokens=1, detokenize=False)


def plain_prefill(loop: EngineLoop, rows: Sequence[Row]) -> tuple[int, float]:
    """(tokens, seconds) of the same engine on rows of the same kind, capturing nothing."""
    began = time.monotonic()
    for _ in loop.generate([row.input_ids for row in rows], _params()):
        pass
    return sum(len(row.input_ids) for row in rows), time.monotonic() - began


def extract_rows(
    cfg: Config,
    loop: EngineLoop,
    rows_path: Path,
    layers: tuple[int, ...],
    dtype: torch.dtype,
    progress: Progress,
    split: str,
) -> dict[str, Any]:
    """Fill the store of a split; the rows that it has are not computed again.

    Returns the tokens of this call, its seconds until the index is published, and what a crash had left.
    """
    with capture_hidden_states(loop, layers, dtype=dtype) as capture:
        provenance = provenance_of(cfg, capture.model_info, layers, sha256_file(rows_path))
        answers = AnswerStates(folder_of(cfg), provenance)
        began = time.monotonic()
        tokens = answered = 0
        store = StoreWriter(
            cfg.run_dir / "extract" / split, provenance, cfg.extract.shard_mb << 20, cfg.extract.max_bad_rows
        )

        def add(item: tuple[Row, torch.Tensor | CapturedStates]) -> None:
            row, found = item
            states = found.hidden_states if isinstance(found, CapturedStates) else found
            ids = torch.tensor(row.input_ids, dtype=torch.int32)
            mask = torch.tensor(row.loss_mask, dtype=torch.uint8)
            store.add(Sample(row.row_id, ids, mask, states.to(dtype)))

        bar_of = progress.task(f"extracting {split}", total=count_rows(rows_path))
        with store, Background(add, room_for(cfg, loop, provenance)) as feeder, bar_of as bar:
            bar.advance(len(store.done))
            waiting: list[Row] = []

            def prompts() -> Iterator[list[int]]:
                nonlocal answered
                for row in read_rows(rows_path):
                    if row.row_id in store.done:
                        continue
                    states = answers.of(row)
                    if states is None:
                        waiting.append(row)
                        yield row.input_ids
                    else:
                        feeder.put((row, states), states.nbytes)
                        answered += 1
                        bar.advance(1)

            # generate yields in the order given, so the oldest waiting row is the one that finished.
            for done in loop.generate(prompts(), _params()):
                row = waiting.pop(0)
                states = capture.pop(done.request_id)
                if states.token_ids != tuple(row.input_ids):
                    raise DataError(
                        f"row {row.row_id}",
                        needed="the tokens that were sent",
                        found="states of other tokens",
                        advice="report it with `vllm-compat doctor`: nothing of this row was stored",
                    )
                feeder.put((row, states), states.nbytes)
                tokens += len(row.input_ids)
                bar.advance(1)
        seconds = time.monotonic() - began
    return {
        "tokens": tokens,
        "seconds": seconds,
        "recovered": store.recovered,
        "refused": len(store.refused),
        "waited": store.waited,
        "answered": answered,
        "way": capture.way,
    }

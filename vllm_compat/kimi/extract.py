"""extract: rows -> hidden states in a store, at the speed of plain prefill, resumable at any point."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from vllm_compat import DataError, EngineLoop, capture_hidden_states

from .background import Background
from .files import sha256_file
from .one_pass import AnswerStates, folder_of
from .progress import Progress
from .provenance import provenance_of, room_for
from .row_states import States, prefill_params, sample_of, states_of_rows
from .rows import SPLITS, Row, count_rows, read_rows
from .selfcheck import ROWS, self_check
from .settings import Config, aux_layers
from .shards import DTYPES
from .store import Store, StoreWriter
from .target import TargetHead, load_text_config
from .target_engine import open_target

#: A cached token leaves no hidden state, and compiled code calls no hooks.
ENGINE_ARGS: dict[str, Any] = {"enable_prefix_caching": False, "enforce_eager": True}


def extract_stage(cfg: Config, progress: Progress) -> dict[str, Any]:
    """Fill <run>/extract/{train,heldout}; rows that a store has already are not computed again.

    Returns the metrics: tokens and tokens per second of durable extraction, plain prefill on the same engine, their
    ratio, and the self-check.
    """
    num_layers = int(load_text_config(cfg.target.model)["num_hidden_layers"])
    layers = (*aux_layers(cfg.extract.layers, num_layers), num_layers)
    paths = {split: cfg.run_dir / "prepare" / f"{split}.parquet" for split in SPLITS}
    _check_lengths(paths, cfg.target.max_model_len)
    # Whatever is compiled or allocated on first use is not part of any rate, so the check comes first. Plain prefill is
    # timed before and again after, so that a machine that speeds up or slows down favours neither.
    checked = spread(paths["train"], ROWS) if cfg.extract.self_check else []
    sample = spread(paths["train"], cfg.extract.baseline_rows)
    if cfg.extract.replicas > 1 or cfg.extract.ray_address:
        from .replicas import Team

        with Team(cfg, layers) as team:
            check = team.self_check(checked) if checked else None
            plain = team.measure(sample)
            done = {split: team.fill(split, paths[split], progress) for split in SPLITS}
            plain += team.measure(sample)
    else:
        with open_engine(cfg) as loop:
            check = check_engine(cfg, loop, layers, checked) if checked else None
            plain = [plain_prefill(loop, sample)]
            done = {split: extract_rows(cfg, loop, paths[split], layers, progress, split) for split in SPLITS}
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


def open_engine(cfg: Config) -> EngineLoop:
    """The engine that extracts."""
    return open_target(
        cfg.target,
        max_num_seqs=cfg.extract.max_num_seqs,
        max_num_batched_tokens=cfg.extract.max_num_batched_tokens,
        **ENGINE_ARGS,
    )


def check_engine(cfg: Config, loop: EngineLoop, layers: tuple[int, ...], rows: Sequence[Row]) -> dict[str, Any]:
    """The self-check on some rows, see ``selfcheck``; it raises when it fails."""
    head = TargetHead.load(cfg.target.model).to("cpu", torch.float32)
    return self_check(loop, rows, head, layers, DTYPES[cfg.extract.dtype]).to_json()


def plain_prefill(loop: EngineLoop, rows: Sequence[Row]) -> tuple[int, float]:
    """(tokens, seconds) of the same engine on rows of the same kind, capturing nothing."""
    began = time.monotonic()
    for _ in loop.generate([row.input_ids for row in rows], prefill_params()):
        pass
    return sum(len(row.input_ids) for row in rows), time.monotonic() - began


def extract_rows(
    cfg: Config,
    loop: EngineLoop,
    rows_path: Path,
    layers: tuple[int, ...],
    progress: Progress,
    split: str,
) -> dict[str, Any]:
    """Fill the store of a split; the rows that it has are not computed again.

    Returns the tokens of this call, its seconds until the index is published, and what a crash had left.
    """
    dtype = DTYPES[cfg.extract.dtype]
    with capture_hidden_states(loop, layers, dtype=dtype) as capture:
        provenance = provenance_of(cfg, capture.model_info, layers, sha256_file(rows_path))
        answers = AnswerStates(folder_of(cfg), provenance)
        began = time.monotonic()
        store = StoreWriter(
            cfg.run_dir / "extract" / split, provenance, cfg.extract.shard_mb << 20, cfg.extract.max_bad_rows
        )
        bar_of = progress.task(f"extracting {split}", total=count_rows(rows_path))
        feeder_of = Background[tuple[Row, States]](
            lambda item: store.add(sample_of(*item, dtype)), room_for(cfg, loop, provenance)
        )
        with store, feeder_of as feeder, bar_of as bar:
            bar.advance(len(store.done))

            def put(item: tuple[Row, States], nbytes: int) -> None:
                feeder.put(item, nbytes)
                bar.advance(1)

            rows = (row for row in read_rows(rows_path) if row.row_id not in store.done)
            tokens, answered = states_of_rows(loop, capture, answers, rows, put)
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

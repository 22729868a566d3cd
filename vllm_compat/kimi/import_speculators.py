"""Samples that speculators 0.3.0 or 0.4.0 generated -> a run that `kimi vocab`, `train` and `export` go on with.

Its folder has ``data_<i>.pt`` files, each {input_ids int64 [T], loss_mask int64 [T], hidden_states: list of [T, H]},
and says which layers they are in one of two files:

- ``vllm_compat.json``, written where its generator ran with our patch: boundaries, in the order of the list;
- ``data_config.json`` alone: layer ids as they were asked for. Layer id *l* is the output of 0-based layer *l*, so
  boundary *l* + 1, and the library itself sorts the tensors and leaves duplicates out.

The last state is the one before the final norm in both, as in ours.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import vllm_compat
from vllm_compat.errors import DataError, StoreError

from .config import Config
from .files import sha256_file
from .fingerprints import model_fingerprint
from .progress import Progress
from .row_maker import heldout_share
from .rows import SPLITS, Row, RowWriter
from .shards import DTYPES, Provenance, Sample
from .store import StoreWriter
from .target import load_text_config

#: What is written where the answers come from, which these files do not say.
SOURCE = "speculators"


@dataclass(frozen=True)
class Layout:
    """What the files of a folder hold.

    boundaries: of the tensors, in the order of the list in each file. vllm: version that made them.
    """

    boundaries: tuple[int, ...]
    vllm: str

    @property
    def stored(self) -> tuple[int, ...]:
        """As a store has them: ascending, each once."""
        return tuple(sorted(set(self.boundaries)))

    @property
    def places(self) -> list[int]:
        """Where each of ``stored`` is in a file's list."""
        return [self.boundaries.index(boundary) for boundary in self.stored]


def read_layout(folder: Path) -> Layout:
    """What a folder's own description says.

    Raises:
        StoreError: there is none, or it says that the final norm was applied.
    """
    ours, theirs = folder / "vllm_compat.json", folder / "data_config.json"
    if ours.is_file():
        said = json.loads(ours.read_text(encoding="utf-8"))
        if said["final_norm_applied"]:
            raise StoreError(f"the samples in {folder}", needed="states before the final norm", found="after it")
        return Layout(tuple(said["boundaries"]), said["vllm"])
    if theirs.is_file():
        said = json.loads(theirs.read_text(encoding="utf-8"))
        boundaries = tuple(layer + 1 for layer in sorted(set(said["hidden_states"]["layer_ids"])))
        return Layout(boundaries, said["reproducibility"]["package_versions"]["vllm"])
    raise StoreError(
        f"the samples in {folder}",
        needed="vllm_compat.json or data_config.json, which say what layers they are",
        found="neither; data_config.json is written only when a run ends",
        advice="generate them with `vllm-compat run -- python data_generation_offline.py …`, or finish the run",
    )


def import_samples(cfg: Config, folder: Path, progress: Progress) -> dict[str, Any]:
    """Fill <run>/prepare and <run>/extract from a folder of speculators; samples without a token to learn are left out.

    Returns the number of rows and tokens per split, and what was left out.

    Raises:
        StoreError: the folder does not say what it holds, or a run is there already that differs. DataError: a file is
            not what it should be, or its states are not those of ``target.model``.
    """
    layout = read_layout(folder)
    files = _files(folder)
    num_layers = _check_target(cfg, layout, folder, files)
    counts: dict[str, Any] = {"rows": dict.fromkeys(SPLITS, 0), "tokens": 0, "without_loss": 0}
    side: dict[str, str] = {}
    with RowWriter(cfg.run_dir / "prepare") as rows, progress.task("reading masks", total=len(files)) as bar:
        for path in files:
            bar.advance(1)
            ids, mask, _ = _read(path, layout)
            if not mask.any():
                counts["without_loss"] += 1
                continue
            split = "heldout" if heldout_share(path.stem, cfg.seed) < cfg.prepare.heldout_fraction else "train"
            side[path.stem] = split
            counts["rows"][split] += 1
            counts["tokens"] += len(ids)
            prompt = int(mask.to(torch.uint8).argmax())
            rows.add(split, Row(f"{path.stem}/0", path.stem, 0, ids.tolist(), prompt, mask.tolist(), SOURCE))
    for split in SPLITS:
        mine = [path for path in files if side.get(path.stem) == split]
        with progress.task(f"importing {split}", total=len(mine)) as bar:
            for sample in _store(cfg, layout, num_layers, split, mine):
                bar.advance(sample)
    return counts


def _store(cfg: Config, layout: Layout, num_layers: int, split: str, files: list[Path]) -> Iterator[int]:
    provenance = Provenance(
        layers=layout.stored,
        hidden_size=int(load_text_config(cfg.target.model)["hidden_size"]),
        num_hidden_layers=num_layers,
        dtype=cfg.extract.dtype,
        model_fingerprint=model_fingerprint(cfg.target.model),
        vllm_version=layout.vllm,
        distribution=SOURCE,
        runner="unknown",
        created_with=vllm_compat.__version__,
        rows_fingerprint=sha256_file(cfg.run_dir / "prepare" / f"{split}.parquet"),
    )
    with StoreWriter(cfg.run_dir / "extract" / split, provenance, cfg.extract.shard_mb << 20) as store:
        for path in files:
            name = f"{path.stem}/0"
            if name not in store.done:
                ids, mask, states = _read(path, layout)
                stacked = torch.stack([states[at] for at in layout.places], dim=1).to(DTYPES[cfg.extract.dtype])
                store.add(Sample(name, ids.to(torch.int32), mask.to(torch.uint8), stacked))
            yield 1


def _files(folder: Path) -> list[Path]:
    named = [(re.fullmatch(r"data_(\d+)\.pt", path.name), path) for path in folder.glob("data_*.pt")]
    files = [path for _, path in sorted((int(match[1]), path) for match, path in named if match)]
    if not files:
        raise DataError(f"importing {folder}", needed="files data_<i>.pt of speculators", found="none")
    return files


def _read(path: Path, layout: Layout) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    try:
        sample = torch.load(path, weights_only=True, mmap=True)
        ids, mask, states = sample["input_ids"], sample["loss_mask"], sample["hidden_states"]
        lengths = {len(ids), len(mask), *(len(layer) for layer in states)}
    except (OSError, RuntimeError, KeyError, TypeError, EOFError) as error:
        raise DataError(
            f"reading {path}",
            needed="input_ids, loss_mask and hidden_states, as speculators saves them",
            found=f"{type(error).__name__}: {error}",
            advice="move it away; it may have been cut off while it was written",
        ) from error
    if len(lengths) != 1 or len(states) != len(layout.boundaries):
        raise DataError(
            f"reading {path}",
            needed=f"tensors of the boundaries {list(layout.boundaries)}, ids and a mask, of equal length",
            found=f"{len(states)} tensors; lengths {sorted(lengths)}",
        )
    return ids, mask, states


def _check_target(cfg: Config, layout: Layout, folder: Path, files: list[Path]) -> int:
    """Number of layers of the target; DataError when the states cannot be its."""
    shape = load_text_config(cfg.target.model)
    num_layers, hidden = int(shape["num_hidden_layers"]), int(shape["hidden_size"])
    _, _, states = _read(files[0], layout)
    if states[0].shape[1] != hidden or layout.stored[-1] != num_layers:
        raise DataError(
            f"importing {folder} for {cfg.target.model}",
            needed=f"states of width {hidden}, the last one boundary {num_layers} (layer id {num_layers - 1})",
            found=f"width {states[0].shape[1]}, boundaries {list(layout.stored)}",
            advice="name the model that they were generated with as target.model; its last layer must be among them",
        )
    return num_layers

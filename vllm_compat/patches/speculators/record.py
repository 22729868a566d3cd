"""What speculators' files do not say by themselves: the layer convention, the norm, and whether all of them are there.

``data_generation_offline.py`` writes ``data_<i>.pt`` one by one, goes on after the highest number that it finds, and
describes them in ``data_config.json`` only when the whole run has finished. Beside them we write ``vllm_compat.json``
before the first; what cannot be continued rightly is refused before the model is loaded.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vllm_compat.errors import StoreError
from vllm_compat.installed import installed
from vllm_compat.patches.patch import Wrap

FILE = "vllm_compat.json"
CONVENTION = (
    "layer id l is the residual stream after decoder layer l, counted from 0 (boundary l+1 of vllm_compat, auxiliary "
    "layer l+1 of vLLM), before the model's last norm; tensors are in the order of layer_ids"
)


def boundaries(layer_ids: Sequence[int]) -> list[int]:
    """Turn layer ids of speculators (outputs of layers, counted from 0) into ours: layers done."""
    return [layer_id + 1 for layer_id in layer_ids]


def begin(generator: Any, num_layers: int) -> None:
    """Describe what the script is about to write.

    Raises:
        StoreError: its folder has files of another model or other layers.
    """
    folder, _ = _output()
    if folder is None:
        return
    config = generator.vllm_config.model_config
    said = {
        "convention": CONVENTION,
        "layer_ids": list(generator.layer_ids),
        "boundaries": boundaries(generator.layer_ids),
        "final_norm_applied": False,
        "model": generator.model_path,
        "num_hidden_layers": num_layers,
        "hidden_size": config.get_hidden_size(),
        "dtype": str(config.dtype).removeprefix("torch."),
    }
    path = folder / FILE
    if path.exists():
        _refuse_other(folder, json.loads(path.read_text(encoding="utf-8")), said)
        return
    if _files(folder):
        _refuse_other(folder, _described(folder), said)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**said, "vllm": installed().version}, indent=1)
    beside = path.with_suffix(".tmp")
    beside.write_text(text + "\n", encoding="utf-8")
    beside.replace(path)


def _described(folder: Path) -> dict[str, Any]:
    """What the ``data_config.json`` of a run without us says; empty where it did not finish."""
    path = folder / "data_config.json"
    if not path.exists():
        return {}
    theirs = json.loads(path.read_text(encoding="utf-8"))
    return {"layer_ids": theirs["hidden_states"]["layer_ids"], "model": theirs["model"]["target_model_path"]}


def _refuse_other(folder: Path, there: dict[str, Any], said: dict[str, Any]) -> None:
    other = [f"{key}={there[key]!r}, not {value!r}" for key, value in said.items() if there.get(key, value) != value]
    if other:
        raise StoreError(
            f"more samples in {folder}",
            needed="files of one model and the same layers in one folder",
            found="; ".join(other),
            advice="choose another --output-dir, or the settings of the run before",
        )


def _load_and_preprocess(wrapped: Callable[..., Any], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    folder, start = _output()
    if folder is not None:
        check_files(folder, start)
    return wrapped(*args, **kwargs)


def check_files(folder: Path, start: int) -> None:
    """Refuse a folder that the script would continue wrongly.

    Raises:
        StoreError: a number is missing below the highest, a file was cut off while it was written, or ``--start-idx``
            is one that the script cannot begin with.
    """
    files = _files(folder)
    following = max(files, default=-1) + 1
    missing = sorted(set(range(start, following)) - files.keys())
    if missing:
        raise StoreError(
            f"going on in {folder} after data_{following - 1}.pt",
            needed=f"every file from data_{start}.pt on, since no later run fills a gap",
            found=f"{len(missing)} missing, the first one data_{missing[0]}.pt",
            advice=f"move data_{missing[0]}.pt and all after it away; the run then goes on from there",
        )
    torn = [number for number, path in sorted(files.items()) if not zipfile.is_zipfile(path)]
    if torn:
        raise StoreError(
            f"going on in {folder} after data_{following - 1}.pt",
            needed="complete files; they are not written atomically",
            found=f"{len(torn)} cut off, the first one data_{torn[0]}.pt",
            advice=f"move data_{torn[0]}.pt and all after it away; the run then goes on from there",
        )
    if start > following:
        raise StoreError(
            f"--start-idx {start} with {folder}",
            needed=f"files up to data_{start - 1}.pt: the script's first sample is its next free number less this one",
            found=f"data_{following}.pt would be the next",
            advice="leave --start-idx away, and give each part an --output-dir of its own",
        )


def _files(folder: Path) -> dict[int, Path]:
    named = ((path, re.fullmatch(r"data_(\d+)\.pt", path.name)) for path in folder.glob("data_*.pt"))
    return {int(match[1]): path for path, match in named if match}


def _output() -> tuple[Path | None, int]:
    """Folder and first number that the script was given; None where something else is running."""
    if not hasattr(sys.modules.get("__main__"), "generate_and_save_hidden_states"):
        return None, 0
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--output-dir", type=Path)
    parser.add_argument("--start-idx", type=int, default=0)
    given, _ = parser.parse_known_args(sys.argv[1:])
    return given.output_dir, given.start_idx


def _from_generator(wrapped: Callable[..., Any], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    config = wrapped(*args, **kwargs)
    config.hidden_states.description = f"{config.hidden_states.description}: {CONVENTION}"
    return config


CHANGES = (
    Wrap("speculators.data_generation.preprocessing", "load_and_preprocess_dataset", _load_and_preprocess),
    Wrap("speculators.data_generation.config_generator", "DataGenerationConfig.from_generator", _from_generator),
)

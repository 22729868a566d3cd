"""A training checkpoint: everything that the next step depends on, replaced atomically.

    checkpoint/latest              name of the directory that counts, written last
    checkpoint/step-00000100-0/    draft.safetensors (float32 weights), state.pt (loadable with weights_only)

A crash while saving leaves `latest` on the previous directory; leftovers are removed by the next save.
"""

from __future__ import annotations

import io
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save

from vllm_compat.errors import DataError

from .files import write_atomic


def save_checkpoint(root: Path, step: int, weights: Mapping[str, torch.Tensor], state: dict[str, Any]) -> None:
    """`state` may hold tensors, numbers, strings, lists and dicts."""
    # A name of its own for every save: the directory that `latest` names is not touched, even when it is of this step.
    taken = [int(path.name.rsplit("-", 1)[1]) for path in root.glob(f"step-{step:08d}-*")]
    folder = root / f"step-{step:08d}-{max(taken, default=-1) + 1}"
    folder.mkdir(parents=True)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    write_atomic(folder / "draft.safetensors", save(tensors))
    buffer = io.BytesIO()
    torch.save(state, buffer)
    write_atomic(folder / "state.pt", buffer.getvalue())
    write_atomic(root / "latest", folder.name + "\n")
    for other in root.glob("step-*"):
        if other != folder:
            shutil.rmtree(other)


def load_checkpoint(root: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]] | None:
    """Weights and state of the latest checkpoint on the CPU, None when there is none, DataError if broken."""
    pointer = root / "latest"
    if not pointer.is_file():
        return None
    folder = root / pointer.read_text(encoding="utf-8").strip()
    try:
        weights = load_file(folder / "draft.safetensors")
        state: dict[str, Any] = torch.load(folder / "state.pt", map_location="cpu", weights_only=True)
    except Exception as error:  # safetensors, pickle, zip and OS errors all mean the same here
        raise DataError(
            asked=f"resuming from {folder}",
            needed="a complete checkpoint",
            found=f"{type(error).__name__}: {error}",
            advice=f"remove {root} to train from the start",
        ) from error
    return weights, state

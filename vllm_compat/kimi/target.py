"""The three tensors of the target that a head is trained against: embedding, final norm and lm_head.

They are read straight from the checkpoint's safetensors by the ends of their names, so that a 600 GB target
costs three tensors, and both layouts work: `model.embed_tokens.weight` (K2) and
`language_model.model.embed_tokens.weight` (K2.5). Kimi's INT4 and FP8 checkpoints keep all three in bfloat16,
so there is no dequantiser here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from vllm_compat.errors import DataError

from .layers import rms_norm

_ENDS = {"embed_tokens": "embed_tokens.weight", "norm": "norm.weight", "lm_head": "lm_head.weight"}


@dataclass(frozen=True)
class TargetHead:
    """embed_tokens [V, H], norm [H], lm_head [V, H] as stored; config = the text config as a plain dict."""

    config: dict[str, Any]
    embed_tokens: torch.Tensor
    norm: torch.Tensor
    lm_head: torch.Tensor
    eps: float

    @classmethod
    def load(cls, model: str | Path) -> TargetHead:
        """A local directory or a hub id (only the files that hold the three tensors are fetched).

        DataError names the tensor that is missing, ambiguous, quantised, or of a shape that contradicts the
        config.
        """
        config = load_text_config(model)
        files = _tensor_files(model)
        names = {what: _find(what, end, files) for what, end in _ENDS.items()}
        if names["lm_head"] is None and config.get("tie_word_embeddings"):
            names["lm_head"] = names["embed_tokens"]
        tensors = {}
        for what, name in names.items():
            if name is None:
                raise DataError(
                    asked=f"{what} of {model}",
                    needed=f"a tensor whose name ends in {_ENDS[what]!r}",
                    found=f"none among {len(files)} tensors"
                    + (" (tie_word_embeddings is off)" if what == "lm_head" else ""),
                )
            with safe_open(_fetch(model, files[name]), framework="pt") as stored:
                tensors[what] = stored.get_tensor(name)
        made = cls(config=config, eps=float(config.get("rms_norm_eps", 1e-6)), **tensors)
        made._check(model)
        return made

    def _check(self, model: str | Path) -> None:
        vocab, hidden = int(self.config["vocab_size"]), int(self.config["hidden_size"])
        expected = {"embed_tokens": (vocab, hidden), "norm": (hidden,), "lm_head": (vocab, hidden)}
        for what, shape in expected.items():
            tensor: torch.Tensor = getattr(self, what)
            if tuple(tensor.shape) != shape or not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2:
                raise DataError(
                    asked=f"{what} of {model}",
                    needed=f"floating point {list(shape)} (config: vocab_size {vocab}, hidden_size {hidden})",
                    found=f"{tensor.dtype} {list(tensor.shape)}",
                    advice="use a checkpoint that leaves embed_tokens, norm and lm_head unquantised",
                )

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> TargetHead:
        moved = {what: getattr(self, what).to(device=device, dtype=dtype) for what in _ENDS}
        return replace(self, **moved)

    def logits(self, final_states: torch.Tensor) -> torch.Tensor:
        """States after the last layer, *before* the final norm, [..., H] -> float32 logits [..., V]."""
        normed = rms_norm(final_states.to(self.lm_head.dtype), self.norm, self.eps)
        return (normed @ self.lm_head.T).float()


def load_text_config(model: str | Path) -> dict[str, Any]:
    """config.json as a plain dict; a multimodal one gives its `text_config`."""
    path = Path(_fetch(model, "config.json"))
    config: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return dict(config.get("text_config") or config)


def _fetch(model: str | Path, name: str) -> str:
    """Path of one file of the model; DataError when a local directory lacks it."""
    root = Path(model)
    if root.is_dir():
        if not (root / name).is_file():
            raise DataError(asked=f"{name} of {model}", found=f"no such file in {root.resolve()}")
        return str(root / name)
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return str(hf_hub_download(str(model), name))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise DataError(
            asked=f"{name} of {model}",
            needed="a local directory, or a model of the Hugging Face hub that can be reached",
            found=str(error).splitlines()[0],
        ) from error


def _tensor_files(model: str | Path) -> dict[str, str]:
    """Tensor name -> file name."""
    root, index = Path(model), "model.safetensors.index.json"
    if root.is_dir():
        sharded = (root / index).is_file()
    else:
        from huggingface_hub import file_exists

        sharded = bool(file_exists(str(model), index))
    if sharded:
        listed = json.loads(Path(_fetch(model, index)).read_text(encoding="utf-8"))
        weights: dict[str, str] = listed["weight_map"]
        return weights
    with safe_open(_fetch(model, "model.safetensors"), framework="pt") as stored:
        return dict.fromkeys(stored.keys(), "model.safetensors")


def _find(what: str, end: str, files: Mapping[str, str]) -> str | None:
    """The one tensor `…<end>` of the language model: not a layer's, not the vision tower's."""
    found = [
        name
        for name in files
        if name == end or (name.endswith(f".{end}") and ".layers." not in name and "vision" not in name)
    ]
    if what == "norm":
        found = [name for name in found if name.removesuffix(end).rstrip(".").split(".")[-1] in ("model", "")]
    if len(found) > 1:
        raise DataError(
            asked=f"{what} of the target", needed=f"one tensor named …{end}", found=", ".join(sorted(found))
        )
    return found[0] if found else None

"""The target's config.json, read without its weights, its code or its tokenizer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_compat.errors import ConfigError


@dataclass(frozen=True)
class TargetShape:
    """What is known of the target before it is loaded; from `text_config` where there is one."""

    architecture: str
    num_hidden_layers: int
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int | None


def read_target_shape(model: str) -> TargetShape:
    """The shape of a local model or of one on the hub.

    ConfigError when config.json cannot be had or lacks a field.
    """
    path = Path(model) / "config.json" if Path(model).is_dir() else _from_hub(model)
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        text = config.get("text_config") or config
        return TargetShape(
            architecture=str(config["architectures"][0]),
            num_hidden_layers=int(text["num_hidden_layers"]),
            hidden_size=int(text["hidden_size"]),
            vocab_size=int(text["vocab_size"]),
            max_position_embeddings=text.get("max_position_embeddings"),
        )
    except FileNotFoundError as error:
        raise ConfigError(f"target.model = {model!r}", needed="config.json", found="none there") from error
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ConfigError(
            f"target.model = {model!r}",
            needed="a config.json with architectures, num_hidden_layers, hidden_size and vocab_size",
            found=f"{type(error).__name__}: {error}",
        ) from error


def _from_hub(model: str) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(hf_hub_download(model, "config.json"))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ConfigError(
            f"target.model = {model!r}",
            needed="a local directory, or a model of the Hugging Face hub that can be reached",
            found=str(error).splitlines()[0],
        ) from error

"""Finding a model's decoder layers, and the residual stream in their arguments."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch

from vllm_compat.errors import CaptureError


@dataclass(frozen=True)
class Decoder:
    """The decoder of a vLLM model, or the part of it that one pipeline stage has.

    Attributes:
        holder: The module whose ``forward`` runs the layers.
        layers: All N of them; those of other pipeline stages are placeholders.
        start: The first layer of this stage.
        end: One more than its last.
    """

    holder: Any
    layers: tuple[torch.nn.Module, ...]
    start: int
    end: int

    @property
    def here(self) -> torch.nn.Module:
        """A layer that this stage has."""
        return self.layers[self.start]

    def boundaries(self, layers: tuple[int, ...]) -> tuple[int, ...]:
        """Those of ``layers`` that pass through this stage: before each of its layers, and N after the last one."""
        last = self.end + (self.end == len(self.layers))
        return tuple(layer for layer in layers if self.start <= layer < last)


def decoder_of(model: Any) -> Decoder:
    """The decoder of a vLLM model; that of its language model if it is multimodal.

    Raises:
        CaptureError: no list of layers where vLLM's decoder models keep it (``[language_model.]model.layers``).
    """
    language_model = model
    if hasattr(model, "get_language_model"):
        language_model = model.get_language_model()
    elif hasattr(model, "language_model"):
        language_model = model.language_model
    inner = getattr(language_model, "model", language_model)
    layers = getattr(inner, "layers", None)
    if not isinstance(layers, torch.nn.ModuleList) or len(layers) == 0:
        raise CaptureError(
            f"decoder layers of {type(model).__name__}",
            needed="a torch.nn.ModuleList at [language_model.]model.layers",
            found=f"{type(layers).__name__} in {type(inner).__name__}",
            advice="report the model class; hidden states of it cannot be captured yet",
        )
    start, end = getattr(inner, "start_layer", 0), getattr(inner, "end_layer", len(layers))
    return Decoder(inner, tuple(layers), start, end)


class LayerArguments:
    """Where a layer's ``forward`` takes ``hidden_states`` and ``residual``: some by position, some by name."""

    def __init__(self, layer: torch.nn.Module) -> None:
        self._signature = inspect.signature(layer.forward)
        if "hidden_states" not in self._signature.parameters:
            raise CaptureError(
                f"input of {type(layer).__name__}",
                needed="a forward with a parameter hidden_states",
                found=f"{self._signature}",
                advice="report the model class; hidden states of it cannot be captured yet",
            )

    @property
    def has_residual(self) -> bool:
        """Whether the residual stream is the sum of two arguments."""
        return "residual" in self._signature.parameters

    def stream(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(hidden_states, residual) of one call; residual is None at the first layer."""
        bound = self._signature.bind(*args, **kwargs).arguments
        return bound["hidden_states"], bound.get("residual")

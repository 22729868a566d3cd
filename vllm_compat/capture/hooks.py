"""The way "hooks": Python hooks on decoder layers. Needs eager mode and nothing of the model class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from vllm_compat.capture.layers import Decoder, LayerArguments


class LayerHooks:
    """Keeps ``hidden_states + residual`` at each boundary of this pipeline stage, one forward pass at a time.

    Args:
        decoder: The decoder, or this stage's part of it.
        boundaries: Those of this stage.

    Raises:
        CaptureError: a layer whose arguments are not understood; nothing is hooked then.
    """

    def __init__(self, decoder: Decoder, boundaries: tuple[int, ...]) -> None:
        self._seen: dict[int, torch.Tensor] = {}
        self._recording = False
        modules = decoder.layers
        arguments = {k: LayerArguments(modules[k]) for k in boundaries if k < len(modules)}
        self._hooks = [
            modules[k].register_forward_pre_hook(self._before(k, arguments[k]), with_kwargs=True) for k in arguments
        ]
        if len(modules) in boundaries:
            self._hooks.append(modules[-1].register_forward_hook(self._after(len(modules))))

    def begin(self) -> None:
        """A forward pass is about to start."""
        self._seen = {}
        self._recording = True

    def end(self) -> Mapping[int, torch.Tensor]:
        """Boundary -> [rows, H] of the pass, in memory of their own; empty when the model did not run."""
        self._recording = False
        seen, self._seen = self._seen, {}
        return seen

    def close(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()

    def _before(self, boundary: int, arguments: LayerArguments) -> Any:
        def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._recording:
                self._seen[boundary] = _stream(*arguments.stream(args, kwargs))

        return hook

    def _after(self, boundary: int) -> Any:
        def hook(_: Any, __: tuple[Any, ...], output: Any) -> None:
            if self._recording:
                hidden, residual = output if isinstance(output, tuple) else (output, None)
                self._seen[boundary] = _stream(hidden, residual)

        return hook


def _stream(hidden: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    # A sum or a copy, never the tensor itself: later layers add into these buffers in place.
    return hidden.clone() if residual is None else hidden + residual

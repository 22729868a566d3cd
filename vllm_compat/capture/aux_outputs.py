"""The way "aux": the model's own auxiliary outputs, which survive torch.compile and CUDA graphs.

They are taken from ``execute_model_state``, where both runners keep what a step computed until it is sampled from, and
not from a wrapper around the model's ``forward``. A wrapper sees nothing when a CUDA graph of the whole model is
replayed, because no Python of the model runs then, and the graph would have to be recorded with what it takes away.
With the runner's own switch on, graphs are recorded with the auxiliary outputs in them, and the runner unpacks them.
Up to 0.17.1 there would be no other place than the wrapper for one of the two runners, but up to then no model returns
its final state either, so that hooks serve those releases.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from vllm_compat.adapters.select import adapter
from vllm_compat.capture.layers import Decoder, LayerArguments


def why_not(runner: Any, decoder: Decoder, layers: tuple[int, ...]) -> str:
    """Why these boundaries cannot be taken this way; "" when they can."""
    states = adapter("aux_states")
    model = runner.get_model()
    if states.unavailable:
        return str(states.unavailable)
    if not states.supports(model):
        return f"{type(model).__name__} does not return auxiliary hidden states here (SupportsEagle3)"
    if decoder.end - decoder.start < len(decoder.layers):
        return "the model is split over pipeline stages, which do not all hand auxiliary outputs on"
    if 0 in layers:
        # Llama and its like hand out the buffer that the first layer then adds to; DeepSeek's adds None to it.
        return "boundary 0 is no auxiliary output in its own memory"
    if len(decoder.layers) in layers and not states.gives_final(decoder.holder):
        return f"{type(decoder.holder).__name__} does not return its final state (boundary {len(decoder.layers)}) here"
    if not LayerArguments(decoder.here).has_residual:
        # Where the residual stream is no sum, an auxiliary output may be a buffer that a later layer changes.
        return (
            f"{type(decoder.here).__name__} has no residual of its own, so outputs may share memory with later layers"
        )
    if runner.use_aux_hidden_state_outputs and AuxOutputs.of(runner) is None:
        return "a draft head has the model's auxiliary outputs"
    return ""


class AuxOutputs:
    """Switches a runner and its model to auxiliary outputs at ``layers``, and takes them out of each step.

    Under torch.compile this must come before the first forward pass, in every rank; see ``why_not`` for the rest.

    Args:
        runner, decoder: Of this worker.
        layers: Boundary ids, ascending.
        stays: ``close`` leaves them on, since compiled code and CUDA graphs have them in.
    """

    def __init__(self, runner: Any, layers: tuple[int, ...], *, stays: bool = False) -> None:
        self.layers = layers
        self._runner, self._stays = runner, stays
        runner.get_model().set_aux_hidden_state_layers(layers)
        runner.use_aux_hidden_state_outputs = True
        runner._vllm_compat_aux_outputs = self

    @staticmethod
    def of(runner: Any) -> AuxOutputs | None:
        """What is switched on already, from before the first forward pass."""
        return getattr(runner, "_vllm_compat_aux_outputs", None)

    def begin(self) -> None:
        """A forward pass is about to start."""

    def end(self) -> Mapping[int, torch.Tensor]:
        """Boundary -> [rows, H] of the pass, to be copied before the next one; empty when the model did not run."""
        state = self._runner.execute_model_state
        if state is None:
            return {}
        # One tensor per layer id, in ascending order whatever order was asked for.
        return dict(zip(self.layers, state.aux_hidden_states or (), strict=False))

    def close(self) -> None:
        """Switch them off again."""
        if self._stays:
            return
        self._runner.get_model().set_aux_hidden_state_layers(())
        self._runner.use_aux_hidden_state_outputs = False
        del self._runner._vllm_compat_aux_outputs

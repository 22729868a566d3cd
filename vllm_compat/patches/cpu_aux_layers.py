"""The CPU runner never tells the target which layers' states its EAGLE-3 head wants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_compat.patches.patch import Patch, Wrap


def _then_tell_the_target(
    wrapped: Callable[..., None], runner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    from vllm.model_executor.models.interfaces import supports_eagle3

    wrapped(*args, **kwargs)
    if not runner.use_aux_hidden_state_outputs:
        return
    model = runner.get_model()
    if not supports_eagle3(model):
        msg = "Model does not support EAGLE3 interface but aux_hidden_state_outputs was requested"  # as on a GPU
        raise RuntimeError(msg)
    layers = runner._get_eagle3_aux_layers_from_config() or model.get_eagle3_default_aux_hidden_state_layers()
    model.set_aux_hidden_state_layers(layers)


PATCH = Patch(
    name="cpu-aux-layers",
    changes=(Wrap("vllm.v1.worker.cpu_model_runner", "CPUModelRunner.load_model", _then_tell_the_target),),
    since=(0, 20, 0),
    until=(0, 22, 0),
    platform="cpu",
    phase="worker",
    why=(
        "CPUModelRunner.load_model leaves out what GPUModelRunner.load_model does for an EAGLE-3 head: the target "
        "returns no auxiliary states, and the engine does not start: ValueError: too many values to unpack."
    ),
    upstream="https://github.com/vllm-project/vllm/pull/42468",
    remove_when="0.21 is no longer supported",
)

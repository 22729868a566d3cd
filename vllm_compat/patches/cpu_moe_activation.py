"""The CPU's mixture of experts makes its activation during the forward pass, where there is no vLLM config."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_compat.patches.patch import Patch, Wrap


def _inside_a_config(wrapped: Callable[[str], Any], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from vllm.config import VllmConfig, get_current_vllm_config_or_none, set_current_vllm_config

    # Only forward_native of the object is called, which reads nothing of the config.
    with set_current_vllm_config(get_current_vllm_config_or_none() or VllmConfig()):
        return wrapped(*args, **kwargs)


PATCH = Patch(
    name="cpu-moe-activation",
    changes=(
        Wrap("vllm.model_executor.layers.fused_moe.cpu_fused_moe", "_LazyActivationDict.__missing__", _inside_a_config),
    ),
    since=(0, 14, 0),
    until=(0, 15, 0),
    platform="cpu",
    phase="worker",
    why="A model with experts does not start: AssertionError: Current vLLM config is not set.",
    upstream="https://github.com/vllm-project/vllm/pull/32777",
    remove_when="0.14 is no longer supported",
)

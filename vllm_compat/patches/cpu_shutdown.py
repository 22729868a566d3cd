"""On a CPU the worker's shutdown waits for an accelerator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_compat.patches.patch import Patch, Wrap


def _if_there_is_one(wrapped: Callable[..., Any], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    import torch

    return wrapped(*args, **kwargs) if torch.accelerator.is_available() else None


PATCH = Patch(
    name="cpu-shutdown",
    changes=(Wrap("torch.accelerator", "synchronize", _if_there_is_one),),
    since=(0, 20, 0),
    until=(0, 21, 0),
    platform="cpu",
    phase="worker",
    why=(
        "The CPU worker inherits GPUModelRunner.shutdown, which calls torch.accelerator.synchronize(): RuntimeError "
        "where there is no accelerator (0.21.0 replaces it, _set_torch_accelerator_to_noop). With worker processes it "
        "is only logged; in this process the engine's shutdown fails."
    ),
    upstream="https://github.com/vllm-project/vllm/blob/v0.21.0/vllm/v1/worker/cpu_model_runner.py",
    remove_when="0.20 is no longer supported",
)

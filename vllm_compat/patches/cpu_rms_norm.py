"""The CPU's rms_norm reads strided input as if it were contiguous."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_compat.patches.patch import Patch, Wrap


def _contiguous(wrapped: Callable[..., None], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    out, x, *rest = args
    wrapped(out, x.contiguous(), *rest, **kwargs)  # as up to 0.11.2


PATCH = Patch(
    name="cpu-rms-norm",
    changes=(Wrap("vllm._custom_ops", "rms_norm", _contiguous),),
    since=(0, 12, 0),
    until=(0, 14, 0),
    platform="cpu",
    phase="worker",
    why=(
        "DeepSeek models, whose kv_a_layernorm gets a slice, give wrong numbers, other ones each time. 0.12.0 took the "
        "conversion out of vllm._custom_ops.rms_norm when the CUDA kernel had learned about strides; 0.14.0 does it in "
        "PyTorch on a CPU."
    ),
    upstream="https://github.com/vllm-project/vllm/pull/28103",
    remove_when="0.13 is no longer supported",
)

"""llvmlite's library proxy claims to have every attribute, ``__dict__`` included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_compat.patches.patch import Patch, Wrap


def _no_dunder(wrapped: Callable[[str], Any], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = args[0] if args else kwargs["name"]
    if name.startswith("__"):
        # Python looks these up to learn what an object is; no C library exports them.
        raise AttributeError(name)
    return wrapped(*args, **kwargs)


PATCH = Patch(
    name="llvmlite-proxy",
    changes=(Wrap("llvmlite.binding.ffi", "_lib_wrapper.__getattr__", _no_dunder),),
    since=(0, 31, 0),
    until=None,
    platform="cpu",
    phase="worker",
    why=(
        "Registering CPU kernels, vLLM looks at vars(value) of everything in every module "
        "(vllm/triton_utils/dispatcher.py, _rebind_kernels). llvmlite's proxy, which models such as Kimi-K2.5 import "
        "through numba, answers __dict__ with a C function: AttributeError: '_lib_fn_wrapper' object has no attribute "
        "'get', and the engine does not start."
    ),
    upstream="https://github.com/vllm-project/vllm/pull/43048",
    remove_when="vLLM's scan skips objects whose __dict__ is no dictionary, or llvmlite's proxy refuses dunder names",
)

"""The CPU's rejection kernels do not take what the rejection sampler passes for synthetic acceptance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_compat.patches.patch import Change, Patch, Wrap


def _without(*positions: int) -> Callable[..., None]:
    """A wrapper that leaves out the arguments at these positions, and SYNTHETIC_MODE where it is off."""

    def leave_out(wrapped: Callable[..., None], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Refused, as from 0.21.0 on: acceptance would be real where made up rates were asked for.
        assert not kwargs.pop("SYNTHETIC_MODE"), "Synthetic acceptance not supported with CPU sampling"
        wrapped(*(value for position, value in enumerate(args) if position not in positions), **kwargs)

    return leave_out


def _kernel(name: str, *positions: int) -> Change:
    # What is launched is the function that the module's kernel object was made with.
    return Wrap("vllm.utils.cpu_triton_utils", f"{name}.func", _without(*positions))


PATCH = Patch(
    name="cpu-synthetic-mode",
    changes=(
        _kernel("rejection_greedy_sample_kernel", 7, 8),  # uniform_probs, synthetic_conditional_rates
        _kernel("rejection_random_sample_kernel", 11),  # synthetic_conditional_rates
    ),
    since=(0, 20, 0),
    until=(0, 21, 0),
    platform="cpu",
    phase="worker",
    why=(
        "Speculative decoding: TypeError: _rejection_greedy_sample_kernel_impl() got an unexpected keyword argument "
        "'SYNTHETIC_MODE'."
    ),
    upstream="https://github.com/vllm-project/vllm/pull/41932",
    remove_when="0.20 is no longer supported",
)

"""The CPU's kernel for recovered tokens does not take USE_FP64_GUMBEL, which the rejection sampler passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_compat.patches.patch import Patch, Wrap

#: Position of inv_q, the noise of shape [batch_size, vocab_size].
_INV_Q = 5


def _in_float32(wrapped: Callable[..., None], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    # The compiled kernel reads float32 whatever it is given; so does 0.25.0, which takes the argument and converts.
    kwargs.pop("USE_FP64_GUMBEL")
    wrapped(*args[:_INV_Q], args[_INV_Q].float(), *args[_INV_Q + 1 :], **kwargs)


PATCH = Patch(
    name="cpu-fp64-gumbel",
    changes=(Wrap("vllm.utils.cpu_triton_utils", "sample_recovered_tokens_kernel.func", _in_float32),),
    since=(0, 23, 0),
    until=(0, 25, 0),
    platform="cpu",
    phase="worker",
    why=(
        "Speculative decoding: TypeError: _sample_recovered_tokens_kernel_impl() got an unexpected keyword argument "
        "'USE_FP64_GUMBEL', when the engine starts."
    ),
    upstream="https://github.com/vllm-project/vllm/pull/46069",
    remove_when="0.24 is no longer supported",
)

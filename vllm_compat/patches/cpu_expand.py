"""On a CPU, speculative decoding reads temperatures, top_k and top_p from memory that nobody wrote."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_compat.patches.patch import Patch, Wrap


def _expand(_wrapped: Callable[..., Any], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _per_token(*args, **kwargs)


def _per_token(x: Any, cu_num_tokens: Any, num_tokens: int, replace_from: int = 0, replace_to: int = 0) -> Any:
    """[batch_size] values -> [num_tokens], each as often as its request has tokens.

    ``cu_num_tokens``, [batch_size]: tokens of the requests up to this one.
    """
    import torch

    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    return x.masked_fill(x == replace_from, replace_to).repeat_interleave(counts, output_size=num_tokens)


PATCH = Patch(
    name="cpu-expand",
    changes=(Wrap("vllm.v1.sample.rejection_sampler", "expand_batch_to_tokens", _expand),),
    since=(0, 20, 0),
    until=None,
    platform="cpu",
    phase="worker",
    why=(
        "expand_batch_to_tokens hands out an uninitialised tensor: the CPU's kernel converts it to int64, which is a "
        "copy, and writes that. Speculative decoding with a temperature then samples from anything, or fails; greedy "
        "decoding does not call it."
    ),
    upstream="https://github.com/vllm-project/vllm/issues/55005",
    remove_when="the oldest supported release has https://github.com/vllm-project/vllm/pull/55006",
)

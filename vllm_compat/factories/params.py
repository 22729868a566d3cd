"""What a request asks for: how to sample, or how to pool."""

from __future__ import annotations

from typing import Any

from vllm_compat._unset import UNSET
from vllm_compat.adapters.select import adapter

__all__ = ["make_pooling_params", "make_sampling_params"]


def make_sampling_params(**options: Any) -> Any:
    """A native ``vllm.SamplingParams`` by keyword: ``make_sampling_params(temperature=0.0, max_tokens=16)``.

    Raises:
        UnsupportedField: this release's SamplingParams has no such option. Whatever vLLM raises for bad values.
    """
    return adapter("sampling_params").build(options)


def make_pooling_params(task: Any = UNSET, **options: Any) -> Any:
    """A native ``vllm.PoolingParams``: ``make_pooling_params("embed", use_activation=False)``.

    Args:
        task: "embed", "classify", "token_embed", …; as in the release. A request made by hand needs one, which
            ``LLM.encode`` would fill in: workers only assert it.
        options: Further fields by name. ``use_activation`` is ``normalize``, ``activation`` or ``softmax`` in older
            releases, by the task; any of these names goes in every release.

    Raises:
        UnsupportedField: this release's PoolingParams has no such option. Whatever vLLM raises for bad values.
        VllmCompatError: two names of one option; ``use_activation`` without a task, up to 0.13.0.
    """
    return adapter("pooling_params").build({"task": task, **options})

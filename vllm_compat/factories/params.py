"""What a request asks for: how to sample."""

from __future__ import annotations

from typing import Any

from vllm_compat.adapters.select import adapter

__all__ = ["make_sampling_params"]


def make_sampling_params(**options: Any) -> Any:
    """A native ``vllm.SamplingParams`` by keyword: ``make_sampling_params(temperature=0.0, max_tokens=16)``.

    Raises:
        UnsupportedField: this release's SamplingParams has no such option. Whatever vLLM raises for bad values.
    """
    return adapter("sampling_params").build(options)

"""SamplingParams, by keyword."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_compat.adapters.base import Adapter, Need


class SamplingParams_0_12(Adapter):
    """Structured output is asked for by ``structured_outputs`` alone (``guided_decoding`` went in 0.12.0)."""

    surface = "sampling_params"
    since = (0, 12, 0)
    params = Need(
        "vllm:SamplingParams",
        options={"structured_outputs": "", "skip_reading_prefix_cache": "", "repetition_detection": "0.17.0"},
    )
    needs = (params,)

    def build(self, options: Mapping[str, Any]) -> Any:
        return self.construct(self.params, options)


ADAPTERS = (SamplingParams_0_12,)

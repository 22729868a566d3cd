"""The configuration of an engine, from which almost everything else is made."""

from __future__ import annotations

from typing import Any

from vllm_compat.adapters.select import adapter

__all__ = ["make_vllm_config"]


def make_vllm_config(**engine_args: Any) -> Any:
    """A ``vllm.config.VllmConfig`` from EngineArgs by name: ``make_vllm_config(model=path, max_model_len=2048)``.

    Raises:
        UnsupportedField: this release's EngineArgs has no such option. Whatever vLLM itself raises for bad values.
    """
    return adapter("vllm_config").build(engine_args)

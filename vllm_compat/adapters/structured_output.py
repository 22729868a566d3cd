"""StructuredOutputManager: grammar back ends, and the bitmask that the runner applies before sampling."""

from __future__ import annotations

from typing import Any

from vllm_compat.adapters.base import Adapter, Need

_MANAGER = "vllm.v1.structured_output:StructuredOutputManager"


class StructuredOutput_0_9(Adapter):
    """The constructor has not changed since 0.9.0; it loads the tokenizer unless ``skip_tokenizer_init`` (0.9.2)."""

    surface = "structured_output"
    since = (0, 9, 2)
    manager = Need(_MANAGER, passes=("vllm_config",))
    grammar = Need(f"{_MANAGER}.grammar_init", passes=("request",), bound=True)
    needs = (manager, grammar)

    def build(self, vllm_config: Any) -> Any:
        return self.construct(self.manager, {"vllm_config": vllm_config})


ADAPTERS = (StructuredOutput_0_9,)

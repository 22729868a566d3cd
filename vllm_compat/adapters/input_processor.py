"""vLLM's own front end for one request: validation, defaults of the sampling params, LoRA, multimodal features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_compat.adapters.base import Adapter, Need

_PROCESSOR = "vllm.v1.engine.input_processor:InputProcessor"


class InputProcessor_0_20(Adapter):
    """``process_inputs`` wants the engine's tasks by name and takes rendered inputs (0.20.0 and its neighbours)."""

    surface = "input_processor"
    since = (0, 20, 0)
    processor = Need(_PROCESSOR, passes=("vllm_config",))
    process = Need(
        f"{_PROCESSOR}.process_inputs",
        passes=("request_id", "prompt", "params", "supported_tasks"),
        options={
            "arrival_time": "",
            "lora_request": "",
            "trace_headers": "",
            "priority": "",
            "data_parallel_rank": "",
            "tokenization_kwargs": "",
            "resumable": "",
            "session_id": "0.28.0",
            "kv_hints": "0.31.0",
        },
        bound=True,
    )
    from_core = Need("vllm.v1.request:Request.from_engine_core_request", passes=("request", "block_hasher"))
    tokens = Need("vllm.inputs:tokens_input", passes=("prompt_token_ids",), options={"prompt": "", "cache_salt": ""})
    needs = (processor, process, from_core, tokens)

    def build(self, vllm_config: Any) -> Any:
        return self.construct(self.processor, {"vllm_config": vllm_config})

    def request(
        self, processor: Any, prompt: Sequence[int] | str | Mapping[str, Any], options: Mapping[str, Any], hasher: Any
    ) -> Any:
        """A native Request, made as vLLM's LLM makes it. ``options`` are those of ``process_inputs``."""
        salt = options.get("cache_salt")
        if isinstance(prompt, Sequence) and not isinstance(prompt, str):
            # Rendered form: the raw form is deprecated, and would be tokenised, truncated and padded again.
            prompt = self.construct(self.tokens, {"prompt_token_ids": list(prompt), "cache_salt": salt})
        elif salt is not None:
            # A salt that got lost here would let tenants share blocks.
            prompt = {**({"prompt": prompt} if isinstance(prompt, str) else prompt), "cache_salt": salt}
        given = {name: value for name, value in options.items() if name != "cache_salt"}
        core = self.construct_class(
            self.process, processor.process_inputs, {**given, "prompt": prompt, "supported_tasks": ("generate",)}
        )
        return self.construct(self.from_core, {"request": core, "block_hasher": hasher})


ADAPTERS = (InputProcessor_0_20,)

"""vLLM's own front end for one request: validation, defaults of the sampling params, LoRA, multimodal features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from vllm_compat.adapters.base import Adapter, Need

_PROCESSOR = "vllm.v1.engine.input_processor:InputProcessor"
_OLD_PROCESSOR = "vllm.v1.engine.processor:Processor"
_FROM_CORE = Need("vllm.v1.request:Request.from_engine_core_request", passes=("request", "block_hasher"))
_ASKED = ("request_id", "prompt", "params")
_OPTIONS = {
    "arrival_time": "",
    "lora_request": "",
    "trace_headers": "",
    "priority": "",
    "data_parallel_rank": "",
    "tokenization_kwargs": "",
    "resumable": "0.15.0",
    "session_id": "0.28.0",
    "kv_hints": "0.31.0",
}


class InputProcessor_0_19(Adapter):
    """``process_inputs`` wants the engine's tasks by name and takes rendered inputs, made by ``tokens_input`` (0.19.0).

    Raw prompts still go, deprecated since 0.17.0.
    """

    surface = "input_processor"
    since = (0, 19, 0)
    processor = Need(_PROCESSOR, passes=("vllm_config",))
    process = Need(f"{_PROCESSOR}.process_inputs", passes=(*_ASKED, "supported_tasks"), options=_OPTIONS, bound=True)
    tokens = Need("vllm.inputs:tokens_input", passes=("prompt_token_ids",), options={"cache_salt": ""})
    needs: ClassVar[tuple[Need, ...]] = (processor, process, _FROM_CORE, tokens)
    left: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "InputProcessor": ("renderer", "mm_registry"),  # what the config says
        "tokens_input": ("prompt",),  # the text, which only error messages would show
    }

    def build(self, vllm_config: Any) -> Any:
        return self.construct(self.processor, {"vllm_config": vllm_config})

    def request(
        self, processor: Any, prompt: Sequence[int] | str | Mapping[str, Any], options: Mapping[str, Any], hasher: Any
    ) -> Any:
        """A native Request, made as vLLM's LLM makes it. ``options`` are those of ``process_inputs``."""
        salt = options.get("cache_salt")
        if isinstance(prompt, Sequence) and not isinstance(prompt, str):
            prompt = self.token_prompt(list(prompt), salt)
        elif salt is not None:
            # A salt that got lost here would let tenants share blocks.
            prompt = {**({"prompt": prompt} if isinstance(prompt, str) else prompt), "cache_salt": salt}
        given = {name: value for name, value in options.items() if name != "cache_salt"}
        core = self.core_request(processor, {**given, "prompt": prompt})
        return self.construct(_FROM_CORE, {"request": core, "block_hasher": hasher})

    def token_prompt(self, ids: list[int], salt: str | None) -> Any:
        # Rendered form: the raw form is deprecated, and would be tokenised, truncated and padded again.
        return self.construct(self.tokens, {"prompt_token_ids": ids, "cache_salt": salt})

    def core_request(self, processor: Any, given: Mapping[str, Any]) -> Any:
        """The EngineCoreRequest that ``process_inputs`` makes."""
        tasks = {"supported_tasks": ("generate",)} if "supported_tasks" in self.process.passes else {}
        return self.construct_class(self.process, processor.process_inputs, {**given, **tasks})


class InputProcessor_0_17(InputProcessor_0_19):
    """Rendered inputs came with 0.17.0, made by ``token_inputs``; ``supported_tasks`` is required from there on."""

    since = (0, 17, 0)
    tokens = Need("vllm.inputs:token_inputs", passes=("prompt_token_ids",), options={"cache_salt": ""})
    needs: ClassVar[tuple[Need, ...]] = (InputProcessor_0_19.processor, InputProcessor_0_19.process, _FROM_CORE, tokens)
    left: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "InputProcessor": ("renderer", "mm_registry"),
        "token_inputs": ("prompt",),
    }


class InputProcessor_0_15(InputProcessor_0_17):
    """Takes raw prompts only, token ids as a ``TokensPrompt`` (up to 0.16.0), and makes its own tokenizer (0.15.0)."""

    since = (0, 15, 0)
    process = Need(f"{_PROCESSOR}.process_inputs", passes=_ASKED, options=_OPTIONS, bound=True)
    needs: ClassVar[tuple[Need, ...]] = (InputProcessor_0_19.processor, process, _FROM_CORE)
    # 0.16.0 has supported_tasks already, and looks at it for pooling only.
    left: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "InputProcessor": ("mm_registry",),
        "InputProcessor.process_inputs": ("supported_tasks",),
    }

    def token_prompt(self, ids: list[int], salt: str | None) -> Any:
        # A TypedDict, which has no signature; its keys are those of a dictionary prompt.
        return {"prompt_token_ids": ids, **({"cache_salt": salt} if salt is not None else {})}


class InputProcessor_0_12(InputProcessor_0_15):
    """``Processor`` became ``InputProcessor`` (0.12.0); the tokenizer is passed to it (up to 0.14.1)."""

    since = (0, 12, 0)
    processor = Need(_PROCESSOR, passes=("vllm_config", "tokenizer"))
    tokenizer = Need("vllm.tokenizers:cached_tokenizer_from_config", passes=("model_config",))
    needs: ClassVar[tuple[Need, ...]] = (processor, InputProcessor_0_15.process, _FROM_CORE, tokenizer)
    left: ClassVar[Mapping[str, tuple[str, ...]]] = {"InputProcessor": ("mm_registry",)}

    def build(self, vllm_config: Any) -> Any:
        model = vllm_config.model_config
        tokenizer = None if model.skip_tokenizer_init else self.make_tokenizer(vllm_config)
        return self.construct(self.processor, {"vllm_config": vllm_config, "tokenizer": tokenizer})

    def make_tokenizer(self, vllm_config: Any) -> Any:
        # Prompts are truncated on the left, as for every generating model. From 0.13.0 that is the default.
        model = vllm_config.model_config
        return self.construct(self.tokenizer, {"model_config": model, "truncation_side": "left"})


class InputProcessor_0_11(InputProcessor_0_12):
    """``Processor`` of ``vllm.v1.engine.processor`` (up to 0.11.2), whose tokenizer is a plain one from 0.11.0 on.

    0.11.1 stopped returning the prompt's text beside the request; nothing in the signature tells, so both are taken.
    """

    since = (0, 11, 0)
    processor = Need(_OLD_PROCESSOR, passes=("vllm_config", "tokenizer"))
    process = Need(f"{_OLD_PROCESSOR}.process_inputs", passes=_ASKED, options=_OPTIONS, bound=True)
    tokenizer = Need("vllm.transformers_utils.tokenizer:init_tokenizer_from_configs", passes=("model_config",))
    needs: ClassVar[tuple[Need, ...]] = (processor, process, _FROM_CORE, tokenizer)
    left: ClassVar[Mapping[str, tuple[str, ...]]] = {"Processor": ("mm_registry",)}

    def make_tokenizer(self, vllm_config: Any) -> Any:
        return self.construct(self.tokenizer, {"model_config": vllm_config.model_config})

    def core_request(self, processor: Any, given: Mapping[str, Any]) -> Any:
        made = super().core_request(processor, given)
        return made[1] if isinstance(made, tuple) else made


class InputProcessor_0_10(InputProcessor_0_11):
    """The tokenizer is a ``TokenizerGroup``, with one tokenizer per LoRA (up to 0.10.2)."""

    since = (0, 10, 2)
    tokenizer = Need(
        "vllm.transformers_utils.tokenizer_group:init_tokenizer_from_configs",
        passes=("model_config", "scheduler_config", "lora_config"),
    )
    needs: ClassVar[tuple[Need, ...]] = (
        InputProcessor_0_11.processor,
        InputProcessor_0_11.process,
        _FROM_CORE,
        tokenizer,
    )

    def make_tokenizer(self, vllm_config: Any) -> Any:
        return self.construct(
            self.tokenizer,
            {
                "model_config": vllm_config.model_config,
                "scheduler_config": vllm_config.scheduler_config,
                "lora_config": vllm_config.lora_config,
            },
        )


ADAPTERS = (
    InputProcessor_0_19,
    InputProcessor_0_17,
    InputProcessor_0_15,
    InputProcessor_0_12,
    InputProcessor_0_11,
    InputProcessor_0_10,
)
#: Earlier releases have all that these need as well; see ``select.in_order``.
UNSEEN = (InputProcessor_0_17,)

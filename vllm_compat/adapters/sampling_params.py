"""SamplingParams, by keyword."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from vllm_compat._unset import UNSET
from vllm_compat.adapters.base import Adapter, Need, resolve
from vllm_compat.errors import VllmCompatError

#: The two names of one option: "guided_decoding" up to 0.11.2, "structured_outputs" from 0.11.0.
_STRUCTURED = ("structured_outputs", "guided_decoding")
#: Private fields, which vLLM's own front end fills in.
_OLD_PRIVATE = ("_real_n", "output_text_buffer_length", "_all_stop_token_ids", "_bad_words_token_ids")
_PRIVATE = (*_OLD_PRIVATE, "_eos_token_id", "_watermarking_skipped")
_OPTIONS = {
    "n": "",
    "best_of": "0.10.2-0.11.2",
    "presence_penalty": "",
    "frequency_penalty": "",
    "repetition_penalty": "",
    "temperature": "",
    "watermarking": "0.30.0",
    "top_p": "",
    "top_k": "",
    "min_p": "",
    "seed": "",
    "stop": "",
    "stop_token_ids": "",
    "ignore_eos": "",
    "max_tokens": "",
    "min_tokens": "",
    "logprobs": "",
    "prompt_logprobs": "",
    "prompt_logprob_token_ids": "0.31.0",
    "prompt_logprob_start": "0.31.0",
    "logprob_token_ids": "0.20.0",
    "flat_logprobs": "0.12.0",
    "detokenize": "",
    "skip_special_tokens": "",
    "spaces_between_special_tokens": "",
    "logits_processors": "0.10.2-0.16.0",
    "include_stop_str_in_output": "",
    "truncate_prompt_tokens": "0.10.2-0.16.0",
    "output_kind": "",
    "stream_interval": "0.27.0",
    "skip_clone": "0.14.0",
    "logit_bias": "",
    "allowed_token_ids": "",
    "extra_args": "",
    "routed_experts_prompt_start": "0.22.0",
    "trace_decode_token_ids": "0.29.0",
    "bad_words": "",
    "skip_reading_prefix_cache": "0.11.1",
    "thinking_token_budget": "0.19.0",
    "repetition_detection": "0.17.0",
}


class SamplingParams_0_11(Adapter):
    """Structured output is asked for by ``structured_outputs``, a ``StructuredOutputsParams`` (0.11.0).

    Up to 0.11.2 ``guided_decoding`` is still there beside it, deprecated; 0.12.0 took it away. Here either name goes,
    in every release, with the class of any release or a dictionary of its fields.
    """

    surface = "sampling_params"
    since = (0, 11, 0)
    params = Need("vllm.sampling_params:SamplingParams", options={**_OPTIONS, "structured_outputs": ""})
    structured = Need(
        "vllm.sampling_params:StructuredOutputsParams",
        options={
            "json": "",
            "regex": "",
            "choice": "",
            "grammar": "",
            "json_object": "",
            "disable_fallback": "0.10.2-0.17.1",
            "disable_any_whitespace": "",
            "disable_additional_properties": "",
            "whitespace_pattern": "",
            "structural_tag": "",
            "backend": "0.10.2-0.10.2",
        },
    )
    needs: ClassVar[tuple[Need, ...]] = (params, structured)
    left: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "SamplingParams": (*_PRIVATE, "guided_decoding")
    }  # guided_decoding: mapped
    #: This release's own name of the option.
    structured_name = "structured_outputs"

    def build(self, options: Mapping[str, Any]) -> Any:
        if options.keys().isdisjoint(_STRUCTURED):
            return self.construct(self.params, options)
        given = {name: value for name, value in options.items() if name not in _STRUCTURED}
        asked = {name: options[name] for name in _STRUCTURED if options.get(name, UNSET) is not UNSET}
        if len(asked) > 1:
            raise VllmCompatError(
                "sampling params with structured_outputs and guided_decoding",
                needed="one of them: they are two names of one option",
                found="both",
                advice="pass structured_outputs only",
            )
        for value in asked.values():
            given[self.structured_name] = self.structured_params(value)
        return self.construct(self.params, given)

    def structured_params(self, value: Any) -> Any:
        """This release's class from a dictionary of fields, or from the class of another release.

        Raises:
            UnsupportedField: a field that is set does not exist here.
        """
        target = resolve(self.structured.symbol)
        if value is None or isinstance(value, target):
            return value
        if isinstance(value, Mapping):
            fields = dict(value)
        elif dataclasses.is_dataclass(value):
            # Fields at their default were not asked for, so they may be missing here.
            fields = {
                field.name: getattr(value, field.name)
                for field in dataclasses.fields(value)
                if field.init and getattr(value, field.name) not in (None, False)
            }
        else:
            raise VllmCompatError(
                f"structured output by a {type(value).__name__}",
                needed=f"vLLM's {self.structured.short}, or a dictionary of its fields",
                found=repr(value),
                advice='pass for example structured_outputs={"choice": ["yes", "no"]}',
            )
        return self.construct(self.structured, fields)


class SamplingParams_0_10(SamplingParams_0_11):
    """Structured output is asked for by ``guided_decoding``, a ``GuidedDecodingParams`` (0.10.2).

    Its ``backend`` was dropped with the class's new name in 0.11.0: V1 never let a request choose.
    """

    since = (0, 10, 2)
    structured = Need(
        "vllm.sampling_params:GuidedDecodingParams",
        options=SamplingParams_0_11.structured.options,
    )
    params = Need("vllm.sampling_params:SamplingParams", options={**_OPTIONS, "guided_decoding": ""})
    needs: ClassVar[tuple[Need, ...]] = (params, structured)
    left: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "SamplingParams": _OLD_PRIVATE,
        "GuidedDecodingParams": ("backend_was_auto",),
    }
    structured_name = "guided_decoding"


ADAPTERS = (SamplingParams_0_11, SamplingParams_0_10)

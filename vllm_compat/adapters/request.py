"""vllm.v1.request.Request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_compat._unset import UNSET
from vllm_compat.adapters.base import Adapter, Need


class Request_0_17(Adapter):
    """The end-of-sequence id moved from Request into SamplingParams (0.17.0); every later change adds optional fields.

    ``SamplingParams.eos_token_id`` is private and is set only by ``update_from_generation_config``, which also adds it
    to the ids that ``min_tokens`` suppresses.
    """

    surface = "request"
    since = (0, 17, 0)
    request = Need(
        "vllm.v1.request:Request",
        passes=("request_id", "prompt_token_ids", "sampling_params", "pooling_params", "block_hasher"),
        options={
            "client_index": "",
            "arrival_time": "",
            "prompt_embeds": "",
            "prompt_is_token_ids": "0.21.0",
            "mm_features": "",
            "lora_request": "",
            "cache_salt": "",
            "priority": "",
            "trace_headers": "",
            "resumable": "",
            "session_id": "0.28.0",
            "reasoning_ended": "",
            "reasoning_parser_kwargs": "0.20.1",
            "abort_immediately": "0.21.0",
            "kv_hints": "0.31.0",
        },
    )
    needs = (request,)

    def build(self, options: Mapping[str, Any], eos_token_id: Any) -> Any:
        """A native Request.

        Args:
            options: Parameters of Request by name; UNSET ones are left out.
            eos_token_id: Stop at this id, or UNSET/None for what the sampling params say themselves.
        """
        given = dict(options)
        params = given["sampling_params"]
        if params is not None and eos_token_id is not UNSET and eos_token_id is not None:
            given["sampling_params"] = params = params.clone()
            # By position: the keyword was called model_eos_token_id up to 0.16.0.
            params.update_from_generation_config({}, eos_token_id)
        return self.construct(self.request, given)

    def read(self, request: Any) -> dict[str, Any]:
        """The options that ``build`` takes, read back from a native Request."""
        structured = request.structured_output_request
        values = {
            "request_id": request.request_id,
            "prompt_token_ids": request.prompt_token_ids,
            "sampling_params": request.sampling_params,
            "pooling_params": request.pooling_params,
            "block_hasher": request._block_hasher,
            "client_index": request.client_index,
            "arrival_time": request.arrival_time,
            "prompt_embeds": request.prompt_embeds,
            "mm_features": request.mm_features,
            "lora_request": request.lora_request,
            "cache_salt": request.cache_salt,
            "priority": request.priority,
            "trace_headers": request.trace_headers,
            "resumable": request.resumable,
            "reasoning_ended": structured.reasoning_ended if structured is not None else None,
        }
        for name in ("prompt_is_token_ids", "session_id", "abort_immediately", "kv_hints"):
            if hasattr(request, name):
                values[name] = getattr(request, name)
        if structured is not None and hasattr(structured, "reasoning_parser_kwargs"):
            values["reasoning_parser_kwargs"] = structured.reasoning_parser_kwargs
        return values


ADAPTERS = (Request_0_17,)

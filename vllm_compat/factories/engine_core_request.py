"""Requests on their way from the front end to the engine core, and what the core makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_compat._token_ids import plain_token_ids
from vllm_compat._unset import UNSET
from vllm_compat.adapters.select import adapter
from vllm_compat.factories._checks import check_params
from vllm_compat.hashing import hasher_of_scheduler, make_block_hasher

__all__ = ["make_engine_core_request", "request_from_engine_core_request"]


def make_engine_core_request(
    request_id: str,
    prompt_token_ids: Sequence[int] | None = None,
    sampling_params: Any = None,
    *,
    pooling_params: Any = None,
    eos_token_id: Any = UNSET,
    arrival_time: Any = UNSET,
    prompt_embeds: Any = UNSET,
    prompt_is_token_ids: Any = UNSET,
    mm_features: Any = UNSET,
    lora_request: Any = UNSET,
    cache_salt: Any = UNSET,
    data_parallel_rank: Any = UNSET,
    client_index: Any = UNSET,
    current_wave: Any = UNSET,
    priority: Any = UNSET,
    trace_headers: Any = UNSET,
    resumable: Any = UNSET,
    external_req_id: Any = UNSET,
    reasoning_ended: Any = UNSET,
    reasoning_parser_kwargs: Any = UNSET,
    abort_immediately: Any = UNSET,
    session_id: Any = UNSET,
    kv_hints: Any = UNSET,
) -> Any:
    """A native ``vllm.v1.engine.EngineCoreRequest``, for ``EngineCore.add_request`` or the wire.

    It goes over the wire as an array in the order of its fields, which differs between releases: encode and decode it
    in the same one.

    Args:
        request_id: Unique among the core's requests.
        prompt_token_ids: The prompt. None only together with ``prompt_embeds``.
        sampling_params: SamplingParams of a generating request (``max_tokens`` set); exactly one of this and
            ``pooling_params``.
        pooling_params: PoolingParams of a pooling request.
        eos_token_id: Generation stops at this id. Up to 0.16 a field of its own, from 0.17 of the sampling params,
            which are cloned, not changed.
        arrival_time: Seconds since the epoch; now, when not given.
        prompt_embeds: [tokens, hidden] tensor instead of, or mixed with, token ids.
        mm_features: list of MultiModalFeatureSpec.
        external_req_id: The user's own id. ``InputProcessor.assign_request_id`` fills it in and wants it unset.
        prompt_is_token_ids, lora_request, cache_salt, data_parallel_rank, client_index, current_wave, priority,
        trace_headers, resumable, reasoning_ended, reasoning_parser_kwargs, abort_immediately, session_id, kv_hints: as
            in EngineCoreRequest.

    Raises:
        UnsupportedField: an option that was set does not exist in this release.
        VllmCompatError: as ``make_request``.
    """
    check_params(request_id, sampling_params, pooling_params)
    return adapter("engine_core_request").build(
        {
            "request_id": request_id,
            "prompt_token_ids": None if prompt_token_ids is None else plain_token_ids(request_id, prompt_token_ids),
            "sampling_params": sampling_params,
            "pooling_params": pooling_params,
            "arrival_time": arrival_time,
            "prompt_embeds": prompt_embeds,
            "prompt_is_token_ids": prompt_is_token_ids,
            "mm_features": mm_features,
            "lora_request": lora_request,
            "cache_salt": cache_salt,
            "data_parallel_rank": data_parallel_rank,
            "client_index": client_index,
            "current_wave": current_wave,
            "priority": priority,
            "trace_headers": trace_headers,
            "resumable": resumable,
            "external_req_id": external_req_id,
            "reasoning_ended": reasoning_ended,
            "reasoning_parser_kwargs": reasoning_parser_kwargs,
            "abort_immediately": abort_immediately,
            "session_id": session_id,
            "kv_hints": kv_hints,
        },
        eos_token_id,
    )


def request_from_engine_core_request(
    core_request: Any,
    *,
    vllm_config: Any = None,
    kv_cache_config: Any = None,
    scheduler: Any = None,
    block_hasher: Any = UNSET,
) -> Any:
    """The scheduler's native ``Request`` of an EngineCoreRequest, with block hashes, as the engine core makes it.

    What the core does besides is left to the caller: it swaps cached multimodal features in, and asks the structured
    output manager for the grammar (``EngineCore.preprocess_add_request``).

    Args:
        core_request: An EngineCoreRequest.
        vllm_config, kv_cache_config, scheduler, block_hasher: Where the hasher comes from, as in ``make_request``.
    """
    if block_hasher is UNSET:
        if scheduler is not None:
            block_hasher = hasher_of_scheduler(scheduler)
        else:
            block_hasher = make_block_hasher(vllm_config, kv_cache_config)
    return adapter("engine_core_request").to_request(core_request, block_hasher)

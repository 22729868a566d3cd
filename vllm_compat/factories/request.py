"""Requests as the scheduler keeps them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_compat._token_ids import plain_token_ids
from vllm_compat._unset import UNSET
from vllm_compat.adapters.select import adapter
from vllm_compat.factories._checks import check_params
from vllm_compat.hashing import hasher_of_scheduler, make_block_hasher

__all__ = ["make_request"]


def make_request(
    request_id: str,
    prompt_token_ids: Sequence[int] | None = None,
    sampling_params: Any = None,
    *,
    pooling_params: Any = None,
    vllm_config: Any = None,
    kv_cache_config: Any = None,
    scheduler: Any = None,
    block_hasher: Any = UNSET,
    eos_token_id: Any = UNSET,
    arrival_time: Any = UNSET,
    prompt_embeds: Any = UNSET,
    prompt_is_token_ids: Any = UNSET,
    mm_features: Any = UNSET,
    lora_request: Any = UNSET,
    cache_salt: Any = UNSET,
    priority: Any = UNSET,
    trace_headers: Any = UNSET,
    client_index: Any = UNSET,
    resumable: Any = UNSET,
    session_id: Any = UNSET,
    reasoning_ended: Any = UNSET,
    reasoning_parser_kwargs: Any = UNSET,
    abort_immediately: Any = UNSET,
    kv_hints: Any = UNSET,
) -> Any:
    """A native ``vllm.v1.request.Request`` with a block hasher attached and NONE_HASH initialised.

    Args:
        request_id: Unique among the scheduler's requests.
        prompt_token_ids: The prompt. None only together with ``prompt_embeds``.
        sampling_params: SamplingParams of a generating request (``max_tokens`` set); exactly one of this and
            ``pooling_params``.
        pooling_params: PoolingParams of a pooling request.
        vllm_config, kv_cache_config: Where the hasher's block size and function come from (``make_block_hasher``).
        scheduler: Take both configs from this scheduler, so that its block size is matched for certain.
        block_hasher: Use this hasher; None attaches none (prefix caching must then be off).
        eos_token_id: Generation stops at this id. Up to 0.16 a field of Request, from 0.17 of the sampling params,
            which are cloned, not changed.
        prompt_embeds: [tokens, hidden] tensor instead of, or mixed with, token ids.
        prompt_is_token_ids: Per position, whether it is a token id (mixed prompts).
        mm_features: list of MultiModalFeatureSpec.
        lora_request, cache_salt, priority, trace_headers, client_index, arrival_time (seconds since the epoch),
        resumable, session_id, reasoning_ended, reasoning_parser_kwargs, abort_immediately, kv_hints: as in Request.

    Raises:
        UnsupportedField: an option that was set does not exist in this release.
        VllmNotInstalled, SignatureMismatch: see ``installed`` and ``doctor``.
        VllmCompatError: neither or both of sampling and pooling params; no max_tokens; a token id that is no
            non-negative integer.
    """
    check_params(request_id, sampling_params, pooling_params)
    if block_hasher is UNSET:
        if scheduler is not None:
            block_hasher = hasher_of_scheduler(scheduler)
        else:
            block_hasher = make_block_hasher(vllm_config, kv_cache_config)
    return adapter("request").build(
        {
            "request_id": request_id,
            "prompt_token_ids": None if prompt_token_ids is None else plain_token_ids(request_id, prompt_token_ids),
            "sampling_params": sampling_params,
            "pooling_params": pooling_params,
            "block_hasher": block_hasher,
            "arrival_time": arrival_time,
            "prompt_embeds": prompt_embeds,
            "prompt_is_token_ids": prompt_is_token_ids,
            "mm_features": mm_features,
            "lora_request": lora_request,
            "cache_salt": cache_salt,
            "priority": priority,
            "trace_headers": trace_headers,
            "client_index": client_index,
            "resumable": resumable,
            "session_id": session_id,
            "reasoning_ended": reasoning_ended,
            "reasoning_parser_kwargs": reasoning_parser_kwargs,
            "abort_immediately": abort_immediately,
            "kv_hints": kv_hints,
        },
        eos_token_id,
    )

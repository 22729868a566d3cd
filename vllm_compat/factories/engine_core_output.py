"""What the engine core reports to the front end, made by hand: to test a front end, a router, an output processor."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from vllm_compat._token_ids import plain_token_ids
from vllm_compat._unset import UNSET
from vllm_compat.adapters.select import adapter

__all__ = ["make_engine_core_output", "make_engine_core_outputs"]


def make_engine_core_output(
    request_id: str,
    new_token_ids: Sequence[int] = (),
    *,
    finish_reason: Any = UNSET,
    stop_reason: Any = UNSET,
    num_cached_tokens: Any = UNSET,
    num_external_computed_tokens: Any = UNSET,
    prefill_stats: Any = UNSET,
    new_logprobs: Any = UNSET,
    new_prompt_logprobs_tensors: Any = UNSET,
    **options: Any,
) -> Any:
    """A native ``EngineCoreOutput``: what a step brought for one request.

    Args:
        request_id: The request's id.
        new_token_ids: Tokens of the step.
        finish_reason: "stop", "length", "abort", "error" (0.13.0), "repetition" (0.17.0), a FinishReason, or None.
        stop_reason: The stop token id or string that ended it.
        num_cached_tokens: Prompt tokens from the prefix cache. Up to 0.19.1 a field, from 0.20.0 inside
            ``prefill_stats``.
        num_external_computed_tokens: Those of them that a KV connector brought (0.16.0); likewise.
        prefill_stats: A PrefillStats, instead of the two numbers (0.20.0).
        new_logprobs: From ``make_logprobs_lists``.
        new_prompt_logprobs_tensors: From ``make_logprobs_tensors``.
        options: Further fields by name: ``pooling_output``, ``events``, ``kv_transfer_params``, …

    Raises:
        UnsupportedField: an option that was set does not exist in this release.
        VllmCompatError: no such finish reason here; numbers of cached tokens that contradict each other.
    """
    return adapter("engine_core_output").build(
        {
            "request_id": request_id,
            "new_token_ids": plain_token_ids(request_id, new_token_ids),
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
            "num_cached_tokens": num_cached_tokens,
            "num_external_computed_tokens": num_external_computed_tokens,
            "prefill_stats": prefill_stats,
            "new_logprobs": new_logprobs,
            "new_prompt_logprobs_tensors": new_prompt_logprobs_tensors,
            **options,
        }
    )


def make_engine_core_outputs(
    outputs: Sequence[Any] = (),
    *,
    engine_index: Any = UNSET,
    scheduler_stats: Any = UNSET,
    timestamp: Any = UNSET,
    utility_output: Any = UNSET,
    finished_requests: Collection[str] | Any = UNSET,
    wave_complete: Any = UNSET,
    start_wave: Any = UNSET,
    weight_version: Any = UNSET,
) -> Any:
    """A native ``EngineCoreOutputs``: one message of the engine core to a front end.

    Args:
        outputs: From ``make_engine_core_output``.
        engine_index: Rank of the engine among the data-parallel ones.
        timestamp: Seconds of the monotonic clock; now, when not given.
        finished_requests: Ids of requests that ended.
        scheduler_stats, utility_output, wave_complete, start_wave, weight_version: as in EngineCoreOutputs.

    Raises:
        UnsupportedField: an option that was set does not exist in this release.
    """
    if finished_requests is not UNSET and finished_requests is not None:
        finished_requests = set(finished_requests)
    return adapter("engine_core_output").build_outputs(
        {
            "outputs": list(outputs),
            "engine_index": engine_index,
            "scheduler_stats": scheduler_stats,
            "timestamp": timestamp,
            "utility_output": utility_output,
            "finished_requests": finished_requests,
            "wave_complete": wave_complete,
            "start_wave": start_wave,
            "weight_version": weight_version,
        }
    )

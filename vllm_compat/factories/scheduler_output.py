"""What a step does for each request, made by hand: to drive workers and runners, to test connectors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from vllm_compat._token_ids import plain_token_ids
from vllm_compat._unset import UNSET
from vllm_compat.adapters.select import adapter
from vllm_compat.errors import VllmCompatError
from vllm_compat.factories._checks import check_params

__all__ = ["make_cached_request_data", "make_grammar_output", "make_new_request_data", "make_scheduler_output"]

#: Per KV cache group, the ids of a request's blocks.
BlockIds = Sequence[Sequence[int]]


def make_new_request_data(
    request_id: str,
    prompt_token_ids: Sequence[int] | None = None,
    sampling_params: Any = None,
    *,
    block_ids: BlockIds,
    num_computed_tokens: int = 0,
    pooling_params: Any = None,
    mm_features: Sequence[Any] = (),
    lora_request: Any = None,
    prompt_embeds: Any = UNSET,
    prompt_is_token_ids: Any = UNSET,
    prefill_token_ids: Any = UNSET,
    replay_start: Any = UNSET,
) -> Any:
    """A native ``NewRequestData``: a request that a step schedules for the first time.

    Args:
        request_id: The request's id.
        prompt_token_ids: The prompt. None only together with ``prompt_embeds``.
        sampling_params, pooling_params: Exactly one of both.
        block_ids: Per KV cache group, the blocks of the request: all that it has, cached ones included.
        num_computed_tokens: Tokens whose KV entries exist already (a cached prefix).
        mm_features: MultiModalFeatureSpecs. 0.10.2 gets their data, identifiers and positions as three lists.
        lora_request: A LoRARequest.
        prefill_token_ids: For the V2 model runner, which requires it: the prompt, and what was generated before a
            preemption.
        prompt_embeds, prompt_is_token_ids, replay_start: as in NewRequestData.

    Raises:
        UnsupportedField: an option that was set does not exist in this release.
        VllmCompatError: block ids that are not one list per group; else as ``make_request``.
    """
    check_params(request_id, sampling_params, pooling_params)
    return adapter("scheduler_output").build_new(
        {
            "req_id": request_id,
            "prompt_token_ids": None if prompt_token_ids is None else plain_token_ids(request_id, prompt_token_ids),
            "mm_features": list(mm_features),
            "sampling_params": sampling_params,
            "pooling_params": pooling_params,
            "block_ids": _block_ids(request_id, block_ids),
            "num_computed_tokens": num_computed_tokens,
            "lora_request": lora_request,
            "prompt_embeds": prompt_embeds,
            "prompt_is_token_ids": prompt_is_token_ids,
            "prefill_token_ids": prefill_token_ids,
            "replay_start": replay_start,
        }
    )


def make_cached_request_data(
    num_computed_tokens: Mapping[str, int],
    *,
    num_output_tokens: Mapping[str, int],
    new_block_ids: Mapping[str, BlockIds | None] | None = None,
    resumed_req_ids: Collection[str] = (),
    new_token_ids: Mapping[str, Sequence[int]] | None = None,
    all_token_ids: Any = UNSET,
) -> Any:
    """A native ``CachedRequestData``: the requests of a step that workers know already, in the order of the first map.

    Args:
        num_computed_tokens: Request id -> tokens whose KV entries exist before the step.
        num_output_tokens: Request id -> tokens generated so far. The runner cuts its own state to it; up to 0.11.0 it
            counts them itself, and this is not passed on.
        new_block_ids: Request id -> blocks that the step adds, per KV cache group; all blocks of a resumed request.
            None, or left out, where the step needs none.
        resumed_req_ids: Those that were preempted and start again.
        new_token_ids: Request id -> tokens of the step, for pipeline parallelism; then for every request.
        all_token_ids: Request id -> its tokens, for those that the last step did not schedule (resumed ones among
            them); the V1 runner and connectors read it (0.11.1).

    Raises:
        UnsupportedField: ``all_token_ids`` was set and does not exist in this release.
        VllmCompatError: maps that name other requests; a resumed request without blocks.
    """
    request_ids = list(num_computed_tokens)
    blocks = new_block_ids or {}
    asked = "cached request data"
    _same_requests(asked, "num_output_tokens", num_output_tokens, request_ids)
    if new_token_ids:
        _same_requests(asked, "new_token_ids", new_token_ids, request_ids)
    _known_requests(asked, "new_block_ids", blocks, request_ids)
    _known_requests(asked, "resumed_req_ids", resumed_req_ids, request_ids)
    without = [request_id for request_id in resumed_req_ids if blocks.get(request_id) is None]
    if without:
        raise VllmCompatError(
            asked,
            needed="new_block_ids of every resumed request: all blocks that it has",
            found=f"none for {', '.join(map(repr, without))}",
            advice="give its blocks, or take it out of resumed_req_ids",
        )
    if all_token_ids is not UNSET:
        _known_requests(asked, "all_token_ids", all_token_ids, request_ids)
        all_token_ids = {request_id: list(ids) for request_id, ids in all_token_ids.items()}
    return adapter("scheduler_output").build_cached(
        {
            "req_ids": request_ids,
            "resumed_req_ids": set(resumed_req_ids),
            # Without pipeline parallelism vLLM sends none at all, rather than an empty list per request.
            "new_token_ids": [list(new_token_ids[request_id]) for request_id in request_ids] if new_token_ids else [],
            "all_token_ids": all_token_ids,
            "new_block_ids": [
                None if blocks.get(request_id) is None else _block_ids(request_id, blocks[request_id])
                for request_id in request_ids
            ],
            "num_computed_tokens": [num_computed_tokens[request_id] for request_id in request_ids],
            "num_output_tokens": [num_output_tokens[request_id] for request_id in request_ids],
        }
    )


def make_scheduler_output(
    num_scheduled_tokens: Mapping[str, int],
    *,
    scheduled_new_reqs: Sequence[Any] = (),
    scheduled_cached_reqs: Any = None,
    scheduled_spec_decode_tokens: Mapping[str, Sequence[int]] | None = None,
    scheduled_encoder_inputs: Mapping[str, Sequence[int]] | None = None,
    finished_req_ids: Collection[str] = (),
    free_encoder_mm_hashes: Sequence[str] = (),
    num_common_prefix_blocks: Any = UNSET,
    preempted_req_ids: Any = UNSET,
    **options: Any,
) -> Any:
    """A native ``SchedulerOutput``.

    Args:
        num_scheduled_tokens: Request id -> tokens of the step, drafts included, at least 1. Names exactly the requests
            of the two next; the runner's rows follow its order.
        scheduled_new_reqs: From ``make_new_request_data``.
        scheduled_cached_reqs: From ``make_cached_request_data``; None for none.
        scheduled_spec_decode_tokens: Request id -> draft tokens that the step verifies, fewer than it schedules.
        scheduled_encoder_inputs: Request id -> indices of its multimodal inputs that the encoder runs on.
        finished_req_ids: Requests that ended since the last step, which workers forget.
        free_encoder_mm_hashes: Encoder outputs that workers forget.
        num_common_prefix_blocks: Blocks that all running requests share, per KV cache group. By default 0 for every
            group that the step's block ids show, one group when they show none. Nothing reads it from 0.32.0 on.
        preempted_req_ids: For the V2 model runner (0.12.0).
        options: Further fields of SchedulerOutput by name: ``kv_connector_metadata``, ``new_block_ids_to_zero``, …

    Raises:
        UnsupportedField: an option that was set does not exist in this release.
        VllmCompatError: the requests of the parts are not the same, or one is there twice.
    """
    asked = "a scheduler output"
    building = adapter("scheduler_output")
    if scheduled_cached_reqs is None:
        scheduled_cached_reqs = make_cached_request_data({}, num_output_tokens={})
    request_ids = [new.req_id for new in scheduled_new_reqs] + list(scheduled_cached_reqs.req_ids)
    if len({*request_ids}) != len(request_ids):
        twice = [request_id for request_id, count in Counter(request_ids).items() if count > 1]
        raise VllmCompatError(
            asked,
            needed="every request once, as a new or as a cached one",
            found=f"{', '.join(map(repr, twice))} more than once",
            advice="a request is new in its first step only",
        )
    _same_requests(asked, "num_scheduled_tokens", num_scheduled_tokens, request_ids)
    drafts = scheduled_spec_decode_tokens or {}
    _known_requests(asked, "scheduled_spec_decode_tokens", drafts, request_ids)
    _known_requests(asked, "scheduled_encoder_inputs", scheduled_encoder_inputs or {}, request_ids)
    for request_id, count in num_scheduled_tokens.items():
        if count <= len(drafts.get(request_id, ())):
            raise VllmCompatError(
                asked,
                needed="at least one scheduled token per request, and more than its draft tokens",
                found=f"{count} for {request_id!r}, with {len(drafts.get(request_id, ()))} drafts",
                advice="count the drafts among the scheduled tokens; leave out requests that wait",
            )
    return building.build(
        {
            "scheduled_new_reqs": list(scheduled_new_reqs),
            "scheduled_cached_reqs": scheduled_cached_reqs,
            "num_scheduled_tokens": dict(num_scheduled_tokens),
            "total_num_scheduled_tokens": sum(num_scheduled_tokens.values()),
            "scheduled_spec_decode_tokens": {request_id: list(ids) for request_id, ids in drafts.items()},
            "scheduled_encoder_inputs": {
                request_id: list(indices) for request_id, indices in (scheduled_encoder_inputs or {}).items()
            },
            "finished_req_ids": set(finished_req_ids),
            "free_encoder_mm_hashes": list(free_encoder_mm_hashes),
            "num_common_prefix_blocks": num_common_prefix_blocks,
            "preempted_req_ids": preempted_req_ids,
            **options,
        }
    )


def make_grammar_output(
    structured_output_request_ids: Sequence[str], grammar_bitmask: Any, *, num_acceptable_drafts: Any = UNSET
) -> Any:
    """A native ``GrammarOutput`` for ``sample_tokens`` (0.11.1).

    Args:
        structured_output_request_ids: Requests with a grammar, in the order of the bitmask's rows.
        grammar_bitmask: int32 array [rows, ceil(vocabulary / 32)], a row per request and draft token; a set bit allows
            a token.
        num_acceptable_drafts: Per request, how many of its first drafts the bitmask constrained.

    Raises:
        UnsupportedField: up to 0.11.0 the bitmask is a field of SchedulerOutput.
    """
    return adapter("scheduler_output").build_grammar(
        {
            "structured_output_request_ids": list(structured_output_request_ids),
            "grammar_bitmask": grammar_bitmask,
            "num_acceptable_drafts": num_acceptable_drafts,
        }
    )


def _block_ids(request_id: str, block_ids: Any) -> tuple[list[int], ...]:
    groups = list(block_ids)
    if not groups or not all(isinstance(group, Sequence) for group in groups):
        raise VllmCompatError(
            f"block ids of request {request_id!r}",
            needed="a list of block ids per KV cache group",
            found=repr(block_ids),
            advice="one group is the usual case: ([1, 2],)",
        )
    return tuple(list(group) for group in groups)


def _same_requests(asked: str, name: str, given: Collection[str], request_ids: Collection[str]) -> None:
    if not {*given}.issuperset(request_ids):
        missing = [repr(request_id) for request_id in request_ids if request_id not in given]
        raise VllmCompatError(
            asked,
            needed=f"{name} of every request",
            found=f"none for {', '.join(missing)}",
            advice="give one entry per request",
        )
    _known_requests(asked, name, given, request_ids)


def _known_requests(asked: str, name: str, given: Iterable[str], request_ids: Collection[str]) -> None:
    known = {*request_ids}
    if known.issuperset(given):
        return
    unknown = [repr(request_id) for request_id in given if request_id not in known]
    if unknown:
        raise VllmCompatError(
            asked,
            needed=f"{name} of the step's requests only",
            found=f"{', '.join(unknown)}, which the step does not have",
            advice="give the same request ids everywhere",
        )

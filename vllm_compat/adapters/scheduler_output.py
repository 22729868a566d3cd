"""Readers of SchedulerOutput."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from vllm_compat.adapters.base import Adapter, Need
from vllm_compat.values import ScheduledBatch, ScheduledRequest

_OUTPUT = "vllm.v1.core.sched.output"


_BATCH = (
    "scheduled_new_reqs",
    "scheduled_cached_reqs",
    "num_scheduled_tokens",
    "total_num_scheduled_tokens",
    "scheduled_spec_decode_tokens",
    "finished_req_ids",
)
_NEW = Need(f"{_OUTPUT}:NewRequestData", reads=("req_id", "block_ids", "num_computed_tokens"), read_only=True)
_CACHED = ("req_ids", "new_block_ids", "num_computed_tokens")


class SchedulerOutput_0_12(Adapter):
    """The scheduler names the requests that it preempted (``preempted_req_ids``, 0.12.0)."""

    surface = "scheduler_output"
    since = (0, 12, 0)
    needs: ClassVar[tuple[Need, ...]] = (
        Need(f"{_OUTPUT}:SchedulerOutput", reads=(*_BATCH, "preempted_req_ids"), read_only=True),
        _NEW,
        Need(f"{_OUTPUT}:CachedRequestData", reads=(*_CACHED, "resumed_req_ids"), read_only=True),
    )
    left: ClassVar[Mapping[str, tuple[str, ...]]] = {
        # What the worker and its connectors are told beside the batch.
        "SchedulerOutput": (
            "num_common_prefix_blocks",
            "scheduled_encoder_inputs",
            "scheduled_encoder_input_stats",
            "encoder_input_updates",
            "free_encoder_mm_hashes",
            "structured_output_request_ids",
            "grammar_bitmask",
            "has_structured_output_requests",
            "pending_structured_output_tokens",
            "num_invalid_spec_tokens",
            "num_spec_tokens_to_schedule",
            "skip_drafts",
            "kv_connector_metadata",
            "kv_connector_block_state",
            "has_sync_kv_loads",
            "ec_connector_metadata",
            "ec_manager_metadata",
            "aux_output_connector_metadata",
            "new_block_ids_to_zero",
            "kv_cache_block_copies",
            "block_table_updates",
            "partial_tail_offloads",
        ),
        # What the request itself says, to whoever made it.
        "NewRequestData": (
            "prompt_token_ids",
            "prompt_embeds",
            "prompt_is_token_ids",
            "prefill_token_ids",
            "mm_features",
            "mm_kwargs",
            "mm_hashes",
            "mm_positions",
            "sampling_params",
            "pooling_params",
            "lora_request",
            "replay_start",
        ),
        # Tokens that the worker may not know: of pipeline stages and of the V2 runner.
        "CachedRequestData": ("new_token_ids", "all_token_ids", "num_output_tokens"),
    }

    def read(self, output: Any) -> ScheduledBatch:
        counts, drafts = output.num_scheduled_tokens, output.scheduled_spec_decode_tokens
        requests = [
            ScheduledRequest(
                request_id=new.req_id,
                num_computed_tokens=new.num_computed_tokens,
                num_scheduled_tokens=counts[new.req_id],
                is_new=True,
                resumed=False,
                draft_token_ids=tuple(drafts.get(new.req_id, ())),
                new_block_ids=tuple(tuple(group) for group in new.block_ids),
            )
            for new in output.scheduled_new_reqs
        ]
        cached = output.scheduled_cached_reqs
        resumed = self.resumed(cached)
        for request_id, computed, blocks in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            requests.append(
                ScheduledRequest(
                    request_id=request_id,
                    num_computed_tokens=computed,
                    num_scheduled_tokens=counts[request_id],
                    is_new=False,
                    resumed=request_id in resumed,
                    draft_token_ids=tuple(drafts.get(request_id, ())),
                    new_block_ids=tuple(tuple(group) for group in blocks or ()),
                )
            )
        return ScheduledBatch(
            requests=tuple(requests),
            total_num_scheduled_tokens=output.total_num_scheduled_tokens,
            finished_request_ids=frozenset(output.finished_req_ids),
            preempted_request_ids=self.preempted(output),
        )

    def resumed(self, cached: Any) -> Collection[str]:
        """Ids of the requests that start again after a preemption."""
        return cached.resumed_req_ids  # type: ignore[no-any-return]

    def preempted(self, output: Any, /) -> frozenset[str]:
        return frozenset(output.preempted_req_ids or ())


class SchedulerOutput_0_11_1(SchedulerOutput_0_12):
    """Requests that start again after a preemption are a set of ids (0.11.1). Nothing says which were preempted."""

    since = (0, 11, 1)
    needs: ClassVar[tuple[Need, ...]] = (
        Need(f"{_OUTPUT}:SchedulerOutput", reads=_BATCH, read_only=True),
        _NEW,
        Need(f"{_OUTPUT}:CachedRequestData", reads=(*_CACHED, "resumed_req_ids"), read_only=True),
    )

    def preempted(self, _: Any, /) -> frozenset[str]:
        return frozenset()


class SchedulerOutput_0_10(SchedulerOutput_0_11_1):
    """Requests that start again are a list of booleans beside the ids (``resumed_from_preemption``, until 0.11.0)."""

    since = (0, 10, 2)
    needs: ClassVar[tuple[Need, ...]] = (
        Need(f"{_OUTPUT}:SchedulerOutput", reads=_BATCH, read_only=True),
        _NEW,
        Need(f"{_OUTPUT}:CachedRequestData", reads=(*_CACHED, "resumed_from_preemption"), read_only=True),
    )

    def resumed(self, cached: Any) -> Collection[str]:
        pairs = zip(cached.req_ids, cached.resumed_from_preemption, strict=True)
        return {request_id for request_id, resumed in pairs if resumed}


ADAPTERS = (SchedulerOutput_0_12, SchedulerOutput_0_11_1, SchedulerOutput_0_10)

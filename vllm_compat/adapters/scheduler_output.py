"""Readers of SchedulerOutput."""

from __future__ import annotations

from typing import Any

from vllm_compat.adapters.base import Adapter, Need
from vllm_compat.values import ScheduledBatch, ScheduledRequest

_OUTPUT = "vllm.v1.core.sched.output"


class SchedulerOutput_0_11_1(Adapter):
    """Cached requests are one object of parallel lists with ``resumed_req_ids`` (0.11.1).

    ``preempted_req_ids`` came in 0.12.0; before, nothing says which requests were preempted.
    """

    surface = "scheduler_output"
    since = (0, 11, 1)
    needs = (
        Need(
            f"{_OUTPUT}:SchedulerOutput",
            passes=(
                "scheduled_new_reqs",
                "scheduled_cached_reqs",
                "num_scheduled_tokens",
                "total_num_scheduled_tokens",
                "scheduled_spec_decode_tokens",
                "finished_req_ids",
            ),
            read_only=True,
        ),
        Need(f"{_OUTPUT}:NewRequestData", passes=("req_id", "block_ids", "num_computed_tokens"), read_only=True),
        Need(
            f"{_OUTPUT}:CachedRequestData",
            passes=("req_ids", "resumed_req_ids", "new_block_ids", "num_computed_tokens"),
            read_only=True,
        ),
    )

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
        for request_id, computed, blocks in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            requests.append(
                ScheduledRequest(
                    request_id=request_id,
                    num_computed_tokens=computed,
                    num_scheduled_tokens=counts[request_id],
                    is_new=False,
                    resumed=request_id in cached.resumed_req_ids,
                    draft_token_ids=tuple(drafts.get(request_id, ())),
                    new_block_ids=tuple(tuple(group) for group in blocks or ()),
                )
            )
        return ScheduledBatch(
            requests=tuple(requests),
            total_num_scheduled_tokens=output.total_num_scheduled_tokens,
            finished_request_ids=frozenset(output.finished_req_ids),
            preempted_request_ids=frozenset(getattr(output, "preempted_req_ids", None) or ()),
        )


ADAPTERS = (SchedulerOutput_0_11_1,)

"""SchedulerOutput and what it is made of: what a step does for each request."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from vllm_compat._unset import UNSET
from vllm_compat.adapters.base import Adapter, Need, refuse, refuse_symbol
from vllm_compat.values import ScheduledBatch, ScheduledRequest

_MODULE = "vllm.v1.core.sched.output"
_BATCH = (
    "scheduled_new_reqs",
    "scheduled_cached_reqs",
    "num_scheduled_tokens",
    "total_num_scheduled_tokens",
    "scheduled_spec_decode_tokens",
    "scheduled_encoder_inputs",
    "finished_req_ids",
    "free_encoder_mm_hashes",
)
_BATCH_READS = (
    "scheduled_new_reqs",
    "scheduled_cached_reqs",
    "num_scheduled_tokens",
    "total_num_scheduled_tokens",
    "scheduled_spec_decode_tokens",
    "finished_req_ids",
)
_OPTIONS = {
    "structured_output_request_ids": "0.10.2-0.11.0",
    "grammar_bitmask": "0.10.2-0.11.0",
    "pending_structured_output_tokens": "0.11.1",
    "has_structured_output_requests": "0.14.0",
    "preempted_req_ids": "0.12.0",
    "num_invalid_spec_tokens": "0.14.0",
    "num_spec_tokens_to_schedule": "0.24.0",
    "skip_drafts": "0.33.0",
    "scheduled_encoder_input_stats": "0.26.0",
    "encoder_input_updates": "0.33.0",
    "new_block_ids_to_zero": "0.17.1",
    "kv_cache_block_copies": "0.26.0",
    "block_table_updates": "0.30.0-0.31.0",
    "partial_tail_offloads": "0.27.0-0.28.0",
    "kv_connector_metadata": "",
    "kv_connector_block_state": "0.29.0",
    "has_sync_kv_loads": "0.29.0",
    "ec_connector_metadata": "0.11.1",
    "ec_manager_metadata": "0.27.0",
    "aux_output_connector_metadata": "0.31.0",
}
_NEW = (
    "req_id",
    "prompt_token_ids",
    "sampling_params",
    "pooling_params",
    "block_ids",
    "num_computed_tokens",
    "lora_request",
)
_NEW_OPTIONS = {
    "prompt_embeds": "0.11.0",
    "prompt_is_token_ids": "0.21.0",
    "prefill_token_ids": "0.12.0",
    "replay_start": "0.31.0",
}
_NEW_READS = ("req_id", "block_ids", "num_computed_tokens")
_CACHED = ("req_ids", "new_token_ids", "new_block_ids", "num_computed_tokens")
_CACHED_READS = ("req_ids", "new_block_ids", "num_computed_tokens")
_CACHED_SET = Need(
    f"{_MODULE}:CachedRequestData",
    passes=(*_CACHED, "resumed_req_ids", "all_token_ids", "num_output_tokens"),
    reads=(*_CACHED_READS, "resumed_req_ids"),
)
_CACHED_LIST = Need(
    f"{_MODULE}:CachedRequestData",
    passes=(*_CACHED, "resumed_from_preemption"),
    reads=(*_CACHED_READS, "resumed_from_preemption"),
)
_GRAMMAR_FIELDS = ("structured_output_request_ids", "grammar_bitmask")
_GRAMMAR = Need(
    f"{_MODULE}:GrammarOutput",
    passes=_GRAMMAR_FIELDS,
    options={"num_acceptable_drafts": "0.32.0"},
    life="0.11.1",
)


class SchedulerOutput_0_32(Adapter):
    """Cascade attention is gone, and ``num_common_prefix_blocks`` with it: kept for others, empty (0.32.0)."""

    surface = "scheduler_output"
    since = (0, 32, 0)
    output = Need(
        f"{_MODULE}:SchedulerOutput",
        passes=_BATCH,
        options={**_OPTIONS, "num_common_prefix_blocks": ""},
        reads=(*_BATCH_READS, "preempted_req_ids"),
    )
    new = Need(f"{_MODULE}:NewRequestData", passes=(*_NEW, "mm_features"), options=_NEW_OPTIONS, reads=_NEW_READS)
    cached = _CACHED_SET
    needs: ClassVar[tuple[Need, ...]] = (output, new, cached, _GRAMMAR)

    def build_new(self, options: Mapping[str, Any]) -> Any:
        """A NewRequestData. ``mm_features`` is a list, of no features too."""
        return self.construct(self.new, options)

    def build_cached(self, columns: Mapping[str, Any]) -> Any:
        """A CachedRequestData from its columns, by the names of the newest release."""
        all_token_ids = columns["all_token_ids"]
        given = {**columns, "all_token_ids": {} if all_token_ids is UNSET else all_token_ids}
        return self.construct(self.cached, given)

    def build_grammar(self, options: Mapping[str, Any]) -> Any:
        """A GrammarOutput."""
        return self.construct(_GRAMMAR, options)

    def build(self, options: Mapping[str, Any]) -> Any:
        """A SchedulerOutput."""
        return self.construct(self.output, options)

    def read(self, output: Any) -> ScheduledBatch:
        counts, drafts = output.num_scheduled_tokens, output.scheduled_spec_decode_tokens
        requests = [
            ScheduledRequest(
                request_id=new.req_id,
                num_computed_tokens=new.num_computed_tokens,
                num_scheduled_tokens=counts[new.req_id],
                is_new=not self.starts_again(new),
                resumed=self.starts_again(new),
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

    def starts_again(self, new: Any) -> bool:
        """Whether one of the new requests is none: for the V2 runner (0.12.0) the scheduler puts resumed ones there.

        Only for that runner ``prefill_token_ids`` is set: what was generated already is longer than the prompt.
        """
        if getattr(new, "prefill_token_ids", None) is None:
            return False
        embeds = getattr(new, "prompt_embeds", None)
        prompt = new.prompt_token_ids if new.prompt_token_ids is not None else embeds
        return prompt is not None and len(new.prefill_token_ids) > len(prompt)

    def preempted(self, output: Any, /) -> frozenset[str]:
        return frozenset(output.preempted_req_ids or ())


class SchedulerOutput_0_12(SchedulerOutput_0_32):
    """The scheduler names the requests that it preempted (``preempted_req_ids``, 0.12.0).

    ``num_common_prefix_blocks``, one number per KV cache group, is required up to 0.31.0.
    """

    since = (0, 12, 0)
    output = Need(
        f"{_MODULE}:SchedulerOutput",
        passes=(*_BATCH, "num_common_prefix_blocks"),
        options=_OPTIONS,
        reads=(*_BATCH_READS, "preempted_req_ids"),
    )
    needs: ClassVar[tuple[Need, ...]] = (output, SchedulerOutput_0_32.new, _CACHED_SET, _GRAMMAR)

    def build(self, options: Mapping[str, Any]) -> Any:
        return super().build(self.with_prefix_blocks(options))

    def with_prefix_blocks(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """With ``num_common_prefix_blocks``: no common prefix in any group, unless the caller knows better."""
        if options["num_common_prefix_blocks"] is not UNSET:
            return dict(options)
        blocks = [new.block_ids for new in options["scheduled_new_reqs"]]
        blocks += [given for given in options["scheduled_cached_reqs"].new_block_ids if given is not None]
        groups = len(blocks[0]) if blocks else 1 if options["num_scheduled_tokens"] else 0
        return {**options, "num_common_prefix_blocks": [0] * groups}


class SchedulerOutput_0_11_1(SchedulerOutput_0_12):
    """Requests that start again after a preemption are a set of ids (0.11.1). Nothing says which were preempted.

    The grammar's bitmask is a GrammarOutput of its own, handed over after the forward pass has begun (0.11.1).
    """

    since = (0, 11, 1)
    output = Need(
        f"{_MODULE}:SchedulerOutput",
        passes=(*_BATCH, "num_common_prefix_blocks"),
        options=_OPTIONS,
        reads=_BATCH_READS,
    )
    needs: ClassVar[tuple[Need, ...]] = (output, SchedulerOutput_0_32.new, _CACHED_SET, _GRAMMAR)

    def preempted(self, _: Any, /) -> frozenset[str]:
        return frozenset()


class SchedulerOutput_0_11(SchedulerOutput_0_11_1):
    """Requests that start again are a list of booleans beside the ids (``resumed_from_preemption``, until 0.11.0).

    Ids of requests with a grammar, and their bitmask, are required fields. The runner counts output tokens itself.
    """

    since = (0, 11, 0)
    output = Need(
        f"{_MODULE}:SchedulerOutput",
        passes=(*_BATCH, "num_common_prefix_blocks", *_GRAMMAR_FIELDS),
        options={name: life for name, life in _OPTIONS.items() if name not in _GRAMMAR_FIELDS},
        reads=_BATCH_READS,
    )
    cached = _CACHED_LIST
    needs: ClassVar[tuple[Need, ...]] = (output, SchedulerOutput_0_32.new, _CACHED_LIST)

    def build_cached(self, columns: Mapping[str, Any]) -> Any:
        if columns["all_token_ids"] is not UNSET:
            refuse(Need(self.cached.symbol, options={"all_token_ids": "0.11.1"}), "all_token_ids")
        resumed = [request_id in columns["resumed_req_ids"] for request_id in columns["req_ids"]]
        given = {name: columns[name] for name in _CACHED}
        return self.construct(self.cached, {**given, "resumed_from_preemption": resumed})

    def build_grammar(self, _: Mapping[str, Any], /) -> Any:
        refuse_symbol(_GRAMMAR, "pass structured_output_request_ids and grammar_bitmask to make_scheduler_output")

    def build(self, options: Mapping[str, Any]) -> Any:
        nothing: dict[str, Any] = {"structured_output_request_ids": {}, "grammar_bitmask": None}
        given = {name: value for name, value in options.items() if value is not UNSET or name not in nothing}
        return super().build({**nothing, **given})

    def resumed(self, cached: Any) -> Collection[str]:
        pairs = zip(cached.req_ids, cached.resumed_from_preemption, strict=True)
        return {request_id for request_id, resumed in pairs if resumed}


class SchedulerOutput_0_10(SchedulerOutput_0_11):
    """A new request's multimodal features are three lists, not one (until 0.10.2)."""

    since = (0, 10, 2)
    new = Need(
        f"{_MODULE}:NewRequestData",
        passes=(*_NEW, "mm_kwargs", "mm_hashes", "mm_positions"),
        options=_NEW_OPTIONS,
        reads=_NEW_READS,
    )
    needs: ClassVar[tuple[Need, ...]] = (SchedulerOutput_0_11.output, new, _CACHED_LIST)

    def build_new(self, options: Mapping[str, Any]) -> Any:
        features = options["mm_features"]
        given = {name: value for name, value in options.items() if name != "mm_features"}
        return super().build_new(
            {
                **given,
                "mm_kwargs": [feature.data for feature in features],
                "mm_hashes": [feature.identifier for feature in features],
                "mm_positions": [feature.mm_position for feature in features],
            }
        )


ADAPTERS = (
    SchedulerOutput_0_32,
    SchedulerOutput_0_12,
    SchedulerOutput_0_11_1,
    SchedulerOutput_0_11,
    SchedulerOutput_0_10,
)

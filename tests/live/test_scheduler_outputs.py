"""Scheduler outputs made by hand: equal to those of vLLM's scheduler, and run by vLLM's workers."""

from __future__ import annotations

from typing import Any

import pytest
from here import BLOCK_SIZE, RELEASE
from same import differences, fields

import vllm_compat as vc
from vllm_compat.adapters.select import adapter

PARAMS = {"temperature": 0.0, "max_tokens": 4}


def _rebuilt_new(new: Any) -> Any:
    """The same NewRequestData by our factory."""
    held = fields(new)
    later = ("prompt_embeds", "prompt_is_token_ids", "prefill_token_ids", "replay_start")
    return vc.make_new_request_data(
        new.req_id,
        new.prompt_token_ids,
        new.sampling_params,
        block_ids=new.block_ids,
        num_computed_tokens=new.num_computed_tokens,
        lora_request=new.lora_request,
        **{name: held[name] for name in later if name in held},
    )


def _rebuilt(output: Any) -> Any:
    """The same SchedulerOutput by our factories."""
    cached = output.scheduled_cached_reqs
    ids = cached.req_ids
    resumed = {r.request_id for r in vc.read_scheduler_output(output).requests if r.resumed}
    columns: dict[str, Any] = {"num_output_tokens": dict.fromkeys(ids, 0)}
    if RELEASE >= (0, 11, 1):
        columns = {
            "num_output_tokens": dict(zip(ids, cached.num_output_tokens, strict=True)),
            "all_token_ids": cached.all_token_ids,
        }
    held = fields(output)
    ours = ("scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens", "total_num_scheduled_tokens")
    return vc.make_scheduler_output(
        output.num_scheduled_tokens,
        scheduled_new_reqs=[_rebuilt_new(new) for new in output.scheduled_new_reqs],
        scheduled_cached_reqs=vc.make_cached_request_data(
            dict(zip(ids, cached.num_computed_tokens, strict=True)),
            new_block_ids=dict(zip(ids, cached.new_block_ids, strict=True)),
            resumed_req_ids=resumed,
            new_token_ids=dict(zip(ids, cached.new_token_ids, strict=True)) if cached.new_token_ids else None,
            **columns,
        ),
        **{name: value for name, value in held.items() if name not in ours},
    )


def test_equal_to_the_schedulers_own(tiny_llama: str) -> None:
    """Step by step: new, chunked, running, preempted and resumed requests, and the ends of them.

    Eight blocks for three requests that come to need more, so that somebody is preempted and starts again.
    """
    config = vc.make_vllm_config(
        model=tiny_llama,
        dtype="float32",
        enforce_eager=True,
        max_model_len=BLOCK_SIZE * 4,
        max_num_batched_tokens=BLOCK_SIZE * 2,
        block_size=BLOCK_SIZE,
        max_num_seqs=4,
        enable_prefix_caching=True,
    )
    scheduler = vc.make_scheduler(config, vc.make_kv_cache_config(config, num_blocks=7))
    requests = {}
    for name, length in (("a", BLOCK_SIZE + 9), ("b", BLOCK_SIZE * 2 - 1), ("c", BLOCK_SIZE - 1)):
        params = vc.make_sampling_params(temperature=0.0, max_tokens=BLOCK_SIZE + 3, ignore_eos=True)
        requests[name] = vc.make_request(name, range(7, 7 + length), params, scheduler=scheduler)
        scheduler.add_request(requests[name])
    seen = set()
    for step in range(400):
        if not scheduler.has_requests():
            break
        output = scheduler.schedule()
        assert [] == differences(output, _rebuilt(output)), f"step {step}"
        batch = vc.read_scheduler_output(output)
        seen |= {"new" if r.is_new else "resumed" if r.resumed else "running" for r in batch.requests}
        seen |= {"finished"} if batch.finished_request_ids else set()
        done = {
            r.request_id: [3]
            if r.num_computed_tokens + r.num_scheduled_tokens >= requests[r.request_id].num_tokens
            else []
            for r in batch.requests
        }
        scheduler.update_from_output(output, vc.make_model_runner_output(done))
    assert {"new", "resumed", "running", "finished"} == seen


def _run(loop: Any, output: Any) -> dict[str, tuple[int, ...]]:
    """Give a step to the workers, as the loop does; there is no grammar."""

    class NoGrammar:
        @staticmethod
        def get_grammar_bitmask(_: Any) -> None:
            return None

    made = adapter("step").run(loop.executor, NoGrammar, output)
    return dict(vc.read_model_runner_output(made).token_ids)


def _for_v2(text: list[int]) -> dict[str, Any]:
    """What the V2 model runner takes a request's tokens from."""
    return {"prefill_token_ids": text} if RELEASE >= (0, 12, 0) else {}


def test_run_by_a_worker(loop: Any, prompts: list[list[int]]) -> None:
    """A prefill in two chunks beside another request, then decoding: the tokens that the engine generates."""
    params = vc.make_sampling_params(**PARAMS)
    texts = [max(prompts, key=len)[: BLOCK_SIZE + 5], prompts[3][:10]]
    expected = [finished.token_ids for finished in loop.generate(texts, params)]
    # The scheduler is idle, so its blocks are free to use by hand; block 0 is vLLM's null block.
    blocks = {"x": ([1, 2],), "y": ([3],)}
    first = vc.make_scheduler_output(
        {"x": BLOCK_SIZE, "y": 10},
        scheduled_new_reqs=[
            vc.make_new_request_data(name, text, params, block_ids=blocks[name])
            for name, text in zip("xy", texts, strict=True)
        ],
        finished_req_ids={f"{name}-of-before" for name in "xy"},
    )
    tokens: dict[str, list[int]] = {"x": [], "y": list(_run(loop, first)["y"])}
    computed = {"x": BLOCK_SIZE, "y": 10}
    for _ in range(4):
        counts = {"x": 1 if tokens["x"] else 5, "y": 1}
        output = vc.make_scheduler_output(
            counts,
            scheduled_cached_reqs=vc.make_cached_request_data(
                computed, num_output_tokens={name: len(ids) for name, ids in tokens.items()}
            ),
        )
        for name, ids in _run(loop, output).items():
            tokens[name] += ids
        computed = {name: computed[name] + counts[name] for name in computed}
    _run(loop, vc.make_scheduler_output({}, finished_req_ids=["x", "y"]))
    assert [list(ids) for ids in expected] == [tokens["x"][:4], tokens["y"][:4]]


def test_defaults() -> None:
    """An empty step is what vLLM's own ``make_empty`` makes; absent blocks and tokens are vLLM's absent ones."""
    from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput

    assert [] == differences(CachedRequestData.make_empty(), vc.make_cached_request_data({}, num_output_tokens={}))
    if RELEASE >= (0, 12, 0):
        assert [] == differences(SchedulerOutput.make_empty(), vc.make_scheduler_output({}))
    cached = vc.make_cached_request_data({"a": 3, "b": 5}, num_output_tokens={"b": 1, "a": 0})
    assert (["a", "b"], [None, None], [3, 5], []) == (
        cached.req_ids,
        cached.new_block_ids,
        cached.num_computed_tokens,
        cached.new_token_ids,
    )


def test_prefix_blocks_by_group() -> None:
    """Up to 0.31.0 a number per KV cache group is required; the groups are those of the step's blocks."""
    params = vc.make_sampling_params(**PARAMS)
    new = vc.make_new_request_data("r", [1, 2], params, block_ids=([1], [2], [3]))
    output = vc.make_scheduler_output({"r": 2}, scheduled_new_reqs=[new])
    assert ([] if RELEASE >= (0, 32, 0) else [0, 0, 0]) == output.num_common_prefix_blocks
    given = vc.make_scheduler_output({"r": 2}, scheduled_new_reqs=[new], num_common_prefix_blocks=[1, 0, 0])
    assert [1, 0, 0] == given.num_common_prefix_blocks
    assert 2 == output.total_num_scheduled_tokens


def test_grammar() -> None:
    """The bitmask is an object of its own from 0.11.1 on; before, it is refused with where it goes."""
    import numpy

    mask = numpy.full((1, 64), -1, dtype=numpy.int32)
    if RELEASE < (0, 11, 1):
        with pytest.raises(vc.UnsupportedField, match="make_scheduler_output"):
            vc.make_grammar_output(["r"], mask)
        return
    made = vc.make_grammar_output(("r",), mask)
    assert ["r"] == made.structured_output_request_ids
    assert mask is made.grammar_bitmask
    with pytest.raises(vc.UnsupportedField, match=r"0\.10\.2 to 0\.11\.0"):
        vc.make_scheduler_output({}, grammar_bitmask=mask)


def _new(name: str) -> Any:
    return vc.make_new_request_data(name, [1, 2, 3], vc.make_sampling_params(**PARAMS), block_ids=([1],))


@pytest.mark.parametrize(
    ("counts", "options", "message"),
    [
        ({}, {"scheduled_new_reqs": ["a"]}, "num_scheduled_tokens of every request .* none for 'a'"),
        ({"a": 1, "b": 1}, {"scheduled_new_reqs": ["a"]}, "'b', which the step does not have"),
        ({"a": 1}, {"scheduled_new_reqs": ["a", "a"]}, "'a' more than once"),
        ({"a": 0}, {"scheduled_new_reqs": ["a"]}, "at least one scheduled token"),
        (
            {"a": 2},
            {"scheduled_new_reqs": ["a"], "scheduled_spec_decode_tokens": {"a": [5, 6]}},
            "more than its draft tokens .* 2 for 'a', with 2 drafts",
        ),
        ({"a": 2}, {"scheduled_new_reqs": ["a"], "scheduled_spec_decode_tokens": {"b": [5]}}, "'b', which the step"),
        ({"a": 2}, {"scheduled_new_reqs": ["a"], "scheduled_encoder_inputs": {"b": [0]}}, "'b', which the step"),
    ],
)
def test_parts_that_do_not_go_together(counts: dict[str, int], options: dict[str, Any], message: str) -> None:
    """A worker would fail far away, or run somebody else's tokens."""
    given = {**options, "scheduled_new_reqs": [_new(name) for name in options["scheduled_new_reqs"]]}
    with pytest.raises(vc.VllmCompatError, match=f"(?s){message.replace(' .* ', '.*')}"):
        vc.make_scheduler_output(counts, **given)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_output_tokens": {}}, "num_output_tokens of every request"),
        ({"num_output_tokens": {"a": 1, "b": 1}}, "'b', which the step does not have"),
        ({"num_output_tokens": {"a": 1}, "resumed_req_ids": ["a"]}, "all blocks that it has"),
        ({"num_output_tokens": {"a": 1}, "new_block_ids": {"b": ([1],)}}, "'b', which the step does not have"),
        ({"num_output_tokens": {"a": 1}, "new_block_ids": {"a": [1, 2]}}, "a list of block ids per KV cache group"),
        ({"num_output_tokens": {"a": 1}, "new_token_ids": {"b": [1]}}, "new_token_ids of every request"),
    ],
)
def test_columns_that_do_not_go_together(options: dict[str, Any], message: str) -> None:
    """The columns of CachedRequestData lie side by side, so a missing entry would shift the others."""
    with pytest.raises(vc.VllmCompatError, match=message):
        vc.make_cached_request_data({"a": 4}, **options)


def test_unknown_fields_are_refused() -> None:
    """A misspelt field is no field of any release."""
    with pytest.raises(vc.UnsupportedField, match="kv_conector_metadata"):
        vc.make_scheduler_output({}, kv_conector_metadata=None)

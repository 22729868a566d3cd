"""Readers of a scheduler's KV cache, against what the scheduler itself hands out; no engine is needed."""

from __future__ import annotations

from typing import Any

import pytest
from here import BLOCK_SIZE, RELEASE

import vllm_compat as vc
from vllm_compat.adapters.select import adapter

NUM_BLOCKS = 40
PROMPT = list(range(100, 100 + 3 * BLOCK_SIZE + 4))  # three full blocks and a bit


@pytest.fixture
def scheduler(scheduler_config: Any) -> Any:
    """A scheduler of 40 blocks and 64 tokens a step, with statistics."""
    kv_cache_config = vc.make_kv_cache_config(scheduler_config, num_blocks=NUM_BLOCKS)
    return vc.make_scheduler(scheduler_config, kv_cache_config, scheduler_cls="sync", log_stats=True)


def request(scheduler: Any, request_id: str, prompt: list[int], **options: Any) -> Any:
    params = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, **options.pop("params", {})}
    return vc.make_request(request_id, prompt, vc.make_sampling_params(**params), scheduler=scheduler, **options)


def step(scheduler: Any, token: int = 7) -> vc.ScheduledBatch:
    """One step of a model that always says ``token``; what was scheduled."""
    scheduled = scheduler.schedule()
    batch = vc.read_scheduler_output(scheduled)
    sampled = {}
    for part in batch.requests:
        length = scheduler.requests[part.request_id].num_tokens
        sampled[part.request_id] = [token] if part.num_computed_tokens + part.num_scheduled_tokens == length else []
    adapter("scheduler").outputs(scheduler, scheduled, vc.make_model_runner_output(sampled))
    return batch


def run(scheduler: Any) -> list[vc.ScheduledBatch]:
    """Steps until every request is done, and the one that tells the workers."""
    batches = []
    while scheduler.has_requests():
        batches.append(step(scheduler))
    return batches


def contents(scheduler: Any) -> Any:
    """All that a reader could have disturbed: every block, the order of eviction, the statistics, the queues."""
    manager = scheduler.kv_cache_manager
    pool = manager.block_pool
    return (
        [(block.block_id, block.ref_cnt, block.block_hash) for block in pool.blocks],
        [block.block_id for block in pool.free_block_queue.get_all_free_blocks()],
        repr(vars(manager.prefix_cache_stats)),
        (manager.log_stats, [r.request_id for r in scheduler.running], len(scheduler.waiting)),
        {key: repr(value) for key, value in vars(manager.coordinator).items() if isinstance(value, int | float)},
    )


def test_block_ids_are_those_that_the_steps_handed_out(scheduler: Any) -> None:
    """Of requests of different lengths, prefilled in chunks: the blocks of all steps in order, and none afterwards."""
    lengths = {"long": 5 * BLOCK_SIZE, "short": 3, "exact": BLOCK_SIZE}
    for number, (name, length) in enumerate(lengths.items()):
        scheduler.add_request(request(scheduler, name, [number * 300 + i for i in range(length)]))
    assert {((),)} == {vc.read_block_ids(scheduler, name) for name in (*lengths, "never here")}
    handed: dict[str, list[int]] = {name: [] for name in lengths}
    seen = set()
    while scheduler.has_requests():
        scheduled = scheduler.schedule()
        batch = vc.read_scheduler_output(scheduled)
        sampled = {}
        for part in batch.requests:
            for (ids,) in [part.new_block_ids] if part.new_block_ids else []:
                handed[part.request_id] += ids
            assert (tuple(handed[part.request_id]),) == vc.read_block_ids(scheduler, part.request_id)
            seen.add(part.request_id)
            length = scheduler.requests[part.request_id].num_tokens
            sampled[part.request_id] = [7] if part.num_computed_tokens + part.num_scheduled_tokens == length else []
        adapter("scheduler").outputs(scheduler, scheduled, vc.make_model_runner_output(sampled))
    assert set(lengths) == seen
    assert {((),)} == {vc.read_block_ids(scheduler, name) for name in lengths}
    assert [6, 1, 2] == [len(handed[name]) for name in lengths]


def test_the_pool_is_counted(scheduler: Any) -> None:
    """Free and used blocks add up, and all are free again at the end, though the prefix cache still knows them."""
    start = vc.read_block_pool(scheduler)
    assert vc.BlockPoolState(NUM_BLOCKS, NUM_BLOCKS - 1, 0, 0.0, 0, caches_prefixes=True) == start
    scheduler.add_request(request(scheduler, "a", PROMPT))
    scheduler.add_request(request(scheduler, "b", PROMPT[::-1]))
    for _ in range(5):
        step(scheduler)
    held = [vc.read_block_ids(scheduler, name)[0] for name in "ab"]
    during = vc.read_block_pool(scheduler)
    assert [4, 4] == [len(ids) for ids in held]
    assert 8 == len({*held[0], *held[1]})
    assert start.null_block_id not in {*held[0], *held[1]}
    assert (NUM_BLOCKS - 1 - 8, 6) == (during.num_free_blocks, during.num_cached_hashes)
    assert during.usage == pytest.approx(8 / (NUM_BLOCKS - 1)) == scheduler.kv_cache_manager.usage
    run(scheduler)
    end = vc.read_block_pool(scheduler)
    assert (start.num_free_blocks, 6, 0.0) == (end.num_free_blocks, end.num_cached_hashes, end.usage)


def test_a_second_request_finds_what_the_first_computed(scheduler: Any) -> None:
    """The prefix found is the one that the scheduler then takes: whole blocks, and never the last token."""
    scheduler.add_request(request(scheduler, "first", PROMPT))
    step(scheduler)
    step(scheduler)
    (blocks,) = vc.read_block_ids(scheduler, "first")
    run(scheduler)
    second = request(scheduler, "second", PROMPT)
    assert vc.CachedPrefix(3 * BLOCK_SIZE, (blocks[:3],), 0) == vc.read_cached_prefix(scheduler, second)
    for prompt, expected in (
        (PROMPT[: 3 * BLOCK_SIZE], 2),
        (PROMPT[: 2 * BLOCK_SIZE + 1], 2),
        (PROMPT[:BLOCK_SIZE], 0),
        (PROMPT[1:], 0),
        ([*PROMPT[:BLOCK_SIZE], 0, *PROMPT[BLOCK_SIZE + 1 :]], 1),
    ):
        found = vc.read_cached_prefix(scheduler, request(scheduler, "other", prompt))
        assert (expected * BLOCK_SIZE, (blocks[:expected],)) == (found.num_tokens, found.block_ids)
    scheduler.add_request(second)
    (scheduled,) = step(scheduler).requests
    assert (3 * BLOCK_SIZE, 4) == (scheduled.num_computed_tokens, scheduled.num_scheduled_tokens)
    assert blocks[:3] == scheduled.new_block_ids[0][:3]


@pytest.mark.parametrize(
    "options",
    [{"params": {"prompt_logprobs": 0}}, {"cache_salt": "mine"}],
    ids=["prompt log-probabilities", "cache salt"],
)
def test_what_the_scheduler_would_not_take_is_not_found(scheduler: Any, options: dict[str, Any]) -> None:
    """A request that has to compute its prompt, or must not share it, finds nothing of the same tokens."""
    scheduler.add_request(request(scheduler, "first", PROMPT))
    run(scheduler)
    assert vc.CachedPrefix(0, ((),), 0) == vc.read_cached_prefix(scheduler, request(scheduler, "x", PROMPT, **options))


def test_reading_changes_nothing(scheduler: Any) -> None:
    """Blocks, eviction order and statistics stand as they did, also when the lookup fails."""
    scheduler.add_request(request(scheduler, "first", PROMPT))
    run(scheduler)
    scheduler.add_request(request(scheduler, "running", PROMPT[::-1]))
    step(scheduler)
    second = request(scheduler, "second", PROMPT)
    before, request_before = contents(scheduler), repr(vars(second))
    for _ in range(2):
        assert 3 * BLOCK_SIZE == vc.read_cached_prefix(scheduler, second).num_tokens
        vc.read_block_ids(scheduler, "running")
        vc.read_block_pool(scheduler)
    with pytest.raises(AttributeError):
        vc.read_cached_prefix(scheduler, object())
    assert before == contents(scheduler)
    assert request_before == repr(vars(second))


def test_block_ids_in_all_of_vllms_shapes(scheduler: Any) -> None:
    """Native blocks, a tuple of lists, one flat list, and none."""
    scheduler.add_request(request(scheduler, "a", PROMPT))
    scheduled = scheduler.schedule()
    ids = vc.read_block_ids(scheduler, "a")
    assert 2 <= len(ids[0])
    for shape in (
        scheduler.kv_cache_manager.get_blocks("a"),
        scheduled.scheduled_new_reqs[0].block_ids,
        list(ids[0]),
        (list(ids[0]),),
    ):
        assert ids == vc.plain_block_ids(shape)
    assert ((), (), ((),)) == tuple(map(vc.plain_block_ids, (None, [], ([],))))


def test_the_cache_is_reset_when_nobody_holds_blocks(scheduler: Any) -> None:
    """False, and nothing forgotten, while a request runs; afterwards the same prompt finds nothing."""
    scheduler.add_request(request(scheduler, "first", PROMPT))
    step(scheduler)
    step(scheduler)
    cached = vc.read_block_pool(scheduler).num_cached_hashes
    assert 3 == cached
    assert vc.reset_prefix_cache(scheduler) is False
    assert cached == vc.read_block_pool(scheduler).num_cached_hashes
    run(scheduler)
    assert vc.reset_prefix_cache(scheduler) is True
    assert 0 == vc.read_block_pool(scheduler).num_cached_hashes
    assert 0 == vc.read_cached_prefix(scheduler, request(scheduler, "second", PROMPT)).num_tokens


@pytest.mark.parametrize(("option", "since"), [("reset_running_requests", (0, 12)), ("reset_connector", (0, 13))])
def test_options_of_the_reset(scheduler: Any, option: str, since: tuple[int, ...]) -> None:
    """Running requests are preempted where the release can; an option that it does not have is refused."""
    scheduler.add_request(request(scheduler, "first", PROMPT))
    step(scheduler)
    if since > RELEASE:
        with pytest.raises(vc.UnsupportedField, match=option):
            vc.reset_prefix_cache(scheduler, **{option: True})
        return
    assert vc.reset_prefix_cache(scheduler, **{option: True}) is (option == "reset_running_requests")
    released = vc.read_block_ids(scheduler, "first") == ((),)
    assert released is (option == "reset_running_requests")


@pytest.fixture
def hybrid(scheduler_config: Any) -> Any:
    """A scheduler of a model with one layer of full attention and one of a window of one block."""
    import torch

    common = {"block_size": BLOCK_SIZE, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
    specs = {
        "model.layers.0.self_attn.attn": vc.make_kv_cache_spec("full_attention", **common),
        "model.layers.1.self_attn.attn": vc.make_kv_cache_spec("sliding_window", sliding_window=BLOCK_SIZE, **common),
    }
    kv_cache_config = vc.make_kv_cache_config(scheduler_config, specs, num_blocks=NUM_BLOCKS)
    assert 2 == len(kv_cache_config.kv_cache_groups)
    return vc.make_scheduler(scheduler_config, kv_cache_config, scheduler_cls="sync", log_stats=True)


def test_groups_are_told_apart(hybrid: Any) -> None:
    """Two groups have blocks of their own; the null block stands where the window has passed."""
    prompt = list(range(6 * BLOCK_SIZE))
    hybrid.add_request(request(hybrid, "first", prompt))
    while hybrid.requests["first"].num_computed_tokens < len(prompt):
        step(hybrid)
    full, window = vc.read_block_ids(hybrid, "first")
    null = vc.read_block_pool(hybrid).null_block_id
    assert null not in full
    assert null == window[0]
    assert null != window[-1]
    assert len(full) == len(window)
    assert not {*full} & {*window}
    run(hybrid)
    before = contents(hybrid)
    second = request(hybrid, "second", [*prompt, 1])
    found = vc.read_cached_prefix(hybrid, second)
    assert before == contents(hybrid)
    count = found.num_tokens // BLOCK_SIZE
    assert count >= 4
    assert full[:count] == found.block_ids[0]
    assert (null,) * (count - 1) == found.block_ids[1][:-1]
    hybrid.add_request(second)
    (scheduled,) = step(hybrid).requests
    assert found.num_tokens == scheduled.num_computed_tokens
    assert found.block_ids == tuple(ids[:count] for ids in scheduled.new_block_ids)

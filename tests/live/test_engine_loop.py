"""EngineLoop by hand: order, abort, finish, and what it refuses, on one running engine."""

from __future__ import annotations

from typing import Any

import pytest

import vllm_compat as vc


def test_a_second_in_process_loop_is_refused(loop: Any) -> None:
    """vLLM's process groups are global: a second model would run in the first one's groups, or tear them down."""
    with pytest.raises(vc.VllmCompatError, match="is open in this process"):
        vc.EngineLoop(loop.vllm_config)


def test_outputs_come_in_the_callers_order_while_others_run(loop: Any, prompts: list[list[int]]) -> None:
    """A long first request does not let later ones overtake it, and a request added elsewhere goes on beside them."""
    params = [vc.make_sampling_params(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (40, 1, 5)]
    other = loop.add(prompts[3], vc.make_sampling_params(temperature=0.0, max_tokens=60, ignore_eos=True))

    finished = list(loop.generate(prompts[:3], params))

    assert [40, 1, 5] == [len(f.token_ids) for f in finished]
    assert [tuple(p) for p in prompts[:3]] == [f.prompt_token_ids for f in finished]
    while loop.has_unfinished():
        loop.step()
    assert [(other, 60)] == [(f.request_id, len(f.token_ids)) for f in loop.collect()]


def test_abort_and_finish_end_a_request_and_free_its_blocks(loop: Any, prompts: list[list[int]]) -> None:
    """Both keep the tokens so far; the reasons differ; all blocks come back."""
    pool = loop.scheduler.kv_cache_manager.block_pool
    loop.step()
    free = pool.get_num_free_blocks()
    params = vc.make_sampling_params(temperature=0.0, max_tokens=100, ignore_eos=True)
    first, second = (loop.add(prompt, params) for prompt in prompts[:2])
    for _ in range(8):
        loop.step()

    loop.abort([first, "never added"])
    loop.finish(second)
    loop.step()

    assert [(first, "abort"), (second, "stop")] == [(f.request_id, f.finish_reason) for f in loop.collect()]
    assert free == pool.get_num_free_blocks()
    assert not loop.has_unfinished()


def test_leaving_generate_early_aborts_the_rest(loop: Any, prompts: list[list[int]]) -> None:
    """Nothing keeps running, and nothing is left to collect, when the caller stops iterating."""
    params = vc.make_sampling_params(temperature=0.0, max_tokens=30, ignore_eos=True)
    for _ in loop.generate(prompts, params):
        break
    assert not loop.has_unfinished()
    assert [] == loop.collect()


def test_an_id_in_use_is_refused(loop: Any, prompts: list[list[int]]) -> None:
    """vLLM itself would take a second request of the same id for a continuation of the first."""
    params = vc.make_sampling_params(temperature=0.0, max_tokens=5)
    loop.add(prompts[0], params, request_id="same")
    with pytest.raises(vc.VllmCompatError, match="an id that is not in use"):
        loop.add(prompts[1], params, request_id="same")
    loop.abort("same")
    loop.collect()


def test_logprobs_are_read_per_token(loop: Any, prompts: list[list[int]]) -> None:
    """One dictionary per generated token, and one per prompt position from 1 on, with the token itself in each."""
    params = vc.make_sampling_params(temperature=0.0, max_tokens=6, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    (done,) = loop.generate([prompts[1]], params)

    assert done.logprobs is not None
    assert done.prompt_logprobs is not None
    assert len(done.logprobs) == 6
    assert len(done.prompt_logprobs) == len(prompts[1]) - 1
    assert all(row[token] == max(row.values()) for token, row in zip(done.token_ids, done.logprobs, strict=True))
    assert all(token in row for token, row in zip(done.prompt_token_ids[1:], done.prompt_logprobs, strict=True))

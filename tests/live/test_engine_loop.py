"""EngineLoop by hand: order, abort, finish, and what it refuses, on one running engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from here import RELEASE
from vllm import PoolingParams

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
    running = loop.generate(prompts, params)
    first = next(running)
    running.close()
    assert not loop.has_unfinished()
    assert [] == loop.collect()

    abandoned = str(int(first.request_id) + 1)
    loop.add(prompts[0], vc.make_sampling_params(max_tokens=1), request_id=abandoned)
    loop.step()
    while loop.has_unfinished():
        loop.step()
    assert [abandoned] == [f.request_id for f in loop.collect()]


def test_workers_forget_what_is_done(loop: Any, prompts: list[list[int]]) -> None:
    """The last step of generate tells them; until then they would keep the requests' states."""
    list(loop.generate(prompts[:3], vc.make_sampling_params(temperature=0.0, max_tokens=2)))
    assert not loop.executor.driver_worker.worker.model_runner.requests
    assert not loop.scheduler.has_requests()


def test_generate_does_not_wait_for_what_is_gone(loop: Any, prompts: list[list[int]]) -> None:
    """A request that was ended behind the loop's back is an error, not an endless loop."""
    from vllm.v1.request import RequestStatus

    params = vc.make_sampling_params(temperature=0.0, max_tokens=30, ignore_eos=True)
    running = loop.generate([prompts[0], prompts[1]], [vc.make_sampling_params(max_tokens=1), params])
    next(running)
    loop.scheduler.finish_requests(list(loop.scheduler.requests), RequestStatus.FINISHED_ABORTED)
    with pytest.raises(vc.VllmCompatError, match="has no request left"):
        next(running)
    assert not loop.has_unfinished()


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


def test_each_request_gets_the_logprobs_that_it_asked_for(loop: Any, prompts: list[list[int]]) -> None:
    """Requests of one batch that ask for different numbers of log-probabilities get what each would get alone.

    vLLM's runner makes the rows of all as long as the longest; its front end, which is not here, cuts them.
    """
    params = [
        vc.make_sampling_params(temperature=0.0, max_tokens=3, logprobs=count, ignore_eos=True) for count in (0, 1, 4)
    ]
    alone = [next(iter(loop.generate([prompts[n]], each))).logprobs for n, each in enumerate(params)]
    together = [done.logprobs for done in loop.generate(prompts[:3], params)]

    # Greedy: the token is the first of the top ones.
    assert [[1] * 3, [1] * 3, [4] * 3] == [[len(row) for row in rows] for rows in together]
    assert [[list(row) for row in rows] for rows in alone] == [[list(row) for row in rows] for rows in together]


@pytest.mark.parametrize(("count", "found"), [(1, "fewer"), (3, "more")])
def test_sampling_params_that_do_not_pair_up_are_refused(
    loop: Any, prompts: list[list[int]], count: int, found: str
) -> None:
    """Instead of a StopIteration that becomes a RuntimeError, or of params that nobody used; nothing keeps running."""
    params = [vc.make_sampling_params(temperature=0.0, max_tokens=2)] * count
    with pytest.raises(vc.VllmCompatError, match=f"{found} sampling params than prompts"):
        list(loop.generate(prompts[:2], params))
    assert not loop.has_unfinished()
    assert [] == loop.collect()


def test_collect_leaves_a_running_generate_its_requests(loop: Any, prompts: list[list[int]]) -> None:
    """Whoever collects while generate runs gets the others only; generate loses none and does not wait forever."""
    params = [vc.make_sampling_params(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (9, 1, 1)]
    other = loop.add(prompts[3], vc.make_sampling_params(temperature=0.0, max_tokens=1, ignore_eos=True))
    collected, lengths = [], []
    loop.step()
    loop.step()
    for done in loop.generate(prompts[:3], params):
        lengths.append(len(done.token_ids))
        collected += loop.collect()
    assert [9, 1, 1] == lengths
    assert [other] == [f.request_id for f in collected]


def test_default_ids_step_aside(loop: Any, prompts: list[list[int]]) -> None:
    """A caller's own id may be a number."""
    params = vc.make_sampling_params(temperature=0.0, max_tokens=1)
    first = loop.add(prompts[0], params)
    own = loop.add(prompts[0], params, request_id=str(int(first) + 1))
    others = [loop.add(prompts[0], params) for _ in range(2)]
    assert len({first, own, *others}) == 4
    while loop.has_unfinished():
        loop.step()
    last = loop.add(prompts[0], params)  # those are done, and not collected yet
    assert last not in {first, own, *others}
    loop.abort(last)
    assert len(loop.collect()) == 5


@pytest.mark.parametrize(
    ("options", "found"),
    [({"n": 2}, "n=2"), ({"stop": ["\n", "end"]}, "stop=['\\n', 'end']")],
)
def test_what_the_front_end_would_do_is_refused(
    loop: Any, prompts: list[list[int]], options: dict[str, Any], found: str
) -> None:
    """vllm.LLM fans out n and matches stop strings outside of EngineCore: here they would be dropped silently."""
    with pytest.raises(vc.VllmCompatError) as caught:
        loop.add(prompts[0], vc.make_sampling_params(max_tokens=2, **options))
    assert found == caught.value.found
    assert caught.value.advice
    assert not loop.has_unfinished()


def test_requests_that_do_not_generate_once_are_refused(loop: Any) -> None:
    """Pooling output and continued sessions have no place in what the loop hands out."""
    pooling = vc.make_request("p", [1, 2], pooling_params=PoolingParams(task="embed"), scheduler=loop.scheduler)
    with pytest.raises(vc.VllmCompatError, match="pooling params"):
        loop.add_request(pooling)
    if RELEASE < (0, 15):
        return  # there are no sessions to continue
    params = vc.make_sampling_params(max_tokens=1)
    session = vc.make_request("s", [1, 2], params, scheduler=loop.scheduler, resumable=True)
    with pytest.raises(vc.VllmCompatError, match="resumable=True"):
        loop.add_request(session)
    assert not loop.has_unfinished()


@pytest.mark.skipif(RELEASE < (0, 21), reason="abort_immediately came in 0.21.0")
def test_abort_immediately_is_obeyed(loop: Any, prompts: list[list[int]]) -> None:
    """As in EngineCore.add_request: the request is added and aborted in one go."""
    params = vc.make_sampling_params(max_tokens=5)
    loop.add_request(vc.make_request("a", prompts[0], params, scheduler=loop.scheduler, abort_immediately=True))
    assert not loop.has_unfinished()
    assert [("a", "abort", ())] == [(f.request_id, f.finish_reason, f.token_ids) for f in loop.collect()]
    assert not loop.scheduler.requests


@pytest.mark.parametrize("kind", [tuple, np.array, torch.tensor, lambda ids: np.array(ids, dtype=np.int32)])
def test_prompts_of_any_sequence_type(loop: Any, prompts: list[list[int]], kind: Any) -> None:
    """Arrays, tensors and tuples of ids are ids."""
    params = vc.make_sampling_params(temperature=0.0, max_tokens=4)
    (expected,) = loop.generate([prompts[2]], params)
    (actual,) = loop.generate([kind(prompts[2])], params)
    assert (expected.prompt_token_ids, expected.token_ids) == (actual.prompt_token_ids, actual.token_ids)
    assert {int} == {type(token) for token in actual.prompt_token_ids}


@pytest.mark.parametrize("prompt", [7, None, [1.5], np.array([0.5]), [[1, 2]], np.array([[1, 2]]), [-1], ["a"], b"ab"])
def test_prompts_that_are_no_ids_are_refused(loop: Any, prompt: Any) -> None:
    """The message shows the first that is none."""
    with pytest.raises(vc.VllmCompatError, match="integers from 0 on"):
        loop.add(prompt, vc.make_sampling_params(max_tokens=1))
    assert not loop.has_unfinished()


@pytest.mark.parametrize("form", ["ids", "text", "dictionary"])
def test_cache_salt_reaches_the_request(loop: Any, prompts: list[list[int]], form: str) -> None:
    """Whatever the form of the prompt: a lost salt lets two tenants share blocks."""
    prompt = {"ids": prompts[0], "text": "hello there", "dictionary": {"prompt_token_ids": prompts[0]}}[form]
    request_id = loop.add(prompt, vc.make_sampling_params(max_tokens=1), cache_salt="tenant")
    assert loop.scheduler.requests[request_id].cache_salt == "tenant"
    loop.abort(request_id)
    loop.collect()


def test_a_request_whose_grammar_fails_leaves_nothing_behind(loop: Any, prompts: list[list[int]]) -> None:
    """Neither in the loop nor in a capture."""
    constraint = {"regex": "[0-9]+"}  # nobody has chosen a back end for it
    params = vc.make_sampling_params(max_tokens=1, structured_outputs=constraint)
    with vc.capture_hidden_states(loop, (7,)) as capture:
        # A ValueError that names the back end, from 0.33 on a bare assertion.
        with pytest.raises((ValueError, AssertionError)):
            loop.add_request(vc.make_request("g", prompts[0], params, scheduler=loop.scheduler))
        with pytest.raises(vc.CaptureError, match="no states under this id"):
            capture.pop("g")
    assert not loop.has_unfinished()
    assert not loop.scheduler.requests


class Failing:
    """An observer that fails when a request ends."""

    def on_add(self, request: Any) -> None:
        pass

    def on_finish(self, finished: vc.FinishedRequest) -> None:
        raise RuntimeError("observer")


def test_a_failing_observer_leaves_the_books_right(loop: Any, prompts: list[list[int]]) -> None:
    """The scheduler has ended both requests, so the loop has too: nobody waits for a request that is gone."""
    params = vc.make_sampling_params(max_tokens=5)
    ids = [loop.add(prompt, params) for prompt in prompts[:2]]
    observer = Failing()
    loop.observe(observer)
    try:
        with pytest.raises(RuntimeError, match="observer"):
            loop.abort(ids)
    finally:
        loop.unobserve(observer)
    assert not loop.has_unfinished()
    assert ids == [f.request_id for f in loop.collect()]

"""Hidden states under everything a scheduler does, on one running engine."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from here import RELEASE, WAYS
from states import Reference, captured_states, relative_error

import vllm_compat as vc

NO_AUX = "up to 0.17.1 there is one way"


@pytest.fixture(scope="module")
def llama_reference(tiny_llama: str) -> Reference:
    return Reference(tiny_llama, torch.float32)


@pytest.mark.parametrize("way", WAYS)
def test_batch_equals_one_by_one(loop: Any, prompts: list[list[int]], way: str) -> None:
    """Neither company in the batch nor a second call changes a request's states."""
    params = vc.make_sampling_params(temperature=0.0, max_tokens=1)
    together = captured_states(loop, (2, 7), prompts, params, way)
    again = captured_states(loop, (2, 7), prompts[::-1], params, way)[::-1]
    alone = [captured_states(loop, (2, 7), [prompt], params, way)[0] for prompt in prompts]
    for a, b, c in zip(together, again, alone, strict=True):
        assert relative_error(a.hidden_states, c.hidden_states).max() < 1e-5
        assert relative_error(b.hidden_states, c.hidden_states).max() < 1e-5


@pytest.mark.parametrize("way", WAYS)
def test_cached_tokens_are_recomputed(
    loop: Any, prompts: list[list[int]], llama_reference: Reference, way: str
) -> None:
    """With prefix caching on and the prompt's blocks in the cache, the states are complete all the same."""
    params = vc.make_sampling_params(temperature=0.0, max_tokens=1)
    list(loop.generate([prompts[1]], params))
    (warm,) = loop.generate([prompts[1]], params)
    assert warm.num_cached_tokens > 0

    (captured,) = captured_states(loop, (3, 4, 7), [prompts[1]], params, way)

    assert tuple(prompts[1]) == captured.token_ids
    assert relative_error(captured.hidden_states, llama_reference(prompts[1])[:, [3, 4, 7]]).max() < 1e-4


@pytest.mark.parametrize("way", WAYS)
def test_requests_that_finish_mid_batch(
    loop: Any, prompts: list[list[int]], llama_reference: Reference, way: str
) -> None:
    """Short requests leave, long ones go on in other rows of the batch; an aborted one has no states to give."""
    params = [vc.make_sampling_params(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (3, 25, 9, 17)]
    with vc.capture_hidden_states(loop, (1, 5, 7), way=way) as capture:
        ids = [loop.add(prompt, p) for prompt, p in zip(prompts, params, strict=False)]
        for _ in range(12):
            loop.step()
        loop.abort(ids[3])
        while loop.has_unfinished():
            loop.step()
        loop.collect()
        states = [capture.pop(request_id) for request_id in ids[:3]]
        with pytest.raises(vc.CaptureError, match="not aborted"):
            capture.pop(ids[3])
        # Neither what was handed over nor what was aborted stays in the worker.
        assert not loop.executor.driver_worker.worker._vllm_compat_recorder._chunks
    for captured, prompt, count in zip(states, prompts, (3, 25, 9), strict=False):
        assert len(captured.token_ids) == len(prompt) + count - 1
        error = relative_error(captured.hidden_states, llama_reference(captured.token_ids)[:, [1, 5, 7]])
        assert error.max() < 1e-4


def test_states_are_handed_over_once(loop: Any, prompts: list[list[int]]) -> None:
    """pop gives each request's states exactly once, and nothing for a request from before the capture."""
    params = vc.make_sampling_params(temperature=0.0, max_tokens=20, ignore_eos=True)
    before = loop.add(prompts[0], params)
    loop.step()
    with vc.capture_hidden_states(loop, (7,)) as capture:
        (done,) = loop.generate([prompts[1]], params)
        capture.pop(done.request_id)
        with pytest.raises(vc.CaptureError, match="pop each request once"):
            capture.pop(done.request_id)
        while loop.has_unfinished():
            loop.step()
        loop.collect()
        with pytest.raises(vc.CaptureError, match="no states under this id"):
            capture.pop(before)


def test_the_model_is_left_as_it_was(loop: Any, prompts: list[list[int]]) -> None:
    """After close no hook, no wrapper and no switch is left, and a new capture can begin."""
    runner = loop.executor.driver_worker.worker.model_runner
    params = vc.make_sampling_params(temperature=0.0, max_tokens=1)
    captured_states(loop, (0, 7), prompts[:1], params)
    captured_states(loop, (2, 7), prompts[:1], params)
    assert "execute_model" not in vars(runner)
    assert not runner.use_aux_hidden_state_outputs
    assert not getattr(runner.get_model().model, "aux_hidden_state_layers", ())
    for layer in runner.get_model().model.layers:
        assert not layer._forward_hooks
        assert not layer._forward_pre_hooks
    captured_states(loop, (3,), prompts[:1], params)


@pytest.mark.parametrize(("layers", "found"), [((8,), "[8] out of range"), ((-1, 2), "[-1]"), ((), "no id at all")])
def test_ids_out_of_range_are_refused(loop: Any, layers: tuple[int, ...], found: str) -> None:
    """The message says which ids there are; the next capture is not hindered."""
    with pytest.raises(vc.CaptureError) as caught:
        vc.capture_hidden_states(loop, layers)
    assert found in str(caught.value)
    assert "between 0 (embeddings) and 7" in str(caught.value)
    vc.capture_hidden_states(loop, (7,)).close()


def test_two_captures_at_once_are_refused(loop: Any) -> None:
    """One capture per model at a time."""
    with vc.capture_hidden_states(loop, (7,)), pytest.raises(vc.CaptureError, match="one at a time"):
        vc.capture_hidden_states(loop, (2,))


def test_states_own_their_memory(loop: Any, prompts: list[list[int]]) -> None:
    """Not a view into the step's batch: that would keep the batch alive, and travel with it between processes."""
    params = vc.make_sampling_params(temperature=0.0, max_tokens=1)
    for captured in captured_states(loop, (2, 7), prompts, params):
        states = captured.hidden_states
        assert states.untyped_storage().nbytes() == states.numel() * states.element_size()
        assert not states.is_inference()  # vLLM's workers run in inference mode; nobody could train on such a tensor


def test_a_request_finished_early_is_refused_to_whoever_asks(loop: Any, prompts: list[list[int]]) -> None:
    """Ended by hand in the middle of its prompt, its states are incomplete: pop says so, and the loop goes on."""
    params = vc.make_sampling_params(temperature=0.0, max_tokens=4, ignore_eos=True)
    long = max(prompts, key=len)
    assert len(long) > 64
    with vc.capture_hidden_states(loop, (7,)) as capture:
        cut, other = loop.add(long, params), loop.add(prompts[0], params)
        loop.step()
        loop.finish(cut)
        while loop.has_unfinished():
            loop.step()
        assert {(cut, "stop"), (other, "length")} == {(f.request_id, f.finish_reason) for f in loop.collect()}
        with pytest.raises(vc.CaptureError, match=f"of all {len(long)} tokens.* positions were never computed"):
            capture.pop(cut)
        with pytest.raises(vc.CaptureError, match="no states under this id"):
            capture.pop(cut)
        assert len(capture.pop(other).token_ids) == len(prompts[0]) + 3


@pytest.mark.skipif(RELEASE < (0, 11), reason="prompt_embeds came in 0.11.0")
def test_prompts_without_ids_are_refused(loop: Any) -> None:
    """States are given by token; a prompt of embeddings has none, and its rows would be counted short."""
    params = vc.make_sampling_params(max_tokens=1)
    request = vc.make_request("e", None, params, scheduler=loop.scheduler, prompt_embeds=torch.zeros(40, 128))
    with vc.capture_hidden_states(loop, (7,)), pytest.raises(vc.CaptureError, match="embeddings only"):
        loop.add_request(request)
    assert not loop.has_unfinished()


def test_workers_without_our_extension_are_refused(loop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A config with an extension of its own keeps it; capture then says what is missing."""
    other = "vllm.v1.worker.worker_base.WorkerBase"
    monkeypatch.setattr(loop.vllm_config.parallel_config, "worker_extension_cls", other)
    with pytest.raises(vc.CaptureError, match="HiddenStatesWorkerExtension") as caught:
        vc.capture_hidden_states(loop, (7,))
    assert other in caught.value.found


def test_closing_twice_and_asking_afterwards(loop: Any, prompts: list[list[int]]) -> None:
    """What was finished can still be popped; what was running cannot, and is not said to run on."""
    params = vc.make_sampling_params(temperature=0.0, max_tokens=6, ignore_eos=True)
    capture = vc.capture_hidden_states(loop, (7,))
    (done,) = loop.generate([prompts[0]], params)
    running = loop.add(prompts[1], params)
    loop.step()
    capture.close()
    capture.close()
    assert capture.pop(done.request_id).layers == (7,)
    with pytest.raises(vc.CaptureError, match="no states under this id"):
        capture.pop(running)
    while loop.has_unfinished():
        loop.step()
    loop.collect()


@pytest.mark.skipif(len(WAYS) == 1, reason=NO_AUX)
def test_the_first_way_that_works_is_taken_and_said(loop: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Auxiliary outputs, unless boundary 0 is asked for; in the log, and on the capture with the reason."""
    with caplog.at_level(logging.INFO, "vllm_compat.capture"):
        with vc.capture_hidden_states(loop, (2, 7)) as capture:
            assert "aux" == capture.way
        with vc.capture_hidden_states(loop, (0, 7)) as capture:
            assert "hooks" == capture.way
            assert "boundary 0 is no auxiliary output" in capture.model_info["why"]
    assert ["by way of aux", "by way of hooks"] == [m[m.index("by way") :].split(" (")[0] for m in caplog.messages]


@pytest.mark.skipif(len(WAYS) == 1, reason=NO_AUX)
def test_a_way_that_does_not_work_is_refused(loop: Any) -> None:
    """With the reason, and with what works; an unknown one with the names there are. The next capture can begin."""
    with pytest.raises(vc.CaptureError, match=r"boundary 0 is no auxiliary output.*here it would be hooks"):
        vc.capture_hidden_states(loop, (0, 7), way="aux")
    with pytest.raises(vc.CaptureError, match="one of aux, hooks, native"):
        vc.capture_hidden_states(loop, (7,), way="magic")
    vc.capture_hidden_states(loop, (7,)).close()


@pytest.mark.skipif(len(WAYS) > 1, reason="auxiliary outputs are there")
def test_auxiliary_outputs_of_an_older_release_are_refused(loop: Any) -> None:
    """Up to 0.17.1 no model returns its final state among them."""
    with pytest.raises(vc.CaptureError, match=r"up to 0\.17\.1"):
        vc.capture_hidden_states(loop, (2, 7), way="aux")
    with vc.capture_hidden_states(loop, (2, 7)) as capture:
        assert "hooks" == capture.way


def test_what_nobody_pops_is_bounded(loop: Any, prompts: list[list[int]]) -> None:
    """States beyond the bound are dropped, and whoever asks for them is told; popping makes room again."""
    params = vc.make_sampling_params(temperature=0.0, max_tokens=1)
    one = len(prompts[0]) * 2 * 128 * 4
    with vc.capture_hidden_states(loop, (2, 7), max_unpopped_bytes=2 * one + one // 2) as capture:
        first, second, third = [done.request_id for done in loop.generate([prompts[0]] * 3, params)]
        with pytest.raises(vc.CaptureError, match=f"{2 * one} bytes of 2 requests that nobody popped"):
            capture.pop(third)
        assert one == capture.pop(first).nbytes
        capture.pop(second)
        (fourth,) = [done.request_id for done in loop.generate([prompts[0]], params)]
        assert one == capture.pop(fourth).hidden_states.nbytes


def test_native_extraction_needs_a_loop_of_its_own(loop: Any) -> None:
    """The message says what to make; before 0.24.0 that it is not right there."""
    with pytest.raises(vc.CaptureError, match="native_capture_args") as caught:
        vc.capture_hidden_states(loop, (2, 7), way="native")
    reason = "speculative_config is another one" if RELEASE >= (0, 24) else "has no generated tokens, or loses rows"
    assert reason in caught.value.found

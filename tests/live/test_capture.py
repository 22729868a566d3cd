"""Hidden states under everything a scheduler does, on one running engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from here import RELEASE
from states import Reference, captured_states, relative_error

import vllm_compat as vc


@pytest.fixture(scope="module")
def llama_reference(tiny_llama: str) -> Reference:
    return Reference(tiny_llama, torch.float32)


def test_batch_equals_one_by_one(loop: Any, prompts: list[list[int]]) -> None:
    """Neither company in the batch nor a second call changes a request's states."""
    params = vc.make_sampling_params(temperature=0.0, max_tokens=1)
    together = captured_states(loop, (2, 7), prompts, params)
    again = captured_states(loop, (2, 7), prompts[::-1], params)[::-1]
    alone = [captured_states(loop, (2, 7), [prompt], params)[0] for prompt in prompts]
    for a, b, c in zip(together, again, alone, strict=True):
        assert relative_error(a.hidden_states, c.hidden_states).max() < 1e-5
        assert relative_error(b.hidden_states, c.hidden_states).max() < 1e-5


def test_cached_tokens_are_recomputed(loop: Any, prompts: list[list[int]], llama_reference: Reference) -> None:
    """With prefix caching on and the prompt's blocks in the cache, the states are complete all the same."""
    params = vc.make_sampling_params(temperature=0.0, max_tokens=1)
    list(loop.generate([prompts[1]], params))
    (warm,) = loop.generate([prompts[1]], params)
    assert warm.num_cached_tokens > 0

    (captured,) = captured_states(loop, (0, 4, 7), [prompts[1]], params)

    assert tuple(prompts[1]) == captured.token_ids
    assert relative_error(captured.hidden_states, llama_reference(prompts[1])[:, [0, 4, 7]]).max() < 1e-4


def test_requests_that_finish_mid_batch(loop: Any, prompts: list[list[int]], llama_reference: Reference) -> None:
    """Short requests leave, long ones go on in other rows of the batch; an aborted one has no states to give."""
    params = [vc.make_sampling_params(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (3, 25, 9, 17)]
    with vc.capture_hidden_states(loop, (1, 5, 7)) as capture:
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
    """After close no hook and no wrapper is left, and a new capture can begin."""
    runner = loop.executor.driver_worker.worker.model_runner
    params = vc.make_sampling_params(temperature=0.0, max_tokens=1)
    captured_states(loop, (0, 7), prompts[:1], params)
    assert "execute_model" not in vars(runner)
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

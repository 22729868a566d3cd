"""Hidden states against Hugging Face transformers, boundary by boundary, and under everything a scheduler does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import vllm_compat as vc

# Relative Frobenius norm per boundary.
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}


class Reference:
    """transformers' residual stream, every boundary 0 … N before the last norm."""

    def __init__(self, model: str, dtype: torch.dtype) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()
        self._final: list[torch.Tensor] = []
        # hidden_states[N] of transformers is after the norm; the boundary is its input.
        self.model.model.norm.register_forward_pre_hook(lambda _, args: self._final.append(args[0]))

    @torch.no_grad()
    def __call__(self, token_ids: Any) -> torch.Tensor:
        self._final.clear()
        states = self.model(torch.tensor([list(token_ids)]), output_hidden_states=True).hidden_states
        return torch.stack([*states[:-1], self._final[0]], dim=2)[0]


def relative_error(states: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """[L], norm of the difference over norm of the reference."""
    states, reference = states.float(), reference.float()
    return (states - reference).norm(dim=(0, 2)) / reference.norm(dim=(0, 2))


def _loop(model: str, dtype: str = "float32", num_blocks: int | None = None, **options: Any) -> vc.EngineLoop:
    arguments = {
        "model": model,
        "dtype": dtype,
        "enforce_eager": True,
        "max_model_len": 512,
        "max_num_seqs": 4,
        "enable_prefix_caching": False,
        **options,
    }
    return vc.EngineLoop(vc.make_vllm_config(**arguments), num_blocks=num_blocks)


def _captured(loop: Any, layers: Any, prompts: Any, params: Any) -> list[Any]:
    with vc.capture_hidden_states(loop, layers) as capture:
        return [capture.pop(done.request_id) for done in loop.generate(prompts, params)]


@pytest.fixture(scope="module")
def llama_reference(tiny_llama: str) -> Reference:
    return Reference(tiny_llama, torch.float32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", ["kimi", "kimi-without-mla", "llama"])
def test_every_boundary_equals_transformers(
    model: str,
    dtype: str,
    prompts: list[list[int]],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Any,
) -> None:
    """Boundaries 0 … N of prompts and generated tokens, in a mixed batch.

    Prompts run in chunks of 32 tokens, except with MLA, for which vLLM 0.32 has no chunks on CPU.
    """
    path = request.getfixturevalue("tiny_llama" if model == "llama" else "tiny_kimi")
    chunks = {} if model == "kimi" else {"max_num_batched_tokens": 32}
    if model == "kimi-without-mla":
        monkeypatch.setenv("VLLM_MLA_DISABLE", "1")
    reference = Reference(path, getattr(torch, dtype))
    layers = range(reference.model.config.num_hidden_layers + 1)
    params = vc.make_sampling_params(temperature=0.0, max_tokens=8, ignore_eos=True)
    with _loop(path, dtype, **chunks) as loop:
        assert loop.vllm_config.model_config.use_mla == (model == "kimi")
        captured = _captured(loop, layers, prompts, params)

    worst = torch.stack([relative_error(c.hidden_states, reference(c.token_ids)) for c in captured]).amax(0)
    record_property("relative_error_per_boundary", [f"{error:.1e}" for error in worst.tolist()])

    assert [len(p) + 7 for p in prompts] == [len(c.token_ids) for c in captured]
    assert tuple(layers) == captured[0].layers
    assert captured[0].hidden_states.dtype == getattr(torch, dtype)
    assert worst.max() < TOLERANCE[dtype], worst


def test_batch_equals_one_by_one(loop: Any, prompts: list[list[int]]) -> None:
    """Neither company in the batch nor a second call changes a request's states."""
    params = vc.make_sampling_params(temperature=0.0, max_tokens=1)
    together = _captured(loop, (2, 7), prompts, params)
    again = _captured(loop, (2, 7), prompts[::-1], params)[::-1]
    alone = [_captured(loop, (2, 7), [prompt], params)[0] for prompt in prompts]
    for a, b, c in zip(together, again, alone, strict=True):
        assert relative_error(a.hidden_states, c.hidden_states).max() < 1e-5
        assert relative_error(b.hidden_states, c.hidden_states).max() < 1e-5


def test_cached_tokens_are_recomputed(loop: Any, prompts: list[list[int]], llama_reference: Reference) -> None:
    """With prefix caching on and the prompt's blocks in the cache, the states are complete all the same."""
    params = vc.make_sampling_params(temperature=0.0, max_tokens=1)
    list(loop.generate([prompts[1]], params))
    (warm,) = loop.generate([prompts[1]], params)
    assert warm.num_cached_tokens > 0

    (captured,) = _captured(loop, (0, 4, 7), [prompts[1]], params)

    assert tuple(prompts[1]) == captured.token_ids
    assert relative_error(captured.hidden_states, llama_reference(prompts[1])[:, [0, 4, 7]]).max() < 1e-4


def test_preempted_requests_are_complete(
    tiny_llama: str, prompts: list[list[int]], llama_reference: Reference
) -> None:
    """A cache too small for the batch forces preemption; a position computed twice counts once."""
    params = vc.make_sampling_params(temperature=0.0, max_tokens=60, ignore_eos=True)
    batch = [prompt[:40] for prompt in prompts if len(prompt) >= 40][:4]
    with _loop(tiny_llama, num_blocks=11, max_model_len=128, block_size=32) as loop:
        preempted = 0
        with vc.capture_hidden_states(loop, (3, 7)) as capture:
            for prompt in batch:
                loop.add(prompt, params)
            while loop.has_unfinished():
                requests = list(loop.scheduler.requests.values())
                loop.step()
                preempted = max([preempted, *(r.num_preemptions for r in requests)])
            finished = loop.collect()
            captured = [capture.pop(done.request_id) for done in finished]
    assert preempted > 0
    for states in captured:
        assert len(states.token_ids) == 99
        assert relative_error(states.hidden_states, llama_reference(states.token_ids)[:, [3, 7]]).max() < 1e-4


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
    _captured(loop, (0, 7), prompts[:1], params)
    assert "execute_model" not in vars(runner)
    for layer in runner.get_model().model.layers:
        assert not layer._forward_hooks
        assert not layer._forward_pre_hooks
    _captured(loop, (3,), prompts[:1], params)


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


def test_rows_that_do_not_add_up_stop_the_run(loop: Any, prompts: list[list[int]]) -> None:
    """A layer that hands on fewer rows than the step has tokens (sequence-parallel shards) is an error, not a result."""
    layer = loop.executor.driver_worker.worker.model_runner.get_model().model.layers[3]
    params = vc.make_sampling_params(temperature=0.0, max_tokens=1)

    with vc.capture_hidden_states(loop, (3,)) as capture:

        def drop_a_row(module: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
            hidden = [a[:-1] if isinstance(a, torch.Tensor) and a.dim() == 2 else a for a in args]
            seen = [hook for hook in layer._forward_pre_hooks.values() if hook is not drop_a_row]
            seen[0](module, tuple(hidden), kwargs)
            return args, kwargs

        handle = layer.register_forward_pre_hook(drop_a_row, with_kwargs=True)
        try:
            request_id = loop.add(prompts[0], params)
            with pytest.raises(vc.CaptureError, match="rows of a step"):
                loop.step()
        finally:
            handle.remove()
            loop.abort(request_id)
            loop.collect()
    del capture


def test_tensor_parallel_workers_give_the_same_states(
    tiny_kimi: str, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two worker processes, tensor parallel: rank 0 answers with the states that one worker has."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    params = vc.make_sampling_params(temperature=0.0, max_tokens=3, ignore_eos=True)
    with _loop(tiny_kimi, tensor_parallel_size=2) as loop:
        captured = _captured(loop, range(9), prompts[:4], params)
    reference = Reference(tiny_kimi, torch.float32)
    for states in captured:
        assert relative_error(states.hidden_states, reference(states.token_ids)).max() < 1e-4

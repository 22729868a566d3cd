"""Hidden states against Hugging Face transformers, boundary by boundary, on engines of every kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import FIXTURE
from here import CPU_MLA, KIMI_K25, NO_KIMI_K25, RELEASE, WAYS
from kimi_k25 import build
from states import TOLERANCE, Reference, captured_states, open_loop, relative_error

import vllm_compat as vc


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", [*(["kimi"] if CPU_MLA else []), "kimi-without-mla", "llama"])
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
    with open_loop(path, dtype, **chunks) as loop:
        assert loop.vllm_config.model_config.use_mla == (model == "kimi")
        captured = captured_states(loop, layers, prompts, params)

    expected = [reference(c.token_ids) for c in captured]
    # Over all tokens of the batch: in bfloat16 a router's near tie falls otherwise now and then, and one such token is
    # much of a short prompt.
    error = relative_error(torch.cat([c.hidden_states for c in captured]), torch.cat(expected))
    record_property("relative_error_per_boundary", [f"{value:.1e}" for value in error.tolist()])

    assert [len(p) + 7 for p in prompts] == [len(c.token_ids) for c in captured]
    assert tuple(layers) == captured[0].layers
    assert captured[0].hidden_states.dtype == getattr(torch, dtype)
    assert error.max() < TOLERANCE[dtype], error
    if dtype == "float32":
        worst = max(relative_error(c.hidden_states, e).max() for c, e in zip(captured, expected, strict=True))
        assert worst < TOLERANCE[dtype]


@pytest.mark.parametrize("way", WAYS)
def test_preempted_requests_are_complete(tiny_llama: str, prompts: list[list[int]], way: str) -> None:
    """A cache too small for the batch forces preemption; a position computed twice counts once."""
    params = vc.make_sampling_params(temperature=0.0, max_tokens=60, ignore_eos=True)
    batch = [prompt[:40] for prompt in prompts if len(prompt) >= 40][:4]
    with open_loop(tiny_llama, num_blocks=11, max_model_len=128, block_size=32) as loop:
        preempted = 0
        with vc.capture_hidden_states(loop, (3, 7), way=way) as capture:
            for prompt in batch:
                loop.add(prompt, params)
            while loop.has_unfinished():
                loop.step()
                preempted += sum(r.status.name == "PREEMPTED" for r in loop.scheduler.requests.values())
            finished = loop.collect()
            captured = [capture.pop(done.request_id) for done in finished]
    assert preempted > 0
    reference = Reference(tiny_llama, torch.float32)
    for states in captured:
        assert len(states.token_ids) == 99
        assert relative_error(states.hidden_states, reference(states.token_ids)[:, [3, 7]]).max() < 1e-4


def test_tensor_parallel_workers_give_the_same_states(
    tiny_kimi: str, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two worker processes, tensor parallel: rank 0 answers with the states that one worker has."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    params = vc.make_sampling_params(temperature=0.0, max_tokens=3, ignore_eos=True)
    with open_loop(tiny_kimi, tensor_parallel_size=2) as loop:
        # Raised in a worker process, and still the error that it is; neither rank keeps a half-made recorder.
        for layers in ((9,), ()):
            with pytest.raises(vc.CaptureError, match="final state before the last norm"):
                vc.capture_hidden_states(loop, layers)
        captured = captured_states(loop, range(9), prompts[:4], params)
    reference = Reference(tiny_kimi, torch.float32)
    for states in captured:
        assert relative_error(states.hidden_states, reference(states.token_ids)).max() < 1e-4


@pytest.mark.skipif(RELEASE < (0, 12), reason="float16 weights of that time's CPU builds need AVX512-FP16")
def test_float16_deepseek_is_refused(tiny_kimi: str) -> None:
    """vLLM rescales the residual of DeepSeek's layers in float16."""
    with open_loop(tiny_kimi, "float16", max_model_len=64) as loop, pytest.raises(vc.CaptureError, match="float16"):
        vc.capture_hidden_states(loop, (2,))


@pytest.mark.skipif(not KIMI_K25, reason=NO_KIMI_K25)
def test_float16_deepseek_in_a_wrapper_is_refused(tmp_path: Path) -> None:
    """Kimi-K2.5's language model has DeepSeek's layers."""
    model = str(build(FIXTURE, tmp_path / "k25"))
    with (
        open_loop(model, "float16", max_model_len=64, language_model_only=True) as loop,
        pytest.raises(vc.CaptureError, match="float16"),
    ):
        vc.capture_hidden_states(loop, (2,))


def test_rows_that_do_not_add_up_stop_the_run(tiny_llama: str, prompts: list[list[int]]) -> None:
    """A layer that sees fewer rows than the step has tokens (sequence-parallel shards) is an error, and the loop is
    over: a step that was cut short leaves vLLM's runner between two states.
    """
    params = vc.make_sampling_params(temperature=0.0, max_tokens=1)
    with open_loop(tiny_llama) as loop, vc.capture_hidden_states(loop, (3,), way="hooks"):
        layer = loop.executor.driver_worker.worker.model_runner.get_model().model.layers[3]
        (ours,) = layer._forward_pre_hooks.values()

        def without_a_row(module: Any, args: Any, kwargs: Any) -> None:
            ours(module, tuple(a[:-1] if isinstance(a, torch.Tensor) else a for a in args), kwargs)

        layer.register_forward_pre_hook(without_a_row, with_kwargs=True)
        loop.add(prompts[0], params)

        with pytest.raises(vc.CaptureError, match="rows of a step"):
            loop.step()
        with pytest.raises(vc.VllmCompatError, match="a step failed before"):
            loop.step()

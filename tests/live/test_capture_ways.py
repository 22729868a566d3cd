"""The ways of capturing give the same states, and so do pipeline stages; on engines of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from here import CPU_MLA, KIMI_WAYS, RELEASE, WAYS
from states import Reference, captured_states, open_loop, relative_error

import vllm_compat as vc
from vllm_compat.capture.worker import HiddenStatesWorkerExtension

NO_AUX = "up to 0.17.1 there is one way"


@pytest.mark.skipif(len(WAYS) == 1, reason=NO_AUX)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", ["kimi", "llama"])
def test_ways_agree_bit_for_bit(
    model: str,
    dtype: str,
    prompts: list[list[int]],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts of mixed lengths and generated tokens, in chunks of 16 where the CPU has chunks for the model."""
    kimi = model == "kimi"
    if kimi and not CPU_MLA:
        monkeypatch.setenv("VLLM_MLA_DISABLE", "1")
    chunks = {} if kimi and CPU_MLA else {"max_num_batched_tokens": 16}
    path = request.getfixturevalue("tiny_kimi" if kimi else "tiny_llama")
    num_layers = 8 if kimi else 7
    final = (num_layers,) if not kimi or len(KIMI_WAYS) > 1 else ()
    layers = (1, 2, 5, num_layers - 1, *final)
    params = vc.make_sampling_params(temperature=0.0, max_tokens=5, ignore_eos=True)
    with open_loop(path, dtype, **chunks) as loop:
        aux, hooks = (captured_states(loop, layers, prompts, params, way) for way in ("aux", "hooks"))
    assert len(prompts) == len(aux)
    for a, b in zip(aux, hooks, strict=True):
        assert (a.token_ids, a.layers) == (b.token_ids, b.layers)
        assert torch.equal(a.hidden_states, b.hidden_states)


@pytest.mark.skipif(not 18 <= RELEASE[1] < 25, reason="releases whose DeepSeek models give all boundaries but the last")
def test_hooks_give_what_the_model_does_not_return(tiny_kimi: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Boundary N of DeepSeek and Kimi from 0.18 to 0.24."""
    monkeypatch.setenv("VLLM_MLA_DISABLE", "1")
    with open_loop(tiny_kimi) as loop:
        with vc.capture_hidden_states(loop, (2, 8)) as capture:
            assert "hooks" == capture.way
            assert "does not return its final state (boundary 8)" in capture.model_info["why"]
        with vc.capture_hidden_states(loop, (2, 7)) as capture:
            assert "aux" == capture.way


@pytest.mark.skipif(len(WAYS) == 1, reason=NO_AUX)
def test_layers_named_when_the_loop_is_opened(tiny_llama: str, prompts: list[list[int]]) -> None:
    """They stay on between captures, for any of them; tokens are the same with them, and hooks still work."""
    params = vc.make_sampling_params(temperature=0.0, max_tokens=4, ignore_eos=True)
    with open_loop(tiny_llama) as loop:
        plain = [done.token_ids for done in loop.generate(prompts[:4], params)]
        (whole,) = captured_states(loop, (2, 5, 7), prompts[:1], params)
    with open_loop(tiny_llama, capture_layers=(7, 2, 5)) as loop:
        assert (2, 5, 7) == loop.capture_layers
        assert [2, 5, 7] == loop.vllm_config.additional_config["vllm_compat_capture_layers"]
        for _ in range(2):
            (some,) = captured_states(loop, (2, 7), prompts[:1], params, "aux")
            assert torch.equal(whole.hidden_states[:, [0, 2]], some.hidden_states)
        (hooked,) = captured_states(loop, (0, 5), prompts[:1], params)
        assert torch.equal(whole.hidden_states[:, 1], hooked.hidden_states[:, 1])
        assert plain == [done.token_ids for done in loop.generate(prompts[:4], params)]
        with pytest.raises(vc.CaptureError, match=r"opened with capture_layers=\(2, 5, 7\)"):
            vc.capture_hidden_states(loop, (3,), way="aux")


@pytest.mark.skipif(len(WAYS) == 1, reason=NO_AUX)
def test_auxiliary_rows_that_do_not_add_up_stop_the_run(tiny_llama: str, prompts: list[list[int]]) -> None:
    """A model that returns a tensor less than it was asked for."""
    params = vc.make_sampling_params(temperature=0.0, max_tokens=1)
    with open_loop(tiny_llama) as loop, vc.capture_hidden_states(loop, (3, 7), way="aux"):
        loop.executor.driver_worker.worker.model_runner.get_model().set_aux_hidden_state_layers((3,))
        loop.add(prompts[0], params)
        with pytest.raises(vc.CaptureError, match=r"boundaries missing: \[7\]"):
            loop.step()


class StageExtension(HiddenStatesWorkerExtension):
    """Allocates what a later pipeline stage receives into, which vLLM's CPU worker leaves out in eager mode.

    Workers of a GPU do it in their profiling pass, the CPU's only when they compile (cpu_worker.py,
    ``determine_available_memory``).
    """

    def allocate_stage_input(self) -> None:
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        if runner.intermediate_tensors is None:
            model = runner.get_model()
            options = {"batch_size": runner.max_num_tokens, "dtype": runner.dtype, "device": runner.device}
            runner.intermediate_tensors = model.make_empty_intermediate_tensors(**options)


@pytest.mark.skipif(RELEASE < (0, 29), reason="pipeline stages of older CPU builds were not tried")
def test_pipeline_stages_give_their_boundaries(
    tiny_kimi: str, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two worker processes, half of the layers each: states of both stages, the boundary between them once."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    if not CPU_MLA:
        monkeypatch.setenv("VLLM_MLA_DISABLE", "1")
    params = vc.make_sampling_params(temperature=0.0, max_tokens=3, ignore_eos=True)
    with open_loop(tiny_kimi, pipeline_parallel_size=2, worker_extension_cls=f"{__name__}.StageExtension") as loop:
        loop.call_workers("allocate_stage_input")
        with pytest.raises(vc.CaptureError, match="final state before the last norm"):
            vc.capture_hidden_states(loop, (9,))
        captured = captured_states(loop, range(9), prompts[:4], params)
        early = captured_states(loop, (2,), prompts[:4], params)
    reference = Reference(tiny_kimi, torch.float32)
    for states, alone in zip(captured, early, strict=True):
        assert relative_error(states.hidden_states, reference(states.token_ids)).max() < 1e-4
        assert torch.equal(states.hidden_states[:, [2]], alone.hidden_states)

"""Worker processes: tensor parallelism, and speculators' own worker extension under ``spawn``."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from beside import VERSION, figure
from states import Reference, open_loop, relative_error
from test_generator import TOLERANCE

import vllm_compat as vc

EXTENSION = "speculators.data_generation.custom_worker.HiddenStatesWorkerExtension"


def test_tensor_parallel(
    tiny_kimi: str, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch, figure: Callable[..., None]
) -> None:
    """Two ranks, each with half of the heads; states come from the first one."""
    from speculators.data_generation import VllmHiddenStatesGenerator

    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    generator = VllmHiddenStatesGenerator(tiny_kimi, max_model_len=512, tensor_parallel_size=2)
    try:
        results = generator.generate(prompts)
    finally:
        del generator
        gc.collect()
    reference = Reference(tiny_kimi, results[0]["hidden_states"][0].dtype)
    states = torch.cat([torch.stack(result["hidden_states"], dim=1) for result in results])
    expected = torch.cat([reference(prompt)[:, [3, 5, 6, 8]] for prompt in prompts])
    error = float(relative_error(states, expected).max())
    figure("kimi", "transformers, TP 2", error)
    assert error < TOLERANCE


def test_the_worker_extension_by_itself(
    tiny_llama: str, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Named in ``worker_extension_cls`` by a driver of one's own, in workers that import speculators anew."""
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    params = vc.make_sampling_params(temperature=0.0, max_tokens=1)
    options = {"worker_extension_cls": EXTENSION, "distributed_executor_backend": "mp"}
    reference = Reference(tiny_llama, torch.float32)
    expected = [reference(prompt)[:, [6, 3]] for prompt in prompts]
    with open_loop(tiny_llama, **options) as loop:
        loop.call_workers("_setup_hidden_states_capture", [5, 2])
        for prompt, states in zip(prompts[:2], expected, strict=False):
            loop.call_workers("_reset_capture")
            assert 1 == len(list(loop.generate([prompt], params)))
            (answer,) = loop.call_workers("_get_captured_states")
            layers = one(answer)
            assert relative_error(torch.stack(layers, dim=1), states).max() < 1e-4
        loop.call_workers("_reset_capture")
        ids = [loop.add(prompt, params) for prompt in prompts[:4]]
        while loop.has_unfinished():
            loop.step()
        check_several(loop, ids, expected)


def one(answer: Any) -> list[torch.Tensor]:
    """The tensors of the only request: 0.4.0 has them by its name."""
    if isinstance(answer, dict):
        (answer,) = answer.values()
    layers: list[torch.Tensor] = answer
    return layers


def check_several(loop: Any, ids: list[str], expected: list[torch.Tensor]) -> None:
    """0.4.0: each request its own rows. 0.3.0: one list cannot say whose rows they are, and is refused."""
    if VERSION.startswith("0.3."):
        # vLLM makes another error of what a worker process raises.
        with pytest.raises(Exception, match="rows whose order only the model runner knows"):
            loop.call_workers("_get_captured_states")
        return
    (answer,) = loop.call_workers("_get_captured_states")
    assert set(ids) == set(answer)
    for name, states in zip(ids, expected, strict=False):
        assert relative_error(torch.stack(answer[name], dim=1), states).max() < 1e-4

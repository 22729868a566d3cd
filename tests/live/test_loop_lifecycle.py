"""Loops opened and closed in every way: nothing of a loop is left behind, whatever fails on the way."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from here import CPU_MLA, EAGER, NO_SPECULATION, SPECULATES
from states import open_loop
from test_engine_loop import Failing

import vllm_compat as vc


def test_shutdown_goes_on_when_a_step_of_it_fails(tiny_llama: str, prompts: list[list[int]]) -> None:
    """The error comes out, but workers are gone, the process is free for another loop, and calls say what happened."""
    params = vc.make_sampling_params(temperature=0.0, max_tokens=5, ignore_eos=True)
    loop = open_loop(tiny_llama)
    capture = vc.capture_hidden_states(loop, (3,))
    loop.add(prompts[0], params)
    loop.step()
    loop.observe(Failing())

    with pytest.raises(RuntimeError, match="observer"):
        loop.shutdown()

    loop.shutdown()
    capture.close()
    calls: list[Any] = [lambda: loop.add(prompts[0], params), loop.step, lambda: loop.call_workers("x")]
    for call in calls:
        with pytest.raises(vc.VllmCompatError, match=r"shutdown\(\) was called"):
            call()
    with open_loop(tiny_llama) as again:
        assert len(list(again.generate(prompts[:2], params))) == 2


def test_a_loop_that_cannot_be_made_frees_the_process(tiny_llama: str, prompts: list[list[int]]) -> None:
    """Whether the model, the cache or the scheduler is at fault."""
    config = vc.make_vllm_config(model=tiny_llama, dtype="float32", **EAGER, max_model_len=64)
    with pytest.raises(vc.VllmCompatError, match="num_blocks of at least 1"):
        vc.EngineLoop(config, num_blocks=0)
    config = vc.make_vllm_config(model=tiny_llama, dtype="float32", **EAGER, max_model_len=64)
    with pytest.raises(vc.VllmCompatError, match="scheduler_cls='fancy'"):
        vc.EngineLoop(config, num_blocks=8, scheduler_cls="fancy")
    params = vc.make_sampling_params(temperature=0.0, max_tokens=2)
    with open_loop(tiny_llama, num_blocks=8, max_model_len=64) as loop:
        assert len(list(loop.generate([prompts[0][:20]], params))) == 1


@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")  # before 0.12; pytest would keep its traceback
@pytest.mark.parametrize("model", ["llama", "kimi"])
def test_the_kv_cache_goes_with_the_loop(
    model: str, tiny_llama: str, tiny_kimi: str, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process may open one after the other: a run of the pipeline does."""
    if model == "kimi" and not CPU_MLA:
        monkeypatch.setenv("VLLM_MLA_DISABLE", "1")
    addresses = _caches_of_a_closed_loop({"llama": tiny_llama, "kimi": tiny_kimi}[model], prompts[0][:20])
    assert addresses
    gc.collect()
    there = (o for o in gc.get_objects() if type(o) is torch.Tensor and o.device.type == "cpu")
    assert not [t.shape for t in there if t.data_ptr() in addresses]


def _caches_of_a_closed_loop(model: str, prompt: list[int]) -> set[int]:
    """Addresses; a function of its own, so that none of its variables keeps the loop."""
    with open_loop(model, num_blocks=8, max_model_len=64) as loop:
        list(loop.generate([prompt], vc.make_sampling_params(temperature=0.0, max_tokens=2)))
        return {cache.data_ptr() for cache in _tensors(loop.executor.driver_worker.worker.model_runner.kv_caches)}


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    else:
        for item in value:
            yield from _tensors(item)


@pytest.mark.skipif(not SPECULATES, reason=NO_SPECULATION)
def test_drafts_need_the_scheduler_that_the_config_means(tiny_llama: str) -> None:
    """The other kind would never be handed a draft: speculation would silently not happen."""
    config = vc.make_vllm_config(
        model=tiny_llama,
        dtype="float32",
        **EAGER,
        max_model_len=128,
        speculative_config={"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2},
    )
    with pytest.raises(vc.VllmCompatError, match="async_scheduling=False"):
        vc.EngineLoop(config, scheduler_cls="async")


@pytest.mark.filterwarnings("ignore:(.|\n)*reflected list")  # numba about vLLM's n-gram proposer
@pytest.mark.skipif(not SPECULATES, reason=NO_SPECULATION)
def test_capture_with_drafts(tiny_llama: str, prompts: list[list[int]]) -> None:
    """Rows of rejected drafts are replaced: states are those of plain decoding, and so are the tokens."""
    params = vc.make_sampling_params(temperature=0.0, max_tokens=40, ignore_eos=True)
    runs = []
    for speculative in (None, {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}):
        with (
            open_loop(tiny_llama, speculative_config=speculative) as loop,
            vc.capture_hidden_states(loop, (2, 7)) as capture,
        ):
            runs.append([(done, capture.pop(done.request_id)) for done in loop.generate(prompts[:4], params)])
    plain, drafted = runs
    steps = [step for done, _ in drafted for step in done.draft_steps]
    assert 0 < sum(step.accepted for step in steps) < sum(step.drafted for step in steps)
    for (a, states), (b, others) in zip(plain, drafted, strict=True):
        assert a.token_ids == b.token_ids
        assert len(b.token_ids) == 40
        assert b.num_steps < 40 or not sum(step.accepted for step in b.draft_steps)
        assert states.token_ids == others.token_ids
        assert (states.hidden_states - others.hidden_states).abs().max() < 1e-3

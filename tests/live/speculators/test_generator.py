"""``VllmHiddenStatesGenerator``: what it returns, on every release, is what its own pin returned, and right."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from beside import figure
from here import by_release
from states import Reference, captured_states, open_loop, relative_error

import vllm_compat as vc

#: Neither ascending nor all different, the last layer among them.
LAYER_IDS = [5, 2, 6, 2]
MAX_MODEL_LEN = 512
#: In bfloat16, over all tokens of a batch. Rows of another prompt are off by more than 1. Up to 0.11.2 the experts are
#: those of intel_extension_for_pytorch, and up to 0.13.0 the kernels round more (matrix/deviations.toml).
TOLERANCE = by_release(("0", 0.1), ("0.12.0", 0.05), ("0.14.0", 0.03))


@dataclass
class Generated:
    """A generator, and what the tests compare with."""

    generator: Any
    model: str
    path: str
    reference: Reference

    def expected(self, prompts: list[list[int]]) -> list[torch.Tensor]:
        return [self.reference(prompt)[:, [layer_id + 1 for layer_id in LAYER_IDS]] for prompt in prompts]

    def error(self, results: list[dict[str, Any]], expected: list[torch.Tensor]) -> float:
        states = torch.cat([torch.stack(result["hidden_states"], dim=1) for result in results])
        return float(relative_error(states, torch.cat(expected)).max())


@pytest.fixture(scope="module", params=["llama", "kimi"])
def generated(request: pytest.FixtureRequest) -> Iterator[Generated]:
    from speculators.data_generation import VllmHiddenStatesGenerator

    path = request.getfixturevalue(f"tiny_{request.param}")
    generator = VllmHiddenStatesGenerator(path, layer_ids=LAYER_IDS, max_model_len=MAX_MODEL_LEN)
    dtype = generator.vllm_config.model_config.dtype
    yield Generated(generator, request.param, path, Reference(path, dtype))
    del generator
    gc.collect()


def test_shapes_and_types(generated: Generated, prompts: list[list[int]]) -> None:
    """int64 ids; a contiguous tensor [T, H] per layer id, on the CPU, alone in its storage; no mask; in order."""
    results = generated.generator.generate(prompts)
    assert prompts == [result["input_ids"].tolist() for result in results]
    model = generated.generator.vllm_config.model_config
    for prompt, result in zip(prompts, results, strict=True):
        assert {"input_ids", "hidden_states", "loss_mask"} == result.keys()
        assert torch.int64 == result["input_ids"].dtype
        assert result["loss_mask"] is None
        assert [(len(prompt), model.get_hidden_size())] * len(LAYER_IDS) == [
            tuple(h.shape) for h in result["hidden_states"]
        ]
        for states in result["hidden_states"]:
            assert (model.dtype, "cpu", True) == (states.dtype, states.device.type, states.is_contiguous())
            assert states.untyped_storage().nbytes() == states.nbytes


def test_layer_ids_are_served_as_asked(generated: Generated, prompts: list[list[int]]) -> None:
    """In their order, a duplicate twice; its own pin sorts them and leaves duplicates out, and says otherwise."""
    assert LAYER_IDS == generated.generator.layer_ids
    (result,) = generated.generator.generate(prompts[:1])
    states = torch.stack(result["hidden_states"], dim=1)
    assert torch.equal(states[:, 1], states[:, 3])
    assert generated.error([result], generated.expected(prompts[:1])) < TOLERANCE


def test_states_equal_transformers(generated: Generated, prompts: list[list[int]], figure: Callable[..., None]) -> None:
    """Of twelve prompts at once, two of them with more than a block, and the same in a second call."""
    expected = generated.expected(prompts)
    for _ in range(2):
        error = generated.error(generated.generator.generate(prompts), expected)
        figure(generated.model, "transformers", error)
        assert error < TOLERANCE


def test_states_equal_our_own_extraction(
    generated: Generated, prompts: list[list[int]], figure: Callable[..., None]
) -> None:
    """``capture_hidden_states`` on a loop of one's own gives the same."""
    results = generated.generator.generate(prompts)
    options = {"max_num_seqs": 32, "max_model_len": MAX_MODEL_LEN, "max_num_batched_tokens": 8192}
    dtype = str(generated.generator.vllm_config.model_config.dtype).removeprefix("torch.")
    params = vc.make_sampling_params(temperature=0.0, max_tokens=1)
    wanted = sorted({layer_id + 1 for layer_id in LAYER_IDS})
    with open_loop(generated.path, dtype, **options) as loop:
        captured = captured_states(loop, wanted, prompts, params)
    places = [wanted.index(layer_id + 1) for layer_id in LAYER_IDS]
    error = generated.error(results, [states.hidden_states[:, places] for states in captured])
    figure(generated.model, "vllm_compat", error)
    # Two processes may divide the work among threads otherwise.
    assert error < 0.01


def test_a_batch_over_the_token_budget(generated: Generated, figure: Callable[..., None]) -> None:
    """24 prompts of 400 tokens and less in steps of 8192: on its own pin, rows of other prompts."""
    config = generated.generator.vllm_config.scheduler_config
    prompts = [[(7 * i + at) % 2000 for at in range(400 - 3 * i)] for i in range(24)]
    assert sum(map(len, prompts)) > config.max_num_batched_tokens
    results = generated.generator.generate(prompts)
    assert prompts == [result["input_ids"].tolist() for result in results]
    expected = generated.expected(prompts)
    figure(generated.model, "transformers, over the budget", generated.error(results, expected))
    for prompt in range(len(prompts)):
        assert generated.error(results[prompt : prompt + 1], expected[prompt : prompt + 1]) < 0.5, prompt


def test_an_empty_prompt_is_refused(generated: Generated, prompts: list[list[int]]) -> None:
    """Before anything is queued, so that the next call is a good one; its own pin never answers again."""
    with pytest.raises(vc.CaptureError, match="empty prompt") as caught:
        generated.generator.generate([prompts[0], [], prompts[1]])
    assert "prompt 1 of 3" in caught.value.asked
    (result,) = generated.generator.generate(prompts[:1])
    assert generated.error([result], generated.expected(prompts[:1])) < TOLERANCE


def test_a_prompt_that_vllm_refuses_does_no_harm(generated: Generated, prompts: list[list[int]]) -> None:
    """A token beyond the vocabulary: vLLM's own error, of whatever class, and the next call is a good one."""
    with pytest.raises(Exception, match="out of vocabulary"):
        generated.generator.generate([prompts[0], [5, 10**6]])
    (result,) = generated.generator.generate(prompts[1:2])
    assert generated.error([result], generated.expected(prompts[1:2])) < TOLERANCE


def test_kinds_of_input(generated: Generated, prompts: list[list[int]]) -> None:
    """A tensor [B, T], a list of tensors and a list of lists are the same; no rows are refused as ever."""
    rows = [prompts[1][:64], prompts[3][:64]]
    plain = generated.generator.generate(rows)
    for given in (torch.tensor(rows), [torch.tensor(row) for row in rows]):
        results = generated.generator.generate(given)
        assert rows == [result["input_ids"].tolist() for result in results]
        assert generated.error(results, [torch.stack(result["hidden_states"], dim=1) for result in plain]) < 0.01
    with pytest.raises(ValueError, match="token_ids cannot be empty"):
        generated.generator.generate([])


def test_long_prompts_are_cut(generated: Generated, prompts: list[list[int]]) -> None:
    """To one token less than ``max_model_len``, in ids and states."""
    (result,) = generated.generator.generate([prompts[3] * 4])
    assert (prompts[3] * 4)[: MAX_MODEL_LEN - 1] == result["input_ids"].tolist()
    assert [MAX_MODEL_LEN - 1] * len(LAYER_IDS) == [len(states) for states in result["hidden_states"]]


def test_layers_that_are_not_there(tiny_llama: str) -> None:
    """In speculators' own words, before the model is loaded."""
    from speculators.data_generation import VllmHiddenStatesGenerator

    for layer_id in (-1, 7):
        with pytest.raises(ValueError, match=rf"Layer index {layer_id} out of bounds \[0, 6\]"):
            VllmHiddenStatesGenerator(tiny_llama, layer_ids=[2, layer_id], max_model_len=MAX_MODEL_LEN)


def test_its_workers_end_with_it(tiny_llama: str, prompts: list[list[int]]) -> None:
    """Default layers; a generator that nobody holds any more leaves no process behind."""
    from speculators.data_generation import VllmHiddenStatesGenerator

    before = {process.pid for process in multiprocessing.active_children()}
    generator = VllmHiddenStatesGenerator(tiny_llama, max_model_len=MAX_MODEL_LEN)
    assert [2, 3, 4, 6] == generator.layer_ids
    assert [13] * 4 == [len(states) for states in generator.generate(prompts[:1])[0]["hidden_states"]]
    assert {process.pid for process in multiprocessing.active_children()} > before
    del generator
    gc.collect()
    assert before == {process.pid for process in multiprocessing.active_children()}

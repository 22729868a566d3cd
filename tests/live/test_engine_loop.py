"""EngineLoop against ``vllm.LLM``: the same tokens, for every way of running."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from conftest import run_script

import vllm_compat as vc

ENGINE = {"dtype": "float32", "enforce_eager": True, "max_model_len": 512, "max_num_seqs": 4}
GREEDY = {"temperature": 0.0, "max_tokens": 24}
SCHEMA = {
    "type": "object",
    "properties": {"mood": {"enum": ["good", "bad"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["mood", "age"],
    "additionalProperties": False,
}


def _cases(model: str, prompts: list[list[int]]) -> dict[str, dict[str, Any]]:
    def case(engine: dict[str, Any], params: list[dict[str, Any]], repeat: int = 1) -> dict[str, Any]:
        return {"engine": {"model": model, **ENGINE, **engine}, "prompts": prompts, "params": params, "repeat": repeat}

    plain = [GREEDY] * len(prompts)
    constraints: list[dict[str, Any]] = [
        {},
        {"structured_outputs": {"choice": ["yes", "no", "maybe"]}},
        {"structured_outputs": {"regex": "[0-9]{3}-[0-9]{2}"}},
        {"structured_outputs": {"json": SCHEMA}},
    ]
    structured = [{**GREEDY, **constraints[i % 4]} for i in range(len(prompts))]
    sampled = [{"temperature": 0.8, "top_p": 0.9, "seed": i, "max_tokens": 24} for i in range(len(prompts))]
    return {
        "plain": case({"enable_prefix_caching": False}, plain),
        "chunked": case({"enable_prefix_caching": False, "max_num_batched_tokens": 32}, plain),
        "prefix_caching": case({"enable_prefix_caching": True}, plain, repeat=2),
        "structured": case({"enable_prefix_caching": True, "max_num_batched_tokens": 64}, structured),
        "seeded": case({"enable_prefix_caching": False}, sampled),
    }


@pytest.fixture(scope="module")
def cases(tiny_kimi: str, prompts: list[list[int]]) -> dict[str, dict[str, Any]]:
    return _cases(tiny_kimi, prompts)


@pytest.fixture(scope="module")
def reference(cases: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What vllm.LLM generates for every case, in a process of its own."""
    path = tmp_path_factory.mktemp("llm") / "cases.json"
    path.write_text(json.dumps(list(cases.values())))
    return dict(zip(cases, run_script("llm_reference.py", str(path))["results"], strict=True))


def _run(case: dict[str, Any]) -> list[vc.FinishedRequest]:
    from vllm.sampling_params import StructuredOutputsParams

    params = []
    for options in copy.deepcopy(case["params"]):
        if "structured_outputs" in options:
            options["structured_outputs"] = StructuredOutputsParams(**options["structured_outputs"])
        params.append(vc.make_sampling_params(**options))
    with vc.EngineLoop(vc.make_vllm_config(**case["engine"])) as loop:
        for _ in range(case["repeat"]):
            finished = list(loop.generate(case["prompts"], params))
    return finished


@pytest.mark.parametrize("name", ["plain", "chunked", "prefix_caching", "structured", "seeded"])
def test_tokens_are_those_of_vllm_llm(name: str, cases: dict[str, Any], reference: dict[str, Any]) -> None:
    """Tokens, finish reasons and cached-token counts equal vllm.LLM's, in the order of the prompts."""
    finished = _run(cases[name])

    assert [[list(f.token_ids), f.finish_reason, f.num_cached_tokens] for f in finished] == reference[name]
    assert any(f.finish_reason == "stop" for f in finished)
    if name == "prefix_caching":
        assert sum(f.num_cached_tokens for f in finished) > 0
    if name == "chunked":
        assert any(len(f.prompt_token_ids) > 32 for f in finished)


def test_structured_output_is_obeyed(cases: dict[str, Any], reference: dict[str, Any], tokenizer: Any) -> None:
    """The reference itself is constrained: a mask that nobody applied would pass the comparison otherwise."""
    texts = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens, _, _ in reference["structured"]]

    assert texts[1] in ("yes", "no", "maybe")
    assert texts[2][3] == "-"


def test_async_scheduling_gives_the_same_tokens(cases: dict[str, Any], reference: dict[str, Any]) -> None:
    """A config that asks for the asynchronous scheduler is stepped in lockstep and changes nothing."""
    case = copy.deepcopy(cases["chunked"])
    case["engine"]["async_scheduling"] = True

    assert [list(f.token_ids) for f in _run(case)] == [row[0] for row in reference["chunked"]]


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
    assert all(token in row and row[token] == max(row.values()) for token, row in zip(done.token_ids, done.logprobs))
    assert all(token in row for token, row in zip(done.prompt_token_ids[1:], done.prompt_logprobs, strict=True))

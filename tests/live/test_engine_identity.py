"""EngineLoop against ``vllm.LLM``: the same tokens, for every way of running."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
import torch
from conftest import run_script
from here import EAGER, IN_PROCESS, lora_names
from safetensors.torch import save_file
from transformers import AutoConfig

import vllm_compat as vc

ENGINE = {"dtype": "float32", **EAGER, "max_model_len": 512, "max_num_seqs": 4, **IN_PROCESS}
GREEDY = {"temperature": 0.0, "max_tokens": 24}
SCHEMA = {
    "type": "object",
    "properties": {"mood": {"enum": ["good", "bad"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["mood", "age"],
    "additionalProperties": False,
}


def _cases(kimi: str, llama: str, loras: list[str], prompts: list[list[int]]) -> dict[str, dict[str, Any]]:
    def case(model: str, engine: dict[str, Any], params: list[dict[str, Any]], repeat: int = 1) -> dict[str, Any]:
        return {
            "engine": {"model": model, **ENGINE, **engine},
            "prompts": prompts,
            "params": params,
            "loras": [None] * len(prompts),
            "repeat": repeat,
        }

    plain = [GREEDY] * len(prompts)
    constraints: list[dict[str, Any]] = [
        {},
        {"structured_outputs": {"choice": ["yes", "no", "maybe"]}},
        {"structured_outputs": {"regex": "[0-9]{3}-[0-9]{2}"}},
        {"structured_outputs": {"json": SCHEMA}},
    ]
    structured = [{**GREEDY, **constraints[i % 4]} for i in range(len(prompts))]
    sampled = [{"temperature": 0.8, "top_p": 0.9, "seed": i, "max_tokens": 24} for i in range(len(prompts))]
    chunks = {"block_size": 32, "max_num_batched_tokens": 32}
    # On CPU vLLM 0.32 has neither chunks nor prefix caching with MLA: the Llama shows those.
    return {
        "kimi": case(kimi, {}, plain),
        "kimi-structured": case(kimi, {}, structured),
        "kimi-seeded": case(kimi, {}, sampled),
        "llama-chunked": case(llama, {**chunks, "enable_prefix_caching": False}, plain),
        "llama-prefix-caching": case(llama, {**chunks, "enable_prefix_caching": True}, plain, repeat=2),
        "llama-structured": case(llama, {**chunks, "enable_prefix_caching": True}, structured),
        "llama-lora": {
            **case(llama, {**chunks, "enable_lora": True, "max_loras": 2, "max_lora_rank": 8}, plain, repeat=2),
            "loras": [[None, *loras][i % 3] for i in range(len(prompts))],
        },
    }


NAMES = (
    "kimi",
    "kimi-structured",
    "kimi-seeded",
    "llama-chunked",
    "llama-prefix-caching",
    "llama-structured",
    "llama-lora",
)


@pytest.fixture(scope="module")
def loras(tiny_llama: str, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two adapters of the Llama, in PEFT's format, with weights that change its answers."""
    config = AutoConfig.from_pretrained(tiny_llama)
    wide = {"q_proj": config.hidden_size, "v_proj": config.num_key_value_heads * config.head_dim}
    folders = []
    for seed in (1, 2):
        folder = tmp_path_factory.mktemp("lora")
        generator = torch.Generator().manual_seed(seed)
        weights = {}
        for layer, (name, width) in itertools.product(range(config.num_hidden_layers), wide.items()):
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{place}.lora_A.weight"] = torch.randn(8, config.hidden_size, generator=generator)
            weights[f"{place}.lora_B.weight"] = torch.randn(width, 8, generator=generator) * 0.1
        save_file(weights, folder / "adapter_model.safetensors")
        about = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": list(wide), "bias": "none"}
        (folder / "adapter_config.json").write_text(json.dumps(about))
        folders.append(str(folder))
    return folders


@pytest.fixture(scope="module")
def cases(tiny_kimi: str, tiny_llama: str, loras: list[str], prompts: list[list[int]]) -> dict[str, dict[str, Any]]:
    return _cases(tiny_kimi, tiny_llama, loras, prompts)


@pytest.fixture(scope="module")
def reference(cases: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What vllm.LLM generates for every case, in a process of its own."""
    path = tmp_path_factory.mktemp("llm") / "cases.json"
    path.write_text(json.dumps(list(cases.values())))
    return dict(zip(cases, run_script("llm_reference.py", str(path))["results"], strict=True))


def _run(case: dict[str, Any], **arguments: Any) -> list[vc.FinishedRequest]:
    params = [vc.make_sampling_params(**options) for options in case["params"]]
    loras = [folder and vc.make_lora_request(*lora_names(folder)) for folder in case["loras"]]
    with vc.EngineLoop(vc.make_vllm_config(**case["engine"]), **arguments) as loop:
        for _ in range(case["repeat"]):
            finished = list(loop.generate(case["prompts"], params, lora_request=loras))
    return finished


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_of_vllm_llm(name: str, cases: dict[str, Any], reference: dict[str, Any]) -> None:
    """Tokens, finish reasons and cached-token counts equal vllm.LLM's, in the order of the prompts."""
    theirs = reference[name]
    assert not isinstance(theirs, str), f"vllm.LLM itself fails: {theirs}"
    finished = _run(cases[name])

    assert [[list(f.token_ids), f.finish_reason, f.num_cached_tokens] for f in finished] == theirs
    assert any(f.finish_reason == "stop" for f in finished) or name.startswith("llama")
    cached = sum(f.num_cached_tokens for f in finished) > 0
    assert cached == (name in ("llama-prefix-caching", "llama-structured", "llama-lora"))


def _with_and_without_adapters(reference: dict[str, Any], rows: slice) -> list[bool]:
    """Whether vllm.LLM gave some prompts the same answers in a batch with adapters as in one without."""
    assert not isinstance(reference["llama-lora"], str), f"vllm.LLM itself fails: {reference['llama-lora']}"
    without, with_them = (reference[name][rows] for name in ("llama-chunked", "llama-lora"))
    return [a[0] == b[0] for a, b in zip(without, with_them, strict=True)]


def test_adapters_change_the_answers(reference: dict[str, Any]) -> None:
    """The reference itself used them: adapters that nobody applied would pass the comparison otherwise."""
    assert not any(_with_and_without_adapters(reference, slice(1, None, 3)))
    assert not any(_with_and_without_adapters(reference, slice(2, None, 3)))


def test_a_prompt_without_adapter_is_not_given_one(reference: dict[str, Any]) -> None:
    """In a batch with others that have one."""
    assert all(_with_and_without_adapters(reference, slice(0, None, 3)))


def test_structured_output_is_obeyed(cases: dict[str, Any], reference: dict[str, Any], tokenizer: Any) -> None:
    """The reference itself is constrained: a mask that nobody applied would pass the comparison otherwise."""
    assert not isinstance(reference["kimi-structured"], str), reference["kimi-structured"]
    texts = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens, _, _ in reference["kimi-structured"]]

    assert texts[1] in ("yes", "no", "maybe")
    assert texts[2][3] == "-"


@pytest.mark.parametrize("name", ["llama-chunked", "llama-structured", "kimi"])
def test_asynchronous_scheduler_gives_the_same_tokens(
    name: str, cases: dict[str, Any], reference: dict[str, Any]
) -> None:
    """vLLM's asynchronous scheduler, stepped in lockstep, changes nothing.

    It is asked for by class: on CPU vLLM 0.32 resets ``async_scheduling`` of the config (platforms/cpu.py).
    """
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    finished = _run(cases[name], scheduler_cls=AsyncScheduler)

    assert [list(f.token_ids) for f in finished] == [row[0] for row in reference[name]]

"""EngineLoop against vllm.LLM on a GPU, and the states of two GPUs against those of one; prints one JSON document.

    python tests/device/check_engine.py --model tests/fixtures/tiny-kimi

Needs vLLM with a CUDA build, transformers and a GPU (two for states-tp2); no package index. Targets: "mla", a random
DeepSeek-V3 with Kimi's head sizes, and "wide", Kimi at full width (hidden 7168, 64 heads, MLA, 6 layers, 32 experts)
with dummy weights. Names: <target>-<mode>-<runner> for the tokens, states-tp<size>-<runner> for the states.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from check_capture import prompts, target_of
from checks import Check, Checks, machine
from kimi_shape import KIMI

#: Of the 8 layers of "mla", for the comparison of one GPU with two; hooks give all of them on every release.
LAYERS = (0, 2, 4, 5, 8)


def arguments_of(given: argparse.Namespace, target: str) -> dict[str, Any]:
    """Engine arguments; less than half of the memory, since a vllm.LLM that was shut down may hold its share still."""
    made: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 1024, "max_num_seqs": 8}
    made |= {"gpu_memory_utilization": 0.4, "enable_prefix_caching": False, "skip_tokenizer_init": True}
    if target == "mla":
        return {**made, "model": str(target_of(given, "mla"))}
    folder = Path(given.scratch, "wide")
    folder.mkdir(exist_ok=True)
    Path(folder, "config.json").write_text(json.dumps(KIMI))
    return {**made, "model": str(folder), "load_format": "dummy"}


def identity(given: argparse.Namespace, target: str, *, eager: bool) -> dict[str, Any]:
    """Tokens of vllm.LLM and of EngineLoop, one after the other in this process, with the same engine arguments."""
    import torch
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    import vllm_compat as vc

    # In step with the loop, which does not schedule ahead.
    engine = {**arguments_of(given, target), "enforce_eager": eager, "async_scheduling": False}
    options = {"max_tokens": 24, "ignore_eos": True, "detokenize": False}
    kinds = {"greedy": {"temperature": 0.0}, "seeded": {"temperature": 0.8, "top_p": 0.9, "seed": 7}}
    sent = prompts(given.model)
    inputs = [TokensPrompt(prompt_token_ids=ids) for ids in sent]
    llm = LLM(**engine)
    theirs = {}
    for name, kind in kinds.items():
        outputs = llm.generate(inputs, SamplingParams(**options, **kind), use_tqdm=False)
        theirs[name] = [list(output.outputs[0].token_ids) for output in outputs]
    llm.llm_engine.engine_core.shutdown()
    del llm
    torch.cuda.empty_cache()
    report: dict[str, Any] = {}
    with vc.EngineLoop(vc.make_vllm_config(**engine)) as loop:
        report["num_gpu_blocks"] = loop.kv_cache_config.num_blocks
        for name, kind in kinds.items():
            # All at once, as vllm.LLM adds them: a batch of other rows rounds differently.
            params = vc.make_sampling_params(**options, **kind)
            finished = list(loop.generate(sent, params, max_in_flight=len(inputs)))
            same = [list(done.token_ids) == tokens for done, tokens in zip(finished, theirs[name], strict=True)]
            report[name] = f"{sum(same)} of {len(same)} prompts token-identical"
        if eager:
            with vc.capture_hidden_states(loop, (2, 4)) as capture:
                report["runner"] = capture.model_info["runner"]
    return report


def states(given: argparse.Namespace, size: int, runner: str) -> dict[str, Any]:
    """Hidden states of every prompt, on so many GPUs, left in the scratch folder."""
    import torch
    from safetensors.torch import save_file

    import vllm_compat as vc

    if torch.cuda.device_count() < size:
        return {"left out": f"{torch.cuda.device_count()} GPU here"}
    engine = {**arguments_of(given, "mla"), "enforce_eager": True, "tensor_parallel_size": size}
    params = vc.make_sampling_params(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
    sent = prompts(given.model)
    kept: dict[str, torch.Tensor] = {}
    with (
        vc.EngineLoop(vc.make_vllm_config(**engine)) as loop,
        vc.capture_hidden_states(loop, LAYERS) as capture,
    ):
        for index, done in enumerate(loop.generate(sent, params)):
            captured = capture.pop(done.request_id)
            # What is generated may differ behind a near tie.
            kept[str(index)] = captured.hidden_states[: len(sent[index])].contiguous()
    save_file(kept, Path(given.scratch, f"tp{size}-{runner}.safetensors"))
    return {"runner": capture.model_info["runner"]}


def compare(given: argparse.Namespace, checks: dict[str, Any]) -> dict[str, Any]:
    """Two GPUs against one: per runner and boundary, the median over tokens of the relative error.

    The median, because a router's near tie that rounding decides otherwise sends a token through another expert.
    """
    import torch
    from safetensors.torch import load_file

    found: dict[str, Any] = {}
    for runner in ("v1", "v2"):
        files = [Path(given.scratch, f"tp{size}-{runner}.safetensors") for size in (1, 2)]
        if not all(checks.get(f"states-tp{size}-{runner}", {}).get("ok") for size in (1, 2)):
            continue
        if not all(file.exists() for file in files):
            continue
        one, two = map(load_file, files)
        errors = [
            (one[key].float() - two[key].float()).norm(dim=2) / one[key].float().norm(dim=2).clamp(1e-9) for key in one
        ]
        found[runner] = [f"{error:.1e}" for error in torch.cat(errors).median(dim=0).values]
    return {"two_gpus_median_relative_error_per_boundary": found} if found else {}


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    checks = Checks(__file__, parser)

    def identity_check(target: str, *, eager: bool) -> Check:
        return lambda given: identity(given, target, eager=eager)

    def states_check(size: int, runner: str) -> Check:
        return lambda given: states(given, size, runner)

    for runner in ("v2", "v1"):
        flag = str(int(runner == "v2"))
        for target, eager in (("mla", True), ("mla", False), ("wide", True)):
            name = f"{target}-{'eager' if eager else 'compiled'}-{runner}"
            checks.add(name, identity_check(target, eager=eager), limit=150, VLLM_USE_V2_MODEL_RUNNER=flag)
    for runner in ("v1", "v2"):
        flag = str(int(runner == "v2"))
        for size in (1, 2):
            check = states_check(size, runner)
            # NVLink multicast is not to be had everywhere.
            environment = {"VLLM_USE_V2_MODEL_RUNNER": flag, "NCCL_NVLS_ENABLE": "0"}
            checks.add(f"states-tp{size}-{runner}", check, limit=100, usual=True, **environment)
    return checks.main(machine, compare)


if __name__ == "__main__":
    sys.exit(main())

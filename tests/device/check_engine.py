"""EngineLoop against vllm.LLM on a GPU, and the states of two GPUs against those of one; prints one JSON document.

    python tests/device/check_engine.py --model tests/fixtures/tiny-kimi

Needs vLLM with a CUDA build, transformers and a GPU (two for the second part, which says so otherwise); no package
index. Targets: a random DeepSeek-V3 with Kimi's head sizes, on the V1 and the V2 model runner, eager and compiled; and
Kimi at full width (hidden 7168, 64 heads, MLA, 6 layers, 32 experts) with dummy weights. Each case has a process of its
own and a place in the document, whether it came to its end or not.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from check_capture import build_random, prompts
from checks import ENVIRONMENT
from kimi_shape import KIMI


def identity(case: dict[str, Any]) -> dict[str, Any]:
    """Tokens of vllm.LLM and of EngineLoop, one after the other in this process, with the same engine arguments."""
    import torch
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    import vllm_compat as vc

    options = {"max_tokens": 24, "ignore_eos": True, "detokenize": False}
    kinds = {"greedy": {"temperature": 0.0}, "seeded": {"temperature": 0.8, "top_p": 0.9, "seed": 7}}
    inputs = [TokensPrompt(prompt_token_ids=ids) for ids in case["prompts"]]
    llm = LLM(**case["engine"])
    theirs = {}
    for name, kind in kinds.items():
        outputs = llm.generate(inputs, SamplingParams(**options, **kind), use_tqdm=False)
        theirs[name] = [list(output.outputs[0].token_ids) for output in outputs]
    llm.llm_engine.engine_core.shutdown()
    del llm
    torch.cuda.empty_cache()
    report: dict[str, Any] = {}
    with vc.EngineLoop(vc.make_vllm_config(**case["engine"])) as loop:
        report["num_gpu_blocks"] = loop.kv_cache_config.num_blocks
        for name, kind in kinds.items():
            # All at once, as vllm.LLM adds them: a batch of other rows rounds differently.
            finished = list(
                loop.generate(case["prompts"], vc.make_sampling_params(**options, **kind), max_in_flight=len(inputs))
            )
            same = [list(done.token_ids) == tokens for done, tokens in zip(finished, theirs[name], strict=True)]
            report[name] = f"{sum(same)} of {len(same)} prompts token-identical"
        if case["engine"].get("enforce_eager"):
            with vc.capture_hidden_states(loop, (2, 4)) as capture:
                report["runner"] = capture.model_info["runner"]
    return report


def states(case: dict[str, Any]) -> dict[str, Any]:
    """Hidden states and tokens of every prompt, into a file."""
    import torch
    from safetensors.torch import save_file

    import vllm_compat as vc

    params = vc.make_sampling_params(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
    kept: dict[str, torch.Tensor] = {}
    with (
        vc.EngineLoop(vc.make_vllm_config(**case["engine"])) as loop,
        vc.capture_hidden_states(loop, case["layers"]) as capture,
    ):
        for index, done in enumerate(loop.generate(case["prompts"], params)):
            captured = capture.pop(done.request_id)
            length = len(case["prompts"][index])  # what is generated may differ behind a near tie
            kept[str(index)] = captured.hidden_states[:length].contiguous()
        runner = capture.model_info["runner"]
    save_file(kept, case["out"])
    return {"runner": runner}


CASES = {"identity": identity, "states": states}


def run(what: str, case: dict[str, Any], environment: dict[str, str], scratch: Path) -> dict[str, Any]:
    """A case in a process of its own; its report, or the end of what it said."""
    with tempfile.NamedTemporaryFile("w", dir=scratch, suffix=".json", delete=False) as writer:
        json.dump(case, writer)
    file = writer.name
    began = time.monotonic()
    command = [sys.executable, __file__, "--case", what, file]
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **ENVIRONMENT, **environment},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        return {"error": f"not done after {error.timeout} s"}
    seconds = {"seconds": round(time.monotonic() - began, 1)}
    if done.returncode:
        return {"error": (done.stdout + done.stderr)[-3000:], **seconds}
    results = [line for line in done.stdout.splitlines() if line.startswith("{")]  # vLLM may log when it ends
    return {**json.loads(results[-1]), **seconds}


def identities(model: Path, random: Path, wide: Path, scratch: Path) -> dict[str, Any]:
    """EngineLoop against vllm.LLM, case by case."""
    import torch

    sent = prompts(model)
    common = {"dtype": "bfloat16", "max_model_len": 1024, "max_num_seqs": 8, "gpu_memory_utilization": 0.4}
    # In step with the loop, which does not schedule ahead.
    common |= {"async_scheduling": False, "enable_prefix_caching": False, "skip_tokenizer_init": True}
    small = {**common, "model": str(random)}
    full = {**common, "model": str(wide), "load_format": "dummy"}
    engines = {
        "random-with-mla, eager": {**small, "enforce_eager": True},
        "random-with-mla, compiled": small,
        "full width, eager": {**full, "enforce_eager": True},
    }

    def on_runner(runner: str, flag: str, gpu: int) -> dict[str, Any]:
        environment = {"VLLM_USE_V2_MODEL_RUNNER": flag, "CUDA_VISIBLE_DEVICES": str(gpu)}
        return {
            f"{name}, {runner}": run("identity", {"engine": engine, "prompts": sent}, environment, scratch)
            for name, engine in engines.items()
        }

    # A runner on each GPU at the same time, if there are two.
    gpus = torch.cuda.device_count()
    with ThreadPoolExecutor(min(gpus, 2)) as pool:
        both = [pool.submit(on_runner, "v1", "0", 0), pool.submit(on_runner, "v2", "1", min(1, gpus - 1))]
    return {name: report for runner in both for name, report in runner.result().items()}


def two_gpus(model: Path, random: Path, scratch: Path) -> dict[str, Any]:
    """States of two GPUs against those of one."""
    import torch
    from safetensors.torch import load_file

    if torch.cuda.device_count() < 2:
        return {"left out": "one GPU here"}
    engine = {"model": str(random), "dtype": "bfloat16", "enforce_eager": True, "max_model_len": 1024}
    engine |= {"gpu_memory_utilization": 0.3, "max_num_seqs": 8, "enable_prefix_caching": False}
    report: dict[str, Any] = {}
    for runner, flag in {"v1": "0", "v2": "1"}.items():
        kept = {}
        for size in (1, 2):
            out = scratch / f"tp{size}.safetensors"
            case = {
                "engine": {**engine, "tensor_parallel_size": size},
                "prompts": prompts(model),
                "layers": [0, 2, 4, 5, 8],
            }
            environment = {"VLLM_USE_V2_MODEL_RUNNER": flag, "NCCL_NVLS_ENABLE": "0"}
            report[f"{runner}, {size}"] = run("states", {**case, "out": str(out)}, environment, scratch)
            if "error" not in report[f"{runner}, {size}"]:
                kept[size] = load_file(out)
        if len(kept) == 2:
            # The median: a router's near tie that rounding decides otherwise sends a token through another expert.
            errors = torch.cat(
                [
                    (kept[1][key].float() - kept[2][key].float()).norm(dim=2)
                    / kept[1][key].float().norm(dim=2).clamp(1e-9)
                    for key in kept[1]
                ]
            )
            report[f"{runner}, median relative error per boundary"] = [f"{e:.1e}" for e in errors.median(dim=0).values]
    return report


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path)
    parser.add_argument("--out", type=Path, default=Path("engine.json"))
    parser.add_argument("--only", choices=("identity", "two-gpus"))
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        what, file = arguments.case
        print(json.dumps(CASES[what](json.loads(Path(file).read_text()))))
        return
    import torch

    import vllm_compat as vc

    here = vc.installed()
    report: dict[str, Any] = {"vllm": here.version, "distribution": here.distribution, "torch": torch.__version__}
    report |= {"gpu": torch.cuda.get_device_name(), "gpus": torch.cuda.device_count()}
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        random = build_random(scratch / "random", arguments.model)
        wide = scratch / "wide"
        wide.mkdir()
        (wide / "config.json").write_text(json.dumps(KIMI))
        # After each part: a machine's time may end before the last one.
        if arguments.only != "two-gpus":
            report["EngineLoop against vllm.LLM"] = identities(arguments.model, random, wide, scratch)
            arguments.out.write_text(json.dumps(report, indent=1) + "\n")
        if arguments.only != "identity":
            report["two GPUs against one"] = two_gpus(arguments.model, random, scratch)
            arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()

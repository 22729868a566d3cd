"""speculators, unmodified, on a GPU: its generator on the V1 and the V2 model runner; prints one JSON document.

    python tests/device/check_speculators.py --model tests/fixtures/tiny-kimi --speculators FOLDER

FOLDER is what ``pip install --no-deps --target FOLDER speculators==0.3.0 loguru`` makes: two packages, Python alone,
with their ``.dist-info``. Needs vLLM, transformers and a GPU; no package index. Where ``datasets`` is installed and
FOLDER has ``data_generation_offline.py``, the script runs too.

``--tensor-parallel-size 2`` is for a machine with two: DeepSeek's layers may then run on shards of the tokens, and
the answer is either right or a refusal.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from check_capture import ENVIRONMENT, build_random, prompts  # noqa: E402

#: Neither ascending nor all different, the last layer among them.
LAYER_IDS = [5, 2, 7, 2]
MAX_MODEL_LEN = 1024


def build_llama(out: Path, tokenizer_from: Path) -> Path:
    """A random Llama of 8 layers, which Model Runner V2 serves by default from 0.23 on."""
    import shutil

    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"vocab_size": 2048, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8}
    shape |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 2048}
    torch.manual_seed(0)
    config = LlamaConfig(**shape, eos_token_id=2030, pad_token_id=2047, initializer_range=0.04)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(out)
    for name in ("tokenizer.json", "tokenizer_config.json", "conversations.jsonl", "chat_template.jinja"):
        shutil.copy(tokenizer_from / name, out / name)
    return out


def batches(model: Path) -> dict[str, list[list[int]]]:
    """Name -> prompts: mixed lengths, which a runner may reorder; and more tokens than a step takes."""
    mixed = prompts(model)
    long = [[(7 * i + at) % 2000 for at in range(900 - 30 * i)] for i in range(20)]
    return {"mixed": mixed, "over the budget": long, "again": mixed[::-1]}


def one_runner(model: Path, tensor_parallel_size: int) -> dict[str, Any]:
    """Everything on the runner that the environment asks for."""
    import vllm_compat as vc

    assert vc.enable("speculators"), "speculators 0.3 or 0.4 is not installed here"
    from speculators.data_generation import VllmHiddenStatesGenerator

    began = time.monotonic()
    generator = VllmHiddenStatesGenerator(
        str(model),
        layer_ids=LAYER_IDS,
        max_model_len=MAX_MODEL_LEN,
        gpu_memory_utilization=0.4,
        tensor_parallel_size=tensor_parallel_size,
    )
    result: dict[str, Any] = {"runner": generator._vllm_compat[1].model_info["runner"]}
    made = {}
    try:
        for name, sent in batches(model).items():
            made[name] = generator.generate(sent)
        try:
            generator.generate([[5], []])
        except vc.CaptureError as error:
            result["empty prompt"] = str(error)
        result["after it"] = len(generator.generate([[5, 6]]))
    except vc.CaptureError as error:
        result["refused"] = str(error)
    del generator
    result["seconds"] = round(time.monotonic() - began, 1)
    reference = Reference(model)
    for name, results in made.items():
        result[name] = reference.compare(batches(model)[name], results)
    return result


class Reference:
    """transformers' residual stream after the layers asked for, in the same dtype."""

    def __init__(self, model: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).to(self.device).eval()
        self.final: list[Any] = []
        self.model.model.norm.register_forward_pre_hook(lambda _, args: self.final.append(args[0]))

    def compare(self, sent: list[list[int]], results: list[dict[str, Any]]) -> dict[str, Any]:
        """Median over tokens of the relative error, per layer id; and the prompts whose rows are not theirs.

        The median, because a router's near tie that rounding decides otherwise sends a token through another expert.
        """
        import torch

        errors, wrong = [], []
        for at, (prompt, result) in enumerate(zip(sent, results, strict=True)):
            self.final.clear()
            with torch.no_grad():
                answer = self.model(torch.tensor([prompt], device=self.device), output_hidden_states=True)
            boundaries = [*answer.hidden_states[:-1], self.final[0]]
            expected = torch.stack([boundaries[layer + 1][0] for layer in LAYER_IDS], dim=1).float().cpu()
            states = torch.stack(result["hidden_states"], dim=1).float()
            assert result["input_ids"].tolist() == prompt
            per_token = (states - expected).norm(dim=2) / expected.norm(dim=2)  # [T, layer ids]
            errors.append(per_token)
            if per_token.median() > 0.5:
                wrong.append(at)
        medians = torch.cat(errors).median(dim=0).values.tolist()
        return {
            "prompts": len(sent),
            "median_relative_error_per_layer_id": [f"{value:.1e}" for value in medians],
            "prompts_with_rows_of_others": wrong,
        }


def run_script(script: Path, model: Path, environment: dict[str, str]) -> dict[str, Any]:
    """data_generation_offline.py, through ``vllm-compat run``."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "conversations.jsonl")
        with (model / "conversations.jsonl").open(encoding="utf-8") as lines:
            rows = [
                json.dumps({"conversations": json.loads(line)["messages"]})
                for line, _ in zip(lines, range(40), strict=False)
            ]
        data.write_text("\n".join(rows) + "\n")
        command = [sys.executable, "-m", "vllm_compat", "run", "--", sys.executable, str(script)]
        command += ["--target-model-path", str(model), "--train-data-path", str(data), "--output-dir", "data"]
        command += ["--seq-length", "1024", "--batch-size", "16", "--tensor-parallel-size", "1"]
        command += ["--num-preprocessing-workers", "1", "--gpu-memory-utilization", "0.4"]
        if "--max-model-len" in script.read_text(encoding="utf-8"):
            command += ["--max-model-len", "1024"]
        environment = {**environment, "HF_DATASETS_CACHE": str(Path(folder, "cache"))}
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        if done.returncode:
            return {"error": (done.stdout + done.stderr)[-3000:]}
        files = sorted(Path(folder, "data").glob("data_*.pt"))
        tokens = sum(len(torch.load(file, weights_only=True)["input_ids"]) for file in files)
        said = json.loads(Path(folder, "data", "vllm_compat.json").read_text())
        return {"files": len(files), "tokens": tokens, "vllm_compat.json": said}


def main() -> None:
    """Both runners on three targets."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--speculators", type=Path, help="what pip --target made; default: it is installed")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("device-speculators.json"))
    parser.add_argument("--runner", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.runner:
        print(json.dumps(one_runner(arguments.model, arguments.tensor_parallel_size)))
        return
    import torch

    import vllm_compat as vc

    path = [str(arguments.speculators.resolve())] if arguments.speculators else []
    path += [str(HERE.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(path)}
    report: dict[str, Any] = {
        "vllm": vc.installed().version,
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "layer_ids": LAYER_IDS,
        "tensor_parallel_size": arguments.tensor_parallel_size,
    }
    with tempfile.TemporaryDirectory() as scratch:
        targets = {
            "llama": (build_llama(Path(scratch, "llama"), arguments.model), {}),
            "random-with-mla": (build_random(Path(scratch, "random"), arguments.model), {}),
            "tiny-kimi-without-mla": (arguments.model.resolve(), {"VLLM_MLA_DISABLE": "1"}),
        }
        for name, (model, more) in targets.items():
            report[name] = {}
            for runner, flag in {"v1": "0", "v2": "1"}.items():
                command = [sys.executable, __file__, "--model", str(model), "--runner"]
                command += ["--tensor-parallel-size", str(arguments.tensor_parallel_size)]
                variables = {**environment, **more, "VLLM_USE_V2_MODEL_RUNNER": flag}
                done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=400, check=False)
                last = (done.stdout.strip().splitlines() or [""])[-1]
                said = {"error": (done.stdout + done.stderr)[-3000:]} if done.returncode else json.loads(last)
                report[name][runner] = said
                # After each part: a machine's time may end before the last one.
                arguments.out.write_text(json.dumps(report, indent=1) + "\n")
        script = arguments.speculators and arguments.speculators.resolve() / "data_generation_offline.py"
        if script and script.is_file() and importlib.util.find_spec("datasets") is not None:
            report["script"] = run_script(script, targets["llama"][0], environment)
        else:
            report["script"] = "not run: it needs datasets, and data_generation_offline.py in the folder"
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()

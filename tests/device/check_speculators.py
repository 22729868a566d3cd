"""speculators, unmodified, on a GPU: its generator on the V1 and the V2 model runner; prints one JSON document.

    python tests/device/check_speculators.py --model tests/fixtures/tiny-kimi --speculators FOLDER

FOLDER is what ``pip install --no-deps --target FOLDER speculators==0.3.0 loguru`` makes: two packages, Python alone,
with their ``.dist-info``. Needs vLLM, transformers and a GPU; no package index. Where ``datasets`` is installed and
FOLDER has ``data_generation_offline.py``, the script runs too: ``--only script``. Names: <target>-<runner>, where the
target is "llama" (which Model Runner V2 serves by default from 0.23 on), "mla" (random, Kimi's real head sizes) or
"tiny" (the committed one, without MLA).

``--tensor-parallel-size 2`` is for a machine with two GPUs: DeepSeek's layers may then run on shards of the tokens, and
the answer is either right or a refusal.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from check_capture import prompts, target_of
from checks import Check, Checks, machine

#: Neither ascending nor all different, the last layer among them.
LAYER_IDS = [5, 2, 7, 2]
MAX_MODEL_LEN = 1024


def target(given: argparse.Namespace, name: str) -> Path:
    """The model, made by the first check that needs it."""
    if name != "llama":
        return target_of(given, name).resolve()
    path = Path(given.scratch, "llama")
    if not (path / "conversations.jsonl").exists():
        shutil.rmtree(path, ignore_errors=True)
        build_llama(path, given.model)
    return path


def build_llama(out: Path, tokenizer_from: Path) -> None:
    """A random Llama of 8 layers."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"vocab_size": 2048, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8}
    shape |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 2048}
    torch.manual_seed(0)
    config = LlamaConfig(**shape, eos_token_id=2030, pad_token_id=2047, initializer_range=0.04)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(out)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "conversations.jsonl"):
        shutil.copy(tokenizer_from / name, out / name)


def batches(model: Path) -> dict[str, list[list[int]]]:
    """Name -> prompts: mixed lengths, which a runner may reorder; more tokens than a step takes; the first again."""
    mixed = prompts(model)
    long = [[(7 * i + at) % 2000 for at in range(900 - 30 * i)] for i in range(20)]
    return {"mixed": mixed, "over the budget": long, "again": mixed[::-1]}


def generator(given: argparse.Namespace, name: str) -> dict[str, Any]:
    """What the generator returns, against transformers; an empty prompt, and a call after it."""
    import vllm_compat as vc

    assert vc.enable("speculators"), "speculators 0.3 or 0.4 is not installed here"
    from speculators.data_generation import VllmHiddenStatesGenerator

    model = target(given, name)
    made: dict[str, list[dict[str, Any]]] = {}
    result: dict[str, Any] = {}
    try:
        generator = VllmHiddenStatesGenerator(
            str(model),
            layer_ids=LAYER_IDS,
            max_model_len=MAX_MODEL_LEN,
            gpu_memory_utilization=0.4,
            tensor_parallel_size=given.tensor_parallel_size,
        )
        result |= {key: generator._vllm_compat[1].model_info[key] for key in ("runner", "way")}
        for batch, sent in batches(model).items():
            made[batch] = generator.generate(sent)
        try:
            generator.generate([[5], []])
        except vc.CaptureError as error:
            result["empty prompt"] = str(error)
        result["after it"] = len(generator.generate([[5, 6]]))
        del generator
    except vc.CaptureError as error:
        result["refused"] = str(error)
    reference = Reference(model)
    for batch, results in made.items():
        result[batch] = reference.compare(batches(model)[batch], results)
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


def script(given: argparse.Namespace) -> dict[str, Any]:
    """data_generation_offline.py, through ``vllm-compat run``."""
    import torch

    path = given.speculators.resolve() / "data_generation_offline.py"
    model = target(given, "llama")
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "conversations.jsonl")
        with (model / "conversations.jsonl").open(encoding="utf-8") as lines:
            first = [json.loads(line)["messages"] for line, _ in zip(lines, range(40), strict=False)]
        data.write_text("".join(json.dumps({"conversations": messages}) + "\n" for messages in first))
        command = [sys.executable, "-m", "vllm_compat", "run", "--", sys.executable, str(path)]
        command += ["--target-model-path", str(model), "--train-data-path", str(data), "--output-dir", "data"]
        command += ["--seq-length", "1024", "--batch-size", "16", "--tensor-parallel-size", "1"]
        command += ["--num-preprocessing-workers", "1", "--gpu-memory-utilization", "0.4"]
        if "--max-model-len" in path.read_text(encoding="utf-8"):
            command += ["--max-model-len", "1024"]
        environment = {**os.environ, "HF_DATASETS_CACHE": str(Path(folder, "cache"))}
        subprocess.run(command, cwd=folder, env=environment, check=True)
        files = sorted(Path(folder, "data").glob("data_*.pt"))
        tokens = sum(len(torch.load(file, weights_only=True)["input_ids"]) for file in files)
        said = json.loads(Path(folder, "data", "vllm_compat.json").read_text())
        return {"files": len(files), "tokens": tokens, "boundaries": said["boundaries"]}


def wrong(_: argparse.Namespace, checks: dict[str, Any]) -> dict[str, Any]:
    """Every prompt, of any check, that got rows of another one; there should be none."""
    found = {
        f"{name}, {batch}": entry["prompts_with_rows_of_others"]
        for name, check in checks.items()
        for batch, entry in check.items()
        if isinstance(entry, dict) and entry.get("prompts_with_rows_of_others")
    }
    return {"prompts_with_rows_of_others": found}


def main() -> int:
    first = argparse.ArgumentParser(add_help=False)
    first.add_argument("--speculators", type=Path, help="what pip --target made; default: it is installed")
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0], parents=[first])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    checks = Checks(__file__, parser)
    folder = first.parse_known_args()[0].speculators
    path = [str(folder.resolve())] if folder else []
    path += [str(Path(__file__).parents[2].resolve()), *filter(None, [os.environ.get("PYTHONPATH")])]
    for name in ("llama", "mla", "tiny"):
        for runner in ("v1", "v2"):
            environment = {"PYTHONPATH": os.pathsep.join(path), "VLLM_USE_V2_MODEL_RUNNER": str(int(runner == "v2"))}
            environment |= {"VLLM_MLA_DISABLE": "1"} if name == "tiny" else {}
            checks.add(f"{name}-{runner}", generator_check(name), limit=120, **environment)
    checks.add("script", script, limit=150, usual=False, PYTHONPATH=os.pathsep.join(path))
    return checks.main(machine, wrong)


def generator_check(name: str) -> Check:
    return lambda given: generator(given, name)


if __name__ == "__main__":
    sys.exit(main())

"""Hidden states and EAGLE-3 serving on a GPU, on the V1 and the V2 model runner; prints one JSON document.

    python tests/device/check_capture.py --model tests/fixtures/tiny-kimi

Needs vLLM with a CUDA build, transformers, and one GPU; no package index. Two targets: the tiny one, which runs without
MLA there (FlashAttention's MLA prefill wants Kimi's real head sizes, 128 + 64 and 128), and a random one with those
sizes, MLA, and an untrained MLA head. Each runner gets a process of its own, because vLLM reads
VLLM_USE_V2_MODEL_RUNNER when the configuration is made.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}


def prompts(model: Path) -> list[list[int]]:
    """Rendered prompts of mixed lengths, some with a common prefix."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    made = []
    with (model / "conversations.jsonl").open(encoding="utf-8") as lines:
        for line, _ in zip(lines, range(12), strict=False):
            messages = json.loads(line)["messages"]
            for turns in (1, 5):
                text = tokenizer.apply_chat_template(messages[:turns], tokenize=False, add_generation_prompt=True)
                made.append(tokenizer.encode(text, add_special_tokens=False)[:300])
    return made


def build_random(out: Path, tokenizer_from: Path) -> Path:
    """A random DeepSeek-V3 with Kimi's head and latent sizes, 8 layers, hidden size 512."""
    import torch
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    shape = json.loads((tokenizer_from / "config.json").read_text())
    shape |= {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8, "q_lora_rank": 256}
    shape |= {"qk_nope_head_dim": 128, "v_head_dim": 128, "moe_intermediate_size": 128, "initializer_range": 0.04}
    torch.manual_seed(0)
    DeepseekV3ForCausalLM(DeepseekV3Config(**shape)).to(torch.bfloat16).save_pretrained(out)
    (out / "config.json").write_text(json.dumps(shape))
    for name in ("tokenizer.json", "tokenizer_config.json", "conversations.jsonl"):
        shutil.copy(tokenizer_from / name, out / name)
    return out


def build_head(target: Path, out: Path) -> Path:
    """An untrained MLA head for ``target``: it proposes, and nearly everything is rejected."""
    import torch

    from vllm_compat.kimi.draft import init_draft
    from vllm_compat.kimi.draft_config import DraftConfig
    from vllm_compat.kimi.export import export_draft
    from vllm_compat.kimi.target import TargetHead
    from vllm_compat.kimi.vocab import build_vocab

    head = TargetHead.load(target).to("cpu", torch.float32)
    size = int(head.config["vocab_size"])
    vocab = build_vocab(torch.ones(size, dtype=torch.int64), size, [])
    config = DraftConfig.from_target(head.config, architecture="mla", aux_layers=(2, 4, 5), draft_vocab_size=size)
    export_draft(init_draft(config, head, vocab, seed=0).state_dict(), config, vocab, head.config, out)
    return out


def one_runner(model: Path, head: Path | None, out: Path) -> dict[str, Any]:
    """Everything on the runner that the environment asks for; the captured states go to ``out``."""
    import torch
    from safetensors.torch import save_file

    import vllm_compat as vc

    sent = prompts(model)
    common = {"model": str(model), "dtype": "bfloat16", "enforce_eager": True, "max_model_len": 1024}
    common |= {"gpu_memory_utilization": 0.3, "max_num_seqs": 8}
    greedy = vc.make_sampling_params(temperature=0.0, max_tokens=16, ignore_eos=True, detokenize=False)
    result: dict[str, Any] = {}
    states: dict[str, torch.Tensor] = {}
    for name, options in {
        "whole": {"enable_prefix_caching": False},
        "chunked": {"enable_prefix_caching": False, "max_num_batched_tokens": 64},
        "cached": {"enable_prefix_caching": True},
    }.items():
        with vc.EngineLoop(vc.make_vllm_config(**common, **options)) as loop:
            if name == "cached":
                for _ in loop.generate(sent, greedy):
                    pass
            with vc.capture_hidden_states(loop, range(9)) as capture:
                for index, done in enumerate(loop.generate(sent, greedy)):
                    captured = capture.pop(done.request_id)
                    states[f"{name}.{index}"] = captured.hidden_states.contiguous()
                    states[f"{name}.{index}.ids"] = torch.tensor(captured.token_ids)
            result["runner"] = capture.model_info["runner"]
            result["async_scheduling"] = loop.vllm_config.scheduler_config.async_scheduling
    if head is not None:
        params = vc.make_sampling_params(temperature=0.0, max_tokens=48, detokenize=False)
        speculative = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 4}
        options = {"enable_prefix_caching": False, "async_scheduling": False}
        with vc.EngineLoop(vc.make_vllm_config(**common, **options)) as loop:
            plain = [list(done.token_ids) for done in loop.generate(sent, params)]
        with vc.EngineLoop(vc.make_vllm_config(**common, **options, speculative_config=speculative)) as loop:
            finished = list(loop.generate(sent, params))
        steps = [step for done in finished for step in done.draft_steps]
        result["acceptance_length"] = round(sum(step.emitted for step in steps) / len(steps), 4)
        result["steps"] = len(steps)
        same = [a == list(b.token_ids) for a, b in zip(plain, finished, strict=True)]
        result["identical_prompts_with_head"] = f"{sum(same)} of {len(same)}"
    save_file(states, out)
    return result


def against_transformers(model: Path, states: dict[str, Any]) -> dict[str, list[str]]:
    """Median over tokens of the relative error, per boundary and way of running.

    transformers runs in the same dtype on the same GPU. The median, because a router's near tie that rounding decides
    otherwise sends a token through another expert: a few tokens then differ a lot, in either implementation.
    """
    import torch
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).cuda().eval()
    final: list[torch.Tensor] = []
    reference.model.norm.register_forward_pre_hook(lambda _, args: final.append(args[0]))
    errors: dict[str, list[torch.Tensor]] = {}
    for key in [key for key in states if key.endswith(".ids")]:
        final.clear()
        with torch.no_grad():
            hidden = reference(states[key].cuda()[None], output_hidden_states=True).hidden_states
        expected = torch.stack([*hidden[:-1], final[0]], dim=2)[0].cpu()
        name = key.removesuffix(".ids")
        ours = states[name].float()
        per_token = (ours - expected.float()).norm(dim=2) / expected.float().norm(dim=2)  # [T, L]
        errors.setdefault(name.partition(".")[0], []).append(per_token)
    medians = {way: torch.cat(parts).median(dim=0).values for way, parts in errors.items()}
    return {way: [f"{value:.1e}" for value in median.tolist()] for way, median in medians.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--head", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path("device.json"))
    parser.add_argument("--runner", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.runner:
        print(json.dumps(one_runner(arguments.model, arguments.head, Path(arguments.runner))))
        return
    import torch

    import vllm_compat as vc

    here = vc.installed()
    report: dict[str, Any] = {
        "vllm": here.version,
        "distribution": here.distribution,
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(),
        "dtype": "bfloat16",
    }
    with tempfile.TemporaryDirectory() as scratch:
        random = build_random(Path(scratch, "random"), arguments.model)
        head = build_head(random, Path(scratch, "head"))
        parts = {
            "random-with-mla": (random, head, {}),
            "tiny-kimi-without-mla": (arguments.model, None, {"VLLM_MLA_DISABLE": "1"}),
        }
        for name, part in parts.items():
            report[name] = compare(*part, scratch)
            # After each part: a machine's time may end before the last one.
            arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


def compare(model: Path, head: Path | None, environment: dict[str, str], scratch: str) -> dict[str, Any]:
    """Both runners on one target, each against transformers and against the other."""
    import torch
    from safetensors.torch import load_file

    report: dict[str, Any] = {}
    states = {}
    for runner, flag in {"v1": "0", "v2": "1"}.items():
        file = Path(scratch, f"states-{runner}.safetensors")
        command = [sys.executable, __file__, "--model", str(model), "--runner", str(file)]
        command += ["--head", str(head)] if head else []
        began = time.monotonic()
        done = subprocess.run(
            command,
            env={**os.environ, **ENVIRONMENT, **environment, "VLLM_USE_V2_MODEL_RUNNER": flag},
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        if done.returncode:
            report[runner] = {"error": (done.stdout + done.stderr)[-3000:]}
            continue
        states[runner] = load_file(file)
        file.unlink()
        report[runner] = {
            **json.loads(done.stdout.strip().splitlines()[-1]),
            "median_relative_error_per_boundary": against_transformers(model, states[runner]),
            "seconds": round(time.monotonic() - began, 1),
        }
    if len(states) == 2:
        report["v1_equals_v2_bit_for_bit"] = {
            way: all(
                torch.equal(states["v1"][key], states["v2"][key]) for key in states["v1"] if key.startswith(f"{way}.")
            )
            for way in ("whole", "chunked", "cached")
        }
    return report


if __name__ == "__main__":
    main()

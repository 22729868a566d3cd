"""Hidden states and EAGLE-3 serving on a GPU, on the V1 and the V2 model runner; prints one JSON document.

    python tests/device/check_capture.py --model tests/fixtures/tiny-kimi --out device.json

Needs vLLM with a CUDA build, transformers, and one GPU; no package index. Two targets: "mla", a random one with Kimi's
real head sizes (FlashAttention's MLA prefill wants 128 + 64 and 128) and an untrained MLA head for it; "tiny", the
committed one, which runs without MLA there. Each check has a process of its own, because vLLM reads
VLLM_USE_V2_MODEL_RUNNER when the configuration is made. Names: <target>-<what>-<runner>.

    states    every boundary, whole, in chunks of 64 and with a warm prefix cache, against transformers
    ways      auxiliary outputs and hooks, bit for bit, prompts and generated tokens
    native    vLLM's own extraction through vllm.LLM, bit for bit
    way       the same as a way of capturing, generated tokens too (0.24.0 or newer)
    compiled  torch.compile and CUDA graphs: auxiliary outputs against those of eager mode, prompts and generated tokens
    head      serving with the head: the same tokens as without
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from checks import Check, Checks, machine

#: Boundaries of the 8 layers; before 0.25.0 DeepSeek's models do not return the last one themselves.
LAYERS = (2, 4, 5, 8)


def boundaries() -> tuple[int, ...]:
    """Those of ``LAYERS`` that every way of this release gives."""
    import vllm_compat as vc

    return LAYERS if (vc.installed().release or (9,)) >= (0, 25) else LAYERS[:-1]


# -- targets ---------------------------------------------------------------------------------------------------------


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


def target_of(given: argparse.Namespace, name: str) -> Path:
    """The target, made by the first check that needs it."""
    if name == "tiny":
        model: Path = given.model
        return model
    path = Path(given.scratch, "random")
    if not (path / "conversations.jsonl").exists():
        shutil.rmtree(path, ignore_errors=True)
        build_random(path, given.model)
    return path


# -- engines ---------------------------------------------------------------------------------------------------------


def options_of(model: Path, **options: Any) -> dict[str, Any]:
    made = {"model": str(model), "dtype": "bfloat16", "enforce_eager": True, "max_model_len": 1024}
    return {**made, "gpu_memory_utilization": 0.3, "max_num_seqs": 8, "enable_prefix_caching": False, **options}


def captured(loop: Any, layers: Any, sent: list[list[int]], params: Any, way: str | None = None) -> list[Any]:
    """CapturedStates of all prompts, in order."""
    import vllm_compat as vc

    with vc.capture_hidden_states(loop, layers, way=way) as capture:
        assert way in (None, capture.way), capture.way
        return [capture.pop(done.request_id) for done in loop.generate(sent, params)]


def runner_of(loop: Any) -> str:
    return type(loop.executor.driver_worker.worker.model_runner).__module__


def states(given: argparse.Namespace, target: str, runner: str) -> dict[str, Any]:
    """Every boundary; the states are left in the scratch folder for the comparison of the runners."""
    import torch
    from safetensors.torch import save_file

    import vllm_compat as vc

    model = target_of(given, target)
    sent = prompts(model)
    greedy = vc.make_sampling_params(temperature=0.0, max_tokens=16, ignore_eos=True, detokenize=False)
    found: dict[str, torch.Tensor] = {}
    result: dict[str, Any] = {}
    for name, options in {
        "whole": {},
        "chunked": {"max_num_batched_tokens": 64},
        "cached": {"enable_prefix_caching": True},
    }.items():
        with vc.EngineLoop(vc.make_vllm_config(**options_of(model, **options))) as loop:
            if name == "cached":
                for _ in loop.generate(sent, greedy):
                    pass
            for index, one in enumerate(captured(loop, range(9), sent, greedy)):
                found[f"{name}.{index}"] = one.hidden_states.contiguous()
                found[f"{name}.{index}.ids"] = torch.tensor(one.token_ids)
            result["runner"] = runner_of(loop)
            result["async_scheduling"] = loop.vllm_config.scheduler_config.async_scheduling
    save_file(found, Path(given.scratch, f"{target}-{runner}.safetensors"))
    result["median_relative_error_per_boundary"] = against_transformers(model, found)
    return result


def against_transformers(model: Path, found: dict[str, Any]) -> dict[str, list[str]]:
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
    for key in [key for key in found if key.endswith(".ids")]:
        final.clear()
        with torch.no_grad():
            hidden = reference(found[key].cuda()[None], output_hidden_states=True).hidden_states
        expected = torch.stack([*hidden[:-1], final[0]], dim=2)[0].cpu()
        name = key.removesuffix(".ids")
        ours = found[name].float()
        per_token = (ours - expected.float()).norm(dim=2) / expected.float().norm(dim=2)  # [T, L]
        errors.setdefault(name.partition(".")[0], []).append(per_token)
    medians = {way: torch.cat(parts).median(dim=0).values for way, parts in errors.items()}
    return {way: [f"{value:.1e}" for value in median.tolist()] for way, median in medians.items()}


def ways(given: argparse.Namespace, target: str) -> dict[str, Any]:
    """Auxiliary outputs and hooks in one engine, in chunks of 64; a second call; nothing left behind."""
    import torch

    import vllm_compat as vc

    model = target_of(given, target)
    sent = prompts(model)
    greedy = vc.make_sampling_params(temperature=0.0, max_tokens=16, ignore_eos=True, detokenize=False)
    with vc.EngineLoop(vc.make_vllm_config(**options_of(model, max_num_batched_tokens=64))) as loop:
        plain = [done.token_ids for done in loop.generate(sent, greedy)]
        layers = boundaries()
        aux = captured(loop, layers, sent, greedy, "aux")
        hooks = captured(loop, layers, sent, greedy, "hooks")
        again = captured(loop, layers, sent, greedy, "aux")
        whole = captured(loop, LAYERS, sent, greedy)
        after = [done.token_ids for done in loop.generate(sent, greedy)]
        runner = runner_of(loop)
    return {
        "runner": runner,
        "prompts": len(sent),
        "boundaries": list(layers),
        "every_boundary_has_a_way": all(one.layers == LAYERS for one in whole),
        "aux_equals_hooks_bit_for_bit": equal(aux, hooks),
        "a_second_call_is_equal": equal(aux, again),
        "tokens_are_unchanged": plain == after,
        "on_the_cpu": all(one.hidden_states.device == torch.device("cpu") for one in aux),
    }


def equal(ones: list[Any], others: list[Any]) -> bool:
    import torch

    return len(ones) == len(others) > 0 and all(
        a.token_ids == b.token_ids and torch.equal(a.hidden_states, b.hidden_states)
        for a, b in zip(ones, others, strict=True)
    )


def native(given: argparse.Namespace, target: str) -> dict[str, Any]:
    """vLLM's own extraction against ours; prompts alone, whole, one generated token."""
    import torch
    from safetensors.torch import load_file
    from vllm import LLM, SamplingParams

    import vllm_compat as vc

    model = target_of(given, target)
    sent = prompts(model)
    params = vc.make_sampling_params(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
    # The same batches: kernels choose by the number of rows, and sums are rounded otherwise in another order.
    alone = {"max_num_seqs": 1}
    with vc.EngineLoop(vc.make_vllm_config(**options_of(model, **alone))) as loop:
        ours = captured(loop, boundaries(), sent, params)
    out = Path(given.scratch, f"native-{time.monotonic_ns()}")
    speculative = {"method": "extract_hidden_states", "num_speculative_tokens": 1}
    speculative |= {"draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(boundaries())}}}
    extra = {"shared_storage_path": str(out), "use_synchronization_lock": False}
    transfer = {"kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_producer"}
    transfer |= {"kv_connector_extra_config": extra}
    llm = LLM(**options_of(model, **alone), speculative_config=speculative, kv_transfer_config=transfer)
    greedy = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in sent], greedy, use_tqdm=False)
    llm.generate([{"prompt_token_ids": sent[0]}], greedy, use_tqdm=False)  # files of the last are written by this step
    time.sleep(2)
    same, differences = 0, []
    for output, one in zip(outputs, ours, strict=True):
        theirs = load_file((output.kv_transfer_params or {})["hidden_states_path"])
        assert theirs["token_ids"].tolist() == list(one.token_ids)
        if torch.equal(theirs["hidden_states"], one.hidden_states):
            same += 1
        else:
            a, b = theirs["hidden_states"].float(), one.hidden_states.float()
            differences.append(((a - b).norm(dim=(0, 2)) / b.norm(dim=(0, 2))).tolist())
    return {
        "our_way_equals_vllms_bit_for_bit": same == len(sent),
        "equal_prompts": f"{same} of {len(sent)}",
        "relative_differences_of_the_first_unequal": [f"{value:.1e}" for value in (differences or [[]])[0]],
    }


def extraction(given: argparse.Namespace, target: str) -> dict[str, Any]:
    """The same through ``way="native"`` of a loop made for it; generated tokens too, and hooks beside it."""
    import torch

    import vllm_compat as vc

    model = target_of(given, target)
    sent = prompts(model)
    params = vc.make_sampling_params(temperature=0.0, max_tokens=4, ignore_eos=True, detokenize=False)
    folder = Path(given.scratch, f"way-{time.monotonic_ns()}")
    options = options_of(model, max_num_seqs=1, async_scheduling=False)
    with vc.EngineLoop(vc.make_vllm_config(**options, **vc.native_capture_args(boundaries(), folder))) as loop:
        native_states = captured(loop, boundaries(), sent, params, "native")
        found = [(one.token_ids, one.hidden_states) for one in native_states]
        left = len(list(folder.iterdir()))
        hooks = captured(loop, boundaries(), sent, params, "hooks")
        runner = runner_of(loop)
    same = sum(ids == b.token_ids and torch.equal(a, b.hidden_states) for (ids, a), b in zip(found, hooks, strict=True))
    return {"runner": runner, "equal_prompts": f"{same} of {len(sent)}", "files_left": left}


def compiled(given: argparse.Namespace, target: str) -> dict[str, Any]:
    """Compiled against eager; whole tokens where both generate the same, and what a compiled loop refuses."""
    import torch

    import vllm_compat as vc

    model = target_of(given, target)
    sent, layers = prompts(model), boundaries()
    greedy = vc.make_sampling_params(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
    with vc.EngineLoop(vc.make_vllm_config(**options_of(model))) as loop:
        eager = captured(loop, layers, sent, greedy)
    config = vc.make_vllm_config(**options_of(model, enforce_eager=False))
    began = time.monotonic()
    with vc.EngineLoop(config, capture_layers=layers) as loop:
        started = round(time.monotonic() - began, 1)
        fast = captured(loop, layers, sent, greedy)
        some = captured(loop, layers[1:3], sent, greedy)
        said = refused(loop, (0, 8))
        runner = runner_of(loop)
    with vc.EngineLoop(vc.make_vllm_config(**options_of(model, enforce_eager=False))) as loop:
        unprepared = refused(loop, layers)
        plain = [done.token_ids for done in loop.generate(sent, greedy)]
    errors = []
    for a, b in zip(fast, eager, strict=True):
        n = next((i for i, (x, y) in enumerate(zip(a.token_ids, b.token_ids, strict=True)) if x != y), len(a.token_ids))
        ours, expected = a.hidden_states[:n].float(), b.hidden_states[:n].float()
        errors.append((ours - expected).norm(dim=2) / expected.norm(dim=2))
    return {
        "runner": runner,
        "start_seconds": started,
        "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
        "median_relative_error_per_boundary": [f"{v:.1e}" for v in torch.cat(errors).median(dim=0).values.tolist()],
        "a_part_of_the_layers_is_equal": all(
            torch.equal(a.hidden_states[:, 1:3], b.hidden_states) for a, b in zip(fast, some, strict=True)
        ),
        "same_tokens_as_compiled_without": sum(
            tuple(tokens) == (*one.token_ids[len(ids) :], tokens[-1])
            for tokens, one, ids in zip(plain, fast, sent, strict=True)
        ),
        "of": len(sent),
        "boundary_0_is_refused": said,
        "unprepared_is_refused": unprepared,
    }


def refused(loop: Any, layers: tuple[int, ...]) -> str:
    """What capture says; "" when it does not refuse."""
    import vllm_compat as vc

    try:
        vc.capture_hidden_states(loop, layers).close()
    except vc.CaptureError as error:
        return str(error)
    return ""


def head(given: argparse.Namespace, target: str) -> dict[str, Any]:
    """Serving with an untrained MLA head, and capturing beside it (by hooks: the head has the auxiliary outputs)."""
    import vllm_compat as vc

    model = target_of(given, target)
    path = Path(given.scratch, "head")
    if not (path / "config.json").exists():
        build_head(model, path)
    sent = prompts(model)
    params = vc.make_sampling_params(temperature=0.0, max_tokens=48, detokenize=False)
    speculative = {"method": "eagle3", "model": str(path), "num_speculative_tokens": 4}
    options = options_of(model, async_scheduling=False)
    with vc.EngineLoop(vc.make_vllm_config(**options)) as loop:
        plain = [list(done.token_ids) for done in loop.generate(sent, params)]
    with vc.EngineLoop(vc.make_vllm_config(**options, speculative_config=speculative)) as loop:
        finished = list(loop.generate(sent, params))
        with vc.capture_hidden_states(loop, LAYERS) as capture:
            way = capture.way
            lengths = [
                len(capture.pop(d.request_id).token_ids) - len(d.prompt_token_ids) - len(d.token_ids)
                for d in loop.generate(sent[:4], params)
            ]
    steps = [step for done in finished for step in done.draft_steps]
    same = [a == list(b.token_ids) for a, b in zip(plain, finished, strict=True)]
    return {
        "acceptance_length": round(sum(step.emitted for step in steps) / len(steps), 4),
        "steps": len(steps),
        "identical_prompts_with_head": f"{sum(same)} of {len(same)}",
        "way_beside_a_head": way,
        "states_beside_a_head_are_complete": set(lengths) == {-1},
    }


# -- all of it -------------------------------------------------------------------------------------------------------


def compare(given: argparse.Namespace, checks: dict[str, Any]) -> dict[str, Any]:
    """Both runners' states, bit for bit."""
    import torch
    from safetensors.torch import load_file

    found: dict[str, Any] = {}
    for target in ("mla", "tiny"):
        if not all(checks.get(f"{target}-states-{runner}", {}).get("ok") for runner in ("v1", "v2")):
            continue
        v1, v2 = (load_file(Path(given.scratch, f"{target}-{runner}.safetensors")) for runner in ("v1", "v2"))
        found[target] = {
            "v1_equals_v2_bit_for_bit": {
                way: all(torch.equal(v1[key], v2[key]) for key in v1 if key.startswith(f"{way}."))
                for way in ("whole", "chunked", "cached")
            }
        }
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    checks = Checks(__file__, parser)

    def add(target: str, what: str, runner: str, check: Check, limit: int, *, usual: bool = True) -> None:
        environment = {"VLLM_USE_V2_MODEL_RUNNER": str(int(runner == "v2"))}
        environment |= {"VLLM_MLA_DISABLE": "1"} if target == "tiny" else {}
        checks.add(f"{target}-{what}-{runner}", check, limit=limit, usual=usual, **environment)

    for runner in ("v2", "v1"):
        add("mla", "ways", runner, lambda given: ways(given, "mla"), 80)
    add("mla", "native", "v2", lambda given: native(given, "mla"), 100)
    add("mla", "compiled", "v2", lambda given: compiled(given, "mla"), 150)
    add("mla", "way", "v2", lambda given: extraction(given, "mla"), 90)
    add("mla", "native", "v1", lambda given: native(given, "mla"), 100, usual=False)
    add("mla", "compiled", "v1", lambda given: compiled(given, "mla"), 150, usual=False)
    for target in ("mla", "tiny"):
        for runner in ("v1", "v2"):
            check = states_check(target, runner)
            add(target, "states", runner, check, 120, usual=False)
    add("mla", "head", "v2", lambda given: head(given, "mla"), 100, usual=False)
    return checks.main(machine, compare)


def states_check(target: str, runner: str) -> Check:
    return lambda given: states(given, target, runner)


if __name__ == "__main__":
    sys.exit(main())

"""A trained head as vLLM loads it: a plain config and one safetensors file, checked before it is written.

Two things that cost others acceptance (kimi-eagle3 facts, finding 5 and field bugs E4, E11, E16):

- the aux boundaries are written at top level *and* in `eagle_config`. vLLM up to 0.21 and its V2 runner read
  the first, its V1 runner from 0.22 the second when the first is absent; verbatim, without the final one;
- the rotary settings are the target's own keys, unchanged.

The embedding is not written: vLLM and SGLang share the target's when the checkpoint has none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save

from vllm_compat.errors import DataError, ExportError

from .draft import Draft, init_draft
from .draft_config import ARCHITECTURES, MODEL_TYPES, DraftConfig
from .files import write_atomic, write_json
from .rope import Rope
from .target import TargetHead, load_text_config
from .vocab import VocabMap

if TYPE_CHECKING:
    from .config import Config
    from .progress import Progress

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")


def hf_config(config: DraftConfig, target: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """config.json of the head. `target` is the target's text config."""
    layers = list(config.aux_layers)
    made: dict[str, Any] = {
        "architectures": [ARCHITECTURES[config.architecture]],
        "model_type": MODEL_TYPES[config.architecture],
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_attention_heads,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "torch_dtype": dtype,
        **{key: target[key] for key in _TOKEN_KEYS if target.get(key) is not None},
        **config.rope_config,
        "eagle_aux_hidden_state_layer_ids": layers,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": layers,
            "use_aux_hidden_state": True,
            "use_input_layernorm_in_first_layer": True,
            "use_last_layernorm": True,
            "use_mtp_layernorm": False,
        },
    }
    if config.architecture == "llama":
        return {**made, "num_key_value_heads": config.num_key_value_heads, "head_dim": config.head_dim}
    return {
        **made,
        "num_key_value_heads": config.num_attention_heads,
        "q_lora_rank": config.q_lora_rank,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_nope_head_dim": config.qk_nope_head_dim,
        "qk_rope_head_dim": config.qk_rope_head_dim,
        "v_head_dim": config.v_head_dim,
        # Kimi's config class defaults to 256 experts; the head has none.
        "n_routed_experts": 0,
        "n_shared_experts": 0,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 0,
    }


def export_draft(
    state: Mapping[str, torch.Tensor],
    config: DraftConfig,
    vocab: VocabMap,
    target: Mapping[str, Any],
    out_dir: Path,
    dtype: str = "bfloat16",
) -> dict[str, Any]:
    """Write <out_dir>/{model.safetensors, config.json}; also used for the untrained head of an evaluation.

    Args:
        state: `Draft.state_dict()`.
        config: The head's shape.
        vocab: The map that it was trained with.
        target: The target's text config, to check against.
        out_dir: Created; both files are replaced atomically.
        dtype: Of the weights (d2t stays int64, t2d bool).

    Returns tensors, parameters and bytes. ExportError lists all that is wrong, and nothing is written.
    """
    tensors = {name: tensor.detach().cpu().to(_DTYPES[dtype]).contiguous() for name, tensor in state.items()}
    if not vocab.is_full:
        tensors |= {"d2t": vocab.d2t.contiguous(), "t2d": vocab.t2d.contiguous()}
    written = hf_config(config, target, dtype)
    check_export(tensors, written, target)
    data = save(tensors, metadata={"format": "pt"})
    write_atomic(out_dir / "model.safetensors", data)
    write_json(out_dir / "config.json", written)
    return {
        "architecture": written["architectures"][0],
        "aux_layers": list(config.aux_layers),
        "tensors": len(tensors),
        "parameters": sum(tensor.numel() for name, tensor in tensors.items() if name not in ("d2t", "t2d")),
        "bytes": len(data),
    }


def check_export(tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any], target: Mapping[str, Any]) -> None:
    """Everything that would make vLLM load the head wrongly or not at all; ExportError lists all of it."""
    problems = [*_config_problems(config, target)]
    shape = None
    if not problems:
        shape = config_from_hf(config, int(target["num_hidden_layers"]))
        problems += _tensor_problems(tensors, shape)
        problems += _vocab_problems(tensors, shape)
    if problems:
        raise ExportError(
            asked="exporting the draft head",
            needed="a checkpoint that vLLM loads as it was trained",
            found="; ".join(problems),
            advice="fix the stage that made it; nothing was written",
        )


def config_from_hf(config: Mapping[str, Any], target_num_layers: int) -> DraftConfig:
    """The inverse of `hf_config`."""
    architecture = {name: kind for kind, name in ARCHITECTURES.items()}[config["architectures"][0]]
    names = [
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "vocab_size",
        "draft_vocab_size",
        "rms_norm_eps",
    ]
    if architecture == "mla":
        names += ["q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"]
    else:
        names += ["num_key_value_heads", "head_dim"]
    rope_keys = ("rope_parameters", "rope_scaling", "rope_theta", "max_position_embeddings")
    return DraftConfig(
        architecture=architecture,
        aux_layers=tuple(config["eagle_aux_hidden_state_layer_ids"]),
        target_num_layers=target_num_layers,
        rope_config={key: config[key] for key in rope_keys if key in config},
        **{name: config[name] for name in names},
    )


def load_exported(folder: Path, target: TargetHead) -> tuple[Draft, VocabMap]:
    """An exported head back in PyTorch (float32), checked like a new one. Frozen, in evaluation mode."""
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    check_export(tensors, config, target.config)
    shape = config_from_hf(config, int(target.config["num_hidden_layers"]))
    size = shape.vocab_size
    d2t = tensors.pop("d2t", torch.zeros(size, dtype=torch.int64))
    t2d = tensors.pop("t2d", torch.ones(size, dtype=torch.bool))
    draft = Draft(shape, target.embed_tokens)
    draft.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    return draft.eval().requires_grad_(False), VocabMap(d2t, t2d, float("nan"))


def _config_problems(config: Mapping[str, Any], target: Mapping[str, Any]) -> list[str]:
    problems = []
    architecture = (config.get("architectures") or [None])[0]
    kinds = {name: MODEL_TYPES[kind] for kind, name in ARCHITECTURES.items()}
    if architecture not in kinds:
        return [f"architecture {architecture!r}, not one of {', '.join(kinds)}"]
    if config.get("model_type") != kinds[architecture]:
        problems.append(f"model_type {config.get('model_type')!r}, {architecture} needs {kinds[architecture]!r}")
    problems += [
        f"{key} {config.get(key)}, the target has {target[key]}"
        for key in ("vocab_size", "hidden_size")
        if config.get(key) != target[key]
    ]
    if not 0 < config.get("draft_vocab_size", 0) <= target["vocab_size"]:
        problems.append(
            f"draft_vocab_size {config.get('draft_vocab_size')}, the target has {target['vocab_size']} tokens"
        )
    if architecture == ARCHITECTURES["llama"] and not config.get("head_dim"):
        problems.append("no head_dim: vLLM would take hidden_size / num_attention_heads")
    mine, theirs = Rope.from_config(config), Rope.from_config(target)
    if mine != theirs:
        problems.append(f"rotary embedding {mine}, the target has {theirs}")
    problems += _layer_problems(config, int(target["num_hidden_layers"]))
    return problems


def _layer_problems(config: Mapping[str, Any], layers: int) -> list[str]:
    top = config.get("eagle_aux_hidden_state_layer_ids")
    nested = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if not top or top != nested:
        return [f"aux boundaries {top} at top level and {nested} in eagle_config; both must be there and equal"]
    if list(top) != sorted(set(top)):
        return [f"aux boundaries {top} are not strictly ascending"]
    problems = []
    if top[0] < 1:
        problems.append(f"aux boundary {top[0]}: 0 is the embedding, which vLLM's DeepSeek cannot deliver")
    if top[-1] > layers:
        problems.append(f"aux boundary {top[-1]} of a target with {layers} layers")
    elif top[-1] == layers:
        problems.append(f"aux boundary {layers} is the final state, the teacher's; list the aux boundaries only")
    elif top[-1] == layers - 1:
        problems.append(
            f"aux boundary {layers - 1} is the *input* of the last layer: a list that counts layer outputs "
            f"(…, {layers - 1} = final) must be converted to boundaries and its last entry dropped"
        )
    return problems


def _tensor_problems(tensors: Mapping[str, torch.Tensor], shape: DraftConfig) -> list[str]:
    with torch.device("meta"):
        expected = {name: tuple(t.shape) for name, t in Draft(shape).state_dict().items()}
    weights = {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
    problems = [
        f"{name}: vLLM puts 'model.' in front itself; write {name.removeprefix('model.')}"
        for name in weights
        if name.startswith("model.")
    ]
    problems += [f"{name} is missing" for name in expected if name not in weights]
    problems += [f"{name} is unknown" for name in weights if name not in expected and not name.startswith("model.")]
    for name, tensor in weights.items():
        if name in expected and tuple(tensor.shape) != expected[name]:
            problems.append(f"{name} is {list(tensor.shape)}, the config asks for {list(expected[name])}")
        if not bool(torch.isfinite(tensor.float()).all()):
            problems.append(f"{name} has values that are not finite")
    return problems


def _vocab_problems(tensors: Mapping[str, torch.Tensor], shape: DraftConfig) -> list[str]:
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    if shape.draft_vocab_size == shape.vocab_size:
        extra = [name for name, table in (("d2t", d2t), ("t2d", t2d)) if table is not None]
        return [f"{name} beside a full vocabulary: vLLM has no place for it" for name in extra]
    if d2t is None or t2d is None:
        return ["a reduced vocabulary needs d2t (vLLM) and t2d (SGLang)"]
    problems = []
    for name, table, kind, size in (
        ("d2t", d2t, torch.int64, shape.draft_vocab_size),
        ("t2d", t2d, torch.bool, shape.vocab_size),
    ):
        if table.dtype != kind or tuple(table.shape) != (size,):
            problems.append(f"{name} is {table.dtype} {list(table.shape)}, needs {kind} [{size}]")
    if problems:
        return problems
    ids = d2t + torch.arange(len(d2t))
    if int(ids.min()) < 0 or int(ids.max()) >= shape.vocab_size:
        return [f"d2t points to ids {int(ids.min())} … {int(ids.max())} of a vocabulary of {shape.vocab_size}"]
    if not bool((ids[1:] > ids[:-1]).all()):
        problems.append("d2t does not give ascending, distinct target ids (it holds offsets, not ids)")
    if not torch.equal(t2d.nonzero().flatten(), ids.unique()):
        problems.append("t2d marks other tokens than d2t")
    return problems


def export_untrained(cfg: Config, out_dir: Path) -> Path:
    """The head of this run as it was before its first step (`init_draft` with the run's seed), exported.

    It has the trained head's shape, vocabulary map and aux boundaries, and the target's own norm and lm_head
    rows, so that a comparison shows what the training did and nothing else. Returns `out_dir`.
    """
    config = _trained_config(cfg)
    vocab = VocabMap.load(cfg.run_dir / "vocab" / "vocab.safetensors")
    target = TargetHead.load(cfg.target.model)
    draft = init_draft(config, target, vocab, cfg.seed)
    export_draft(draft.state_dict(), config, vocab, target.config, out_dir, cfg.export.dtype)
    return out_dir


def _trained_config(cfg: Config) -> DraftConfig:
    path = cfg.run_dir / "train" / "draft.json"
    if not path.is_file():
        raise DataError(asked=str(path), found="no such file", advice="run the stage 'train' first")
    return DraftConfig.from_dict(json.loads(path.read_text(encoding="utf-8")))


def export_stage(cfg: Config, progress: Progress) -> dict[str, Any]:
    """<run>/train/{draft.safetensors, draft.json} + <run>/vocab -> <run>/export."""
    config = _trained_config(cfg)
    vocab = VocabMap.load(cfg.run_dir / "vocab" / "vocab.safetensors")
    with progress.task("exporting", total=1) as bar:
        metrics = export_draft(
            load_file(cfg.run_dir / "train" / "draft.safetensors"),
            config,
            vocab,
            load_text_config(cfg.target.model),
            cfg.run_dir / "export",
            cfg.export.dtype,
        )
        bar.advance(1)
    return metrics

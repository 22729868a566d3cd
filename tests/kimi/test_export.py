"""The exported head: what vLLM reads, and the gates that refuse a wrong one."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_heads import AUX, TARGET, VOCAB, draft_config, random_draft, target_head, vocab_map
from safetensors.torch import load_file

from vllm_compat.errors import ExportError
from vllm_compat.kimi.draft import init_draft
from vllm_compat.kimi.export import check_export, export_draft, hf_config, load_exported
from vllm_compat.kimi.vocab import VocabMap


def good(architecture: str = "mla", size: int = 30) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    draft, vocab = random_draft(architecture), vocab_map(size)
    tensors = {name: tensor.detach().clone() for name, tensor in draft.state_dict().items()}
    tensors |= {"d2t": vocab.d2t.clone(), "t2d": vocab.t2d.clone()}
    return tensors, copy.deepcopy(hf_config(draft.config, TARGET, "bfloat16"))


@pytest.mark.parametrize("architecture", ["mla", "llama"])
def test_round_trip(tmp_path: Path, architecture: str) -> None:
    """What is written reads back as the same head, in the dtype asked for."""
    draft, vocab = random_draft(architecture), vocab_map()
    metrics = export_draft(draft.state_dict(), draft.config, vocab, TARGET, tmp_path, "float32")
    back, back_vocab = load_exported(tmp_path, target_head())

    assert draft.config == back.config
    assert torch.equal(vocab.d2t, back_vocab.d2t)
    for name, tensor in draft.state_dict().items():
        assert torch.equal(tensor, back.state_dict()[name]), name
    assert sum(p.numel() for p in draft.parameters()) == metrics["parameters"]
    assert ["config.json", "model.safetensors"] == sorted(path.name for path in tmp_path.iterdir())


def test_config_as_vllm_reads_it(tmp_path: Path) -> None:
    """Architecture and model_type that vLLM keeps, aux ids in both places, rope keys as in the target, no
    embedding."""
    draft = random_draft()
    export_draft(draft.state_dict(), draft.config, vocab_map(), TARGET, tmp_path)
    config, tensors = (
        json.loads((tmp_path / "config.json").read_text()),
        load_file(tmp_path / "model.safetensors"),
    )

    assert (["Eagle3DeepseekV2ForCausalLM"], "kimi_k2") == (config["architectures"], config["model_type"])
    assert list(AUX) == config["eagle_aux_hidden_state_layer_ids"]
    assert list(AUX) == config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    for key in ("rope_scaling", "rope_theta", "max_position_embeddings", "rms_norm_eps"):
        assert TARGET[key] == config[key]
    assert (1, VOCAB, 30) == (config["num_hidden_layers"], config["vocab_size"], config["draft_vocab_size"])
    assert not any("embed" in name for name in tensors)
    assert {torch.bfloat16} == {t.dtype for name, t in tensors.items() if name not in ("d2t", "t2d")}
    assert (torch.int64, torch.bool) == (tensors["d2t"].dtype, tensors["t2d"].dtype)
    assert not {"norm_before_residual", "norm_output", "fc_norm", "quantization_config"} & set(config)


def test_llama_config() -> None:
    """A Llama head says its head_dim and its architecture's name."""
    _, config = good("llama")

    assert (["LlamaForCausalLMEagle3"], "llama", 6) == (
        config["architectures"],
        config["model_type"],
        config["head_dim"],
    )


def test_full_vocabulary_has_no_tables(tmp_path: Path) -> None:
    """vLLM builds no d2t when the sizes are equal; a stray one would be unexpected."""
    full = vocab_map(VOCAB)
    draft = init_draft(draft_config(draft_vocab_size=VOCAB), target_head(), full, 0)
    export_draft(draft.state_dict(), draft.config, full, TARGET, tmp_path)

    assert not {"d2t", "t2d"} & set(load_file(tmp_path / "model.safetensors"))
    back, vocab = load_exported(tmp_path, target_head())
    assert vocab.is_full
    tensors = {**draft.state_dict(), "d2t": full.d2t}
    with pytest.raises(ExportError, match="d2t beside a full vocabulary"):
        check_export(tensors, hf_config(back.config, TARGET, "float32"), TARGET)


def drop(name: str) -> Any:
    return lambda tensors, config: tensors.pop(name)


def put(name: str, value: Any) -> Any:
    return lambda tensors, config: tensors.__setitem__(name, value(tensors[name]) if callable(value) else value)


def say(key: str, value: Any) -> Any:
    return lambda tensors, config: config.__setitem__(key, value)


def aux(*ids: int) -> Any:
    def change(tensors: Any, config: Any) -> None:
        config["eagle_aux_hidden_state_layer_ids"] = list(ids)
        config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = list(ids)

    return change


def spoil(tensor: torch.Tensor) -> torch.Tensor:
    out = tensor.clone()
    out.view(-1)[0] = float("nan")
    return out


def rename(tensors: Any, config: Any) -> None:
    tensors["model.norm.weight"] = tensors.pop("norm.weight")


WRONG = {
    "missing": (drop("norm.weight"), "norm.weight is missing"),
    "extra": (put("midlayer.extra.weight", torch.zeros(2)), "midlayer.extra.weight is unknown"),
    "embedding": (put("embed_tokens.weight", torch.zeros(2)), "embed_tokens.weight is unknown"),
    "shape": (put("fc.weight", lambda t: t[:, :-1]), r"fc.weight is \[32, 95\], the config asks for \[32, 9"),
    "not finite": (put("fc.weight", spoil), "fc.weight has values that are not finite"),
    "model prefix": (rename, "'model.' in front itself; write norm.weight"),
    "no d2t": (drop("d2t"), "needs d2t"),
    "d2t holds ids": (put("d2t", lambda t: t + torch.arange(len(t))), "d2t"),
    "d2t out of range": (put("d2t", lambda t: t + VOCAB), "points to ids"),
    "d2t negative": (put("d2t", lambda t: t - 1 - t[0]), "points to ids -1"),
    "d2t twice": (put("d2t", lambda t: torch.cat((t[:1], t[:1] - 1, t[2:]))), "ascending, distinct"),
    "d2t int32": (put("d2t", lambda t: t.int()), "d2t is torch.int32"),
    "t2d of another map": (put("t2d", lambda t: t.roll(1)), "t2d marks other tokens"),
    "t2d short": (put("t2d", lambda t: t[:-1]), r"t2d is torch.bool \[47\]"),
    "aux not ascending": (aux(2, 5, 4), "not strictly ascending"),
    "aux twice": (aux(2, 4, 4), "not strictly ascending"),
    "aux with embeddings": (aux(0, 4, 5), "0 is the embedding"),
    "aux beyond": (aux(2, 4, 9), "9 of a target with 8 layers"),
    "aux with the final state": (aux(2, 4, 8), "8 is the final state"),
    "N-1 as final": (aux(2, 4, 7), "7 is the .input. of the last layer"),
    "too few aux": (aux(2, 4), r"fc.weight is \[32, 96\], the config asks for \[32, 64\]"),
    "aux only nested": (say("eagle_aux_hidden_state_layer_ids", None), "both must be there and equal"),
    "aux only at top": (say("eagle_config", {}), "both must be there and equal"),
    "rope type": (say("rope_scaling", None), "rotary embedding"),
    "rope theta": (say("rope_theta", 10000.0), "theta=10000.0"),
    "rope factor": (say("rope_scaling", {**TARGET["rope_scaling"], "factor": 4.0}), "factor=4.0"),
    "rope length": (
        say("rope_scaling", {**TARGET["rope_scaling"], "original_max_position_embeddings": 63}), "position=63"
    ),
    "vocab size": (say("vocab_size", VOCAB + 1), "vocab_size 49, the target has 48"),
    "hidden size": (say("hidden_size", 16), "hidden_size 16"),
    "draft vocab": (say("draft_vocab_size", 20), r"lm_head.weight is \[30, 32\]"),
    "draft vocab too large": (say("draft_vocab_size", 99), "draft_vocab_size 99"),
    "architecture": (say("architectures", ["DeepseekV3ForCausalLM"]), "DeepseekV3ForCausalLM"),
    "model type": (say("model_type", "deepseek_v3"), "model_type 'deepseek_v3'"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_gates(case: str) -> None:
    """Each way in which a head was ever served wrongly is refused, and the message says what is wrong."""
    tensors, config = good()
    check_export(tensors, config, TARGET)
    change, message = WRONG[case]
    change(tensors, config)

    with pytest.raises(ExportError, match=message):
        check_export(tensors, config, TARGET)


def test_llama_needs_its_head_dim() -> None:
    """Without it vLLM takes hidden / heads."""
    tensors, config = good("llama")
    del config["head_dim"]

    with pytest.raises(ExportError, match="no head_dim"):
        check_export(tensors, config, TARGET)


def test_everything_wrong_is_listed_and_nothing_written(tmp_path: Path) -> None:
    """One error for all problems; the folder stays as it was."""
    draft, vocab = random_draft(), vocab_map()
    state = {**draft.state_dict(), "norm.weight": torch.full((3,), float("inf"))}
    del state["lm_head.weight"]
    torn = VocabMap(vocab.d2t, vocab.t2d.roll(1), 1.0)

    with pytest.raises(ExportError) as caught:
        export_draft(state, draft.config, torn, TARGET, tmp_path / "out")
    for part in (
        "lm_head.weight is missing",
        "norm.weight is [3]",
        "norm.weight has values",
        "t2d marks other",
    ):
        assert part in str(caught.value)
    assert not (tmp_path / "out").exists()

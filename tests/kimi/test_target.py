"""Reading the target's embedding, final norm and lm_head."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from draft_heads import HIDDEN, TARGET, VOCAB, target_head
from safetensors.torch import save_file

from vllm_compat.errors import DataError
from vllm_compat.kimi.target import TargetHead, load_text_config

NAMES = {
    "embed_tokens": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "lm_head": "lm_head.weight",
}


def write(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, object], shards: int = 1) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    others = {
        "model.layers.0.input_layernorm.weight": torch.zeros(3),
        "model.layers.0.self_attn.kv_a_layernorm.weight": torch.zeros(3),
        "model.layers.8.embed_tokens.weight": torch.zeros(3),
        "vision_tower.encoder.norm.weight": torch.zeros(3),
    }
    everything = {**others, **tensors}
    if shards == 1:
        save_file(everything, folder / "model.safetensors")
        return
    index = {}
    for i, name in enumerate(sorted(everything)):
        file = f"model-{i % shards:05d}.safetensors"
        index[name] = file
    for file in set(index.values()):
        save_file({name: everything[name] for name in index if index[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("prefix", ["", "language_model."])
def test_both_layouts(tmp_path: Path, prefix: str, shards: int) -> None:
    """K2 (flat) and K2.5 (language_model., text_config), one file or several; layers and vision are left
    alone."""
    expected = target_head()
    config = TARGET if not prefix else {"model_type": "kimi_k25", "text_config": TARGET, "vision_config": {}}
    write(tmp_path, {prefix + name: getattr(expected, what) for what, name in NAMES.items()}, config, shards)
    made = TargetHead.load(tmp_path)

    for what in NAMES:
        assert torch.equal(getattr(expected, what), getattr(made, what))
    assert TARGET["rms_norm_eps"] == made.eps
    assert "kimi_k2" == load_text_config(tmp_path)["model_type"]


def test_tied_embeddings(tmp_path: Path) -> None:
    """Without lm_head and with tie_word_embeddings the embedding is the head."""
    expected = target_head()
    tensors = {name: getattr(expected, what) for what, name in NAMES.items() if what != "lm_head"}
    write(tmp_path, tensors, {**TARGET, "tie_word_embeddings": True})

    assert torch.equal(expected.embed_tokens, TargetHead.load(tmp_path).lm_head)
    write(tmp_path, tensors, TARGET)
    with pytest.raises(DataError, match=r"lm_head.*tie_word_embeddings is off"):
        TargetHead.load(tmp_path)


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        ({"lm_head.weight": torch.zeros(VOCAB, HIDDEN, dtype=torch.int8)}, "int8"),
        ({"lm_head.weight": torch.zeros(VOCAB + 1, HIDDEN)}, str(VOCAB + 1)),
        ({"other.model.norm.weight": torch.zeros(HIDDEN)}, "other.model.norm.weight"),
    ],
)
def test_what_cannot_be_used_is_named(tmp_path: Path, tensors: dict[str, torch.Tensor], named: str) -> None:
    """Quantised, of another shape, or ambiguous."""
    good = {name: getattr(target_head(), what) for what, name in NAMES.items()}
    write(tmp_path, good | tensors, TARGET)

    with pytest.raises(DataError, match=named):
        TargetHead.load(tmp_path)


def test_logits_are_of_the_normed_state() -> None:
    """States are stored before the final norm: logits apply it."""
    target, state = target_head(), torch.randn(4, HIDDEN)
    normed = state * (state.pow(2).mean(-1, keepdim=True) + target.eps).rsqrt() * target.norm

    torch.testing.assert_close(target.logits(state), normed @ target.lm_head.T)
    assert torch.float32 == target.to("cpu", torch.bfloat16).logits(state).dtype


def test_missing_config(tmp_path: Path) -> None:
    """A folder that is no model says which file it lacks."""
    with pytest.raises(DataError, match=r"config\.json"):
        TargetHead.load(tmp_path)

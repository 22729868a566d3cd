"""A tiny ``KimiK25ForConditionalGeneration``: the tiny target inside Kimi-K2.5's multimodal wrapper, as a checkpoint.

Text weights are the committed fixture's under K2.5's names (``language_model.…``), so its hidden states are known; the
vision tower is a small random one, which ``language_model_only`` leaves out, as the preset ``kimi-k2.5`` does.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

VISION = {
    "model_type": "kimi_k25_vision",
    "patch_size": 14,
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 128,
    "init_pos_emb_height": 8,
    "init_pos_emb_width": 8,
    "init_pos_emb_time": 2,
    "pos_emb_type": "divided_fixed",
    "merge_kernel_size": [2, 2],
    "merge_type": "sd2_tpool",
    "mm_projector_type": "patchmerger",
    "mm_hidden_size": 64,
    "projector_hidden_act": "gelu",
    "projector_ln_eps": 1e-5,
}


def build(fixture: Path, out: Path) -> Path:
    """Write the checkpoint to ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    text = json.loads((fixture / "config.json").read_text())
    tokens = json.loads((fixture / "tokenizer.json").read_text())["added_tokens"]
    media_pad = next(token["id"] for token in tokens if token["content"] == "<|media_pad|>")
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": {**text, "model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]},
        "vision_config": VISION,
        "media_placeholder_token_id": media_pad,
        "use_unified_vision_chunk": True,
        "tie_word_embeddings": False,
        "pad_token_id": text["pad_token_id"],
        "torch_dtype": "bfloat16",
    }
    (out / "config.json").write_text(json.dumps(config, indent=1))
    weights = load_file(fixture / "model.safetensors")
    save_file({f"language_model.{name}": tensor for name, tensor in weights.items()}, out / "model.safetensors")
    media = {"patch_size": 14, "merge_kernel_size": 2, "in_patch_limit": 64, "patch_limit_on_one_side": 8}
    media |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "fixed_output_tokens": None}
    media |= {"temporal_merge_kernel_size": 2, "in_patch_limit_each_frame": 64, "in_patch_limit_video": 256}
    (out / "preprocessor_config.json").write_text(json.dumps({"media_proc_cfg": media}))
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"):
        shutil.copy(fixture / name, out / name)
    return out

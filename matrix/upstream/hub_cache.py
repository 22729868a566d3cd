"""A Hugging Face cache that holds the configurations that vLLM's tests ask for, so that they run offline.

The tests construct configs and schedulers and load no weights: a config.json of the right architecture is enough, with
a tokenizer and, for models that take images, the settings of the processor. All of it is written here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: What stands for the commit of a repository.
_REVISION = "0" * 40

_OPT: dict[str, Any] = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "hidden_size": 768,
    "word_embed_proj_dim": 768,
    "ffn_dim": 3072,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "max_position_embeddings": 2048,
    "vocab_size": 50272,
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 1,
    "torch_dtype": "float16",
}
_QWEN: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "num_hidden_layers": 32,
    "max_position_embeddings": 32768,
    "vocab_size": 151936,
    "torch_dtype": "bfloat16",
}
_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_hidden_layers": 28,
    "max_position_embeddings": 40960,
    "vocab_size": 151936,
    "torch_dtype": "bfloat16",
}
_LLAVA: dict[str, Any] = {
    "architectures": ["LlavaForConditionalGeneration"],
    "model_type": "llava",
    "image_token_index": 32000,
    "image_token_id": 32000,
    "image_seq_length": 576,
    "projector_hidden_act": "gelu",
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
    "vocab_size": 32064,
    "pad_token_id": 32001,
    "torch_dtype": "float16",
    "text_config": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "max_position_embeddings": 4096,
        "vocab_size": 32064,
        "torch_dtype": "float16",
    },
    "vision_config": {
        "model_type": "clip_vision_model",
        "hidden_size": 1024,
        "image_size": 336,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "patch_size": 14,
        "projection_dim": 768,
        "vocab_size": 32000,
    },
}
_LLAVA_IMAGES: dict[str, Any] = {
    "image_processor_type": "CLIPImageProcessor",
    "processor_class": "LlavaProcessor",
    "crop_size": {"height": 336, "width": 336},
    "size": {"shortest_edge": 336},
    "do_center_crop": True,
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "resample": 3,
    "rescale_factor": 1 / 255,
}
_LLAVA_PROCESSOR: dict[str, Any] = {
    "processor_class": "LlavaProcessor",
    "image_token": "<image>",
    "num_additional_image_tokens": 1,
    "patch_size": 14,
    "vision_feature_select_strategy": "default",
}

_QWEN_VL: dict[str, Any] = {
    **_QWEN,
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "num_hidden_layers": 36,
    "max_position_embeddings": 128000,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "image_token_id": 151655,
    "video_token_id": 151656,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vision_config": {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "in_chans": 3,
        "out_hidden_size": 2048,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 2,
        "temporal_patch_size": 2,
    },
}
_QWEN_VL_IMAGES: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2_5_VLProcessor",
    "min_pixels": 3136,
    "max_pixels": 1003520,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}

#: Repository -> its files: JSON by name.
MODELS: Mapping[str, Mapping[str, dict[str, Any]]] = {
    "facebook/opt-125m": {"config.json": _OPT},
    "facebook/opt-350m": {
        "config.json": {
            **_OPT,
            "hidden_size": 1024,
            "word_embed_proj_dim": 512,
            "ffn_dim": 4096,
            "num_attention_heads": 16,
            "num_hidden_layers": 24,
            "do_layer_norm_before": False,
        },
    },
    "Qwen/Qwen1.5-7B": {"config.json": _QWEN},
    # ModelConfig's own default.
    "Qwen/Qwen3-0.6B": {"config.json": _QWEN3},
    "Qwen/Qwen2.5-VL-3B-Instruct": {"config.json": _QWEN_VL, "preprocessor_config.json": _QWEN_VL_IMAGES},
    "llava-hf/llava-1.5-7b-hf": {
        "config.json": _LLAVA,
        "preprocessor_config.json": _LLAVA_IMAGES,
        "processor_config.json": _LLAVA_PROCESSOR,
    },
}

#: Tokens of some meaning, beside one for each byte; images have the ids that the configs above name.
_SPECIAL = {
    "<s>": 300,
    "<pad>": 301,
    "</s>": 302,
    "<unk>": 303,
    "<image>": 32000,
    "<|vision_start|>": 151652,
    "<|vision_end|>": 151653,
    "<|image_pad|>": 151655,
    "<|video_pad|>": 151656,
}


def write(hub: Path) -> None:
    """Fill a folder that ``HF_HUB_CACHE`` may name."""
    for repository, files in MODELS.items():
        home = hub / f"models--{repository.replace('/', '--')}"
        snapshot = home / "snapshots" / _REVISION
        snapshot.mkdir(parents=True, exist_ok=True)
        (home / "refs").mkdir(exist_ok=True)
        (home / "refs" / "main").write_text(_REVISION, encoding="utf-8")
        for name, content in {**files, **_tokenizer()}.items():
            (snapshot / name).write_text(json.dumps(content), encoding="utf-8")


def _tokenizer() -> dict[str, dict[str, Any]]:
    """Files of a tokenizer that has a token for each byte and nothing learned."""
    vocabulary = {**{token: index for index, token in enumerate(_bytes())}, **_SPECIAL}
    return {
        "tokenizer.json": {
            "version": "1.0",
            "added_tokens": [
                {
                    "id": vocabulary[token],
                    "content": token,
                    "special": True,
                    **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
                }
                for token in _SPECIAL
            ],
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "pad_token": "<pad>",
            "unk_token": "<unk>",
        },
    }


def _bytes() -> list[str]:
    """The characters that byte-level BPE writes the 256 bytes as: themselves if printable, else from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(0x100) if byte not in printable]
    return [chr(byte) if byte in printable else chr(0x100 + others.index(byte)) for byte in range(0x100)]

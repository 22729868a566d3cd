"""KV cache specs: what the classes of ``vllm.v1.kv_cache_interface`` take, by release."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_compat._unset import UNSET
from vllm_compat.adapters.base import Need, refuse

_SPECS = "vllm.v1.kv_cache_interface"

#: Our name of a spec kind -> class in vllm.v1.kv_cache_interface.
SPEC_CLASSES = {
    "full_attention": "FullAttentionSpec",
    "mla_attention": "MLAAttentionSpec",
    "sliding_window": "SlidingWindowSpec",
}

_COMMON = ("block_size", "num_kv_heads", "head_size", "dtype")

#: Of every attention spec. "" where all releases that an adapter serves have it; else the first, or first and last.
_ATTENTION = {
    "page_size_padded": "0.14.0",
    "kv_quant_mode": "0.20.0",
    "indexes_kv_by_block_stride": "0.24.0-0.28.0",
    "num_head_slots": "0.28.0",
    "state_content_bytes": "0.28.0",
    "tokens_per_state": "0.29.0",
    "dcp_sharded": "0.31.0",
    "block_stride_alignment": "0.31.0",
    "max_tp_shards": "0.31.0",
    "is_draft": "0.33.0",
}
_FULL = {
    **_ATTENTION,
    "head_size_v": "0.14.0",
    "sliding_window": "",
    "attention_chunk_size": "",
    "non_causal": "0.24.0",
}
_MLA = {
    **_FULL,
    "cache_dtype_str": "",
    "alignment": "0.20.0",
    "model_version": "0.20.0",
    "compress_ratio": "0.20.0-0.28.0",
    "non_causal_multi_token_decode": "0.27.0",
    "cache_role": "0.30.0",
    "is_index_group_leader": "0.30.0",
    "storage_block_size": "0.30.0-0.31.0",
    "topk_buffer_width": "0.33.0",
}
_SLIDING = {**_ATTENTION, "head_size_v": "0.20.0", "extra_retained_tokens": "0.28.0"}

#: MLA is a class of its own (0.11.0). Everything but the block size is keyword-only since 0.14.0: no difference here.
SPECS_0_11 = (
    Need(f"{_SPECS}:FullAttentionSpec", passes=_COMMON, options=_FULL),
    Need(f"{_SPECS}:MLAAttentionSpec", passes=_COMMON, options=_MLA),
    Need(f"{_SPECS}:SlidingWindowSpec", passes=(*_COMMON, "sliding_window"), options=_SLIDING),
)
#: ``use_mla`` is required of both.
SPECS_0_10 = (
    Need(f"{_SPECS}:FullAttentionSpec", passes=(*_COMMON, "use_mla"), options=_FULL),
    Need(f"{_SPECS}:SlidingWindowSpec", passes=(*_COMMON, "use_mla", "sliding_window"), options=_SLIDING),
)


def refuse_of_mla_class(options: Mapping[str, Any]) -> None:
    """Refuse options of an MLA spec that ``FullAttentionSpec(use_mla=True)`` has no place for.

    Raises:
        UnsupportedField: one of them was set; names the release whose MLAAttentionSpec has it.
    """
    need = Need(f"{_SPECS}:MLAAttentionSpec", options={**_MLA, "cache_dtype_str": "0.11.0"})
    for name, value in options.items():
        if value is not UNSET and name in _MLA.keys() - _FULL.keys():
            refuse(need, name)

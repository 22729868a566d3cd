"""KV cache specs: what the classes of ``vllm.v1.kv_cache_interface`` take, by release."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from vllm_compat._unset import UNSET
from vllm_compat.adapters.base import Need, refuse, refuse_symbol, resolve_or_refuse
from vllm_compat.errors import VllmCompatError

__all__ = ["SPECS_0_10", "SPECS_0_11", "SPEC_CLASSES", "need_of", "refuse_of_mla_class", "translated"]

_SPECS = "vllm.v1.kv_cache_interface"

#: Our name of a spec kind, which is vLLM's where it has one (KVCacheSpecKind) -> class in vllm.v1.kv_cache_interface.
SPEC_CLASSES = {
    "full_attention": "FullAttentionSpec",
    "mla_attention": "MLAAttentionSpec",
    "sliding_window": "SlidingWindowSpec",
    "sliding_window_mla": "SlidingWindowMLASpec",
    "mamba": "MambaSpec",
    "chunked_local_attention": "ChunkedLocalAttentionSpec",
    "sink_full_attention": "SinkFullAttentionSpec",
    "encoder_only_attention": "EncoderOnlyAttentionSpec",
    "cross_attention": "CrossAttentionSpec",
    "hidden_state_cache": "HiddenStateCacheSpec",
    "rswa": "RSWASpec",
    "circular_buffer": "CircularBufferSpec",
    "tq_full_attention": "TQFullAttentionSpec",
    "uniform_type": "UniformTypeKVCacheSpecs",
}

_COMMON = ("block_size", "num_kv_heads", "head_size", "dtype")

#: Of every spec. "" where all releases that an adapter serves have it; else the first, or first and last.
_EVERY = {"dcp_sharded": "0.31.0", "block_stride_alignment": "0.31.0", "is_draft": "0.33.0"}
#: Of every attention spec.
_ATTENTION = {
    **_EVERY,
    "page_size_padded": "0.14.0",
    "kv_quant_mode": "0.20.0",
    "indexes_kv_by_block_stride": "0.24.0-0.28.0",
    "head_size_v": "0.28.0",
    "num_head_slots": "0.28.0",
    "state_content_bytes": "0.28.0",
    "tokens_per_state": "0.29.0",
    "max_tp_shards": "0.31.0",
}
_FULL = {
    **_ATTENTION,
    "head_size_v": "0.14.0",
    "sliding_window": "",
    "attention_chunk_size": "",
    "non_causal": "0.24.0",
}
#: Of both MLA specs.
_LATENT = {
    "cache_dtype_str": "",
    "alignment": "0.20.0",
    "model_version": "0.20.0",
    "compress_ratio": "0.20.0-0.28.0",
}
_MLA = {
    **_FULL,
    **_LATENT,
    "non_causal_multi_token_decode": "0.27.0",
    "cache_role": "0.30.0",
    "is_index_group_leader": "0.30.0",
    "storage_block_size": "0.30.0-0.31.0",
    "topk_buffer_width": "0.33.0",
}
_SLIDING = {**_ATTENTION, "head_size_v": "0.20.0", "extra_retained_tokens": "0.28.0"}
_MAMBA = {
    **_EVERY,
    "page_size_padded": "",
    "mamba_type": "",
    "num_speculative_blocks": "",
    "mamba_cache_mode": "0.15.0",
    "num_prefill_checkpoint_blocks": "0.29.0",
    "num_heads": "0.29.0",
    "tokens_per_state": "0.29.0",
    "tp_replicated": "0.29.0",
    "prefill_checkpoint_alignment": "0.30.0",
}


def _spec(kind: str, *passes: str, options: Mapping[str, str], life: str = "") -> Need:
    return Need(f"{_SPECS}:{SPEC_CLASSES[kind]}", passes=passes, options=options, life=life)


#: MLA is a class of its own (0.11.0). Everything but the block size is keyword-only since 0.14.0: no difference here.
SPECS_0_11 = (
    _spec("full_attention", *_COMMON, options=_FULL),
    _spec("mla_attention", *_COMMON, options=_MLA),
    _spec("sliding_window", *_COMMON, "sliding_window", options=_SLIDING),
    _spec(
        "sliding_window_mla",
        *_COMMON,
        "sliding_window",
        options={**_SLIDING, **_LATENT, "bounded_replay": "0.31.0"},
        life="0.20.0",
    ),
    _spec("mamba", "block_size", "shapes", "dtypes", options=_MAMBA),
    _spec("chunked_local_attention", *_COMMON, "attention_chunk_size", options=_ATTENTION),
    _spec("sink_full_attention", *_COMMON, options={**_FULL, "sink_len": ""}, life="0.14.0"),
    _spec("encoder_only_attention", *_COMMON, options=_ATTENTION),
    _spec("cross_attention", *_COMMON, options=_ATTENTION),
    _spec("hidden_state_cache", *_COMMON, options=_MLA, life="0.22.0"),
    _spec("rswa", *_COMMON, "rswa_window", options=_FULL, life="0.25.0"),
    _spec("circular_buffer", *_COMMON, options=_ATTENTION, life="0.29.0"),
    _spec("tq_full_attention", *_COMMON, options={**_FULL, "tq_slot_size": ""}, life="0.20.0-0.27.1"),
    _spec("uniform_type", "block_size", "kv_cache_specs", options=_EVERY, life="0.11.0"),
)
#: ``use_mla`` is required of every attention spec, and there are fewer kinds.
SPECS_0_10 = (
    _spec("full_attention", *_COMMON, "use_mla", options=_FULL),
    _spec("sliding_window", *_COMMON, "use_mla", "sliding_window", options=_SLIDING),
    _spec("mamba", "block_size", "shapes", "dtypes", options=_MAMBA),
    _spec("chunked_local_attention", *_COMMON, "use_mla", "attention_chunk_size", options=_ATTENTION),
    _spec("encoder_only_attention", *_COMMON, "use_mla", options=_ATTENTION),
    _spec("cross_attention", *_COMMON, "use_mla", options=_ATTENTION),
)


def need_of(kind: str, specs: tuple[Need, ...], options: Mapping[str, Any]) -> Need:
    """The need of a kind among those that a release has; ``options`` must have all that it requires.

    Raises:
        UnsupportedField: this release has no such kind.
        VllmCompatError: there is no such kind at all, or something that it requires was not given.
    """
    if kind not in SPEC_CLASSES:
        raise VllmCompatError(
            f"a KV cache spec of kind {kind!r}",
            needed=f"one of {', '.join(SPEC_CLASSES)}",
            found=repr(kind),
            advice="choose one of them; for other specs call vLLM's class itself",
        )
    need = _find(kind, specs)
    if need is None:
        known = _find(kind, SPECS_0_11)
        assert known is not None  # the newest table has every kind
        refuse_symbol(known)
    missing = [name for name in need.passes if options.get(name, UNSET) is UNSET]
    if missing:
        raise VllmCompatError(
            f"a KV cache spec of kind {kind!r}",
            needed=", ".join(name for name in need.passes if name != "use_mla"),
            found=f"no {', '.join(missing)}",
            advice=f"pass {', '.join(f'{name}=…' for name in missing)}",
        )
    return need


def _find(kind: str, specs: tuple[Need, ...]) -> Need | None:
    return next((need for need in specs if need.short == SPEC_CLASSES[kind]), None)


def translated(need: Need, options: Mapping[str, Any]) -> dict[str, Any]:
    """``options`` in the words of the installed release; what has no counterpart stays, to be refused.

    Raises:
        UnsupportedField: the installed release has no such class.
    """
    cls = resolve_or_refuse(need)
    given = {name: value for name, value in options.items() if value is not UNSET}
    if "compress_ratio" in (need.options or {}):
        _rename(need, given)
    if isinstance(given.get("mamba_type"), str):
        given["mamba_type"] = _mamba_type(cls, given["mamba_type"])
    return given


def _rename(need: Need, given: dict[str, Any]) -> None:
    """MLA's ``compress_ratio``, the tokens that one stored state stands for, is ``tokens_per_state`` since 0.29.0."""
    live = need.live()
    for old, new in (("compress_ratio", "tokens_per_state"), ("tokens_per_state", "compress_ratio")):
        if old in given and new not in given and not live.accepts(old) and live.accepts(new):
            given[new] = given.pop(old)


#: Names of back ends that are not the type in capitals.
_MAMBA_BACKENDS = {"linear_attention": "LINEAR", "gdn_attention": "GDN_ATTN"}


def _mamba_type(cls: Any, name: str) -> Any:
    """The type of a Mamba layer: a string, or the member of an enum of back ends where a release wants that."""
    default = cls.__dataclass_fields__["mamba_type"].default
    if not isinstance(default, Enum):
        return name
    member = type(default).__members__.get(_MAMBA_BACKENDS.get(name, name.upper()))
    if member is None:
        raise VllmCompatError(
            f"MambaSpec.mamba_type={name!r}",
            needed=f"one of {', '.join(type(default).__members__)} of {type(default).__name__}, or its name",
            found=repr(name),
            advice="pass a member of the enum, or the name of one in small letters",
        )
    return member


def refuse_of_mla_class(options: Mapping[str, Any]) -> None:
    """Refuse options of an MLA spec that ``FullAttentionSpec(use_mla=True)`` has no place for.

    Raises:
        UnsupportedField: one of them was set; names the release whose MLAAttentionSpec has it.
    """
    need = Need(f"{_SPECS}:MLAAttentionSpec", options={**_MLA, "cache_dtype_str": "0.11.0"})
    for name, value in options.items():
        if value is not UNSET and name in _MLA.keys() - _FULL.keys():
            refuse(need, name)

"""KV cache specs of every kind, against those that vLLM's own classes make; no engine is needed."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from here import RELEASE, by_release

import vllm_compat as vc
from vllm_compat.adapters.kv_cache_specs import SPEC_CLASSES, SPECS_0_11

ATTENTION = {"block_size": 16, "num_kv_heads": 2, "head_size": 32, "dtype": torch.bfloat16}
MLA = {"block_size": 64, "num_kv_heads": 1, "head_size": 576, "dtype": torch.bfloat16}
LIVES = {need.short: need.life for need in SPECS_0_11}
#: What a person passes; for the native class too, up to what a release adds.
OPTIONS: dict[str, dict[str, Any]] = {
    "full_attention": {**ATTENTION, "sliding_window": 64},
    "mla_attention": MLA,
    "sliding_window": {**ATTENTION, "sliding_window": 48},
    "sliding_window_mla": {**MLA, "sliding_window": 128},
    "mamba": {"block_size": 128, "shapes": ((4, 8), (2, 3)), "dtypes": (torch.float32, torch.bfloat16)},
    "chunked_local_attention": {**ATTENTION, "attention_chunk_size": 256},
    "sink_full_attention": {**ATTENTION, "sink_len": 16},
    "encoder_only_attention": ATTENTION,
    "cross_attention": ATTENTION,
    "hidden_state_cache": MLA,
    "rswa": {**ATTENTION, "rswa_window": 128},
    "circular_buffer": ATTENTION,
    "tq_full_attention": {**ATTENTION, "tq_slot_size": 48},
}


def lives(kind: str) -> bool:
    """Whether the installed release has the kind."""
    if kind == "mla_attention":
        return RELEASE >= (0, 11)
    first, _, last = LIVES[SPEC_CLASSES[kind]].partition("-")
    return RELEASE >= _numbers(first) and (not last or _numbers(last) >= RELEASE)


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split("."))) if release else ()


def native(kind: str) -> Any:
    return getattr(importlib.import_module("vllm.v1.kv_cache_interface"), SPEC_CLASSES[kind])


@pytest.mark.parametrize("kind", OPTIONS)
def test_a_spec_is_the_one_that_vllm_makes(kind: str) -> None:
    """Equal to the native class called by hand, field by field; refused by name where there is none."""
    options = OPTIONS[kind]
    if not lives(kind) and kind != "mla_attention":  # which 0.10 has by a flag
        with pytest.raises(vc.UnsupportedField, match=SPEC_CLASSES[kind]):
            vc.make_kv_cache_spec(kind, **options)
        return
    by_hand = dict(options)
    cls = native(kind) if lives(kind) else native("full_attention")
    if RELEASE < (0, 11) and kind != "mamba":
        by_hand["use_mla"] = kind == "mla_attention"
    made = vc.make_kv_cache_spec(kind, **options)
    assert cls is type(made)
    assert cls(**by_hand) == made
    assert made.page_size_bytes > 0


def test_specs_of_several_layers() -> None:
    """``uniform_type`` holds the specs of its layers, and a block as large as all of theirs."""
    layers = {
        "a": vc.make_kv_cache_spec("full_attention", **ATTENTION),
        "b": vc.make_kv_cache_spec("full_attention", **{**ATTENTION, "head_size": 64}),
    }
    if not lives("uniform_type"):
        with pytest.raises(vc.UnsupportedField, match=r"vLLM 0\.11\.0 or newer"):
            vc.make_kv_cache_spec("uniform_type", block_size=16, kv_cache_specs=layers)
        return
    made = vc.make_kv_cache_spec("uniform_type", block_size=16, kv_cache_specs=layers)
    assert layers == made.kv_cache_specs
    assert sum(spec.page_size_bytes for spec in layers.values()) == made.page_size_bytes


@pytest.mark.parametrize("name", ["compress_ratio", "tokens_per_state"])
@pytest.mark.parametrize("kind", ["mla_attention", "sliding_window_mla"])
def test_compression_has_two_names(kind: str, name: str) -> None:
    """Either name makes blocks of a quarter of the size, in every release that can compress."""
    if RELEASE < (0, 20):
        with pytest.raises(vc.UnsupportedField):
            vc.make_kv_cache_spec(kind, **OPTIONS[kind], **{name: 4})
        return
    whole = vc.make_kv_cache_spec(kind, **OPTIONS[kind])
    made = vc.make_kv_cache_spec(kind, **OPTIONS[kind], **{name: 4})
    assert 64 * 576 * 2 == whole.page_size_bytes == 4 * made.page_size_bytes
    with pytest.raises(vc.UnsupportedField, match=r"compress_ratio|tokens_per_state"):
        vc.make_kv_cache_spec(kind, **OPTIONS[kind], compress_ratio=4, tokens_per_state=4)


@pytest.mark.parametrize(
    ("name", "member"), [("mamba1", "MAMBA1"), ("gdn_attention", "GDN_ATTN"), ("short_conv", "SHORT_CONV")]
)
def test_the_type_of_a_mamba_layer_is_a_string(name: str, member: str) -> None:
    """As it was up to 0.20.2; where vLLM wants a member of its enum, it gets that."""
    made = vc.make_kv_cache_spec("mamba", **OPTIONS["mamba"], mamba_type=name)
    default = vc.make_kv_cache_spec("mamba", **OPTIONS["mamba"]).mamba_type
    assert type(default) is type(made.mamba_type)
    assert by_release(("0", name), ("0.21.0", member)) == getattr(made.mamba_type, "name", made.mamba_type)
    again = vc.make_kv_cache_spec("mamba", **OPTIONS["mamba"], mamba_type=made.mamba_type)
    assert made == again


def test_an_unknown_type_of_mamba_layer_is_refused_where_there_is_a_list() -> None:
    """With the names that there are."""
    if RELEASE < (0, 21):
        assert "mamba9" == vc.make_kv_cache_spec("mamba", **OPTIONS["mamba"], mamba_type="mamba9").mamba_type
        return
    with pytest.raises(vc.VllmCompatError, match="MAMBA2"):
        vc.make_kv_cache_spec("mamba", **OPTIONS["mamba"], mamba_type="mamba9")


def test_what_is_not_given_is_asked_for() -> None:
    """By name, and what a kind has no place for is refused."""
    with pytest.raises(vc.VllmCompatError, match="no attention_chunk_size"):
        vc.make_kv_cache_spec("chunked_local_attention", **ATTENTION)
    with pytest.raises(vc.UnsupportedField, match=r"CrossAttentionSpec\.sliding_window"):
        vc.make_kv_cache_spec("cross_attention", **ATTENTION, sliding_window=16)

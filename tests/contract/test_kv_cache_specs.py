"""Kinds of KV cache specs: every class that vLLM ever had for a layer, and what each requires."""

from __future__ import annotations

from typing import Any

import pytest
import windows

from vllm_compat import UNSET, VllmCompatError
from vllm_compat.adapters.kv_cache_specs import SPEC_CLASSES, SPECS_0_11, need_of
from vllm_compat.factories import kv_cache

#: Bases, and what is no spec of a layer.
NO_KIND = {"KVCacheSpec", "AttentionSpec", "KVCacheGroupSpec"}


def test_every_recorded_class_has_a_kind() -> None:
    """No spec class of any recorded release is missing, and none is invented."""
    recorded = {
        name
        for api in windows.recorded()
        for name, record in api.surfaces["kv_cache"].items()
        if record is not None and name.endswith(("Spec", "Specs"))
    }
    assert recorded - NO_KIND == set(SPEC_CLASSES.values())
    assert set(SPEC_CLASSES.values()) == {need.short for need in SPECS_0_11}


def test_kinds_are_called_as_vllm_calls_them() -> None:
    """Each member of KVCacheSpecKind is one of our names (they are the members in small letters)."""
    (record,) = [api.surfaces["kv_cache"]["KVCacheSpecKind"] for api in windows.recorded() if api.release == "0.33.0"]
    assert record is not None
    assert {name.lower() for name in record["members"]} - {"unknown"} <= set(SPEC_CLASSES)


@pytest.mark.parametrize("kind", SPEC_CLASSES)
def test_what_a_kind_requires_is_asked_for(kind: str) -> None:
    """By name, before vLLM would say so in its own way."""
    need = next(need for need in SPECS_0_11 if need.short == SPEC_CLASSES[kind])
    options: dict[str, Any] = dict.fromkeys(need.passes, 1)
    assert need is need_of(kind, SPECS_0_11, options)
    for name in need.passes:
        with pytest.raises(VllmCompatError, match=f"no {name}"):
            need_of(kind, SPECS_0_11, {**options, name: UNSET})


def test_there_is_no_such_kind() -> None:
    """The message lists those that there are."""
    with pytest.raises(VllmCompatError, match="full_attention, mla_attention"):
        need_of("flash", SPECS_0_11, {})


def test_the_factory_names_every_kind() -> None:
    """With the releases that have it, where not all have."""
    text = kv_cache.make_kv_cache_spec.__doc__ or ""
    for kind, name in SPEC_CLASSES.items():
        life = next(need for need in SPECS_0_11 if need.short == name).life.replace("-", " to ")
        said = " ".join(text.split())
        assert f'"{kind}" ({life})' in said if life else f'"{kind}"' in said

"""KV cache specs and configs."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from upstream.ledger import Left
from vllm_compat import make_vllm_config
from vllm_compat.adapters.kv_cache_specs import SPEC_CLASSES

#: Class of a spec -> its kind.
KINDS: Mapping[str, str] = {name: kind for kind, name in SPEC_CLASSES.items()}

#: What planning writes on a config beside blocks, tensors and groups. Tests mostly state none of it.
_PLANNED = ("hash_block_size", "cache_hit_alignment_tokens", "kv_cache_layout")


def spec(native: Any, stated: dict[str, Any]) -> dict[str, Any]:
    """The kind for the class; MLA is a flag in 0.10.2."""
    kind, options = KINDS[native.__name__], dict(stated)
    if "use_mla" in options and options.pop("use_mla"):
        kind = "mla_attention"
    return {"kind": kind, **options}


def plan(_: Any, stated: dict[str, Any]) -> dict[str, Any]:
    """The specs of all layers and the number of blocks, from which vLLM's own planner makes the groups."""
    specs: dict[str, Any] = {}
    for group in stated["kv_cache_groups"]:
        for layer in group.layer_names:
            if layer in specs:
                raise Left("layer-in-two-groups")
            inner = getattr(group.kv_cache_spec, "kv_cache_specs", None)
            specs[layer] = inner[layer] if isinstance(inner, dict) and layer in inner else group.kv_cache_spec
    if not isinstance(stated["num_blocks"], int) or stated["num_blocks"] < 1:
        raise Left("no-blocks")
    config = _config()
    if hasattr(config.cache_config, "prefix_cache_retention_interval"):
        config.cache_config.prefix_cache_retention_interval = stated.get("prefix_cache_retention_interval")
    return {"vllm_config": config, "specs": specs, "num_blocks": stated["num_blocks"]}


def as_stated(native: Any, stated: dict[str, Any], planned: Any) -> Any:
    """Refuse a plan that is not what the test states: it asks for something that planning would not give."""
    asked = native(**stated)
    exact = bool(stated.get("kv_cache_tensors"))
    for field in dataclasses.fields(asked):
        if field.name == "kv_cache_tensors" and not exact:
            continue
        if field.name in _PLANNED and not exact and field.name not in stated:
            continue
        if getattr(asked, field.name) != getattr(planned, field.name):
            raise Left(_DIFFERENT.get(field.name, "another-plan"))
    return planned


_DIFFERENT = {"kv_cache_groups": "other-groups", "kv_cache_tensors": "other-tensors"}


def _config() -> Any:
    """A config to plan with, whose requests are so short that any number of blocks holds one."""
    config = copy.copy(_kept())
    for name in ("model_config", "cache_config", "scheduler_config", "parallel_config"):
        setattr(config, name, copy.copy(getattr(config, name)))
    return config


@functools.cache
def _kept() -> Any:
    return make_vllm_config(
        model="facebook/opt-125m",
        dtype="float16",
        skip_tokenizer_init=True,
        max_model_len=1,
        block_size=16,
    )

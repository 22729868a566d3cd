"""What keeps speculators from being imported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_compat.patches.lend import Lend
from vllm_compat.patches.patch import Wrap
from vllm_compat.patches.speculators.generator import MODULE

#: In 0.33.0 they moved to vllm.v1.core.kv_cache_planning; the first two came in 0.11.0. With ``generator.CHANGES``
#: nothing calls them.
PLANNING = tuple(
    f"vllm.v1.core.kv_cache_utils:{name}"
    for name in (
        "_get_kv_cache_groups_uniform_spec",
        "get_kv_cache_config_from_groups",
        "unify_hybrid_kv_cache_specs",
    )
)

#: What 0.4.0 imports besides; it came with 0.11.1.
HASHING = ("vllm.utils.hashing:get_hash_fn_by_name",)


def _reload_schema(wrapped: Callable[..., Any], cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # noqa: ARG001
    import torch

    # Transformers annotates PretrainedConfig.dtype with torch.dtype (5.4.0), and imports torch for type checkers only.
    cls.model_rebuild(force=True, _types_namespace={"torch": torch})


#: transformers 5.24.0 has it no longer; the EAGLE-1 model alone calls it.
ATTENTION_MASK = ("transformers.modeling_attn_mask_utils:_prepare_4d_causal_attention_mask",)

CHANGES = (
    Lend("speculators.models.eagle", ATTENTION_MASK),
    Lend(MODULE, (*PLANNING, *HASHING)),
    Wrap("speculators.utils.pydantic_utils", "ReloadableBaseModel.reload_schema", _reload_schema),
)

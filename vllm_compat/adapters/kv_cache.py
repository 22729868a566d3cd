"""KV cache specs, and the planning that turns them into a KVCacheConfig for every worker and one for the scheduler."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from vllm_compat.adapters.base import Adapter, Need
from vllm_compat.adapters.select import adapter

_UTILS = "vllm.v1.core.kv_cache_utils"
_SPECS = "vllm.v1.kv_cache_interface"

#: Our name of a spec kind -> class in vllm.v1.kv_cache_interface.
SPEC_CLASSES = {
    "full_attention": "FullAttentionSpec",
    "mla_attention": "MLAAttentionSpec",
    "sliding_window": "SlidingWindowSpec",
}


class KVCache_0_32(Adapter):
    """Hash block size and hit alignment are written on every config (0.32.0).

    The layout is resolved before memory is measured (0.29.0), and ``get_kv_cache_configs`` plans all workers at once
    (0.11.0).
    """

    surface = "kv_cache"
    since = (0, 32, 0)
    plan_configs = Need(f"{_UTILS}:get_kv_cache_configs", passes=("vllm_config", "kv_cache_specs", "available_memory"))
    for_scheduler = Need(f"{_UTILS}:generate_scheduler_kv_cache_config", passes=("kv_cache_configs",))
    alignment = Need(
        f"{_UTILS}:resolve_cache_hit_alignment_tokens",
        passes=("kv_cache_config", "vllm_config", "scheduler_block_size", "hash_block_size"),
    )
    capacity = Need(f"{_UTILS}:update_kv_cache_capacity", passes=("vllm_config", "kv_cache_config"))
    register = Need("vllm.v1.core.single_type_kv_cache_manager:register_all_kvcache_specs", passes=("vllm_config",))
    cache_dtype = Need("vllm.utils.torch_utils:kv_cache_dtype_str_to_dtype", passes=("kv_cache_dtype", "model_config"))
    needs = (
        plan_configs,
        for_scheduler,
        alignment,
        capacity,
        register,
        cache_dtype,
        Need(f"{_SPECS}:FullAttentionSpec", passes=("block_size", "num_kv_heads", "head_size", "dtype")),
        Need(f"{_SPECS}:MLAAttentionSpec", passes=("block_size", "num_kv_heads", "head_size", "dtype")),
        Need(
            f"{_SPECS}:SlidingWindowSpec",
            passes=("block_size", "num_kv_heads", "head_size", "dtype", "sliding_window"),
        ),
    )

    def build_spec(self, kind: str, options: Mapping[str, Any]) -> Any:
        return self.construct(Need(f"{_SPECS}:{SPEC_CLASSES[kind]}"), options)

    def respect_non_causal(self, vllm_config: Any, specs: Sequence[Mapping[str, Any]]) -> None:
        """Turn chunked prefill and prefix caching off for a model with non-causal layers, which both would corrupt."""
        if any(getattr(spec, "non_causal", False) for worker in specs for spec in worker.values()):
            vllm_config.scheduler_config.enable_chunked_prefill = False
            vllm_config.cache_config.enable_prefix_caching = False

    def plan(
        self, vllm_config: Any, specs: Sequence[Mapping[str, Any]], available_memory: Sequence[int]
    ) -> tuple[list[Any], Any]:
        """(one KVCacheConfig per worker, the scheduler's), and the fields of ``vllm_config`` that depend on them.

        The order is that of ``EngineCore._initialize_kv_caches``. ``available_memory`` is in bytes per worker.
        """
        self.construct(self.register, {"vllm_config": vllm_config})
        self.respect_non_causal(vllm_config, specs)
        if vllm_config.cache_config.kv_cache_layout is None:
            # No worker has been asked (a scheduler without an executor): vLLM's order of preference, as where no
            # backend declares one.
            executors = adapter("executor")
            executors.resolve_layout(vllm_config, [executors.default_layouts()], specs)
        configs: list[Any] = self.construct(
            self.plan_configs,
            {
                "vllm_config": vllm_config,
                # The planner edits the dictionaries when it unifies hybrid specs.
                "kv_cache_specs": [dict(worker) for worker in specs],
                "available_memory": list(available_memory),
            },
        )
        cache = vllm_config.cache_config
        for config in configs:
            config.kv_cache_layout = cache.kv_cache_layout
        scheduler_config = self.construct(self.for_scheduler, {"kv_cache_configs": configs})
        cache.num_gpu_blocks = scheduler_config.num_blocks
        groups = [group.kv_cache_spec for group in scheduler_config.kv_cache_groups]
        if groups:
            # A group that opts out of prefix caching (a ring buffer) must not drag the global block size down.
            cacheable = [spec.block_size for spec in groups if spec.prefix_cacheable]
            cache.block_size = min(cacheable or [spec.block_size for spec in groups])
            self.construct(self.capacity, {"vllm_config": vllm_config, "kv_cache_config": scheduler_config})
        vllm_config.validate_block_size()
        scheduler_block, hash_block = adapter("block_hashing").block_sizes(vllm_config, scheduler_config)
        hit_alignment = self.construct(
            self.alignment,
            {
                "kv_cache_config": scheduler_config,
                "vllm_config": vllm_config,
                "scheduler_block_size": scheduler_block,
                "hash_block_size": hash_block,
            },
        )
        for config in (*configs, scheduler_config):
            config.hash_block_size = hash_block
            config.cache_hit_alignment_tokens = hit_alignment
        return configs, scheduler_config

    def specs_from_model(self, vllm_config: Any, rank: int) -> dict[str, Any]:
        """Specs of the worker ``rank`` from the model's configuration alone, for models whose layers are all alike.

        The names of the layers are ours: a scheduler only counts them, workers have their own.
        """
        model, parallel = vllm_config.model_config, copy.copy(vllm_config.parallel_config)
        parallel.rank = rank  # pipeline stages hold different layers
        block_size = vllm_config.cache_config.block_size
        dtype = self.construct(
            self.cache_dtype, {"kv_cache_dtype": vllm_config.cache_config.cache_dtype, "model_config": model}
        )
        common = {"block_size": block_size, "head_size": model.get_head_size(), "dtype": dtype}
        if model.use_mla:
            # One latent vector a token, the same on every tensor-parallel rank.
            spec = self.build_spec("mla_attention", {**common, "num_kv_heads": 1})
        else:
            spec = self.build_spec("full_attention", {**common, "num_kv_heads": model.get_num_kv_heads(parallel)})
        start, end = model.get_layers_start_end_indices(parallel)
        return {f"model.layers.{index}.self_attn.attn": spec for index in range(start, end)}


ADAPTERS = (KVCache_0_32,)

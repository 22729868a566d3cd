"""KV cache specs, and the planning that turns them into a KVCacheConfig for every worker and one for the scheduler.

Planning follows ``EngineCore._initialize_kv_caches`` of the release, in its order and with its side effects.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from vllm_compat.adapters.base import Adapter, Need
from vllm_compat.adapters.kv_cache_specs import SPECS_0_10, SPECS_0_11, need_of, refuse_of_mla_class, translated
from vllm_compat.adapters.select import adapter

_UTILS = "vllm.v1.core.kv_cache_utils"
_PLANNING = "vllm.v1.core.kv_cache_planning"

_PLAN = ("vllm_config", "kv_cache_specs", "available_memory")
_SCHEDULERS = Need(f"{_UTILS}:generate_scheduler_kv_cache_config", passes=("kv_cache_configs",))
_ALIGNMENT = Need(
    f"{_UTILS}:resolve_cache_hit_alignment_tokens",
    passes=("kv_cache_config", "vllm_config", "scheduler_block_size", "hash_block_size"),
)
_CAPACITY = Need(f"{_UTILS}:update_kv_cache_capacity", passes=("vllm_config", "kv_cache_config"))
_REGISTER = Need("vllm.v1.core.single_type_kv_cache_manager:register_all_kvcache_specs", passes=("vllm_config",))
_DTYPE = Need("vllm.utils.torch_utils:kv_cache_dtype_str_to_dtype", passes=("kv_cache_dtype", "model_config"))


def _reads(symbol: str, *names: str) -> Need:
    """What is read there, or written: an attribute of our own invention would be as good as none."""
    return Need(symbol, reads=names, read_only=True)


_CACHE, _CONFIG = "vllm.config:CacheConfig", "vllm.v1.kv_cache_interface:KVCacheConfig"
_SPEC = "vllm.v1.kv_cache_interface:KVCacheSpec"
_PLANNED = (
    _reads(_CACHE, "num_gpu_blocks", "num_gpu_blocks_override", "block_size", "enable_prefix_caching", "cache_dtype"),
    _reads(_CONFIG, "num_blocks", "kv_cache_groups"),
    _reads("vllm.v1.kv_cache_interface:KVCacheGroupSpec", "kv_cache_spec"),
    _reads(_SPEC, "block_size", "page_size_bytes"),
)
_VALIDATED = (*_PLANNED, Need("vllm.config:VllmConfig.validate_block_size", bound=True))
_LAID_OUT = (*_VALIDATED, _reads(_CACHE, "kv_cache_layout"), _reads(_CONFIG, "kv_cache_layout"))
_CACHEABLE = (*_LAID_OUT, _reads(_SPEC, "prefix_cacheable"))
_ALIGNED = (*_CACHEABLE, _reads(_CONFIG, "hash_block_size", "cache_hit_alignment_tokens"))

Specs = Sequence[Mapping[str, Any]]


class KVCache_0_33(Adapter):
    """Planning moved to ``vllm.v1.core.kv_cache_planning`` and starts from the groups of the whole model (0.33.0).

    The groups are made before memory is measured, because they settle how decode context parallelism interleaves
    tokens (``cp_kv_cache_interleave_size``), and are the planner's fourth argument.
    """

    surface = "kv_cache"
    since = (0, 33, 0)
    plan_configs = Need(f"{_PLANNING}:get_kv_cache_configs", passes=(*_PLAN, "global_kv_cache_groups"))
    plan_groups = Need(f"{_PLANNING}:get_global_kv_cache_groups", passes=("vllm_config", "kv_cache_specs"))
    interleave = Need(
        "vllm.config:VllmConfig.adjust_dcp_kv_cache_interleave_size", passes=("kv_cache_groups",), bound=True
    )
    for_scheduler = _SCHEDULERS
    alignment = _ALIGNMENT
    capacity = _CAPACITY
    register = _REGISTER
    cache_dtype = _DTYPE
    specs: ClassVar[tuple[Need, ...]] = SPECS_0_11
    needs: ClassVar[tuple[Need, ...]] = (
        plan_configs,
        plan_groups,
        interleave,
        for_scheduler,
        alignment,
        capacity,
        register,
        cache_dtype,
        *specs,
        *_ALIGNED,
    )
    left: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "CacheConfig": ("*",),
        "KVCacheConfig": ("*",),
        "KVCacheGroupSpec": ("*",),
        "KVCacheSpec": ("*",),
    }

    # -- specs ------------------------------------------------------------------------------------------------------

    def build_spec(self, kind: str, options: Mapping[str, Any]) -> Any:
        """A native spec; ``kind`` is a key of SPEC_CLASSES.

        Raises:
            UnsupportedField: the kind, or an option that was set, does not exist in this release.
        """
        need = need_of(kind, self.specs, options)
        return self.construct(need, translated(need, options))

    def specs_from_model(self, vllm_config: Any, rank: int) -> dict[str, Any]:
        """Specs of the worker ``rank`` from the model's configuration alone, for models whose layers are all alike.

        The names of the layers are ours: a scheduler only counts them, workers have their own.
        """
        model, parallel = vllm_config.model_config, copy.copy(vllm_config.parallel_config)
        parallel.rank = rank  # pipeline stages hold different layers
        common = {
            "block_size": vllm_config.cache_config.block_size,
            "head_size": model.get_head_size(),
            "dtype": self.dtype_of_cache(vllm_config),
        }
        if model.use_mla:
            # One latent vector a token, the same on every tensor-parallel rank.
            spec = self.build_spec("mla_attention", {**common, "num_kv_heads": 1})
        else:
            spec = self.build_spec("full_attention", {**common, "num_kv_heads": model.get_num_kv_heads(parallel)})
        start, end = model.get_layers_start_end_indices(parallel)
        return {f"model.layers.{index}.self_attn.attn": spec for index in range(start, end)}

    def dtype_of_cache(self, vllm_config: Any) -> Any:
        """The torch dtype that ``cache_config.cache_dtype`` names ("auto" is the model's)."""
        return self.construct(
            self.cache_dtype,
            {"kv_cache_dtype": vllm_config.cache_config.cache_dtype, "model_config": vllm_config.model_config},
        )

    def memory_of_blocks(self, worker: Mapping[str, Any], num_blocks: int) -> int:
        """Bytes that hold ``num_blocks`` blocks of every layer; what is checked against ``max_model_len``.

        vLLM itself computes this from ``num_gpu_blocks_override`` since 0.20.0; before, it fixed the number of blocks
        by the override and compared ``max_model_len`` with the memory that was measured.
        """
        return num_blocks * sum(int(spec.page_size_bytes) for spec in worker.values())

    # -- planning ---------------------------------------------------------------------------------------------------

    def register_specs(self, vllm_config: Any) -> None:
        """Make vLLM's kinds of specs known to its registry; before workers are asked for theirs."""
        self.construct(self.register, {"vllm_config": vllm_config})

    def respect_non_causal(self, vllm_config: Any, specs: Specs) -> None:
        """Turn chunked prefill and prefix caching off for a model with non-causal layers, which both would corrupt."""
        if any(getattr(spec, "non_causal", False) for worker in specs for spec in worker.values()):
            vllm_config.scheduler_config.enable_chunked_prefill = False
            vllm_config.cache_config.enable_prefix_caching = False

    def settle_layout(self, vllm_config: Any, specs: Specs) -> None:
        """Without workers to ask (a scheduler without an executor): vLLM's order of preference for the layout."""
        if vllm_config.cache_config.kv_cache_layout is None:
            executors = adapter("executor")
            executors.resolve_layout(vllm_config, [executors.default_layouts()], specs)

    def groups(self, vllm_config: Any, specs: Specs) -> list[Any]:
        """Groups of the whole model; settles ``parallel_config.cp_kv_cache_interleave_size``."""
        groups: list[Any] = self.construct(
            self.plan_groups, {"vllm_config": vllm_config, "kv_cache_specs": _copied(specs)}
        )
        vllm_config.adjust_dcp_kv_cache_interleave_size(groups)
        return groups

    def plan(self, vllm_config: Any, specs: Specs, available_memory: Sequence[int]) -> tuple[list[Any], Any]:
        """(one KVCacheConfig per worker, the scheduler's), and the fields of ``vllm_config`` that depend on them.

        ``available_memory`` is in bytes per worker.
        """
        self.register_specs(vllm_config)
        self.respect_non_causal(vllm_config, specs)
        self.settle_layout(vllm_config, specs)
        max_model_len = vllm_config.model_config.max_model_len
        try:
            configs = self.plan_workers(vllm_config, specs, available_memory)
        except ValueError:
            # Looking for the length that would have fitted, 0.11.1 to 0.13.0 leave the last one tried in the config.
            vllm_config.model_config.max_model_len = max_model_len
            raise
        scheduler_config = self.plan_scheduler(configs)
        self.bring_in_line(vllm_config, scheduler_config)
        self.annotate(vllm_config, configs, scheduler_config)
        return configs, scheduler_config

    def plan_workers(self, vllm_config: Any, specs: Specs, available_memory: Sequence[int]) -> list[Any]:
        """One KVCacheConfig per worker, all with the same number of blocks."""
        return self.with_layout(
            vllm_config,
            self.construct(
                self.plan_configs,
                {
                    **self.planning(vllm_config, specs, available_memory),
                    "global_kv_cache_groups": self.groups(vllm_config, specs),
                },
            ),
        )

    def planning(self, vllm_config: Any, specs: Specs, available_memory: Sequence[int]) -> dict[str, Any]:
        return {
            "vllm_config": vllm_config,
            "kv_cache_specs": _copied(specs),
            "available_memory": list(available_memory),
        }

    def with_layout(self, vllm_config: Any, configs: list[Any], /) -> list[Any]:
        for config in configs:
            config.kv_cache_layout = vllm_config.cache_config.kv_cache_layout
        return configs

    def plan_scheduler(self, configs: list[Any]) -> Any:
        return self.construct(self.for_scheduler, {"kv_cache_configs": configs})

    def bring_in_line(self, vllm_config: Any, scheduler_config: Any) -> None:
        """Write what follows from the plan into ``vllm_config.cache_config``."""
        cache = vllm_config.cache_config
        cache.num_gpu_blocks = scheduler_config.num_blocks
        groups = [group.kv_cache_spec for group in scheduler_config.kv_cache_groups]
        if groups:
            cache.block_size = self.smallest_block(groups)
            self.note_capacity(vllm_config, scheduler_config)
        vllm_config.validate_block_size()

    def smallest_block(self, groups: list[Any]) -> Any:
        # A group that opts out of prefix caching (a ring buffer) must not drag the global block size down.
        cacheable = [spec.block_size for spec in groups if spec.prefix_cacheable]
        return min(cacheable or [spec.block_size for spec in groups])

    def note_capacity(self, vllm_config: Any, scheduler_config: Any) -> None:
        self.construct(self.capacity, {"vllm_config": vllm_config, "kv_cache_config": scheduler_config})

    def annotate(self, vllm_config: Any, configs: list[Any], scheduler_config: Any) -> None:
        """Write hash block size and hit alignment (both in tokens) on every config."""
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


class KVCache_0_32(KVCache_0_33):
    """Hash block size and hit alignment are written on every config (0.32.0).

    ``get_kv_cache_configs`` lies in ``kv_cache_utils`` and makes the groups itself.
    """

    since = (0, 32, 0)
    plan_configs = Need(f"{_UTILS}:get_kv_cache_configs", passes=_PLAN)
    needs: ClassVar[tuple[Need, ...]] = (
        plan_configs,
        _SCHEDULERS,
        _ALIGNMENT,
        _CAPACITY,
        _REGISTER,
        _DTYPE,
        *SPECS_0_11,
        *_ALIGNED,
    )

    def plan_workers(self, vllm_config: Any, specs: Specs, available_memory: Sequence[int]) -> list[Any]:
        configs = self.construct(self.plan_configs, self.planning(vllm_config, specs, available_memory))
        return self.with_layout(vllm_config, configs)


class KVCache_0_30(KVCache_0_32):
    """A group whose blocks are never shared no longer counts for the block size (``prefix_cacheable``, 0.30.0)."""

    since = (0, 30, 0)
    needs: ClassVar[tuple[Need, ...]] = (
        KVCache_0_32.plan_configs,
        _SCHEDULERS,
        _CAPACITY,
        _REGISTER,
        _DTYPE,
        *SPECS_0_11,
        *_CACHEABLE,
    )

    def annotate(self, vllm_config: Any, configs: list[Any], scheduler_config: Any) -> None:
        """Nothing: the configs have no such fields."""


class KVCache_0_29(KVCache_0_30):
    """The layout of the KV cache is resolved before memory is measured, and written on every config (0.29.0).

    ``KVCacheTensor`` became one allocation with strides instead of a size shared by layers.
    """

    since = (0, 29, 0)
    needs: ClassVar[tuple[Need, ...]] = (
        KVCache_0_32.plan_configs,
        _SCHEDULERS,
        _CAPACITY,
        _REGISTER,
        _DTYPE,
        *SPECS_0_11,
        *_LAID_OUT,
    )

    def smallest_block(self, groups: list[Any]) -> Any:
        return min(spec.block_size for spec in groups)


class KVCache_0_28(KVCache_0_29):
    """``update_kv_cache_capacity`` writes how many tokens and requests fit (0.28.0). There are no layouts."""

    since = (0, 28, 0)
    needs: ClassVar[tuple[Need, ...]] = (
        KVCache_0_32.plan_configs,
        _SCHEDULERS,
        _CAPACITY,
        _REGISTER,
        _DTYPE,
        *SPECS_0_11,
        *_VALIDATED,
    )

    def settle_layout(self, vllm_config: Any, specs: Specs) -> None:
        """Nothing to settle."""

    def with_layout(self, _: Any, configs: list[Any], /) -> list[Any]:
        return configs


class KVCache_0_24(KVCache_0_28):
    """How many tokens and requests fit is written on ``cache_config`` (0.24.0), by the caller.

    Non-causal layers, which turn chunked prefill and prefix caching off, came in the same release.
    """

    since = (0, 24, 0)
    capacity = Need(f"{_UTILS}:get_kv_cache_capacity", passes=("vllm_config", "kv_cache_config"))
    needs: ClassVar[tuple[Need, ...]] = (
        KVCache_0_32.plan_configs,
        _SCHEDULERS,
        capacity,
        _REGISTER,
        _DTYPE,
        *SPECS_0_11,
        *_VALIDATED,
        _reads(_CACHE, "kv_cache_size_tokens", "kv_cache_max_concurrency"),
    )

    def note_capacity(self, vllm_config: Any, scheduler_config: Any) -> None:
        cache = vllm_config.cache_config
        cache.kv_cache_size_tokens, cache.kv_cache_max_concurrency = self.construct(
            self.capacity, {"vllm_config": vllm_config, "kv_cache_config": scheduler_config}
        )


class KVCache_0_23(KVCache_0_24):
    """Kinds of specs have to be registered before anything else (``register_all_kvcache_specs``, 0.23.0)."""

    since = (0, 23, 0)
    needs: ClassVar[tuple[Need, ...]] = (
        KVCache_0_32.plan_configs,
        _SCHEDULERS,
        _REGISTER,
        _DTYPE,
        *SPECS_0_11,
        *_VALIDATED,
    )

    def note_capacity(self, vllm_config: Any, scheduler_config: Any) -> None:
        """Nothing: the capacity is only logged."""


class KVCache_0_18(KVCache_0_23):
    """``cache_config.block_size`` is overwritten with the smallest of all groups, and validated (0.18.0)."""

    since = (0, 18, 0)
    needs: ClassVar[tuple[Need, ...]] = (
        KVCache_0_32.plan_configs,
        _SCHEDULERS,
        _DTYPE,
        *SPECS_0_11,
        *_VALIDATED,
    )

    def register_specs(self, vllm_config: Any) -> None:
        """Nothing: there is no registry."""


class KVCache_0_11_1(KVCache_0_18):
    """The block size of the config stays what it was; blocks in CPU memory are counted (none).

    ``vllm.utils`` became a package, in whose ``torch_utils`` the dtype of the cache is read (0.11.1).
    ``max_model_len`` may be fitted to the memory since 0.14.0.
    """

    since = (0, 11, 1)
    planned: ClassVar[tuple[Need, ...]] = (*_PLANNED, _reads(_CACHE, "num_cpu_blocks"))
    needs: ClassVar[tuple[Need, ...]] = (KVCache_0_32.plan_configs, _SCHEDULERS, _DTYPE, *SPECS_0_11, *planned)

    def bring_in_line(self, vllm_config: Any, scheduler_config: Any) -> None:
        vllm_config.cache_config.num_gpu_blocks = scheduler_config.num_blocks
        vllm_config.cache_config.num_cpu_blocks = 0


class KVCache_0_11(KVCache_0_11_1):
    """All workers are planned at once by ``get_kv_cache_configs`` (0.11.0), and MLA has a spec class of its own."""

    since = (0, 11, 0)
    cache_dtype = Need("vllm.utils:get_kv_cache_torch_dtype", passes=("cache_dtype", "model_dtype"))
    needs: ClassVar[tuple[Need, ...]] = (
        KVCache_0_32.plan_configs,
        _SCHEDULERS,
        cache_dtype,
        *SPECS_0_11,
        *KVCache_0_11_1.planned,
    )

    def dtype_of_cache(self, vllm_config: Any) -> Any:
        return self.construct(
            self.cache_dtype,
            {
                "cache_dtype": vllm_config.cache_config.cache_dtype,
                "model_dtype": vllm_config.model_config.dtype,
            },
        )


class KVCache_0_10(KVCache_0_11):
    """Every worker is planned for itself, then all are cut to the same number of blocks in place (until 0.10.2).

    The scheduler works with the first worker's config. MLA is a flag of FullAttentionSpec (``use_mla``), required.
    """

    since = (0, 10, 2)
    specs: ClassVar[tuple[Need, ...]] = SPECS_0_10
    plan_one = Need(f"{_UTILS}:get_kv_cache_config", passes=("vllm_config", "kv_cache_spec", "available_memory"))
    unify = Need(f"{_UTILS}:unify_kv_cache_configs", passes=("kv_cache_configs",))
    needs: ClassVar[tuple[Need, ...]] = (
        plan_one,
        unify,
        KVCache_0_11.cache_dtype,
        *SPECS_0_10,
        *KVCache_0_11_1.planned,
    )

    def build_spec(self, kind: str, options: Mapping[str, Any]) -> Any:
        if kind == "mamba":
            return super().build_spec(kind, options)
        if kind != "mla_attention":
            return super().build_spec(kind, {**options, "use_mla": False})
        refuse_of_mla_class(options)
        return super().build_spec("full_attention", {**options, "use_mla": True})

    def plan_workers(self, vllm_config: Any, specs: Specs, available_memory: Sequence[int]) -> list[Any]:
        configs = [
            self.construct(
                self.plan_one, {"vllm_config": vllm_config, "kv_cache_spec": worker, "available_memory": memory}
            )
            for worker, memory in zip(_copied(specs), available_memory, strict=True)
        ]
        self.construct(self.unify, {"kv_cache_configs": configs})
        return configs

    def plan_scheduler(self, configs: list[Any]) -> Any:
        return configs[0]


def _copied(specs: Specs) -> list[dict[str, Any]]:
    """The planner edits the dictionaries when it unifies hybrid specs."""
    return [dict(worker) for worker in specs]


ADAPTERS = (
    KVCache_0_33,
    KVCache_0_32,
    KVCache_0_30,
    KVCache_0_29,
    KVCache_0_28,
    KVCache_0_24,
    KVCache_0_23,
    KVCache_0_18,
    KVCache_0_11_1,
    KVCache_0_11,
    KVCache_0_10,
)
#: Earlier releases have all that these need as well; see ``select.in_order``.
UNSEEN = (KVCache_0_30,)

"""Readers of a scheduler's KVCacheManager, its coordinator and its BlockPool, and the reset of the prefix cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

from vllm_compat.adapters.base import Adapter, Need
from vllm_compat.values import BlockPoolState, CachedPrefix

_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_MANAGER = "vllm.v1.core.kv_cache_manager:KVCacheManager"
_BLOCKS = "vllm.v1.core.kv_cache_manager:KVCacheBlocks"
_POOL = "vllm.v1.core.block_pool:BlockPool"

_RESET = Need(
    f"{_SCHEDULER}.reset_prefix_cache",
    options={"reset_running_requests": "0.12.0", "reset_connector": "0.13.0"},
    bound=True,
)
#: What every release has.
_BASIC = (
    Need(_SCHEDULER, reads=("kv_cache_manager",), read_only=True),
    _RESET,
    Need(f"{_MANAGER}.get_block_ids", passes=("request_id",), bound=True),
    Need(f"{_BLOCKS}.get_block_ids", bound=True),
    Need(_POOL, reads=("num_gpu_blocks", "null_block", "enable_caching", "cached_block_hash_to_block"), read_only=True),
    Need(f"{_POOL}.get_num_free_blocks", bound=True),
    Need(f"{_POOL}.get_usage", bound=True),
    Need("vllm.v1.core.kv_cache_utils:KVCacheBlock", reads=("block_id",), read_only=True),
)


def _look_up(values: int) -> Need:
    return Need(f"{_MANAGER}.get_computed_blocks", passes=("request",), bound=True, gives=values)


class KVCacheManager_0_26(Adapter):
    """``get_computed_blocks`` returns a third value, the boundary of a shared prefix (0.26.0).

    Looking a prefix up may also emit KV cache events, of requests with ``kv_cache_report_mode="full"``. What it counts
    in the statistics of the prefix cache moved into the scheduler in 0.27.0.
    """

    surface = "kv_cache_manager"
    since = (0, 26, 0)
    needs: ClassVar[tuple[Need, ...]] = (
        *_BASIC,
        _look_up(3),
        Need(_MANAGER, reads=("block_pool", "log_stats", "enable_kv_cache_events"), read_only=True),
    )
    left: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "KVCacheManager.get_computed_blocks": ("max_cache_hit_length",),  # the scheduler's own bound is wanted
        "KVCacheBlocks.get_block_ids": ("allow_none", "group_ids"),  # all groups, empty ones too
        "KVCacheBlock": ("*",),
    }
    #: What the manager does beside looking up, by the attribute that turns it off.
    side_effects: ClassVar[tuple[str, ...]] = ("log_stats", "enable_kv_cache_events")

    def block_ids(self, scheduler: Any, request_id: str) -> tuple[tuple[int, ...], ...]:
        return self.plain(scheduler.kv_cache_manager.get_block_ids(request_id))

    def plain(self, groups: Any) -> tuple[tuple[int, ...], ...]:
        """Block ids per group, of native KVCacheBlocks or of ids in any of vLLM's shapes."""
        if hasattr(groups, "get_block_ids"):
            groups = groups.get_block_ids()
        groups = tuple(groups or ())
        if groups and isinstance(groups[0], int):
            groups = (groups,)
        return tuple(tuple(group) for group in groups)

    def pool(self, scheduler: Any) -> BlockPoolState:
        pool = scheduler.kv_cache_manager.block_pool
        return BlockPoolState(
            num_blocks=pool.num_gpu_blocks,
            num_free_blocks=pool.get_num_free_blocks(),
            num_cached_hashes=len(pool.cached_block_hash_to_block),
            usage=float(pool.get_usage()),
            null_block_id=pool.null_block.block_id,
            caches_prefixes=bool(pool.enable_caching),
        )

    def cached_prefix(self, scheduler: Any, request: Any) -> CachedPrefix:
        manager = scheduler.kv_cache_manager
        with _without(manager, self.side_effects):
            blocks, num_tokens, boundary = self.look_up(manager, request)
        return CachedPrefix(num_tokens=num_tokens, block_ids=self.plain(blocks), shared_prefix_boundary=boundary)

    def look_up(self, manager: Any, request: Any) -> tuple[Any, int, int]:
        """(native blocks, tokens that they hold, boundary of the shared prefix or 0)."""
        return manager.get_computed_blocks(request)  # type: ignore[no-any-return]

    def reset(self, scheduler: Any, options: Mapping[str, Any]) -> bool:
        return bool(self.construct_class(_RESET, scheduler.reset_prefix_cache, options))


class KVCacheManager_0_24(KVCacheManager_0_26):
    """A hybrid coordinator leaves the shared prefix that is not cached yet as an attribute behind (0.24.0, 0.25)."""

    since = (0, 24, 0)
    needs: ClassVar[tuple[Need, ...]] = (
        *_BASIC,
        _look_up(2),
        Need(_MANAGER, reads=("block_pool", "log_stats", "coordinator"), read_only=True),
        Need(
            "vllm.v1.core.kv_cache_coordinator:HybridKVCacheCoordinator",
            reads=("num_uncached_common_prefix_tokens",),
            read_only=True,
        ),
    )
    side_effects: ClassVar[tuple[str, ...]] = ("log_stats",)

    def look_up(self, manager: Any, request: Any) -> tuple[Any, int, int]:
        state = vars(manager.coordinator)
        # Set by every lookup of a hybrid coordinator, so what stands there is of an earlier request.
        before = state.pop("num_uncached_common_prefix_tokens", None)
        blocks, num_tokens = manager.get_computed_blocks(request)
        uncached = state.pop("num_uncached_common_prefix_tokens", 0)
        if before is not None:
            state["num_uncached_common_prefix_tokens"] = before
        return blocks, num_tokens, num_tokens + uncached if uncached else 0


class KVCacheManager_0_10(KVCacheManager_0_24):
    """Nothing says how far a shared prefix reaches (until 0.23.0)."""

    since = (0, 10, 2)
    needs: ClassVar[tuple[Need, ...]] = (
        *_BASIC,
        _look_up(2),
        Need(_MANAGER, reads=("block_pool", "log_stats"), read_only=True),
    )

    def look_up(self, manager: Any, request: Any) -> tuple[Any, int, int]:
        return (*manager.get_computed_blocks(request), 0)


@contextmanager
def _without(manager: Any, switches: tuple[str, ...]) -> Iterator[None]:
    """Turn ``switches`` of a manager off, so that asking it counts and tells nothing."""
    before = {name: getattr(manager, name) for name in switches}
    for name in switches:
        setattr(manager, name, False)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(manager, name, value)


ADAPTERS = (KVCacheManager_0_26, KVCacheManager_0_24, KVCacheManager_0_10)

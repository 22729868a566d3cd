"""What a scheduler's KV cache holds: readers of its manager and block pool, and the reset of its prefix cache.

``scheduler`` is vLLM's own Scheduler or a subclass, for instance from ``make_scheduler`` or ``EngineLoop.scheduler``.
"""

from __future__ import annotations

from typing import Any

from vllm_compat._unset import UNSET
from vllm_compat.adapters.select import adapter
from vllm_compat.values import BlockPoolState, CachedPrefix

__all__ = [
    "plain_block_ids",
    "read_block_ids",
    "read_block_pool",
    "read_cached_prefix",
    "reset_prefix_cache",
]


def read_block_ids(scheduler: Any, request_id: str) -> tuple[tuple[int, ...], ...]:
    """Blocks that a request holds, in the order of its tokens, per KV cache group.

    A group is empty when the request holds none of its blocks: it waits, was preempted, is finished, or was never here.
    The null block (``read_block_pool``) stands where a block is no longer needed.
    """
    return adapter("kv_cache_manager").block_ids(scheduler, request_id)  # type: ignore[no-any-return]


def plain_block_ids(block_ids: Any) -> tuple[tuple[int, ...], ...]:
    """Block ids per KV cache group, whatever vLLM hands over.

    Args:
        block_ids: ``KVCacheBlocks`` (``update_state_after_alloc`` of a KV connector), a tuple of lists
            (``NewRequestData.block_ids``, ``request_finished_all_groups``), one flat list (``request_finished``), or
            None (``CachedRequestData.new_block_ids`` of a step that needs no block), which gives ().
    """
    return adapter("kv_cache_manager").plain(block_ids)  # type: ignore[no-any-return]


def read_block_pool(scheduler: Any) -> BlockPoolState:
    """How many blocks there are, are free, and are in the prefix cache.

    Since 0.30.0 a group of a model with host-resident cache may have a pool of its own, which is not counted.
    """
    return adapter("kv_cache_manager").pool(scheduler)  # type: ignore[no-any-return]


def read_cached_prefix(scheduler: Any, request: Any) -> CachedPrefix:
    """What the prefix cache has of a native Request, as the scheduler would find it now.

    Nothing is allocated, counted in the statistics or told to listeners of KV cache events. Nothing is found when
    prefix caching is off, or the request does not read it (prompt log-probabilities). KV connectors are not asked.

    Args:
        scheduler: The scheduler; the request need not be one of its own.
        request: From ``make_request(scheduler=scheduler)``, which gives it hashes of the right block size.
    """
    return adapter("kv_cache_manager").cached_prefix(scheduler, request)  # type: ignore[no-any-return]


def reset_prefix_cache(scheduler: Any, *, reset_running_requests: Any = UNSET, reset_connector: Any = UNSET) -> bool:
    """Forget all cached prefixes, for instance after the model's weights were replaced.

    Args:
        scheduler: The scheduler.
        reset_running_requests: Preempt all running requests first; they are computed again (0.12.0).
        reset_connector: Reset the cache of the KV connector as well (0.13.0).

    Returns:
        Whether it was reset. It is not while requests hold blocks.

    Raises:
        UnsupportedField: an option that was set does not exist in this release.
    """
    options = {"reset_running_requests": reset_running_requests, "reset_connector": reset_connector}
    return adapter("kv_cache_manager").reset(scheduler, options)  # type: ignore[no-any-return]

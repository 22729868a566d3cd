"""The scheduler, and the manager of structured output that it asks for grammars."""

from __future__ import annotations

from typing import Any

from vllm_compat._unset import UNSET
from vllm_compat.adapters.select import adapter

__all__ = ["make_scheduler", "make_structured_output_manager"]


def make_structured_output_manager(vllm_config: Any) -> Any:
    """A native ``StructuredOutputManager``; loads the tokenizer unless the config says ``skip_tokenizer_init``."""
    return adapter("structured_output").build(vllm_config)


def make_scheduler(
    vllm_config: Any,
    kv_cache_config: Any,
    structured_output_manager: Any = None,
    *,
    scheduler_cls: str | type | None = None,
    include_finished_set: Any = UNSET,
    log_stats: Any = UNSET,
    mm_registry: Any = UNSET,
) -> Any:
    """A native scheduler.

    Args:
        vllm_config: The configuration, after ``make_kv_cache_config`` (which sets what a Scheduler reads from it).
        kv_cache_config: The scheduler's KVCacheConfig.
        structured_output_manager: None makes one.
        scheduler_cls: "sync", "async", a subclass of vLLM's Scheduler, or None for the class the config asks for.
        include_finished_set, log_stats, mm_registry: as in vLLM's Scheduler.
    """
    scheduling = adapter("scheduler")
    if structured_output_manager is None:
        structured_output_manager = make_structured_output_manager(vllm_config)
    block_size, hash_block_size = adapter("block_hashing").block_sizes(vllm_config, kv_cache_config)
    return scheduling.build(
        scheduling.scheduler_class(vllm_config, scheduler_cls),
        {
            "vllm_config": vllm_config,
            "kv_cache_config": kv_cache_config,
            "structured_output_manager": structured_output_manager,
            "block_size": block_size,
            "hash_block_size": hash_block_size,
            "include_finished_set": include_finished_set,
            "log_stats": log_stats,
            "mm_registry": mm_registry,
        },
    )

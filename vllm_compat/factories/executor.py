"""The executor with its workers, and their KV cache."""

from __future__ import annotations

from typing import Any

from vllm_compat.adapters.select import adapter
from vllm_compat.factories.kv_cache import plan

__all__ = ["initialize_kv_cache", "make_executor"]


def make_executor(vllm_config: Any, *, executor_cls: type | None = None) -> Any:
    """A native executor with its workers started and the model loaded.

    Call ``initialize_kv_cache`` before its first step.

    Args:
        vllm_config: The configuration; ``distributed_executor_backend`` decides the class.
        executor_cls: Use this class instead.
    """
    executors = adapter("executor")
    return executors.build(executor_cls or executors.executor_class(vllm_config), vllm_config)


def initialize_kv_cache(
    executor: Any, vllm_config: Any, *, num_blocks: int | None = None, available_memory: int | None = None
) -> Any:
    """Plan, allocate and warm up the KV cache of a new executor; returns the scheduler's KVCacheConfig.

    Args:
        executor: From ``make_executor``.
        vllm_config: The executor's configuration.
        num_blocks: Number of blocks, or
        available_memory: bytes per worker; with neither, memory is measured by vLLM's profiling run.
    """
    executors, planner = adapter("executor"), adapter("kv_cache")
    planner.register_specs(vllm_config)
    specs = executors.kv_cache_specs(executor)
    planner.respect_non_causal(vllm_config, specs)  # before memory is measured
    executors.prepare_memory(executor, vllm_config, specs)
    memory: int | list[int] | None = available_memory
    if num_blocks is None and available_memory is None:
        memory = executors.available_memory(executor)
    max_model_len = vllm_config.model_config.max_model_len
    configs, scheduler_config = plan(vllm_config, specs, num_blocks, memory)
    if vllm_config.model_config.max_model_len != max_model_len:
        # Planning may shorten it to what fits; workers were started with the longer one.
        executors.call_workers(executor, "update_max_model_len", vllm_config.model_config.max_model_len)
    executors.initialize(executor, configs)
    return scheduler_config

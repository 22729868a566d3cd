"""The KV cache: specs of layers, and the plan that the scheduler and the workers share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_compat._unset import UNSET
from vllm_compat.adapters.select import adapter
from vllm_compat.errors import UnsupportedField, VllmCompatError

__all__ = ["make_kv_cache_config", "make_kv_cache_spec", "make_kv_cache_specs"]


def make_kv_cache_spec(
    kind: str,
    *,
    block_size: int,
    num_kv_heads: Any = UNSET,
    head_size: Any = UNSET,
    dtype: Any = UNSET,
    sliding_window: Any = UNSET,
    attention_chunk_size: Any = UNSET,
    shapes: Any = UNSET,
    dtypes: Any = UNSET,
    **options: Any,
) -> Any:
    """A native KV cache spec of one layer.

    Args:
        kind: "full_attention", "mla_attention", "sliding_window", "sliding_window_mla" (0.20.0), "mamba",
            "chunked_local_attention", "sink_full_attention" (0.14.0), "encoder_only_attention", "cross_attention",
            "hidden_state_cache" (0.22.0), "rswa" (0.25.0), "circular_buffer" (0.29.0), "tq_full_attention"
            (0.20.0 to 0.27.1), or "uniform_type" (0.11.0), which holds the specs of several layers.
        block_size: Tokens per block.
        num_kv_heads: KV heads on one worker (1 for MLA). This and the next two: of every kind of attention.
        head_size: Elements per head (MLA: kv_lora_rank + qk_rope_head_dim).
        dtype: torch dtype of the cache.
        sliding_window: Window in tokens, for both "sliding_window" kinds.
        attention_chunk_size: Chunk in tokens, for "chunked_local_attention".
        shapes, dtypes: One per state tensor of a block, for "mamba".
        options: Further fields of the spec in this release: ``sink_len``, ``rswa_window``, ``kv_cache_specs`` (layer
            name -> spec, of "uniform_type"), … ``mamba_type`` may be a string in every release ("mamba2"). MLA's
            ``compress_ratio`` is the ``tokens_per_state`` of 0.29.0 and newer, and either name is understood.

    Raises:
        UnsupportedField: the kind, or an option that was set, does not exist in this release.
        VllmCompatError: no such kind, or something that it requires is not given.
    """
    return adapter("kv_cache").build_spec(
        kind,
        {
            "block_size": block_size,
            "num_kv_heads": num_kv_heads,
            "head_size": head_size,
            "dtype": dtype,
            "sliding_window": sliding_window,
            "attention_chunk_size": attention_chunk_size,
            "shapes": shapes,
            "dtypes": dtypes,
            **options,
        },
    )


def make_kv_cache_specs(vllm_config: Any, executor: Any = None) -> list[dict[str, Any]]:
    """Layer name -> KV cache spec, one dictionary per worker.

    Args:
        vllm_config: The configuration.
        executor: Ask its workers, whose model is loaded: right for every model. Without it the specs are derived from
            the model's configuration, which is possible when all layers are of one kind.

    Raises:
        UnsupportedField: the model mixes kinds of layers, and no executor was given.
    """
    if executor is not None:
        return adapter("executor").kv_cache_specs(executor)  # type: ignore[no-any-return]
    model = vllm_config.model_config
    if model.is_hybrid or model.is_attention_free or model.get_sliding_window() is not None:
        raise UnsupportedField(
            symbol="make_kv_cache_specs(executor=None)",
            needed="a model whose layers all have full attention, or its loaded executor",
            found=f"{model.hf_config.model_type}, which has layers of another kind",
            advice="pass executor=make_executor(vllm_config), or the specs themselves to make_kv_cache_config",
        )
    parallel = vllm_config.parallel_config
    world = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    return [adapter("kv_cache").specs_from_model(vllm_config, rank) for rank in range(world)]


def make_kv_cache_config(
    vllm_config: Any,
    specs: Sequence[Mapping[str, Any]] | Mapping[str, Any] | None = None,
    *,
    num_blocks: int | None = None,
    available_memory: int | Sequence[int] | None = None,
) -> Any:
    """The scheduler's native ``KVCacheConfig``; ``vllm_config.cache_config`` is brought in line with it.

    Args:
        vllm_config: Its cache_config gets ``num_gpu_blocks``, ``block_size`` and what else a Scheduler reads.
        specs: Layer name -> spec, for one worker or one dictionary per worker. None: ``make_kv_cache_specs``.
        num_blocks: Number of blocks; exactly one of this and ``available_memory``.
        available_memory: Bytes, for every worker or one number per worker.
    """
    return plan(vllm_config, specs, num_blocks, available_memory)[1]


def plan(
    vllm_config: Any,
    specs: Sequence[Mapping[str, Any]] | Mapping[str, Any] | None,
    num_blocks: int | None,
    available_memory: int | Sequence[int] | None,
) -> tuple[list[Any], Any]:
    """(every worker's KVCacheConfig, the scheduler's); arguments as in ``make_kv_cache_config``."""
    if (num_blocks is None) == (available_memory is None):
        raise VllmCompatError(
            "a KV cache config",
            needed="exactly one of num_blocks and available_memory",
            found="neither" if num_blocks is None else "both",
            advice="pass num_blocks=… for a fixed size, available_memory=<bytes> to fill memory",
        )
    if specs is None:
        specs = make_kv_cache_specs(vllm_config)
    workers = [specs] if isinstance(specs, Mapping) else list(specs)
    planner = adapter("kv_cache")
    cache = vllm_config.cache_config
    before = cache.num_gpu_blocks_override
    if num_blocks is not None:
        if num_blocks < 1:
            raise VllmCompatError(
                "a KV cache config",
                needed="num_blocks of at least 1",
                found=str(num_blocks),
                advice="pass a positive number of blocks, or available_memory=<bytes>",
            )
        # vLLM's own switch: it decouples the number of blocks from memory, for every kind of group.
        cache.num_gpu_blocks_override = num_blocks
        available_memory = [planner.memory_of_blocks(worker, num_blocks) for worker in workers]
    memory = [available_memory] * len(workers) if isinstance(available_memory, int) else list(available_memory or ())
    try:
        return planner.plan(vllm_config, workers, memory)  # type: ignore[no-any-return]
    finally:
        if num_blocks is not None:
            cache.num_gpu_blocks_override = before

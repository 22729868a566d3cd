"""Factories: vLLM's own native objects, right for whichever release is installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_compat._token_ids import plain_token_ids
from vllm_compat._unset import UNSET
from vllm_compat.adapters.select import adapter
from vllm_compat.errors import UnsupportedField, VllmCompatError
from vllm_compat.hashing import make_block_hasher

__all__ = [
    "initialize_kv_cache",
    "make_executor",
    "make_kv_cache_config",
    "make_kv_cache_spec",
    "make_kv_cache_specs",
    "make_model_runner_output",
    "make_request",
    "make_sampling_params",
    "make_scheduler",
    "make_structured_output_manager",
    "make_vllm_config",
]


def make_vllm_config(**engine_args: Any) -> Any:
    """A ``vllm.config.VllmConfig`` from EngineArgs by name: ``make_vllm_config(model=path, max_model_len=2048)``.

    Raises:
        UnsupportedField: this release's EngineArgs has no such option. Whatever vLLM itself raises for bad values.
    """
    return adapter("vllm_config").build(engine_args)


def make_sampling_params(**options: Any) -> Any:
    """A native ``vllm.SamplingParams`` by keyword: ``make_sampling_params(temperature=0.0, max_tokens=16)``.

    Raises:
        UnsupportedField: this release's SamplingParams has no such option. Whatever vLLM raises for bad values.
    """
    return adapter("sampling_params").build(options)


def make_request(
    request_id: str,
    prompt_token_ids: Sequence[int] | None = None,
    sampling_params: Any = None,
    *,
    pooling_params: Any = None,
    vllm_config: Any = None,
    kv_cache_config: Any = None,
    scheduler: Any = None,
    block_hasher: Any = UNSET,
    eos_token_id: Any = UNSET,
    arrival_time: Any = UNSET,
    prompt_embeds: Any = UNSET,
    prompt_is_token_ids: Any = UNSET,
    mm_features: Any = UNSET,
    lora_request: Any = UNSET,
    cache_salt: Any = UNSET,
    priority: Any = UNSET,
    trace_headers: Any = UNSET,
    client_index: Any = UNSET,
    resumable: Any = UNSET,
    session_id: Any = UNSET,
    reasoning_ended: Any = UNSET,
    reasoning_parser_kwargs: Any = UNSET,
    abort_immediately: Any = UNSET,
    kv_hints: Any = UNSET,
) -> Any:
    """A native ``vllm.v1.request.Request`` with a block hasher attached and NONE_HASH initialised.

    Args:
        request_id: Unique among the scheduler's requests.
        prompt_token_ids: The prompt. None only together with ``prompt_embeds``.
        sampling_params: SamplingParams of a generating request (``max_tokens`` set); exactly one of this and
            ``pooling_params``.
        pooling_params: PoolingParams of a pooling request.
        vllm_config, kv_cache_config: Where the hasher's block size and function come from (``make_block_hasher``).
        scheduler: Take both configs from this scheduler, so that its block size is matched for certain.
        block_hasher: Use this hasher; None attaches none (prefix caching must then be off).
        eos_token_id: Generation stops at this id. Up to 0.16 a field of Request, from 0.17 of the sampling params,
            which are cloned, not changed.
        prompt_embeds: [tokens, hidden] tensor instead of, or mixed with, token ids.
        prompt_is_token_ids: Per position, whether it is a token id (mixed prompts).
        mm_features: list of MultiModalFeatureSpec.
        lora_request, cache_salt, priority, trace_headers, client_index, arrival_time (seconds since the epoch),
        resumable, session_id, reasoning_ended, reasoning_parser_kwargs, abort_immediately, kv_hints: as in Request.

    Raises:
        UnsupportedField: an option that was set does not exist in this release.
        VllmNotInstalled, SignatureMismatch: see ``installed`` and ``doctor``.
        VllmCompatError: neither or both of sampling and pooling params; no max_tokens; a token id that is no
            non-negative integer.
    """
    if (sampling_params is None) == (pooling_params is None):
        raise VllmCompatError(
            f"request {request_id!r}",
            needed="exactly one of sampling_params and pooling_params",
            found="neither" if sampling_params is None else "both",
            advice="pass SamplingParams(max_tokens=…) to generate, PoolingParams() to pool",
        )
    if getattr(sampling_params, "max_tokens", 0) is None:
        # vLLM's front end fills it in; Request itself stops at a bare assertion.
        raise VllmCompatError(
            f"request {request_id!r}",
            needed="sampling params with max_tokens",
            found="max_tokens=None",
            advice="set max_tokens, at most max_model_len less the prompt",
        )
    if scheduler is not None:
        vllm_config, kv_cache_config = scheduler.vllm_config, scheduler.kv_cache_config
    if block_hasher is UNSET:
        block_hasher = make_block_hasher(vllm_config, kv_cache_config)
    return adapter("request").build(
        {
            "request_id": request_id,
            "prompt_token_ids": None if prompt_token_ids is None else plain_token_ids(request_id, prompt_token_ids),
            "sampling_params": sampling_params,
            "pooling_params": pooling_params,
            "block_hasher": block_hasher,
            "arrival_time": arrival_time,
            "prompt_embeds": prompt_embeds,
            "prompt_is_token_ids": prompt_is_token_ids,
            "mm_features": mm_features,
            "lora_request": lora_request,
            "cache_salt": cache_salt,
            "priority": priority,
            "trace_headers": trace_headers,
            "client_index": client_index,
            "resumable": resumable,
            "session_id": session_id,
            "reasoning_ended": reasoning_ended,
            "reasoning_parser_kwargs": reasoning_parser_kwargs,
            "abort_immediately": abort_immediately,
            "kv_hints": kv_hints,
        },
        eos_token_id,
    )


def make_kv_cache_spec(
    kind: str,
    *,
    block_size: int,
    num_kv_heads: int,
    head_size: int,
    dtype: Any,
    sliding_window: Any = UNSET,
    **options: Any,
) -> Any:
    """A native KV cache spec of one layer.

    Args:
        kind: "full_attention", "mla_attention" or "sliding_window".
        block_size: Tokens per block.
        num_kv_heads: KV heads on one worker (1 for MLA).
        head_size: Elements per head (MLA: kv_lora_rank + qk_rope_head_dim).
        dtype: torch dtype of the cache.
        sliding_window: Window in tokens, for "sliding_window".
        options: Further fields of the spec in this release.
    """
    from vllm_compat.adapters.kv_cache import SPEC_CLASSES

    if kind not in SPEC_CLASSES:
        raise VllmCompatError(
            f"a KV cache spec of kind {kind!r}",
            needed=f"one of {', '.join(SPEC_CLASSES)}",
            found=repr(kind),
            advice="choose one of them; for other specs call vLLM's class itself",
        )
    return adapter("kv_cache").build_spec(
        kind,
        {
            "block_size": block_size,
            "num_kv_heads": num_kv_heads,
            "head_size": head_size,
            "dtype": dtype,
            "sliding_window": sliding_window,
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
    return _plan(vllm_config, specs, num_blocks, available_memory)[1]


def _plan(
    vllm_config: Any,
    specs: Sequence[Mapping[str, Any]] | Mapping[str, Any] | None,
    num_blocks: int | None,
    available_memory: int | Sequence[int] | None,
) -> tuple[list[Any], Any]:
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
        cache.num_gpu_blocks_override = before


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
    configs, scheduler_config = _plan(vllm_config, specs, num_blocks, memory)
    if vllm_config.model_config.max_model_len != max_model_len:
        # Planning may shorten it to what fits; workers were started with the longer one.
        executors.call_workers(executor, "update_max_model_len", vllm_config.model_config.max_model_len)
    executors.initialize(executor, configs)
    return scheduler_config


def make_model_runner_output(
    token_ids: Mapping[str, Sequence[int]],
    *,
    logprobs: Any = UNSET,
    prompt_logprobs_dict: Any = UNSET,
    pooler_output: Any = UNSET,
    kv_connector_output: Any = UNSET,
    ec_connector_output: Any = UNSET,
    num_nans_in_logits: Any = UNSET,
    cudagraph_stats: Any = UNSET,
    routed_experts: Any = UNSET,
    sampling_masks: Any = UNSET,
    prompt_token_id_logprobs_dict: Any = UNSET,
    aux_output_connector_output: Any = UNSET,
) -> Any:
    """A native ``ModelRunnerOutput``.

    Args:
        token_ids: Request id -> tokens sampled in this step, in row order; empty for a prefill chunk that samples
            nothing.
        logprobs, prompt_logprobs_dict, …: as in ModelRunnerOutput; UNSET ones keep the release's default.

    Raises:
        UnsupportedField: an option that was set does not exist in this release.
    """
    request_ids = list(token_ids)
    return adapter("model_runner_output").build(
        {
            "req_ids": request_ids,
            "req_id_to_index": {request_id: index for index, request_id in enumerate(request_ids)},
            "sampled_token_ids": [list(token_ids[request_id]) for request_id in request_ids],
            "logprobs": logprobs,
            "prompt_logprobs_dict": prompt_logprobs_dict,
            "pooler_output": pooler_output,
            "kv_connector_output": kv_connector_output,
            "ec_connector_output": ec_connector_output,
            "num_nans_in_logits": num_nans_in_logits,
            "cudagraph_stats": cudagraph_stats,
            "routed_experts": routed_experts,
            "sampling_masks": sampling_masks,
            "prompt_token_id_logprobs_dict": prompt_token_id_logprobs_dict,
            "aux_output_connector_output": aux_output_connector_output,
        }
    )

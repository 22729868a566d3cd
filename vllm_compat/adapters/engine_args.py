"""Options of EngineArgs that not every release has, and what became of those that were renamed.

Checked against the recorded API of every release by the contract tests, which say what to add for a new one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

#: "first" or "first-last" release -> options.
_BY_LIFE = {
    "0.10.2-0.10.2": """
        disable_async_output_proc max_seq_len_to_capture preemption_mode scheduler_delay_factor
    """,
    "0.10.2-0.11.0": """
        enable_lora_bias rope_scaling rope_theta
    """,
    "0.10.2-0.11.2": """
        eplb_log_balancedness eplb_step_interval eplb_window_size guided_decoding_backend
        guided_decoding_disable_additional_properties guided_decoding_disable_any_whitespace
        guided_decoding_disable_fallback lora_extra_vocab_size num_lookahead_slots num_redundant_experts
        override_pooler_config
    """,
    "0.10.2-0.12.0": """
        cuda_graph_sizes disable_mm_preprocessor_cache enable_multimodal_encoder_data_parallel task
    """,
    "0.10.2-0.16.0": """
        logits_processor_pattern
    """,
    "0.10.2-0.17.1": """
        swap_space
    """,
    "0.10.2-0.26.0": """
        max_long_partial_prefills max_num_partial_prefills
    """,
    "0.10.2-0.27.1": """
        calculate_kv_scales override_attention_dtype
    """,
    "0.11.0": """
        allowed_media_domains dbo_decode_token_threshold dbo_prefill_token_threshold enable_dbo
        expert_placement_strategy mm_processor_cache_type mm_shm_cache_max_object_size_mb pooler_config
        structured_outputs_config video_pruning_rate
    """,
    "0.11.1": """
        aggregate_engine_logging all2all_backend cudagraph_capture_sizes data_parallel_external_lb
        dcp_kv_cache_interleave_size disable_nccl_for_dp_synchronization ec_transfer_config enable_mm_embeds
        kv_offloading_backend kv_offloading_size mamba_block_size master_addr master_port
        max_cudagraph_capture_size mm_encoder_attn_backend nnodes node_rank reasoning_parser_plugin
        stream_interval tokens_only
    """,
    "0.12.0": """
        cp_kv_cache_interleave_size kv_cache_metrics kv_cache_metrics_sample optimization_level
        prefill_context_parallel_size
    """,
    "0.13.0": """
        attention_backend attention_config cudagraph_metrics enable_layerwise_nvtx_tracing profiler_config
    """,
    "0.14.0": """
        allow_deprecated_quantization enable_logging_iteration_details enable_mfu_metrics
        enable_mm_processor_stats enable_return_routed_experts enable_tower_connector_lora model_weights
        ubatch_size
    """,
    "0.15.0": """
        mamba_cache_mode mm_encoder_only
    """,
    "0.16.0": """
        enable_flashinfer_autotune kernel_config specialize_active_lora weight_transfer_config
    """,
    "0.17.0": """
        cpu_offload_params enable_elastic_ep fail_on_environ_validation language_model_only moe_backend
        offload_backend offload_group_size offload_num_in_group offload_params offload_prefetch_step
        performance_mode
    """,
    "0.18.0": """
        dcp_comm_backend distributed_timeout_seconds enable_ep_weight_filter gdn_prefill_backend
        shutdown_timeout
    """,
    "0.19.0": """
        kv_cache_dtype_skip_layers lora_target_modules mm_tensor_ipc reasoning_config renderer_num_workers
        scheduler_reserve_full_isl
    """,
    "0.20.0": """
        enable_mamba_cache_stochastic_rounding ir_op_priority mamba_backend mamba_cache_philox_rounds
        mamba_config numa_bind numa_bind_cpus numa_bind_nodes quantization_config
    """,
    "0.21.0": """
        mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_margin
        mm_encoder_fp8_scale_save_path safetensors_prefetch_block_size safetensors_prefetch_num_threads
    """,
    "0.22.0": """
        cpu_distributed_timeout_seconds data_parallel_multi_port_external_lb enable_cumem_allocator
        enable_mixed_moe_lora_format linear_backend spec_method spec_model spec_tokens use_fp64_gumbel
    """,
    "0.24.0": """
        device_ids diffusion_config jit_monitor_verbose prefill_schedule_interval watermark
    """,
    "0.25.0": """
        jit_monitor_mode mm_ipc_gpu_memory_gb model_class_overrides
    """,
    "0.26.0-0.29.0": """
        enable_bf16x3_router_gemm
    """,
    "0.26.0": """
        enable_moe_shared_loras max_num_scheduled_tokens prefix_match_unit
    """,
    "0.27.0": """
        enable_fault_tolerance fault_tolerance_config kda_prefill_backend mamba_ssu_algorithm
        mm_hasher_algorithm replayssm_buffer_len use_replayssm video_pruning_method
    """,
    "0.28.0": """
        ec_manager_config mm_device_do_normalize mm_processor_device return_sampling_mask
    """,
    "0.29.0": """
        dcp_q_replicate enable_batch_sharded_sampling enable_trace_replay max_num_queued_reqs
        max_num_queued_tokens per_request_spec_decode_metrics prefix_cache_retention_interval
    """,
    "0.30.0-0.30.0": """
        enable_mamba_fine_grained_prefix_cache
    """,
    "0.30.0": """
        dp_sync_interval elastic_ep_max_dp_size enable_nccl_comm_suspend engram_config kda_decode_backend
        sparse_indexer_topk_backend watermark_config
    """,
    "0.31.0": """
        aux_output_config enable_mamba_shared_prefix_checkpoint log_config_file log_level logging_config
        long_prefill_token_threshold_adaptive max_lora_cls_labels max_num_active_seqs
        sleep_preserve_parameter_names swa_bounded_replay
    """,
    "0.32.0": """
        custom_histogram_buckets enable_hc_sp enable_shm_tensor_arena sleep_mode_offload_cudagraph
    """,
    "0.33.0": """
        monokernel sleep_mode_backend watchdog_config
    """,
}
#: Option -> first release that has it, or "first-last" for one that is gone. Options of every release are not listed.
LIVES = {name: life for life, names in _BY_LIFE.items() for name in names.split()}


@dataclass(frozen=True)
class Renamed:
    """An option that another one took over.

    Args:
        old, new: Names of the two options of EngineArgs.
        key: Where ``new`` is a dictionary, the key in it that took the place of ``old``.
        value: New value of an old one, where they differ; None where it has none.
        back: The inverse, if there is one: old value of a new one.
    """

    old: str
    new: str
    key: str = ""
    value: Callable[[Any], Any] = lambda value: value
    back: Callable[[Any], Any] | None = lambda value: value


RENAMED = (
    Renamed("override_pooler_config", "pooler_config"),
    *(
        Renamed(f"guided_decoding_{key}", "structured_outputs_config", key)
        for key in ("backend", "disable_fallback", "disable_any_whitespace", "disable_additional_properties")
    ),
    *(
        Renamed(old, "eplb_config", key, back=None)
        for old, key in (
            ("num_redundant_experts", "num_redundant_experts"),
            ("eplb_window_size", "window_size"),
            ("eplb_step_interval", "step_interval"),
            ("eplb_log_balancedness", "log_balancedness"),
        )
    ),
    Renamed(
        "enable_multimodal_encoder_data_parallel",
        "mm_encoder_tp_mode",
        value=lambda on: "data" if on else "weights",
        back=None,
    ),
    Renamed("disable_mm_preprocessor_cache", "mm_processor_cache_gb", value=lambda off: 0 if off else None, back=None),
    Renamed("task", "runner", value={"generate": "generate", "draft": "draft", "auto": "auto"}.get, back=None),
)


def translated(options: Mapping[str, Any], known: set[str]) -> dict[str, Any]:
    """``options`` in the words of a release whose EngineArgs has the options ``known``.

    A release that has both names gets the newer one. What has no counterpart stays as it is, for the caller to refuse
    if this release lacks it; so does an old option whose new one is set too.
    """
    result = dict(options)
    for renamed in RENAMED:
        if renamed.old in result and renamed.new in known:
            _forward(renamed, result)
        elif renamed.new in result and renamed.new not in known and renamed.old in known:
            _backward(renamed, result, known)
    return result


def _forward(renamed: Renamed, options: dict[str, Any]) -> None:
    value = renamed.value(options[renamed.old])
    if value is None and options[renamed.old] not in (None, False):
        return  # a value that only the old option has
    target = options.get(renamed.new)
    if renamed.key:
        if target is None or isinstance(target, Mapping):
            del options[renamed.old]
            options[renamed.new] = {renamed.key: value, **(target or {})}
    elif target is None:
        del options[renamed.old]
        if value is not None:
            options[renamed.new] = value


def _backward(renamed: Renamed, options: dict[str, Any], known: set[str]) -> None:
    if renamed.back is None:
        return
    if not renamed.key:
        options[renamed.old] = renamed.back(options.pop(renamed.new))
        return
    target = options[renamed.new]
    siblings = {other.key: other.old for other in RENAMED if other.new == renamed.new and other.old in known}
    # All of it or nothing: half a dictionary would be a set option that got lost.
    if isinstance(target, Mapping) and target.keys() <= siblings.keys():
        del options[renamed.new]
        options.update({siblings[key]: renamed.back(value) for key, value in target.items()})

"""What ``bench.py`` compares: each factory beside the work of vLLM's own that it stands for, as 0.32.0 does it.

A model is not loaded: the configuration is that of the fixture, everything else is made by hand.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from vllm import EngineArgs, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils as planning
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

import vllm_compat as vc
from vllm_compat.adapters.select import adapter

MODEL = Path(__file__).parents[1] / "tests" / "fixtures" / "tiny-kimi"
PROMPT = list(range(1000, 2000))
ROWS = 64
PARAMS = SamplingParams(temperature=0.0, max_tokens=16)


@dataclasses.dataclass(frozen=True)
class Pair:
    """One comparison.

    Attributes:
        factory: Name of ours.
        compared_with: The native work, in words.
        ours, native: One call each.
        whole: Whether the native side is all that vLLM's engine does to get there, or a bare constructor.
    """

    factory: str
    compared_with: str
    ours: Callable[[], Any]
    native: Callable[[], Any]
    whole: bool = False


def pairs() -> Iterator[Pair]:
    """Every comparison, cheap ones first."""
    config = vc.make_vllm_config(
        model=str(MODEL), enforce_eager=True, max_model_len=256, block_size=16, enable_prefix_caching=True
    )
    config.cache_config.enable_prefix_caching = True  # which the CPU platform turns off for MLA
    specs = vc.make_kv_cache_specs(config)[0]
    kv_config = vc.make_kv_cache_config(config, specs, num_blocks=256)
    manager = vc.make_structured_output_manager(config)
    scheduler = vc.make_scheduler(config, kv_config, manager)
    yield from _small()
    yield from _requests(config, kv_config, scheduler)
    yield from _steps()
    yield from _large(config, specs, kv_config, manager)


def _small() -> Iterator[Pair]:
    yield Pair(
        "make_sampling_params",
        "`SamplingParams(…)`",
        lambda: vc.make_sampling_params(temperature=0.0, max_tokens=16),
        lambda: SamplingParams(temperature=0.0, max_tokens=16),
    )
    yield Pair(
        "make_lora_request",
        "`LoRARequest(…)`",
        lambda: vc.make_lora_request("name", 1, "/adapter"),
        lambda: LoRARequest("name", 1, "/adapter"),
    )
    size = {"block_size": 16, "num_kv_heads": 8, "head_size": 128, "dtype": torch.float16}
    yield Pair(
        "make_kv_cache_spec",
        "`FullAttentionSpec(…)`",
        lambda: vc.make_kv_cache_spec("full_attention", **size),
        lambda: FullAttentionSpec(**size),
    )


def _requests(config: Any, kv_config: Any, scheduler: Any) -> Iterator[Pair]:
    algo = config.cache_config.prefix_caching_hash_algo
    size = planning.resolve_kv_cache_block_sizes(kv_config, config)[1]
    hasher = planning.get_request_block_hasher(size, get_hash_fn_by_name(algo))
    vc.ensure_none_hash(algo)
    tokens = f"{len(PROMPT)} tokens"
    yield Pair(
        "make_request(block_hasher=None)",
        f"`Request(…)` of {tokens}, never hashed",
        lambda: vc.make_request("r", PROMPT, PARAMS, block_hasher=None),
        lambda: Request("r", PROMPT, PARAMS, None),
    )
    core_request = vc.make_engine_core_request("r", PROMPT, PARAMS)
    yield Pair(
        "make_request(scheduler=…)",
        f"`Request.from_engine_core_request` of {tokens}, hashed: what EngineCore does, its hasher made before",
        lambda: vc.make_request("r", PROMPT, PARAMS, scheduler=scheduler),
        lambda: Request.from_engine_core_request(core_request, hasher),
        whole=True,
    )
    message, decoder = MsgpackEncoder().encode(core_request), MsgpackDecoder(EngineCoreRequest)
    yield Pair(
        "make_request(scheduler=…)",
        "the same, decoded from the wire first, which looks at the tokens: what EngineCoreProc does",
        lambda: vc.make_request("r", PROMPT, PARAMS, scheduler=scheduler),
        lambda: Request.from_engine_core_request(decoder.decode(message), hasher),
        whole=True,
    )
    yield Pair(
        "request_from_engine_core_request",
        "what EngineCore does, as above",
        lambda: vc.request_from_engine_core_request(core_request, scheduler=scheduler),
        lambda: Request.from_engine_core_request(core_request, hasher),
        whole=True,
    )
    given = (*("r", PROMPT, None, PARAMS, None, 1.5), None, None, None)
    yield Pair(
        "make_engine_core_request",
        f"`EngineCoreRequest(…)` of {tokens}, which looks at nothing",
        lambda: vc.make_engine_core_request("r", PROMPT, PARAMS, arrival_time=1.5),
        lambda: EngineCoreRequest(*given),
    )
    inputs = adapter("input_processor")
    processor = inputs.build(config)
    short = PROMPT[:200]  # the fixture's longest prompt

    def front_end() -> Any:
        prompt = inputs.token_prompt(short, None)
        return processor.process_inputs("r", prompt, PARAMS, ("generate",))

    yield Pair(
        "make_engine_core_request(eos_token_id=…)",
        f"`InputProcessor.process_inputs` of {len(short)} tokens: what vLLM's front end does",
        lambda: vc.make_engine_core_request("r", short, PARAMS, eos_token_id=2),
        front_end,
        whole=True,
    )


def _steps() -> Iterator[Pair]:
    ids = [f"request-{index}" for index in range(ROWS)]
    sampled = {request_id: [7] for request_id in ids}

    def runner_output() -> Any:
        # As the V1 runner makes it: the ids and rows of its batch, and where each row is.
        return ModelRunnerOutput(
            req_ids=ids.copy(),
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=[[7] for _ in ids],
        )

    yield Pair(
        "make_model_runner_output",
        f"`ModelRunnerOutput(…)` of {ROWS} requests, with its maps",
        lambda: vc.make_model_runner_output(sampled),
        runner_output,
    )
    drafts = {request_id: [7, 8, 9] for request_id in ids}
    yield Pair(
        "make_draft_token_ids",
        f"`DraftTokenIds(…)` of {ROWS} requests",
        lambda: vc.make_draft_token_ids(drafts),
        lambda: DraftTokenIds(ids.copy(), [[7, 8, 9] for _ in ids]),
    )
    computed, outputs = dict.fromkeys(ids, 20), dict.fromkeys(ids, 4)

    def step() -> Any:
        new = NewRequestData("new", PROMPT, [], PARAMS, None, ([1, 2, 3],), 0, None)
        cached = CachedRequestData(
            req_ids=list(ids),
            resumed_req_ids=set(),
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=[None for _ in ids],
            num_computed_tokens=[computed[request_id] for request_id in ids],
            num_output_tokens=[outputs[request_id] for request_id in ids],
        )
        counts = {"new": len(PROMPT), **dict.fromkeys(ids, 1)}
        return SchedulerOutput(
            [new], cached, counts, sum(counts.values()), {}, {}, finished_req_ids=set(), free_encoder_mm_hashes=[]
        )

    def made() -> Any:
        new = vc.make_new_request_data("new", PROMPT, PARAMS, block_ids=([1, 2, 3],))
        cached = vc.make_cached_request_data(computed, num_output_tokens=outputs)
        counts = {"new": len(PROMPT), **dict.fromkeys(ids, 1)}
        return vc.make_scheduler_output(counts, scheduled_new_reqs=[new], scheduled_cached_reqs=cached)

    yield Pair(
        "make_scheduler_output, with its parts",
        f"`SchedulerOutput(…)` of one new request of {len(PROMPT)} tokens and {ROWS} others, unchecked",
        made,
        step,
    )
    yield Pair(
        "make_engine_core_output",
        "`EngineCoreOutput(…)`",
        lambda: vc.make_engine_core_output("r", [7], finish_reason="stop", stop_reason=7),
        lambda: EngineCoreOutput("r", [7], finish_reason=FinishReason.STOP, stop_reason=7),
    )


def _large(config: Any, specs: Any, kv_config: Any, manager: Any) -> Iterator[Pair]:
    memory = 256 * sum(spec.page_size_bytes for spec in specs.values())

    def plan() -> Any:
        # EngineCore._initialize_kv_caches, without what it asks the workers.
        register_all_kvcache_specs(config)
        if any(getattr(spec, "non_causal", False) for worker in [specs] for spec in worker.values()):
            raise AssertionError
        configs = planning.get_kv_cache_configs(config, [specs], [memory])
        for each in configs:
            each.kv_cache_layout = config.cache_config.kv_cache_layout
        made = planning.generate_scheduler_kv_cache_config(configs)
        config.cache_config.num_gpu_blocks = made.num_blocks
        groups = [group.kv_cache_spec for group in made.kv_cache_groups]
        config.cache_config.block_size = min(spec.block_size for spec in groups if spec.prefix_cacheable)
        planning.update_kv_cache_capacity(config, made)
        config.validate_block_size()
        sizes = planning.resolve_kv_cache_block_sizes(made, config)
        alignment = planning.resolve_cache_hit_alignment_tokens(made, config, *sizes)
        for each in (made, *configs):
            each.hash_block_size = sizes[1]
            each.cache_hit_alignment_tokens = alignment
        return made

    yield Pair(
        "make_kv_cache_config",
        "`EngineCore._initialize_kv_caches`, its planning",
        lambda: vc.make_kv_cache_config(config, specs, available_memory=memory),
        plan,
        whole=True,
    )

    def schedule() -> Any:
        scheduler_cls = config.scheduler_config.get_scheduler_cls()
        block_size, hash_block_size = planning.resolve_kv_cache_block_sizes(kv_config, config)
        return scheduler_cls(config, kv_config, manager, block_size, hash_block_size)

    yield Pair(
        "make_scheduler",
        "`get_scheduler_cls()(…)`, with its block sizes resolved",
        lambda: vc.make_scheduler(config, kv_config, manager),
        schedule,
        whole=True,
    )
    options = {"model": str(MODEL), "enforce_eager": True, "max_model_len": 256}
    yield Pair(
        "make_vllm_config",
        "`EngineArgs(…).create_engine_config()`",
        lambda: vc.make_vllm_config(**options),
        lambda: EngineArgs(**options).create_engine_config(),
        whole=True,
    )

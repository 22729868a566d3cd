"""The target in a vLLM engine, as each stage needs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm_compat import EngineLoop, enable, make_vllm_config

from .settings import TargetConfig

#: Bugs of vLLM's CPU backend that the pipeline meets, by name of the patch. Each is on only where it is needed.
PATCHES = (
    "cpu-rms-norm",  # DeepSeek models give wrong numbers
    "cpu-moe-activation",  # models with experts do not start
    "cpu-shutdown",
    "cpu-aux-layers",  # these four: heads are not served
    "cpu-synthetic-mode",
    "cpu-fp64-gumbel",
    "cpu-dispatchers",
    "cpu-expand",  # heads are served, and answers with a temperature are wrong
    "llvmlite-proxy",  # Kimi-K2.5 does not start
)


def open_target(
    target: TargetConfig,
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int | None = None,
    draft: Path | None = None,
    num_draft_tokens: int = 0,
    **engine_args: Any,
) -> EngineLoop:
    """An EngineLoop of the target; close it with ``with`` or ``shutdown``. Arguments: see ``engine_arguments``."""
    for name in PATCHES:
        enable(name)
    arguments = engine_arguments(
        target,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        draft=draft,
        num_draft_tokens=num_draft_tokens,
        **engine_args,
    )
    return EngineLoop(make_vllm_config(**arguments))


def engine_arguments(
    target: TargetConfig,
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int | None = None,
    draft: Path | None = None,
    num_draft_tokens: int = 0,
    **engine_args: Any,
) -> dict[str, Any]:
    """EngineArgs of the target, by name.

    Args:
        target: The target; its ``engine_args`` win over everything else here.
        max_num_seqs: Requests in a batch.
        max_num_batched_tokens: Tokens in a batch.
        draft: An exported head to draft with.
        num_draft_tokens: Drafts per step, with ``draft``.
        engine_args: Further EngineArgs of the stage.
    """
    arguments: dict[str, Any] = {
        "model": target.model,
        "tokenizer": target.tokenizer,
        "dtype": target.dtype,
        "trust_remote_code": target.trust_remote_code,
        "tensor_parallel_size": target.tensor_parallel_size,
        "pipeline_parallel_size": target.pipeline_parallel_size,
        "max_model_len": target.max_model_len,
        "max_num_seqs": max_num_seqs,
        "use_tqdm_on_load": False,
        # The loop steps in lockstep: scheduling ahead gains nothing, and would hide the drafts' ids from the count.
        "async_scheduling": False,
        **engine_args,
    }
    if max_num_batched_tokens is not None:
        arguments["max_num_batched_tokens"] = max_num_batched_tokens
    if draft is not None:
        arguments["speculative_config"] = {
            "method": "eagle3",
            "model": str(draft),
            "num_speculative_tokens": num_draft_tokens,
            # No draft_tensor_parallel_size: unset, vLLM shards the head as the target, which is what its eagle3 drafter
            # does in any case (it never reads the draft's own ParallelConfig), and checks the head for that size.
        }
    return {**arguments, **target.engine_args}

"""What vLLM would only assert, or find out in a worker: said here, with what to do."""

from __future__ import annotations

from typing import Any

from vllm_compat.errors import VllmCompatError

__all__ = ["check_params"]


def check_params(request_id: str, sampling_params: Any, pooling_params: Any) -> None:
    """Exactly one of both, and ``max_tokens`` set."""
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

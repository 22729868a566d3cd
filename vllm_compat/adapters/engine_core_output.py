"""Readers of EngineCoreOutput: what the scheduler reports of one request after a step."""

from __future__ import annotations

from typing import Any

from vllm_compat.adapters.base import Adapter, Need
from vllm_compat.values import RequestUpdate


class EngineCoreOutput_0_11_1(Adapter):
    """Log-probabilities are arrays (0.11.1); the number of cached tokens moved to ``prefill_stats`` (0.20.0)."""

    surface = "engine_core_output"
    since = (0, 11, 1)
    needs = (
        Need(
            "vllm.v1.engine:EngineCoreOutput",
            passes=(
                "request_id",
                "new_token_ids",
                "new_logprobs",
                "new_prompt_logprobs_tensors",
                "finish_reason",
                "stop_reason",
            ),
            read_only=True,
        ),
    )

    def read(self, output: Any) -> RequestUpdate:
        reason = output.finish_reason
        return RequestUpdate(
            request_id=output.request_id,
            new_token_ids=tuple(output.new_token_ids),
            # By name: the integers of FinishReason are not stable.
            finish_reason=None if reason is None else str(reason),
            stop_reason=output.stop_reason,
            logprobs=None if output.new_logprobs is None else _rows(output.new_logprobs),
            prompt_logprobs=(
                None if output.new_prompt_logprobs_tensors is None else _rows(output.new_prompt_logprobs_tensors)
            ),
            num_cached_tokens=_cached_tokens(output),
        )


def _cached_tokens(output: Any) -> int | None:
    stats = getattr(output, "prefill_stats", None)
    if stats is not None:
        return int(stats.num_cached_tokens)
    return getattr(output, "num_cached_tokens", None)


def _rows(logprobs: Any) -> tuple[dict[int, float], ...]:
    """One dictionary token id -> log-probability per position; the position's own token comes first."""
    ids, values = logprobs.logprob_token_ids.tolist(), logprobs.logprobs.tolist()
    # The first column is the token itself, and may appear again among the top ones: the first wins.
    rows = []
    for row_ids, row_values in zip(ids, values, strict=True):
        row: dict[int, float] = {}
        for token, value in zip(row_ids, row_values, strict=True):
            row.setdefault(token, value)
        rows.append(row)
    return tuple(rows)


ADAPTERS = (EngineCoreOutput_0_11_1,)

"""Readers of EngineCoreOutput: what the scheduler reports of one request after a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from vllm_compat.adapters.base import Adapter, Need
from vllm_compat.values import RequestUpdate

_OUTPUT = "vllm.v1.engine:EngineCoreOutput"
_LOGPROBS = tuple(
    Need(f"vllm.v1.outputs:{name}", reads=("logprob_token_ids", "logprobs"), read_only=True)
    for name in ("LogprobsLists", "LogprobsTensors")
)
_FIELDS = (
    "request_id",
    "new_token_ids",
    "new_logprobs",
    "new_prompt_logprobs_tensors",
    "finish_reason",
    "stop_reason",
)


class EngineCoreOutput_0_20(Adapter):
    """The number of cached tokens moved into ``prefill_stats``, told once, at the end of the prefill (0.20.0)."""

    surface = "engine_core_output"
    since = (0, 20, 0)
    needs: ClassVar[tuple[Need, ...]] = (
        Need(_OUTPUT, reads=(*_FIELDS, "prefill_stats"), read_only=True),
        Need("vllm.v1.metrics.stats:PrefillStats", reads=("num_cached_tokens",), read_only=True),
        *_LOGPROBS,
    )
    left: ClassVar[Mapping[str, tuple[str, ...]]] = {
        # Not of a request that generates, or told to somebody else than its caller.
        "EngineCoreOutput": (
            "pooling_output",
            "events",
            "kv_transfer_params",
            "ec_transfer_params",
            "trace_headers",
            "num_nans_in_logits",
            "num_external_computed_tokens",
            "routed_experts",
            "mm_cache_miss_hashes",
            "new_sampling_mask",
            "spec_decode_metrics",
            "prompt_token_id_logprobs",
            "error",
        ),
        "PrefillStats": ("*",),
        "LogprobsLists": ("sampled_token_ranks", "cu_num_generated_tokens"),
        "LogprobsTensors": (
            "selected_token_ranks",
            "cu_num_generated_tokens",
            "cu_num_generated_tokens_tensor",
        ),
    }

    def read(self, output: Any) -> RequestUpdate:
        reason = output.finish_reason
        return RequestUpdate(
            request_id=output.request_id,
            new_token_ids=tuple(output.new_token_ids),
            # By name: the integers of FinishReason are not stable.
            finish_reason=None if reason is None else str(reason),
            stop_reason=output.stop_reason,
            logprobs=None if output.new_logprobs is None else self.rows(output.new_logprobs),
            prompt_logprobs=(
                None if output.new_prompt_logprobs_tensors is None else self.rows(output.new_prompt_logprobs_tensors)
            ),
            num_cached_tokens=self.cached_tokens(output),
        )

    def cached_tokens(self, output: Any) -> int | None:
        stats = output.prefill_stats
        return None if stats is None else int(stats.num_cached_tokens)

    def rows(self, logprobs: Any) -> tuple[dict[int, float], ...]:
        """One dictionary token id -> log-probability per position; the position's own token comes first."""
        return _rows(logprobs.logprob_token_ids.tolist(), logprobs.logprobs.tolist())


class EngineCoreOutput_0_11_1(EngineCoreOutput_0_20):
    """Every step says how many tokens were cached. Log-probabilities are arrays (0.11.1)."""

    since = (0, 11, 1)
    needs: ClassVar[tuple[Need, ...]] = (
        Need(_OUTPUT, reads=(*_FIELDS, "num_cached_tokens"), read_only=True),
        *_LOGPROBS,
    )

    def cached_tokens(self, output: Any) -> int | None:
        return int(output.num_cached_tokens)


class EngineCoreOutput_0_10(EngineCoreOutput_0_11_1):
    """Log-probabilities of new tokens are Python lists, those of the prompt tensors (until 0.11.0)."""

    since = (0, 10, 2)

    def rows(self, logprobs: Any) -> tuple[dict[int, float], ...]:
        ids, values = logprobs.logprob_token_ids, logprobs.logprobs
        return _rows(*(item if isinstance(item, list) else item.tolist() for item in (ids, values)))


def _rows(ids: list[list[int]], values: list[list[float]]) -> tuple[dict[int, float], ...]:
    # The first column is the token itself, and may appear again among the top ones: the first wins.
    rows = []
    for row_ids, row_values in zip(ids, values, strict=True):
        row: dict[int, float] = {}
        for token, value in zip(row_ids, row_values, strict=True):
            row.setdefault(token, value)
        rows.append(row)
    return tuple(rows)


ADAPTERS = (EngineCoreOutput_0_20, EngineCoreOutput_0_11_1, EngineCoreOutput_0_10)

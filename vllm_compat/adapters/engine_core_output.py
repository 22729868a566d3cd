"""EngineCoreOutput, what the scheduler reports of one request after a step, and the message that carries several."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from vllm_compat._unset import UNSET
from vllm_compat.adapters.base import Adapter, Need, resolve
from vllm_compat.errors import VllmCompatError
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


_OPTIONS = {
    "new_logprobs": "",
    "new_prompt_logprobs_tensors": "",
    "pooling_output": "",
    "finish_reason": "",
    "stop_reason": "",
    "events": "",
    "kv_transfer_params": "",
    "ec_transfer_params": "0.26.0",
    "trace_headers": "",
    "num_nans_in_logits": "0.11.1",
    "routed_experts": "0.14.0",
    "mm_cache_miss_hashes": "0.28.0",
    "new_sampling_mask": "0.28.0",
    "spec_decode_metrics": "0.29.0",
    "prompt_token_id_logprobs": "0.31.0",
    "error": "0.33.0",
}
_STATS = Need(
    "vllm.v1.metrics.stats:PrefillStats",
    passes=("num_cached_tokens", "num_local_cached_tokens", "num_external_cached_tokens"),
    reads=("num_cached_tokens",),
)
_REASON = Need("vllm.v1.engine:FinishReason", reads=("STOP", "LENGTH", "ABORT"), read_only=True)
_OUTPUTS = Need(
    "vllm.v1.engine:EngineCoreOutputs",
    options={
        "engine_index": "",
        "outputs": "",
        "scheduler_stats": "",
        "timestamp": "",
        "utility_output": "",
        "finished_requests": "",
        "wave_complete": "",
        "start_wave": "",
        "weight_version": "0.32.0",
    },
)


class EngineCoreOutput_0_20(Adapter):
    """The number of cached tokens moved into ``prefill_stats``, told once, at the end of the prefill (0.20.0)."""

    surface = "engine_core_output"
    since = (0, 20, 0)
    output = Need(
        _OUTPUT,
        passes=("request_id", "new_token_ids"),
        options={**_OPTIONS, "prefill_stats": "0.20.0"},
        reads=(*_FIELDS, "prefill_stats"),
    )
    needs: ClassVar[tuple[Need, ...]] = (output, _STATS, _REASON, _OUTPUTS, *_LOGPROBS)
    left: ClassVar[Mapping[str, tuple[str, ...]]] = {
        # The parts of the prefill that only the scheduler knows; who has them all passes prefill_stats itself.
        "PrefillStats": ("num_prompt_tokens", "num_computed_tokens", "num_cache_creation_tokens"),
        "LogprobsLists": ("sampled_token_ranks", "cu_num_generated_tokens"),
        "LogprobsTensors": (
            "selected_token_ranks",
            "cu_num_generated_tokens",
            "cu_num_generated_tokens_tensor",
        ),
    }

    def build(self, options: Mapping[str, Any]) -> Any:
        """A native EngineCoreOutput; ``finish_reason`` by name or as it is."""
        reason = options["finish_reason"]
        if isinstance(reason, str):
            reason = self.reason(reason)
        return self.construct(self.output, {**self.with_cached_tokens(options), "finish_reason": reason})

    def with_cached_tokens(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options with the numbers of cached tokens where this release has them."""
        counts = ("num_cached_tokens", "num_external_computed_tokens")
        given = {name: value for name, value in options.items() if name not in counts}
        cached, external = (0 if options[name] is UNSET else options[name] for name in counts)
        if all(options[name] is UNSET for name in counts):
            return given
        if given["prefill_stats"] is not UNSET or cached < external:
            raise VllmCompatError(
                "an engine core output with numbers of cached tokens",
                needed="num_cached_tokens, of which num_external_computed_tokens are a part, or prefill_stats",
                found=f"{cached} cached, {external} external"
                + (", and prefill_stats" if given["prefill_stats"] is not UNSET else ""),
                advice="pass prefill_stats alone, or both numbers",
            )
        stats = {
            "num_cached_tokens": cached,
            "num_local_cached_tokens": cached - external,
            "num_external_cached_tokens": external,
        }
        return {**given, "prefill_stats": self.construct(_STATS, stats)}

    def reason(self, name: str) -> Any:
        """The FinishReason of this release by its lower-case name: the numbers are not stable."""
        reasons = resolve(_REASON.symbol)
        if name.upper() not in reasons.__members__:
            raise VllmCompatError(
                f"finish reason {name!r}",
                needed=f"one of {', '.join(member.lower() for member in reasons.__members__)}",
                found=repr(name),
                advice="'error' came with vLLM 0.13.0, 'repetition' with 0.17.0",
            )
        return reasons[name.upper()]

    def build_outputs(self, options: Mapping[str, Any]) -> Any:
        """An EngineCoreOutputs."""
        return self.construct(_OUTPUTS, options)

    def read(self, output: Any, num_logprobs: int | None = None) -> RequestUpdate:
        """``num_logprobs`` as the request's sampling params say; None and -1 keep whole rows."""
        reason = output.finish_reason
        # Rows of a step are as wide as the widest that any of its requests asked for; vLLM's front end cuts them.
        width = None if num_logprobs is None or num_logprobs < 0 else num_logprobs + 1
        return RequestUpdate(
            request_id=output.request_id,
            new_token_ids=tuple(output.new_token_ids),
            # By name: the integers of FinishReason are not stable.
            finish_reason=None if reason is None else str(reason),
            stop_reason=output.stop_reason,
            logprobs=None if output.new_logprobs is None else self.rows(output.new_logprobs, width),
            prompt_logprobs=(
                None if output.new_prompt_logprobs_tensors is None else self.rows(output.new_prompt_logprobs_tensors)
            ),
            num_cached_tokens=self.cached_tokens(output),
        )

    def cached_tokens(self, output: Any) -> int | None:
        stats = output.prefill_stats
        return None if stats is None else int(stats.num_cached_tokens)

    def rows(self, logprobs: Any, width: int | None = None) -> tuple[dict[int, float], ...]:
        """One dictionary token id -> log-probability per position; the position's own token comes first.

        ``width`` columns of each row count: the token's own, then the most probable ones.
        """
        return _rows(logprobs.logprob_token_ids.tolist(), logprobs.logprobs.tolist(), width)


class EngineCoreOutput_0_11_1(EngineCoreOutput_0_20):
    """Every step says how many tokens were cached. Log-probabilities are arrays (0.11.1)."""

    since = (0, 11, 1)
    output = Need(
        _OUTPUT,
        passes=("request_id", "new_token_ids"),
        options={
            **_OPTIONS,
            "num_cached_tokens": "0.10.2-0.19.1",
            "num_external_computed_tokens": "0.16.0-0.19.1",
            "prefill_stats": "0.20.0",
        },
        reads=(*_FIELDS, "num_cached_tokens"),
    )
    needs: ClassVar[tuple[Need, ...]] = (output, _REASON, _OUTPUTS, *_LOGPROBS)
    left: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "LogprobsLists": ("sampled_token_ranks", "cu_num_generated_tokens"),
        "LogprobsTensors": ("selected_token_ranks", "cu_num_generated_tokens"),
    }

    def with_cached_tokens(self, options: Mapping[str, Any]) -> dict[str, Any]:
        return dict(options)

    def cached_tokens(self, output: Any) -> int | None:
        return int(output.num_cached_tokens)


class EngineCoreOutput_0_10(EngineCoreOutput_0_11_1):
    """Log-probabilities of new tokens are Python lists, those of the prompt tensors (until 0.11.0)."""

    since = (0, 10, 2)

    def rows(self, logprobs: Any, width: int | None = None) -> tuple[dict[int, float], ...]:
        ids, values = (
            item if isinstance(item, list) else item.tolist()
            for item in (logprobs.logprob_token_ids, logprobs.logprobs)
        )
        return _rows(ids, values, width)


def _rows(ids: list[list[int]], values: list[list[float]], width: int | None) -> tuple[dict[int, float], ...]:
    # The first column is the token itself, and may appear again among the top ones: the first wins.
    rows = []
    for row_ids, row_values in zip(ids, values, strict=True):
        row: dict[int, float] = {}
        for token, value in zip(row_ids[:width], row_values[:width], strict=True):
            row.setdefault(token, value)
        rows.append(row)
    return tuple(rows)


ADAPTERS = (EngineCoreOutput_0_20, EngineCoreOutput_0_11_1, EngineCoreOutput_0_10)
#: Earlier releases have all that these need as well; see ``select.in_order``.
UNSEEN = (EngineCoreOutput_0_11_1,)

"""Readers, the inverse of the factories: a native object of any release -> the same plain values."""

from __future__ import annotations

from typing import Any

from vllm_compat.adapters.select import adapter
from vllm_compat.values import RequestUpdate, RunnerOutput, ScheduledBatch

__all__ = [
    "read_engine_core_output",
    "read_engine_core_request",
    "read_model_runner_output",
    "read_request",
    "read_scheduler_output",
]


def read_request(request: Any) -> dict[str, Any]:
    """The options of ``make_request`` that this Request carries, by name; only those that the release has."""
    return adapter("request").read(request)  # type: ignore[no-any-return]


def read_engine_core_request(core_request: Any) -> dict[str, Any]:
    """The options of ``make_engine_core_request`` that this one carries, by name; only those that the release has."""
    return adapter("engine_core_request").read(core_request)  # type: ignore[no-any-return]


def read_scheduler_output(scheduler_output: Any) -> ScheduledBatch:
    """What a step does for each request (new, running and resumed ones alike).

    Read it before ``update_from_output``: in the scheduler's process it may hold the requests' own lists, which grow.
    """
    return adapter("scheduler_output").read(scheduler_output)  # type: ignore[no-any-return]


def read_model_runner_output(runner_output: Any) -> RunnerOutput:
    """The token ids that a step sampled, per request, as plain integers."""
    return adapter("model_runner_output").read(runner_output)  # type: ignore[no-any-return]


def read_engine_core_output(output: Any, num_logprobs: int | None = None) -> RequestUpdate:
    """What the scheduler reports of one request after a step.

    Args:
        output: A native EngineCoreOutput.
        num_logprobs: ``SamplingParams.logprobs`` of the request. A step gives all its requests rows as long as the
            longest that one of them asked for, so without it a row may hold more than this request wanted.
    """
    return adapter("engine_core_output").read(output, num_logprobs)  # type: ignore[no-any-return]

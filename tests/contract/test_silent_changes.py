"""Changes that no signature shows: what a value is made of, where a positional argument lands, what a name means."""

from __future__ import annotations

import re
from typing import Any

import pytest
import windows

from vllm_compat.adapters.engine_core_output import (
    EngineCoreOutput_0_10,
    EngineCoreOutput_0_11_1,
    EngineCoreOutput_0_20,
)
from vllm_compat.adapters.model_runner_output import ADAPTERS as RUNNER_OUTPUTS
from vllm_compat.values import RequestUpdate

#: What this project passes by position: symbol -> names of its first parameters.
POSITIONAL = {
    "vllm.sampling_params:SamplingParams.update_from_generation_config": (
        ("generation_config",),
        ("model_eos_token_id", "eos_token_id"),
    ),
    "vllm.v1.executor.abstract:Executor.execute_model": (("scheduler_output",),),
    "vllm.v1.executor.abstract:Executor.sample_tokens": (("grammar_output",),),
    "vllm.v1.core.sched.scheduler:Scheduler.update_draft_token_ids": (("draft_token_ids",),),
    "vllm.v1.core.sched.scheduler:Scheduler.update_from_output": (("scheduler_output",), ("model_runner_output",)),
    "vllm.v1.core.sched.scheduler:Scheduler.finish_requests": (("request_ids",), ("finished_status",)),
    "vllm.v1.core.sched.scheduler:Scheduler.add_request": (("request",),),
}


@pytest.mark.parametrize("symbol", POSITIONAL)
def test_what_is_passed_by_position_lands_where_it_belongs(symbol: str) -> None:
    """In every release the first parameters are those that are meant, and can be passed by position."""
    seen = 0
    for api in (*windows.recorded(), *windows.nightlies()):
        call = api.call(symbol)
        if call is None:
            continue
        seen += 1
        first = call.parameters[: len(POSITIONAL[symbol])]
        assert len(first) == len(POSITIONAL[symbol]), api.release
        for parameter, names in zip(first, POSITIONAL[symbol], strict=True):
            assert parameter.name in names, f"{api.release}: {call}"
            assert parameter.kind != "keyword_only", f"{api.release}: {call}"
    assert seen >= 30


@pytest.mark.parametrize("release", ["0.10.2", "0.11.0", "0.11.1", "0.11.2", "0.12.0", "0.13.0", "0.14.0", "0.33.0"])
def test_sampled_token_ids_are_what_the_scheduler_reads(release: str) -> None:
    """Lists of integers, but one array per request in 0.11.1 and 0.11.2, whose scheduler calls ``tolist``.

    A list there is an AttributeError in the scheduler, an array elsewhere would end in the caller's token ids.
    """
    numpy = pytest.importorskip("numpy")
    adapter = next(a for a in RUNNER_OUTPUTS if a.since <= windows.numbers(release))
    options: dict[str, Any] = {"sampled_token_ids": [[7, 8], []]}

    rows = adapter().completed(options)["sampled_token_ids"]

    if release in ("0.11.1", "0.11.2"):
        assert [numpy.ndarray, numpy.ndarray] == [type(row) for row in rows]
        rows = [row.tolist() for row in rows]
    assert [[7, 8], []] == rows
    assert all(type(token) is int for row in rows for token in row)


class Logprobs:
    """Columns as LogprobsLists has them; two positions, of which the second token is not among its top two."""

    def __init__(self, make: Any) -> None:
        self.logprob_token_ids = make([[5, 5, 9], [4, 2, 3]])
        self.logprobs = make([[-0.25, -0.25, -2.0], [-4.0, -0.5, -1.0]])


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        (None, ({5: -0.25, 9: -2.0}, {4: -4.0, 2: -0.5, 3: -1.0})),
        (1, ({5: -0.25}, {4: -4.0})),
        (2, ({5: -0.25}, {4: -4.0, 2: -0.5})),
    ],
)
@pytest.mark.parametrize("adapter", [EngineCoreOutput_0_10, EngineCoreOutput_0_11_1, EngineCoreOutput_0_20])
def test_logprobs_are_read_from_lists_and_arrays(adapter: Any, width: int | None, expected: Any) -> None:
    """Lists (up to 0.11.0) and arrays give the same rows: the token's own first, of as many columns as asked for."""
    numpy = pytest.importorskip("numpy")
    makes = [numpy.asarray, list] if adapter is EngineCoreOutput_0_10 else [numpy.asarray]
    for make in makes:
        rows = adapter().rows(Logprobs(make), width)
        assert expected == rows
        assert [list(row) for row in expected] == [list(row) for row in rows]


def test_finish_reasons_have_names() -> None:
    """Each member of FinishReason, in any release, is one of the words that RequestUpdate documents, and the other way.

    The numbers of the members are not stable, and are never given out.
    """
    members: dict[str, str] = {}
    for api in windows.recorded():
        record = api.symbol("vllm.v1.engine:FinishReason")
        assert record is not None, api.release
        for member in record["members"]:
            members.setdefault(member.lower(), api.release)

    assert {
        "stop": "0.10.2",
        "length": "0.10.2",
        "abort": "0.10.2",
        "error": "0.13.0",
        "repetition": "0.17.0",
    } == members
    documented = re.search(r"finish_reason: (.*?), or None", RequestUpdate.__doc__ or "")
    assert documented is not None
    assert set(members) == set(re.findall(r'"(\w+)"', documented[1]))


def test_cached_tokens_have_one_home() -> None:
    """A release says them on every output (up to 0.19.1) or in ``prefill_stats`` (from 0.20.0), never in both."""
    for api in windows.recorded():
        fields = api.fields("vllm.v1.engine:EngineCoreOutput") or set()
        expected = "num_cached_tokens" if api.numbers < (0, 20, 0) else "prefill_stats"
        assert {expected} == fields & {"num_cached_tokens", "prefill_stats"}, api.release


def test_the_end_of_sequence_id_has_one_home() -> None:
    """Request takes it up to 0.16.0; from 0.17.0 on only the sampling params know it, and Request does not take it."""
    for api in windows.recorded():
        request = api.call("vllm.v1.request:Request")
        assert request is not None
        taken = any(parameter.name == "eos_token_id" for parameter in request.parameters)
        kept = "eos_token_id" in (api.attributes("vllm.sampling_params:SamplingParams") or set())
        assert (api.numbers < (0, 17, 0), api.numbers >= (0, 17, 0)) == (taken, kept), api.release

"""The calls that builders make, against the recorded signature of every release: all that it requires, in its names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import windows

from vllm_compat import UNSET, VllmCompatError
from vllm_compat.adapters.base import Adapter, Need
from vllm_compat.factories import (
    engine_core_output,
    engine_core_request,
    lora,
    model_runner_output,
    params,
    scheduler_output,
)
from vllm_compat.recorded.store import RecordedApi

EVERY = [pytest.param(api, id=api.release) for api in (*windows.recorded(), *windows.nightlies())]
FEATURE = SimpleNamespace(data="data", identifier="hash", mm_position="place")


class Refused(Exception):
    """The release does not take an option."""


@pytest.fixture
def building(monkeypatch: pytest.MonkeyPatch) -> Callable[[RecordedApi], None]:
    """Let factories make what a recorded release would be given, as plain values, checked against its signature."""

    def let(api: RecordedApi) -> None:
        def construct(need: Need, options: Mapping[str, Any]) -> Any:
            found = windows.signature(api, need)
            given = {name: value for name, value in options.items() if value is not UNSET}
            unknown = [name for name in given if found is None or not found.accepts(name)]
            if unknown:
                raise Refused(", ".join(unknown))
            assert found is not None
            assert {*found.required} <= {*given}, f"{need.short} of {api.release}"
            return SimpleNamespace(**given)

        def adapter(surface: str) -> Any:
            fits = windows.choose(surface, api)[1]
            assert fits is not None
            return fits()

        monkeypatch.setattr(Adapter, "construct", staticmethod(construct))
        for module in (engine_core_output, engine_core_request, lora, model_runner_output, params, scheduler_output):
            monkeypatch.setattr(module, "adapter", adapter)

    return let


def _has(api: RecordedApi, symbol: str, name: str) -> bool:
    call = api.call(symbol)
    return call is not None and any(parameter.name == name for parameter in call.parameters)


def _taken(api: RecordedApi, symbol: str, name: str, build: Callable[[], Any]) -> Any:
    """What was built, where the release has the option; None where it has not, and then it was refused."""
    if _has(api, symbol, name):
        return build()
    with pytest.raises(Refused, match=name):
        build()
    return None


@pytest.mark.parametrize("api", EVERY)
def test_engine_core_requests(api: RecordedApi, building: Callable[[RecordedApi], None]) -> None:
    """The end-of-sequence id is a field where there is one; arrival time is now; the rest that is required is None."""
    building(api)
    made = engine_core_request.make_engine_core_request("r", [1, 2], pooling_params="pool", eos_token_id=9)
    symbol = "vllm.v1.engine:EngineCoreRequest"
    assert _has(api, symbol, "eos_token_id") is hasattr(made, "eos_token_id")
    assert getattr(made, "eos_token_id", 9) == 9
    assert made.arrival_time > 1e9
    assert (None,) * 5 == tuple(
        getattr(made, n) for n in ("mm_features", "lora_request", "cache_salt", "data_parallel_rank", "sampling_params")
    )
    for name in ("external_req_id", "resumable", "session_id", "kv_hints", "abort_immediately", "prompt_embeds"):
        options = {name: "given"}
        made = _taken(
            api, symbol, name, lambda o=options: engine_core_request.make_engine_core_request("r", [1], 1, **o)
        )
        assert made is None or getattr(made, name) == "given"


@pytest.mark.parametrize("api", EVERY)
def test_new_requests(api: RecordedApi, building: Callable[[RecordedApi], None]) -> None:
    """Multimodal features are one list, or three of the same features; blocks are a list per group."""
    building(api)
    made = scheduler_output.make_new_request_data("r", [1], 1, block_ids=[[1, 2], (3,)], mm_features=[FEATURE])
    assert ([1, 2], [3]) == made.block_ids
    if _has(api, "vllm.v1.core.sched.output:NewRequestData", "mm_features"):
        assert [FEATURE] == made.mm_features
    else:
        assert (["data"], ["hash"], ["place"]) == (made.mm_kwargs, made.mm_hashes, made.mm_positions)


@pytest.mark.parametrize("api", EVERY)
def test_cached_requests(api: RecordedApi, building: Callable[[RecordedApi], None]) -> None:
    """Resumed requests are a set of ids, or a boolean beside each; columns are in the order of the ids."""
    building(api)
    options: dict[str, Any] = {"num_output_tokens": {"b": 1, "a": 2}, "resumed_req_ids": ["b"]}
    options["new_block_ids"] = {"b": ([4],)}
    made = scheduler_output.make_cached_request_data({"a": 5, "b": 6}, **options)
    assert (["a", "b"], [5, 6], [None, ([4],)], []) == (
        made.req_ids,
        made.num_computed_tokens,
        made.new_block_ids,
        made.new_token_ids,
    )
    symbol = "vllm.v1.core.sched.output:CachedRequestData"
    if _has(api, symbol, "resumed_req_ids"):
        assert ({"b"}, {}, [2, 1]) == (made.resumed_req_ids, made.all_token_ids, made.num_output_tokens)
        options["all_token_ids"] = {"b": (1, 2)}
        made = scheduler_output.make_cached_request_data({"a": 5, "b": 6}, **options)
        assert {"b": [1, 2]} == made.all_token_ids
    else:
        assert [False, True] == made.resumed_from_preemption


@pytest.mark.parametrize("api", EVERY)
def test_scheduler_outputs(api: RecordedApi, building: Callable[[RecordedApi], None]) -> None:
    """A number of common blocks for each group where one is required; grammar fields where they still are."""
    building(api)
    new = scheduler_output.make_new_request_data("r", [1], 1, block_ids=([1], [2]))
    made = scheduler_output.make_scheduler_output({"r": 1}, scheduled_new_reqs=[new])
    assert 1 == made.total_num_scheduled_tokens
    symbol = "vllm.v1.core.sched.output:SchedulerOutput"
    call = api.call(symbol)
    assert call is not None
    required = {parameter.name for parameter in call.parameters if parameter.required}
    assert ([0, 0] if "num_common_prefix_blocks" in required else None) == getattr(
        made, "num_common_prefix_blocks", None
    )
    assert ("grammar_bitmask" in required) is hasattr(made, "grammar_bitmask")
    assert not hasattr(made, "preempted_req_ids")  # unset, so vLLM's own default
    for name in ("preempted_req_ids", "new_block_ids_to_zero", "grammar_bitmask", "skip_drafts", "block_table_updates"):
        made = _taken(api, symbol, name, lambda o={name: "given"}: scheduler_output.make_scheduler_output({}, **o))
        assert made is None or getattr(made, name) == "given"


@pytest.mark.parametrize("api", EVERY)
def test_cached_tokens(api: RecordedApi, building: Callable[[RecordedApi], None]) -> None:
    """The number of cached tokens is a field, or in ``prefill_stats``; that of external ones has a life of its own."""
    building(api)
    make = engine_core_output.make_engine_core_output
    made = make("r", [1], num_cached_tokens=5)
    symbol = "vllm.v1.engine:EngineCoreOutput"
    if _has(api, symbol, "prefill_stats"):
        made = make("r", [1], num_cached_tokens=5, num_external_computed_tokens=2)
        assert (5, 3, 2) == (
            made.prefill_stats.num_cached_tokens,
            made.prefill_stats.num_local_cached_tokens,
            made.prefill_stats.num_external_cached_tokens,
        )
        assert not hasattr(make("r", [1]), "prefill_stats")
        assert "own" == make("r", [1], prefill_stats="own").prefill_stats
        with pytest.raises(VllmCompatError, match="and prefill_stats"):
            make("r", [1], prefill_stats="own", num_cached_tokens=1)
        return
    assert 5 == made.num_cached_tokens
    _taken(api, symbol, "num_external_computed_tokens", lambda: make("r", [1], num_external_computed_tokens=2))
    _taken(api, symbol, "prefill_stats", lambda: make("r", [1], prefill_stats="own"))


@pytest.mark.parametrize("api", EVERY)
def test_runner_outputs(api: RecordedApi, building: Callable[[RecordedApi], None]) -> None:
    """What is required and not given stands for nothing; parts are refused where vLLM has no such part."""
    pytest.importorskip("numpy")  # of the rows of 0.11.1
    building(api)
    made = model_runner_output.make_model_runner_output({"a": [7], "b": []}, pooler_output={"b": "vector"})
    assert (["a", "b"], {"a": 0, "b": 1}) == (made.req_ids, made.req_id_to_index)
    assert [None, "vector"] == made.pooler_output
    assert ["a", "b"] == model_runner_output.make_draft_token_ids({"a": [1], "b": []}).req_ids
    sent = model_runner_output.make_kv_connector_output(finished_sending=["a"])
    assert {"finished_sending": {"a"}} == vars(sent)
    for make, name, symbol in (
        (model_runner_output.make_kv_connector_output, "failed_recving", "vllm.v1.outputs:KVConnectorOutput"),
        (model_runner_output.make_kv_connector_output, "invalid_block_ids", "vllm.v1.outputs:KVConnectorOutput"),
        (model_runner_output.make_ec_connector_output, "finished_sending", "vllm.v1.outputs:ECConnectorOutput"),
    ):
        _taken(api, symbol, name, lambda m=make, n=name: m(**{n: ["x"]}))


#: Task -> names of the option that says whether results are activated or normalised, by first release.
ACTIVATION = {
    "embed": (("0.10.2", "normalize"), ("0.14.0", "use_activation")),
    "classify": (("0.10.2", "activation"), ("0.11.1", "use_activation")),
    "encode": (("0.10.2", "softmax"), ("0.11.1", "use_activation")),
}


@pytest.mark.parametrize("api", EVERY)
@pytest.mark.parametrize("task", ACTIVATION)
@pytest.mark.parametrize("name", ["use_activation", "normalize", "activation", "softmax"])
def test_pooling(api: RecordedApi, building: Callable[[RecordedApi], None], task: str, name: str) -> None:
    """Under whichever of its names it is asked for, the option goes where the release reads it for the task."""
    building(api)
    here = [said for since, said in ACTIVATION[task] if windows.numbers(since) <= api.numbers][-1]
    assert {"task": task, here: False} == vars(params.make_pooling_params(task, **{name: False}))


@pytest.mark.parametrize("api", EVERY)
def test_lora_requests(api: RecordedApi, building: Callable[[RecordedApi], None]) -> None:
    """Name, number and folder in every release; the rest in its own."""
    building(api)
    made = lora.make_lora_request("l", 3, "/x")
    assert {"lora_name": "l", "lora_int_id": 3, "lora_path": "/x"} == vars(made)
    for name in ("base_model_name", "load_inplace", "is_3d_lora_weight", "tensorizer_config_dict", "long_lora_max_len"):
        _taken(
            api, "vllm.lora.request:LoRARequest", name, lambda o={name: 1}: lora.make_lora_request("l", 3, "/x", **o)
        )

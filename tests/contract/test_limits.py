"""What doctor says a release cannot do, against what is recorded of it."""

from __future__ import annotations

import pytest
import windows

from vllm_compat.adapters import limits
from vllm_compat.adapters.engine_args import LIVES, translated
from vllm_compat.adapters.select import SURFACES, by_number
from vllm_compat.recorded.store import RecordedApi

RECORDED = [pytest.param(api, id=api.release) for api in windows.recorded()]
#: What an option that became a part of another one was set to.
VALUES = {"task": "generate", "structured_outputs_config": {"backend": "auto"}, "eplb_config": {"window_size": 9}}


@pytest.mark.parametrize("surface", SURFACES)
@pytest.mark.parametrize("api", RECORDED)
def test_options_of_a_surface(api: RecordedApi, surface: str) -> None:
    """An option is said to be missing exactly where the recorded signature of the symbol does not take it."""
    adapter = by_number(surface, api.numbers)
    missing = set()
    for need in adapter.needs:
        found = windows.signature(api, need)
        if found is None and need.options:
            missing.add((need.short, ""))
        missing |= {(need.short, name) for name in need.options or {} if found is not None and not found.accepts(name)}
    assert missing == {(limit.symbol, limit.option) for limit in limits.of_adapter(adapter, api.numbers)}


@pytest.mark.parametrize("api", RECORDED)
def test_options_of_engine_args(api: RecordedApi) -> None:
    """Missing is what the recorded EngineArgs does not have and no other option stands for; by number and by fields."""
    call = api.call("vllm.engine.arg_utils:EngineArgs")
    assert call is not None
    known = {parameter.name for parameter in call.parameters}
    missing = {name for name in LIVES if not set(translated({name: VALUES.get(name, True)}, known)) <= known}
    assert missing == {limit.option for limit in limits.of_engine_args(api.numbers)}
    assert limits.of_engine_args(api.numbers) == limits.of_engine_args(None, known)


def test_what_a_limit_says() -> None:
    """The releases that have the option, those that had it first at the head; of a symbol, when it is not there."""
    found = limits.of_adapter(by_number("request", (0, 16, 0)), (0, 16, 0))
    assert limits.Limit("Request", "reasoning_parser_kwargs", "vLLM 0.20.1 or newer") == found[0]
    assert limits.Limit("Request", "kv_hints", "vLLM 0.31.0 or newer") == found[-1]
    found = limits.of_adapter(by_number("sampling_params", (0, 32, 0)), (0, 32, 0))
    assert limits.Limit("SamplingParams", "best_of", "vLLM 0.10.2 to 0.11.2") in found
    found = limits.of_adapter(by_number("model_runner_output", (0, 11, 0)), (0, 11, 0))
    assert limits.Limit("ECConnectorOutput", "", "vLLM 0.11.1 or newer") in found

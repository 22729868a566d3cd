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
    needs = [need for need in adapter.needs if need.options]
    missing = {
        name if need is needs[0] else f"{need.short}.{name}"
        for need in needs
        for name in need.options or {}
        if (found := windows.signature(api, need)) is not None and not found.accepts(name)
    }
    said = {limit.option for limit in limits.of_adapter(adapter, api.numbers)}
    assert missing - said <= {f"{need.short}.{name}" for need in needs[1:] for name in said}
    assert said <= missing


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
    """The releases that have the option, those that had it first at the head."""
    found = limits.of_adapter(by_number("request", (0, 16, 0)), (0, 16, 0))
    assert ("reasoning_parser_kwargs", "vLLM 0.20.1 or newer") == (found[0].option, found[0].needs)
    assert ("kv_hints", "vLLM 0.31.0 or newer") == (found[-1].option, found[-1].needs)
    gone = {
        limit.option: limit.needs for limit in limits.of_adapter(by_number("sampling_params", (0, 32, 0)), (0, 32, 0))
    }
    assert "vLLM 0.10.2 to 0.11.2" == gone["best_of"]

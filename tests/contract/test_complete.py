"""The boundaries are complete: no recorded parameter of what an adapter calls is one that nobody thought about."""

from __future__ import annotations

import pytest
import windows

from vllm_compat.adapters.base import Adapter
from vllm_compat.adapters.select import adapters_of
from vllm_compat.recorded.store import RecordedApi

#: Surfaces whose adapters account for every parameter.
SURFACES = (
    "sampling_params",
    "request",
    "block_hashing",
    "structured_output",
    "scheduler",
    "input_processor",
)
ADAPTERS = [adapter for surface in SURFACES for adapter in adapters_of(surface)]
SERVED = [pytest.param(a, api, id=f"{a.__name__}-{api.release}") for a in ADAPTERS for api in windows.window(a)]


@pytest.mark.parametrize("surface", SURFACES)
def test_every_recorded_release_is_served(surface: str) -> None:
    """The oldest adapter of a surface serves the oldest recorded release, so none is without one."""
    assert surface not in {name for name, missing in windows.releases_before_every_adapter().items() if missing}


@pytest.mark.parametrize(("adapter", "api"), SERVED)
def test_every_parameter_is_passed_or_left(adapter: type[Adapter], api: RecordedApi) -> None:
    """Each recorded parameter is always passed, an option of the caller's, or named in ``left``."""
    unknown = []
    for need in adapter.needs:
        found = windows.signature(api, need)
        if found is None or need.read_only:
            continue
        known = {*need.passes, *(need.options or {}), *adapter.left.get(need.short, ())}
        unknown += [f"{need.short}.{name}" for name in found.names if name not in known]
    assert not unknown, f"{adapter.label()} says nothing of {', '.join(unknown)}, which vLLM {api.release} has"


@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda adapter: adapter.__name__)
def test_what_is_left_exists(adapter: type[Adapter]) -> None:
    """A name in ``left`` is a parameter in some release that the adapter serves, and one it does not pass."""
    for short, names in adapter.left.items():
        needs = [need for need in adapter.needs if need.short == short]
        assert len(needs) == 1, f"{adapter.label()}: {short} is no need"
        (need,) = needs
        recorded = {
            name
            for api in windows.window(adapter)
            if (found := windows.signature(api, need)) is not None
            for name in found.names
        }
        assert set(names) <= recorded, f"{adapter.label()}: {short}"
        assert not {*names} & {*need.passes, *(need.options or {})}, f"{adapter.label()}: {short}"


@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda adapter: adapter.__name__)
def test_every_adapter_serves_a_release(adapter: type[Adapter]) -> None:
    """An adapter whose window is empty is dead code."""
    assert windows.window(adapter)

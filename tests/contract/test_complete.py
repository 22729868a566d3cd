"""The boundaries are complete: vLLM has no parameter and no field of what an adapter uses that nobody thought about."""

from __future__ import annotations

import pytest
import windows
from fit import ANYTHING_ELSE, there, unheard_of

from vllm_compat.adapters.base import Adapter
from vllm_compat.adapters.select import SURFACES

ADAPTERS = windows.all_adapters()


@pytest.mark.parametrize("surface", SURFACES)
def test_every_recorded_release_is_served(surface: str) -> None:
    """The oldest adapter of a surface serves the oldest recorded release, so none is without one."""
    assert surface not in {name for name, missing in windows.releases_before_every_adapter().items() if missing}


@pytest.mark.parametrize("surface", SURFACES)
def test_every_adapter_says_what_it_uses(surface: str) -> None:
    """An adapter without needs would pass every test below."""
    assert all(adapter.needs for adapter in ADAPTERS if adapter.surface == surface)


@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda adapter: adapter.__name__)
def test_nothing_recorded_is_unknown(adapter: type[Adapter]) -> None:
    """Each recorded parameter and field is passed, an option of the caller's, read, or named in ``left``."""
    unknown = {api.release: names for api in windows.window(adapter) if (names := unheard_of(api, adapter))}
    assert not unknown, f"{adapter.label()} says nothing of what these releases have: {unknown}"


@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda adapter: adapter.__name__)
def test_what_is_left_exists(adapter: type[Adapter]) -> None:
    """A name in ``left`` is there in some release of the adapters that share the list, and none of them uses it."""
    if "left" not in vars(adapter):
        return  # inherited, so proved where it is written
    sharing = [other for other in ADAPTERS if other.left is adapter.left]
    for short, names in adapter.left.items():
        recorded: set[str] = set()
        for other in sharing:
            needs = [need for need in other.needs if need.short == short]
            used = {name for need in needs for name in (*need.passes, *(need.options or {}), *need.reads)}
            assert not {*names} & used, f"{other.label()}: {short}"
            recorded |= {name for need in needs for api in windows.window(other) for name in there(api, need)}
        assert recorded, f"{adapter.label()}: {short} is no need"
        assert {*names} - {ANYTHING_ELSE} <= recorded, f"{adapter.label()}: {short}"


@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda adapter: adapter.__name__)
def test_every_adapter_serves_a_release(adapter: type[Adapter]) -> None:
    """An adapter whose window is empty is dead code."""
    assert windows.window(adapter)

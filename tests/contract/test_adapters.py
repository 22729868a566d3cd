"""Every adapter against the recorded API of every release that it serves; no vLLM is needed."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import windows
from api_record import targets

from vllm_compat import releases
from vllm_compat.adapters.base import Adapter, Need
from vllm_compat.adapters.select import SURFACES, adapters_of
from vllm_compat.patches import CATALOGUE, Patch
from vllm_compat.recorded import store
from vllm_compat.recorded.store import RecordedApi

ROOT = Path(__file__).parents[2]
ADAPTERS = windows.all_adapters()
SERVED = [pytest.param(a, api, id=f"{a.__name__}-{api.release}") for a in ADAPTERS for api in windows.window(a)]
OPTIONS = [
    pytest.param(adapter, need, id=f"{adapter.__name__}-{need.short}")
    for adapter in ADAPTERS
    for need in adapter.needs
    if need.options or need.life
]


def test_every_release_of_the_table_is_recorded() -> None:
    """releases.toml and matrix/api name the same releases: none is proved that was not read, and the other way."""
    assert [row.version for row in releases.all_releases()] == store.releases()


def test_every_release_was_recorded_with_the_same_targets() -> None:
    """A target that was added later was looked for in the old releases too, so a missing record means absence."""
    expected = {surface: {target.key for target in symbols} for surface, symbols in targets.load().items()}
    for api in (*windows.recorded(), *windows.nightlies()):
        assert expected == {surface: set(records) for surface, records in api.surfaces.items()}, api.release


def test_the_recordings_come_from_the_official_wheels() -> None:
    """Not from a repackaging, whose Python files may differ."""
    assert {"vllm"} == {api.wheel["distribution"] for api in windows.recorded()}
    assert all(api.release == api.wheel["version"] for api in windows.recorded())


@pytest.mark.parametrize(("adapter", "api"), SERVED)
def test_what_an_adapter_calls_is_there(adapter: type[Adapter], api: RecordedApi) -> None:
    """In every release that names this adapter, each symbol it needs exists and takes what it passes, and no more."""
    problems = windows.problems(api, adapter)
    assert not problems, f"{adapter.label()} does not fit vLLM {api.release}: " + "; ".join(problems)


@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda adapter: adapter.__name__)
def test_an_option_is_never_required(adapter: type[Adapter]) -> None:
    """An option is passed only when the caller set it, so vLLM must have a default for it.

    ``Need.misfit`` counts options as passed, so the test above would not see this.
    """
    required = [
        f"{need.short} requires {name} in vLLM {api.release}"
        for api in windows.window(adapter)
        for need in adapter.needs
        if (found := windows.signature(api, need)) is not None and not need.read_only
        for name in found.required
        if name in (need.options or {}) and name not in need.passes
    ]
    assert not required, f"{adapter.label()}: {', '.join(required)}"


@pytest.mark.parametrize(("adapter", "need"), OPTIONS)
def test_what_not_every_release_has_is_there_when_the_adapter_says_so(adapter: type[Adapter], need: Need) -> None:
    """An option, and a symbol with a life, exist in exactly the releases that are named, of those the adapter serves.

    The releases are what an UnsupportedField tells the caller to use.
    """
    wrong = []
    for api in windows.window(adapter):
        found = windows.signature(api, need)
        if (found is not None) is not windows.promised(api.release, need.life):
            wrong.append(f"{need.short} {'is' if found else 'is not'} in {api.release}")
        for name, life in (need.options or {}).items() if found else ():
            if found.accepts(name) is not windows.promised(api.release, life):
                wrong.append(f"{need.short}.{name} {'is' if found.accepts(name) else 'is not'} in {api.release}")
    assert not wrong, "; ".join(wrong)


@pytest.mark.parametrize(("adapter", "need"), OPTIONS)
def test_the_releases_that_are_named_are_boundaries(adapter: type[Adapter], need: Need) -> None:
    """The first release named is the first recorded one that has the option, the last named the last one.

    Of this symbol as long as it lives, or of the symbols that take the option in other releases (``Processor`` became
    ``InputProcessor``): what an UnsupportedField advises is a release, not a symbol.
    """
    if need.life:
        assert _said(need.life) == _ends([need])
    whole = _said(need.life)
    for name, life in (need.options or {}).items():
        if not life:
            continue
        said = _said(life)
        sharing = [n for a in adapters_of(adapter.surface) for n in a.needs if name in (n.options or {})]
        here = (max(said[0], whole[0]), min(said[1], whole[1]))
        assert _ends([need], name) in (said, here if here[0] <= here[1] else None) or said == _ends(sharing, name), name
        assert _ends(sharing, name), f"no release has {name}"


def _said(life: str) -> tuple[windows.Numbers, windows.Numbers]:
    """The first and the last recorded release of a life."""
    first, _, last = life.partition("-")
    ends = windows.recorded()
    return windows.numbers(first or ends[0].release), windows.numbers(last or ends[-1].release)


def _ends(needs: list[Need], name: str = "") -> tuple[windows.Numbers, windows.Numbers] | None:
    """The first and the last recorded release that has one of ``needs``, or in which one of them takes an option."""
    has = [
        api.numbers
        for api in windows.recorded()
        if any((found := windows.signature(api, need)) and (not name or found.accepts(name)) for need in needs)
    ]
    return (has[0], has[-1]) if has else None


@pytest.mark.parametrize("surface", SURFACES)
def test_which_adapters_are_told_by_the_shape(surface: str) -> None:
    """Those that an earlier release fits too are in ``UNSEEN``, and no others: a nightly is judged by that."""
    unseen = getattr(importlib.import_module(f"vllm_compat.adapters.{SURFACES[surface]}"), "UNSEEN", ())
    found = [
        adapter
        for adapter in adapters_of(surface)
        if any(not windows.problems(api, adapter) for api in windows.recorded() if api.numbers < adapter.since)
        and adapter is not adapters_of(surface)[-1]
    ]
    assert sorted(found, key=lambda adapter: adapter.since) == sorted(unseen, key=lambda adapter: adapter.since)


@pytest.mark.parametrize("surface", SURFACES)
def test_adapters_are_listed_newest_first(surface: str) -> None:
    """The choice by release takes the first whose ``since`` is not newer; each says which surface it is of."""
    listed = adapters_of(surface)
    assert sorted((adapter.since for adapter in listed), reverse=True) == [adapter.since for adapter in listed]
    assert {surface} == {adapter.surface for adapter in listed}


@pytest.mark.parametrize("patch", CATALOGUE, ids=lambda patch: patch.name)
def test_a_patch_has_its_target(patch: Patch) -> None:
    """A patch of vLLM finds its target in every recorded release of its window; its ends are recorded ones.

    It may begin with a nightly, whose number is above the release before it.
    """
    since, until = patch.since, patch.until
    known = [api.numbers for api in windows.recorded()]
    assert since in {*known, *(api.numbers for api in windows.nightlies())}
    assert until is None or until in known
    for change in patch.changes:
        target = f"{change.module}:{change.attribute}"
        there = [api.numbers for api in windows.recorded() if api.call(target) is not None]
        # What no recording has, somebody else's code or a kernel, is in tests/live/test_patches_in_processes.py.
        if there:
            assert [at for at in known if since <= at and (until is None or at < until)] == [
                at for at in there if since <= at and (until is None or at < until)
            ], target


def test_nothing_heavy_is_imported() -> None:
    """These tests are about every release, so they must not look at an installed vLLM."""
    code = "import sys; import test_adapters; print([m for m in ('vllm', 'torch') if m in sys.modules])"
    path = ":".join(map(str, (Path(__file__).parent, ROOT / "matrix", ROOT)))
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": path}, capture_output=True, text=True, check=False, timeout=60
    )
    assert (0, "[]") == (done.returncode, done.stdout.strip()), done.stderr

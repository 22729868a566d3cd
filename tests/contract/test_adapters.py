"""Every adapter against the recorded API of every release that it serves; no vLLM is needed."""

from __future__ import annotations

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
    pytest.param(adapter, need, name, life, id=f"{adapter.__name__}-{need.short}-{name}")
    for adapter in ADAPTERS
    for need in adapter.needs
    for name, life in (need.options or {}).items()
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


@pytest.mark.parametrize(("adapter", "api"), SERVED)
def test_an_option_is_never_required(adapter: type[Adapter], api: RecordedApi) -> None:
    """An option is passed only when the caller set it, so vLLM must have a default for it.

    ``Need.misfit`` counts options as passed, so the test above would not see this.
    """
    required = [
        f"{need.short} requires {name}"
        for need in adapter.needs
        if (found := windows.signature(api, need)) is not None and not need.read_only
        for name in found.required
        if name in (need.options or {}) and name not in need.passes
    ]
    assert not required, f"{adapter.label()} in vLLM {api.release}: {', '.join(required)}"


@pytest.mark.parametrize(("adapter", "need", "name", "life"), OPTIONS)
def test_an_option_is_there_when_the_adapter_says_so(adapter: type[Adapter], need: Need, name: str, life: str) -> None:
    """An option exists in exactly the releases that its entry names, of those the adapter serves.

    The releases are what an UnsupportedField tells the caller to use.
    """
    wrong = []
    for api in windows.window(adapter):
        found = windows.signature(api, need)
        if found is not None and found.accepts(name) is not windows.promised(api.release, life):
            wrong.append(f"{api.release} {'has' if found.accepts(name) else 'lacks'} it")
    assert not wrong, f"{need.short}.{name} is said to be there in {life or 'every release'}, but {', '.join(wrong)}"


@pytest.mark.parametrize(("adapter", "need", "name", "life"), [case for case in OPTIONS if case.values[3]])
def test_the_releases_that_an_option_names_are_its_boundaries(
    adapter: type[Adapter], need: Need, name: str, life: str
) -> None:
    """The first release named is the first recorded one that has the option, the last named the last one.

    Of this symbol, or of the symbols that take the option in other releases (``Processor`` became ``InputProcessor``):
    what an UnsupportedField advises is a release, not a symbol.
    """
    anywhere = [n for a in adapters_of(adapter.surface) for n in a.needs if name in (n.options or {})]
    first, _, last = life.partition("-")
    assert (first, last or store.releases()[-1]) in (_ends(name, [need]), _ends(name, anywhere))


def _ends(name: str, needs: list[Need]) -> tuple[str, str] | None:
    """The first and the last recorded release in which one of ``needs`` takes the option."""
    has = [
        api.release
        for api in windows.recorded()
        if any((s := windows.signature(api, need)) and s.accepts(name) for need in needs)
    ]
    return (has[0], has[-1]) if has else None


@pytest.mark.parametrize("surface", SURFACES)
def test_adapters_are_listed_newest_first(surface: str) -> None:
    """The choice by release takes the first whose ``since`` is not newer; each says which surface it is of."""
    listed = adapters_of(surface)
    assert sorted((adapter.since for adapter in listed), reverse=True) == [adapter.since for adapter in listed]
    assert {surface} == {adapter.surface for adapter in listed}


@pytest.mark.parametrize("patch", CATALOGUE, ids=lambda patch: patch.name)
def test_a_patch_has_its_target(patch: Patch) -> None:
    """A patch of vLLM finds its target in every recorded release of its window; its ends are recorded releases."""
    since, until = patch.since, patch.until
    known = [api.numbers for api in windows.recorded()]
    assert since in known
    assert until is None or until in known
    if patch.module.partition(".")[0] != "vllm":
        return  # somebody else's code is not recorded; tests/live has it
    for api in windows.recorded():
        if since <= api.numbers and (until is None or api.numbers < until):
            target = f"{patch.module}:{patch.attribute}"
            assert api.call(target) is not None, f"{target} is not there in {api.release}"


def test_nothing_heavy_is_imported() -> None:
    """These tests are about every release, so they must not look at an installed vLLM."""
    code = "import sys; import test_adapters; print([m for m in ('vllm', 'torch') if m in sys.modules])"
    path = ":".join(map(str, (Path(__file__).parent, ROOT / "matrix", ROOT)))
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": path}, capture_output=True, text=True, check=False, timeout=60
    )
    assert (0, "[]") == (done.returncode, done.stdout.strip()), done.stderr

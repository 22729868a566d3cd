"""Choosing an adapter: the release names one, the live signature confirms it or moves the choice. No vLLM needed."""

from __future__ import annotations

import sys
import threading
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import vllm_compat as vc
from vllm_compat import releases
from vllm_compat.adapters import base, select
from vllm_compat.adapters.base import Adapter, Need, resolve
from vllm_compat.installed import Installed

MODULE = "fake_vllm_module"


class Newest(Adapter):
    surface = "thing"
    since = (0, 30, 0)
    make = Need(f"{MODULE}:make", passes=("name", "size"), options={"color": "0.31.0"})
    needs = (make,)


class Middle(Adapter):
    surface = "thing"
    since = (0, 20, 0)
    make = Need(f"{MODULE}:make", passes=("name", "block_size"), options={"color": ""})
    needs = (make,)


class Oldest(Adapter):
    surface = "thing"
    since = (0, 10, 0)
    make = Need(f"{MODULE}:make", passes=("title",))
    needs = (make,)


def takes_size(name: str, size: int, color: str = "red") -> Any:
    return name, size, color


def takes_block_size(name: str, block_size: int) -> Any:
    return name, block_size


def takes_title(title: str) -> Any:
    return title


World = Callable[..., None]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """world(release, function): this release is installed, and its module has this function."""
    module = types.ModuleType(MODULE)
    monkeypatch.setitem(sys.modules, MODULE, module)
    adapters = types.ModuleType("vllm_compat.adapters.fake_thing")
    adapters.ADAPTERS = (Newest, Middle, Oldest)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm_compat.adapters.fake_thing", adapters)
    monkeypatch.setitem(select.SURFACES, "thing", "fake_thing")

    def set_up(release: tuple[int, ...] | None, make: Any = None, version: str | None = None) -> None:
        select._choose.cache_clear()
        monkeypatch.setattr(select, "_said", False)
        if make is None:
            vars(module).pop("make", None)
        else:
            module.make = make  # type: ignore[attr-defined]
        here = Installed(
            version=version or ("dev" if release is None else ".".join(map(str, release))),
            distribution="vllm-fork",
            platform="cpu",
            runner="v1",
            release=release,
            location=Path("/nowhere"),
            source="metadata",
            platform_source="",
            runner_reason="",
            is_nightly=release is not None and ".dev" in (version or ""),
            is_dev=release is None or ".dev" in (version or ""),
        )
        monkeypatch.setattr(select, "installed", lambda: here)
        monkeypatch.setattr(base, "installed", lambda: here)

    yield set_up
    select._choose.cache_clear()


@pytest.mark.filterwarnings("ignore::vllm_compat.UnverifiedRelease")
@pytest.mark.parametrize(
    ("release", "make", "chosen"),
    [
        ((0, 30, 0), takes_size, Newest),
        ((0, 31, 2), takes_size, Newest),
        ((0, 29, 9), takes_block_size, Middle),
        ((0, 20, 0), takes_block_size, Middle),
        ((0, 19, 1), takes_title, Oldest),
        ((0, 10, 2), takes_title, Oldest),
    ],
)
def test_the_release_names_the_adapter(
    world: World, release: tuple[int, ...], make: Any, chosen: type[Adapter]
) -> None:
    """``since`` is inclusive."""
    world(release, make)

    selection = select._choose("thing")

    assert (chosen, chosen) == (selection.adapter, selection.named)
    assert "names it and its live signatures fit" in selection.reason
    assert isinstance(select.adapter("thing"), chosen)


@pytest.mark.parametrize(
    ("release", "make", "named", "chosen"),
    [
        ((0, 29, 0), takes_size, Middle, Newest),  # a nightly that counts itself to the release before
        ((0, 30, 0), takes_block_size, Newest, Middle),  # a fork that has not merged yet
        ((0, 30, 0), takes_title, Newest, Oldest),
        ((0, 12, 0), takes_size, Oldest, Newest),
    ],
)
def test_the_shape_moves_the_choice_to_one_that_fits(
    world: World, release: tuple[int, ...], make: Any, named: type[Adapter], chosen: type[Adapter]
) -> None:
    """The reason names both, and what did not fit."""
    world(release, make)

    selection = select._choose("thing")

    assert (named, chosen) == (selection.named, selection.adapter)
    assert f"names '{named.label()}', but make takes no" in selection.reason


def takes_either(name: str, size: int = 0, block_size: int = 0) -> Any:
    return name, size, block_size


@pytest.mark.filterwarnings("ignore::vllm_compat.UnverifiedRelease")
def test_a_nightly_is_served_by_the_newest_that_fits(world: World) -> None:
    """Ahead of its number: where the older one fits as well, what it has already decides. A release is not ahead."""
    world((0, 29, 1), takes_either, "0.29.1.dev202609091054")
    selection = select._choose("thing")
    assert (Middle, Newest) == (selection.named, selection.adapter)
    assert "0.29.1.dev202609091054 is ahead of its number" in selection.reason

    world((0, 29, 0), takes_either)
    assert Middle is select._choose("thing").adapter
    world((0, 29, 1), takes_block_size, "0.29.1.dev202609091054")
    assert Middle is select._choose("thing").adapter


@pytest.mark.filterwarnings("ignore::vllm_compat.UnverifiedRelease")
@pytest.mark.parametrize(("number", "chosen"), [((0, 29, 1), Newest), ((0, 28, 1), Middle)])
def test_what_earlier_releases_fit_too_proves_nothing(
    world: World, number: tuple[int, ...], chosen: type[Adapter]
) -> None:
    """An adapter that the shape does not tell serves a nightly only when it is the next release's (0.30.0 here)."""
    sys.modules["vllm_compat.adapters.fake_thing"].UNSEEN = (Newest,)  # type: ignore[attr-defined]
    world(number, takes_either, f"{'.'.join(map(str, number))}.dev202609091054")
    assert chosen is select._choose("thing").adapter


def test_what_is_older_than_the_table_is_refused(world: World) -> None:
    """Even where its shape fits: nobody has looked at what it does. The error says from which release on it works."""
    world((0, 10, 1), takes_title)
    with pytest.raises(vc.UnsupportedRelease) as caught:
        select.adapter("thing")
    assert "vLLM 0.10.2 or newer" == caught.value.needed
    assert "vLLM 0.10.1 (vllm-fork)" == caught.value.found
    assert "VLLM_COMPAT_VLLM_VERSION" in caught.value.advice
    with pytest.raises(vc.UnsupportedRelease):
        select.explain()  # the surfaces of this project, before any of them is looked at


UNVERIFIED = [
    ((0, 99, 0), "0.99.0", takes_size, "newer than the newest release known"),
    ((0, 30, 1), "0.30.1.dev202609231158", takes_size, "a nightly from between 0.30.0 and 0.31.0"),
    ((0, 29, 1), "0.29.1.dev202609091054", takes_block_size, "a nightly from between 0.29.0 and 0.30.0"),
    ((0, 29, 1), "0.29.1.dev202609171111", takes_size, "the thing is served by its shape"),
    (None, "dev", takes_title, "its release is unknown"),
    ((0, 17, 2), "0.17.2", takes_title, "the nearest is 0.17.1"),
]


@pytest.mark.parametrize(("release", "version", "make", "why"), UNVERIFIED)
def test_an_unverified_build_is_said_once(
    world: World, release: tuple[int, ...] | None, version: str, make: Any, why: str
) -> None:
    """One warning per process, from the line that called, whatever is asked for afterwards."""
    world(release, make, version)
    with pytest.warns(vc.UnverifiedRelease, match=why) as said:
        select.adapter("thing")
    assert [f"vLLM {version} is unverified"] == [str(warning.message).partition(" (")[0] for warning in said]
    assert __file__ == said[0].filename
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        select.adapter("thing")
        select._choose.cache_clear()
        select.adapter("thing")


def test_it_can_be_made_an_error_once(world: World) -> None:
    """With the filter "error" the first call raises, as whoever set it wants; it is still said once."""
    world((0, 99, 0), takes_size)
    with warnings.catch_warnings():
        warnings.simplefilter("error", vc.UnverifiedRelease)
        with pytest.raises(vc.UnverifiedRelease):
            select.adapter("thing")
        assert isinstance(select.adapter("thing"), Newest)


@pytest.mark.parametrize("row", releases.all_releases(), ids=lambda row: row.version)
def test_a_release_of_the_table_is_never_called_unverified(world: World, row: releases.Release) -> None:
    """Planned or live, by its name or as a post release, and where its shape moves the choice."""
    for make in (takes_size, takes_block_size, takes_title):
        for version in (row.version, f"{row.version}.post2", f"{row.version}+cpu"):
            world(row.numbers, make, version)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                select.adapter("thing")


def test_what_does_not_fit_is_not_called_unverified(world: World) -> None:
    """A mismatch says it all; the warning is for what works."""
    world((0, 99, 0), None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(vc.SignatureMismatch):
            select.adapter("thing")


def test_doctor_does_not_warn(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Explaining is no use of the library, and doctor says "unverified" in its own words."""
    world((0, 99, 0), takes_size)
    monkeypatch.setattr(select, "SURFACES", {"thing": "fake_thing"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        select.explain()


def test_neighbours_are_tried_nearest_first(world: World) -> None:
    """Where several fit, the one next to the release's own is taken; of two equally near, the newer."""
    world((0, 20, 0), lambda **anything: anything)
    assert select._choose("thing").adapter is Middle

    world((0, 20, 0), lambda name, size=0, title="", **_: None)
    assert select._choose("thing").adapter is Middle

    def fits_newest_and_oldest(size: int = 0, name: str = "", title: str = "") -> None:
        pass

    world((0, 20, 0), fits_newest_and_oldest)
    assert select._choose("thing").adapter is Newest


def test_an_unknown_release_tries_the_newest_first(world: World) -> None:
    """ "dev" says nothing, so live signatures decide."""
    world(None, takes_size)
    assert select._choose("thing").adapter is Newest
    world(None, takes_title)
    selection = select._choose("thing")
    assert (Newest, Oldest) == (selection.named, selection.adapter)
    assert "release unknown" in selection.reason


def test_refusal_carries_both_signatures(world: World) -> None:
    """What the named adapter passes, and what the live function takes."""
    world((0, 30, 0), lambda name, weight: None)

    with pytest.raises(vc.SignatureMismatch) as caught:
        select.adapter("thing")

    assert ("name", "size") == caught.value.expected
    assert ("name", "weight") == caught.value.live
    for said in ("Passed here: (name, size)", "live: (name, weight)", "takes no size", "requires weight", "thing"):
        assert said in str(caught.value)
    assert caught.value.advice


@pytest.mark.parametrize("make", [None, "no function", max])
def test_what_is_not_there_or_cannot_be_read_is_a_mismatch(world: World, make: Any) -> None:
    """A symbol that is gone, or has no signature, is said by name instead of a bare AttributeError or TypeError."""
    world((0, 30, 0), make)

    with pytest.raises(vc.SignatureMismatch) as caught:
        select.adapter("thing")

    assert caught.value.symbol == f"{MODULE}:make"
    assert f"{MODULE}:make" in str(caught.value)
    assert ("name", "size") == caught.value.expected


def test_explain_reports_a_mismatch_and_goes_on(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """doctor sees every surface, chosen or refused."""
    world((0, 30, 0), takes_size)
    monkeypatch.setattr(select, "SURFACES", {"gone": "fake_thing", "thing": "fake_thing"})

    first, second = select.explain()
    assert isinstance(first, select.Selection)
    assert isinstance(second, select.Selection)

    world((0, 30, 0), None)
    assert [vc.SignatureMismatch] * 2 == [type(result) for result in select.explain()]


def test_a_module_that_answers_none_to_every_name_does_not_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A __getattr__ without a raise: vllm.transformers_utils.tokenizer of 0.14 and 0.15."""
    module = types.ModuleType("answers_none")
    vars(module).update(__getattr__=lambda _: None, unset=None)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises(AttributeError, match=r"'answers_none' has no attribute 'missing'"):
        resolve("answers_none:missing")
    assert resolve("answers_none:unset") is None


def test_many_threads_choose_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every thread gets the same class, and the live signature is read once."""
    world((0, 30, 0), takes_size)
    reads: list[str] = []
    original = select.misfit
    monkeypatch.setattr(select, "misfit", lambda a: (reads.append(a.label()), original(a))[1])
    chosen: list[Any] = []
    threads = [threading.Thread(target=lambda: chosen.append(type(select.adapter("thing")))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [Newest] * 8 == chosen
    assert len(reads) == 1


def test_needs_say_what_is_missing_and_what_is_new(world: World) -> None:
    """Passed parameters must exist, required ones must be passed always, optional ones may be anything."""
    need = Need(f"{MODULE}:make", passes=("a", "b"), options={"c": ""})
    for make, problem in (
        (lambda a, b: None, ""),
        (lambda a, b, c: None, "make requires c"),
        (lambda a, b, *, later=None: None, ""),
        (lambda **anything: None, ""),
        (lambda a, **anything: None, ""),
        (lambda a: None, "make takes no b"),
        (lambda a, b, new: None, "make requires new"),
        (lambda b, /, a, new: None, "make takes no b; make requires new"),
    ):
        world((0, 30, 0), make)
        assert problem == need.misfit(need.live())


class Output:
    def __init__(self, tokens: list[int], new: int) -> None:
        self.token_ids = tokens


def test_what_is_only_read_may_require_anything(world: World) -> None:
    """A reader needs attributes, which are not parameters; what is called and read needs both."""
    world((0, 30, 0), Output)
    symbol = f"{MODULE}:make"
    for need, problem in (
        (Need(symbol, reads=("token_ids",), read_only=True), ""),
        (Need(symbol, reads=("token_ids", "tokens"), read_only=True), "make has no tokens"),
        (Need(symbol, passes=("tokens", "new"), reads=("token_ids",)), ""),
        (Need(symbol, passes=("tokens",), reads=("gone",)), "make requires new; make has no gone"),
    ):
        assert problem == need.live_misfit()
    with pytest.raises(ValueError, match="never called"):
        Need(symbol, passes=("tokens",), read_only=True)


def test_how_many_values_come_back_is_looked_at(world: World) -> None:
    """Where a need counts on it and vLLM annotates it; an annotation that says nothing is no objection."""

    def two() -> tuple[int, str]: ...  # type: ignore[empty-body]
    def many() -> tuple[int, ...]: ...  # type: ignore[empty-body]
    def silent(): ...  # type: ignore[no-untyped-def]

    two.__annotations__["return"] = tuple[int, str]
    many.__annotations__["return"] = tuple[int, ...]
    need = Need(f"{MODULE}:make", gives=3)
    for make, problem in ((two, "make returns 2 values, not 3"), (many, ""), (silent, "")):
        world((0, 30, 0), make)
        assert problem == need.live_misfit()
    world((0, 30, 0), two)
    assert Need(f"{MODULE}:make", gives=2).live_misfit() == Need(f"{MODULE}:make").live_misfit() == ""


def test_a_reader_that_does_not_fit_is_refused_with_what_it_reads(world: World) -> None:
    """Not with an empty list of parameters."""

    class Reader(Adapter):
        surface = "thing"
        since = (0, 10, 0)
        needs = (Need(f"{MODULE}:make", reads=("logprobs",), read_only=True),)

    world((0, 30, 0), Output)
    sys.modules["vllm_compat.adapters.fake_thing"].ADAPTERS = (Reader,)  # type: ignore[attr-defined]
    with pytest.raises(vc.SignatureMismatch, match=r"make has no logprobs. Read here: \(logprobs\)") as caught:
        select.adapter("thing")
    assert ("logprobs",) == caught.value.expected


def test_what_not_every_release_has_is_not_missed(world: World) -> None:
    """A symbol with a life may be absent; where it is there, it has to fit."""
    need = Need(f"{MODULE}:make", passes=("title",), life="0.20.0-0.30.0")
    for make, problem in ((None, ""), (takes_title, ""), (takes_size, "make takes no title; make requires name, size")):
        world((0, 30, 0), make)
        assert problem == need.live_misfit()


def test_a_module_that_nobody_loaded_is_not_imported(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two model runners only the one in use is looked at."""
    need = Need(f"{MODULE}:make", reads=("gone",), read_only=True, if_loaded=True)
    world((0, 30, 0), Output)
    assert need.live_misfit() == "make has no gone"
    monkeypatch.delitem(sys.modules, MODULE)
    assert need.live_misfit() == ""


def test_methods_are_looked_at_without_their_instance(world: World) -> None:
    """``bound`` leaves out the first parameter, whatever it is called."""

    class Thing:
        def run(self, a: int) -> None:
            pass

    world((0, 30, 0), Thing)
    assert Need(f"{MODULE}:make.run", passes=("a",), bound=True).live().names == ("a",)
    assert Need(f"{MODULE}:make.run", passes=("a",)).live().names == ("self", "a")
    assert resolve(f"{MODULE}:make.run") is Thing.run


def test_unset_options_are_left_out(world: World) -> None:
    """vLLM's own default applies; None is a value and is passed on."""
    world((0, 30, 0), takes_size)
    need = Newest.make
    assert Adapter.construct(need, {"name": "n", "size": 1, "color": vc.UNSET}) == ("n", 1, "red")
    assert Adapter.construct(need, {"name": "n", "size": 1, "color": None}) == ("n", 1, None)


def test_unset_options_may_be_missing(world: World) -> None:
    """Only what the caller set has to exist."""
    world((0, 30, 0), lambda name, size: (name, size))
    assert Adapter.construct(Newest.make, {"name": "n", "size": 1, "color": vc.UNSET}) == ("n", 1)


@pytest.mark.parametrize(
    ("release", "since", "needed", "advice"),
    [
        ((0, 28, 0), "0.31.0", "vLLM 0.31.0 or newer", "leave color unset, or upgrade vLLM"),
        ((0, 32, 0), "0.31.0", "vLLM 0.31.0 or newer", "leave color unset, or use a release that has it"),
        ((0, 31, 0), "0.31.0", "vLLM 0.31.0 or newer", "leave color unset, or use a release that has it"),
        (None, "0.31.0", "vLLM 0.31.0 or newer", "leave color unset, or upgrade vLLM"),
        ((0, 32, 0), "0.22.0-0.30.0", "vLLM 0.22.0 to 0.30.0", "leave color unset, or use a release that has it"),
        ((0, 32, 0), "", "a vLLM whose make takes color", "leave color unset, or use a release that has it"),
    ],
)
def test_a_set_option_that_is_missing_names_its_release(
    world: World, release: tuple[int, ...] | None, since: str, needed: str, advice: str
) -> None:
    """And advises to upgrade only where that would help."""
    world(release, lambda name, size: None)
    need = Need(f"{MODULE}:make", passes=("name", "size"), options={"color": since})

    with pytest.raises(vc.UnsupportedField) as caught:
        Adapter.construct(need, {"name": "n", "size": 1, "color": "blue"})

    assert caught.value.symbol == "make.color"
    assert (needed, advice) == (caught.value.needed, caught.value.advice)
    assert "vllm-fork" in caught.value.found


def test_var_keyword_accepts_every_option(world: World) -> None:
    """A wrapper with ``**kwargs`` is given what was set, and nothing else."""
    world((0, 30, 0), lambda **given: given)
    assert Adapter.construct(Newest.make, {"name": "n", "size": 1, "color": "blue"}) == {
        "name": "n",
        "size": 1,
        "color": "blue",
    }


def test_every_surface_names_a_module_whose_adapters_are_sorted() -> None:
    """Newest first, all of that surface: the choice by release relies on it."""
    for surface in select.SURFACES:
        adapters = select.adapters_of(surface)
        assert {surface} == {a.surface for a in adapters}
        assert sorted((a.since for a in adapters), reverse=True) == [a.since for a in adapters]


def test_factories_without_vllm_say_so(site: Any) -> None:
    """No vLLM: an error of ours from the factory, not an ImportError; importing the library stays possible."""
    code = """
import vllm_compat as vc
for make in (lambda: vc.make_sampling_params(max_tokens=1), lambda: vc.make_vllm_config(model="m"), vc.ensure_none_hash,
             lambda: vc.make_request("r", [1], object()), lambda: vc.read_scheduler_output(None)):
    try:
        make()
    except vc.VllmNotInstalled as error:
        print(type(error).__name__, bool(error.advice))
"""
    done = site.run(code)

    assert done.returncode == 0, done.stderr
    assert ["VllmNotInstalled True"] * 5 == done.stdout.splitlines()

"""Patches: applied where they are needed, once, and taken off without a trace. The targets are modules made here."""

from __future__ import annotations

import dataclasses
import importlib
import multiprocessing
import os
import re
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import wrapt
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

import vllm_compat as vc
from vllm_compat import patches, plugin
from vllm_compat.patches.llvmlite_proxy import PATCH as LLVMLITE

TARGET = "fake_patch_target"
#: A module on disk, which nobody has imported.
LATER = "fake_later_target"


def make_target() -> types.ModuleType:
    module = types.ModuleType(TARGET)

    def greet(name: str) -> str:
        return f"hello {name}"

    class Base:
        def inherited(self) -> str:
            return "base"

    class Thing(Base):
        def method(self) -> str:
            return "thing"

        @classmethod
        def build(cls) -> str:
            return cls.__name__

        @staticmethod
        def loose(x: int) -> int:
            return x

    vars(module).update(greet=greet, Base=Base, Thing=Thing)
    return module


def loud(wrapped: Any, _: Any, args: Any, kwargs: Any) -> str:
    return f"{wrapped(*args, **kwargs)}!"


def patch(name: str, *attributes: str, module: str = TARGET, **window: Any) -> patches.Patch:
    fields: dict[str, Any] = {
        "changes": tuple(patches.Wrap(module, attribute, loud) for attribute in attributes),
        "since": (0, 30, 0),
        "until": None,
        "platform": "",
        "phase": "worker",
        "why": "w",
        "upstream": "u",
        "remove_when": "r",
    }
    return patches.Patch(name=name, **{**fields, **window})


CATALOGUE = (
    patch("greet", "greet"),
    patch("greet-again", "greet"),
    patch("method", "Thing.method"),
    patch("inherited", "Thing.inherited"),
    patch("build", "Thing.build"),
    patch("loose", "Thing.loose"),
    patch("old", "greet", until=(0, 32, 0)),
    patch("cuda", "greet", platform="cuda"),
    patch("cpu", "greet", platform="cpu"),
    patch("absent", "x", module="no_such_package_at_all.inner"),
    patch("typo", "no_such_function"),
    patch("both", "greet", "Thing.method"),
    patch("half", "greet", "no_such_function"),
    patch("engine", "greet", phase="engine"),
    patch("later", "greet", module=LATER),
    patch("later-typo", "no_such_function", module=LATER),
    patch(
        "two-modules",
        "greet",
        module=LATER,
        changes=(patches.Wrap(TARGET, "greet", loud), patches.Wrap(LATER, "greet", loud)),
    ),
)


class Here:
    """What ``installed()`` answers."""

    def __init__(self, release: tuple[int, ...] | None, platform: str) -> None:
        self.release, self.platform = release, platform


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    module = make_target()
    monkeypatch.setitem(sys.modules, TARGET, module)
    monkeypatch.setattr(patches, "CATALOGUE", CATALOGUE)
    monkeypatch.setattr(patches, "installed", lambda: Here((0, 32, 0), "cpu"))
    monkeypatch.setattr(patches, "_switched_on", {})
    monkeypatch.delenv(patches.VARIABLE, raising=False)
    yield module
    os.environ.pop(patches.VARIABLE, None)


@pytest.fixture
def later(target: types.ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of LATER, a package with an inner module that takes a name from it."""
    folder = tmp_path / LATER
    folder.mkdir()
    (folder / "__init__.py").write_text("def greet(name):\n    return f'hello {name}'\n\n\nfrom . import inner\n")
    (folder / "inner.py").write_text("from . import greet\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield folder
    for name in (LATER, f"{LATER}.inner"):
        sys.modules.pop(name, None)


def snapshot(module: types.ModuleType) -> dict[str, Any]:
    """Every object that a patch could have exchanged, by identity."""
    state: dict[str, Any] = {"module": dict(vars(module))}
    for name in ("Base", "Thing"):
        state[name] = dict(vars(getattr(module, name)))
    return state


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(
        a[place].keys() == b[place].keys() and all(a[place][k] is b[place][k] for k in a[place]) for place in a
    )


@pytest.mark.parametrize(
    ("name", "call", "plain"),
    [
        ("greet", lambda m: m.greet("you"), "hello you"),
        ("method", lambda m: m.Thing().method(), "thing"),
        ("inherited", lambda m: m.Thing().inherited(), "base"),
        ("build", lambda m: m.Thing.build(), "Thing"),
        ("loose", lambda m: m.Thing.loose(3), 3),
    ],
)
def test_applied_and_reverted_exactly(target: types.ModuleType, name: str, call: Any, plain: Any) -> None:
    """The wrapper is around the target, enabling twice wraps once, and disabling brings back the very objects."""
    before = snapshot(target)
    assert vc.enable(name)
    assert vc.enable(name)
    assert call(target) == f"{plain}!"
    assert (name,) == vc.enabled()
    assert target.Base().inherited() == "base"

    vc.disable(name)
    vc.disable(name)

    assert call(target) == plain
    assert same(before, snapshot(target))
    assert () == vc.enabled()


@pytest.mark.parametrize(
    ("release", "platform", "applied"),
    [
        ((0, 29, 9), "cpu", set()),
        ((0, 30, 0), "cpu", {"greet", "old", "cpu"}),
        ((0, 31, 9), "cuda", {"greet", "old", "cuda"}),
        ((0, 32, 0), "cpu", {"greet", "cpu"}),
        ((1, 0, 0), "rocm", {"greet"}),
        (None, "cpu", {"greet", "cpu"}),
    ],
)
def test_window_and_platform(
    target: types.ModuleType, monkeypatch: pytest.MonkeyPatch, release: Any, platform: str, applied: set[str]
) -> None:
    """``since`` is inside, ``until`` outside; an unknown release counts as the newest."""
    monkeypatch.setattr(patches, "installed", lambda: Here(release, platform))
    before = snapshot(target)
    for name in ("greet", "old", "cuda", "cpu"):
        assert vc.enable(name) == (name in applied)
    assert applied == set(vc.enabled())
    for name in applied:
        vc.disable(name)
    assert same(before, snapshot(target))


def test_unknown_names(target: types.ModuleType) -> None:
    """Both calls say which there are."""
    for call in (vc.enable, vc.disable):
        with pytest.raises(vc.VllmCompatError, match=r"greet-again") as caught:
            call("grete")
        assert caught.value.found == "'grete'"


def test_a_target_that_is_not_installed_needs_no_patch(target: types.ModuleType) -> None:
    """No error from a package that nobody has; but a wrong name in one that is there is one."""
    assert not vc.enable("absent")
    with pytest.raises(AttributeError):
        vc.enable("typo")
    assert () == vc.enabled()


def test_a_broken_target_is_not_an_absent_one(target: types.ModuleType, tmp_path: Any, monkeypatch: Any) -> None:
    """A package that is there and misses something of its own is the user's to know about, when it is imported."""
    (tmp_path / "no_such_package_at_all").mkdir()
    (tmp_path / "no_such_package_at_all" / "__init__.py").write_text("import something_it_needs\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert vc.enable("absent")
    with pytest.raises(ModuleNotFoundError, match="something_it_needs"):
        importlib.import_module("no_such_package_at_all.inner")


def test_nothing_is_imported_for_a_patch(later: Path) -> None:
    """It waits for its target, and is there before anybody can take a name from the target."""
    assert vc.enable("later")
    assert vc.enable("later")
    assert LATER not in sys.modules
    module = importlib.import_module(LATER)
    assert module.greet("you") == "hello you!"

    vc.disable("later")

    assert module.greet("you") == "hello you"
    assert not hasattr(module.greet, "__wrapped__")


def test_a_patch_that_waits_can_be_taken_off(later: Path) -> None:
    """What is disabled before its target comes is never applied; what is enabled again is, once."""
    vc.enable("later")
    vc.disable("later")
    assert importlib.import_module(LATER).greet("you") == "hello you"
    for name in (LATER, f"{LATER}.inner"):
        del sys.modules[name]
    for _ in range(3):
        vc.enable("later")
        vc.disable("later")
    vc.enable("later")
    assert importlib.import_module(LATER).greet("you") == "hello you!"


def test_a_wrong_name_in_a_module_that_comes_later(later: Path) -> None:
    """It is the import that fails then, by the name."""
    assert vc.enable("later-typo")
    with pytest.raises(AttributeError, match="no_such_function"):
        importlib.import_module(LATER)
    vc.disable("later-typo")


def test_the_changes_of_a_patch_stand_and_fall_together(target: types.ModuleType) -> None:
    """All are made and all are taken back; where one cannot be made, none is, and the patch is not on."""
    before = snapshot(target)
    assert vc.enable("both")
    assert ("hello x!", "thing!") == (target.greet("x"), target.Thing().method())
    vc.disable("both")
    assert same(before, snapshot(target))
    with pytest.raises(AttributeError):
        vc.enable("half")
    assert same(before, snapshot(target))
    assert () == vc.enabled() == patches.noted()


def test_changes_of_two_modules_wait_each_for_its_own(target: types.ModuleType, later: Path) -> None:
    """The module that is there is changed at once, the other one when it comes; both are put back."""
    before = snapshot(target)
    assert vc.enable("two-modules")
    assert target.greet("x") == "hello x!"
    module = importlib.import_module(LATER)
    assert module.greet("x") == "hello x!"
    vc.disable("two-modules")
    assert module.greet("x") == "hello x"
    assert same(before, snapshot(target))


def test_the_environment_has_the_names(target: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are on and no others, each once; a name that was there stays, and nothing is left at the end."""
    for name in ("greet", "method", "greet", "old", "cuda", "absent"):
        vc.enable(name)
    assert os.environ[patches.VARIABLE] == "greet,method"
    vc.disable("greet")
    assert os.environ[patches.VARIABLE] == "method"
    vc.disable("old")
    vc.disable("method")
    assert patches.VARIABLE not in os.environ
    monkeypatch.setenv(patches.VARIABLE, " build, ,loose ")
    vc.enable("greet")
    vc.disable("greet")
    assert ("build", "loose") == patches.noted()


def test_the_plugin_repeats_what_is_noted(target: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process that has only the environment; any number of times; what does not apply there is passed over."""
    plugin.register()
    assert () == vc.enabled()
    monkeypatch.setenv(patches.VARIABLE, "greet,old,cuda, method")
    for _ in range(2):
        plugin.register()
        assert ("greet", "method") == vc.enabled()
        assert ("hello x!", "thing!") == (target.greet("x"), target.Thing().method())


def test_the_plugin_does_not_start_an_engine_without_a_patch(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that is no patch's is an error, not a patch that is missing without a word."""
    monkeypatch.setenv(patches.VARIABLE, "greet,grete")
    with pytest.raises(vc.VllmCompatError, match=patches.VARIABLE) as caught:
        plugin.register()
    assert caught.value.found == "'grete'"


def test_the_plugin_costs_nothing_when_nothing_is_enabled() -> None:
    """It prints nothing, and loads neither wrapt nor the patches."""
    code = (
        "import sys, vllm_compat.plugin\n"
        "vllm_compat.plugin.register()\n"
        "sys.exit(sum(name in sys.modules for name in ('wrapt', 'vllm', 'torch', 'vllm_compat.patches')))\n"
    )
    environment = {key: value for key, value in os.environ.items() if key != patches.VARIABLE}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (0, "", "") == (done.returncode, done.stdout, done.stderr)


def test_a_patch_for_the_engine_is_not_on_in_a_worker(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of vLLM's multiprocessing executor is a worker and nothing else; every other one may be the engine."""
    monkeypatch.setattr(multiprocessing.current_process(), "_name", "VllmWorker-1")
    assert not vc.enable("engine")
    assert vc.enable("method")
    assert ("method",) == vc.enabled()
    monkeypatch.setattr(multiprocessing.current_process(), "_name", "EngineCore_DP0")
    assert vc.enable("engine")


def test_what_cannot_be_taken_off_still_counts(target: types.ModuleType) -> None:
    """Somebody covered our wrapper: disable fails loudly, and works once that is gone."""
    vc.enable("greet")
    ours = target.greet
    target.greet = lambda name: f"{ours(name)}?"
    with pytest.raises((wrapt.WrapperNotFoundError, wrapt.WrapperNotOutermostError)):
        vc.disable("greet")
    assert ("greet",) == vc.enabled()
    target.greet = ours
    vc.disable("greet")
    assert target.greet("x") == "hello x"


def test_many_threads_wrap_once(target: types.ModuleType) -> None:
    """Workers' threads may all ask for the same patch."""
    threads = [threading.Thread(target=vc.enable, args=("greet",)) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert target.greet("x") == "hello x!"


class PatchMachine(RuleBasedStateMachine):
    """enable and disable in any order, two patches on one function among them."""

    target: types.ModuleType

    def __init__(self) -> None:
        super().__init__()
        self.before = snapshot(self.target)
        self.on: set[str] = set()

    @rule(name=st.sampled_from(["greet", "greet-again", "method", "inherited", "build"]))
    def enable(self, name: str) -> None:
        assert vc.enable(name)
        self.on.add(name)

    @rule(name=st.sampled_from(["greet", "greet-again", "method", "inherited", "build"]))
    def disable(self, name: str) -> None:
        vc.disable(name)
        self.on.discard(name)

    @invariant()
    def exactly_those_are_on(self) -> None:
        assert self.on == set(vc.enabled())
        assert self.target.greet("x") == "hello x" + "!" * len(self.on & {"greet", "greet-again"})
        assert self.target.Thing().method() == "thing" + "!" * ("method" in self.on)
        assert self.target.Thing().inherited() == "base" + "!" * ("inherited" in self.on)
        assert self.target.Thing.build() == "Thing" + "!" * ("build" in self.on)
        assert self.target.Base().inherited() == "base"

    def teardown(self) -> None:
        for name in self.on:
            vc.disable(name)
        assert same(self.before, snapshot(self.target))


def test_any_order_of_enable_and_disable(target: types.ModuleType) -> None:
    """Exactly the enabled ones work, and nothing is left when all are off."""
    PatchMachine.target = target
    run_state_machine_as_test(PatchMachine, settings=settings(max_examples=60, deadline=None))


def test_the_catalogue_is_complete() -> None:
    """Each patch says why, where to read about it, and when it can go; names are unique."""
    names = [p.name for p in patches.CATALOGUE]
    assert len(set(names)) == len(names)
    for p in patches.CATALOGUE:
        assert p.why
        assert p.remove_when
        assert re.match(r"https://\S+$", p.upstream)
        assert p.until is None or p.since < p.until


class Library:
    """llvmlite's proxy in small: it answers every name."""

    def __getattr__(self, name: str) -> str:
        return f"function {name}"


def test_llvmlites_proxy_refuses_dunder_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Python looks up to learn what an object is, is not there; C functions still are."""
    module = types.ModuleType("fake_llvmlite")
    module.Library = Library  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fake_llvmlite", module)
    (change,) = LLVMLITE.changes
    undo = dataclasses.replace(change, module="fake_llvmlite", attribute="Library.__getattr__").apply(module)
    try:
        library = Library()
        assert library.LLVMPY_Create == "function LLVMPY_Create"
        assert library._private == "function _private"
        assert not hasattr(library, "__len__")
        assert not hasattr(library, "__wrapped__")
    finally:
        undo()


@pytest.fixture
def brought(target: types.ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An installed package that brings two patches; one is not what its entry point says."""
    (tmp_path / "package_with_patches.py").write_text(
        "from vllm_compat.patches import Patch, Wrap\n"
        "def loud(wrapped, instance, args, kwargs):\n    return wrapped(*args, **kwargs) + '?'\n"
        f"CHANGES = (Wrap({TARGET!r}, 'greet', loud),)\n"
        "PATCH = Patch('theirs', CHANGES, (0, 30, 0), None, '', 'worker', 'w', 'https://u', 'r')\n"
    )
    info = tmp_path / "package_with_patches-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: package-with-patches\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        f"[{patches.GROUP}]\ntheirs = package_with_patches:PATCH\nmislabelled = package_with_patches:PATCH\n"
        "no-patch = package_with_patches:CHANGES\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield tmp_path
    sys.modules.pop("package_with_patches", None)


def test_patches_of_other_packages_are_found_by_name(brought: Path, target: types.ModuleType) -> None:
    """They count as the catalogue's do, travel in the environment, and are loaded when they are asked for."""
    assert {"theirs", "mislabelled", "no-patch", "greet"} <= {*patches.names()}
    assert "package_with_patches" not in sys.modules
    assert vc.enable("theirs")
    assert "hello x?" == target.greet("x")
    assert ("theirs",) == patches.noted() == vc.enabled()
    vc.disable("theirs")
    assert "hello x" == target.greet("x")


@pytest.mark.parametrize(("name", "found"), [("mislabelled", "a Patch called 'theirs'"), ("no-patch", "tuple")])
def test_an_entry_point_that_is_no_patch_is_refused(brought: Path, name: str, found: str) -> None:
    """The message says whose entry point it is and what is there instead."""
    with pytest.raises(vc.VllmCompatError, match="package_with_patches") as caught:
        vc.enable(name)
    assert found == caught.value.found


@pytest.mark.parametrize(
    ("version", "on"),
    [("0.2.9", False), ("0.3.0", True), ("0.4.0.1", True), ("0.5.0", False), ("?", False), (None, False)],
)
def test_the_version_of_the_library(
    target: types.ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str | None, on: bool
) -> None:
    """A patch of a library is for some of its versions: from the first, before the last; not for an unreadable one."""
    if version is not None:
        info = tmp_path / "a_library-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: a-library\nVersion: {version}\n")
    monkeypatch.syspath_prepend(tmp_path)
    bounds: dict[str, Any] = {"library": "a-library", "library_since": (0, 3, 0), "library_until": (0, 5, 0)}
    monkeypatch.setattr(patches, "CATALOGUE", (patch("bounded", "greet", **bounds),))
    assert on is vc.enable("bounded")
    assert on is (target.greet("x") == "hello x!")

"""What `vllm-compat diff` says of two recorded releases."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm_compat.errors import VllmCompatError
from vllm_compat.recorded import diff, store
from vllm_compat.recorded.calls import parse
from vllm_compat.recorded.diff import Change
from vllm_compat.recorded.store import RecordedApi

ROOT = Path(__file__).parents[2]


def api(record: dict[str, Any] | None) -> RecordedApi:
    return RecordedApi("0.0.0", {}, {"surface": {"X": record}})


def changes(old: dict[str, Any] | None, new: dict[str, Any] | None) -> list[tuple[bool, str, str]]:
    return [(change.hard, change.symbol, change.what) for change in diff.between(api(old), api(new))]


@pytest.mark.parametrize(
    ("old", "new", "hard", "what"),
    [
        ("(a, b=)", "(a)", True, "b is gone"),
        ("(a, b=)", "(a, **kwargs)", False, "b is gone"),
        ("(a)", "(a, b)", True, "b is new and required"),
        ("(a)", "(a, b=)", False, "b is new"),
        ("(a, b=)", "(a, b)", True, "b is now required"),
        ("(a, b)", "(a, b=)", False, "b is now optional"),
        ("(a, b)", "(a, *, b)", True, "b is now keyword only"),
        ("(a, b)", "(b, a)", False, "other order: (a, b) -> (b, a)"),
        ("(a) -> tuple[int, bool]", "(a) -> tuple[int, bool, list[int]]", True, "returns"),
        ("(a) -> None", "(a) -> list[Request]", True, "returns"),
        ("(a) -> int", "(a) -> int | None", False, "returns"),
        ("(a) -> int", "(a) -> tuple[int] | list[int]", False, "returns"),
        ("(a) -> tuple[int, bool]", "(a) -> tuple[int, dict[str, int]] | None", False, "returns"),
        ("(a) -> tuple[int, bool] | None", "(a) -> tuple[int, bool, int] | None", True, "returns"),
        ("(a)", "staticmethod (a)", True, "plain -> staticmethod"),
    ],
)
def test_a_changed_call(old: str, new: str, hard: bool, what: str) -> None:
    """A change that can break a call that worked is hard, one that cannot is not."""
    found = list(diff.calls(parse(old), parse(new)))
    assert (hard, what) in [(h, w if len(w) == len(what) else w[: len(what)]) for h, w in found], found
    assert any(h for h, _ in found) is hard


def test_the_order_of_a_union_is_no_change() -> None:
    """``A | None`` and ``None | A`` are one type."""
    assert [] == list(diff.calls(parse("(a) -> A | B | None"), parse("(a) -> B | None | A")))


def test_a_name_that_went_to_an_unknown_place() -> None:
    """Where a name of the table of moves is gone, the diff says which modules define one now."""
    record = {"module": "vllm.utils.math_utils", "kind": "function", "call": "(a, b)"}
    old = RecordedApi("0.0.0", {}, {"utils": {"cdiv": record}})
    new = RecordedApi("0.0.1", {}, {"utils": {"cdiv": None}}, {"cdiv": ["vllm.utils.maths"]})
    (change,) = diff.between(old, new)
    assert "gone (was in vllm.utils.math_utils; one of that name is in vllm.utils.maths)" == change.what


def test_the_same_call_is_no_change() -> None:
    """Nothing is said of what stayed."""
    assert [] == list(diff.calls(parse("(a, b=, *, c) -> int"), parse("(a, b=, *, c) -> int")))


def test_the_order_is_that_of_the_parameters() -> None:
    """The same two releases always read the same: what is gone is listed as it stood."""
    found = [what for _, what in diff.calls(parse("(c, a, e, b, d)"), parse("()"))]
    assert [f"{name} is gone" for name in "caebd"] == found


def test_a_method_that_plugins_override() -> None:
    """What vLLM may now pass to an override breaks it, and so does another return value."""
    old = {"module": "m", "kind": "class", "methods": {"update": "(a) -> list[int]"}, "subclassed": True}
    new = {**old, "methods": {"update": "(a, is_stale=) -> list[str]"}}
    assert [
        (True, "X.update", "is_stale is new"),
        (True, "X.update", "returns list[int] -> list[str]"),
    ] == changes(old, new)
    assert [(False, "X.update", "is_stale is new"), (False, "X.update", "returns list[int] -> list[str]")] == changes(
        {**old, "subclassed": False}, {**new, "subclassed": False}
    )


def test_a_symbol_that_moved() -> None:
    """Hard when the old import breaks; said to be moved when it still works; gone and new otherwise."""
    old = {"module": "old", "kind": "function", "call": "()"}
    assert [(True, "X", "can no longer be imported from old; is in new")] == changes(old, {**old, "module": "new"})
    assert [(False, "X", "moved to new, still importable from old")] == changes(
        old, {**old, "module": "new", "also": ["old"]}
    )
    assert [(True, "X", "gone (was in old)")] == changes(old, None)
    assert [(False, "X", "new, in old")] == changes(None, old)


def test_a_method_that_is_now_inherited_is_not_gone() -> None:
    """Looked up through the recorded bases, as Python would."""
    base = {"module": "m", "kind": "class", "methods": {"run": "(a)"}}
    own = {"module": "m", "kind": "class", "bases": ["m:Base"], "methods": {"run": "(a)"}}
    old = RecordedApi("1", {}, {"s": {"Base": base, "X": own}})
    new = RecordedApi("2", {}, {"s": {"Base": base, "X": {k: v for k, v in own.items() if k != "methods"}}})
    assert [] == diff.between(old, new)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("0.16.0", "0.17.0", Change("request", "Request", True, "eos_token_id is gone")),
        ("0.25.1", "0.26.0", Change("scheduler", "Scheduler.finish_requests", True, "")),
        ("0.25.1", "0.26.0", Change("kv_cache_manager", "KVCacheManager.get_computed_blocks", True, "")),
        ("0.26.0", "0.27.1", Change("scheduler", "Scheduler._update_request_with_output", True, "is_stale is new")),
        ("0.20.0", "0.20.1", Change("request", "Request", False, "reasoning_parser_kwargs is new")),
        ("0.32.0", "0.33.0", Change("kv_cache", "get_kv_cache_configs", True, "global_kv_cache_groups is new and req")),
    ],
)
def test_the_boundaries_that_broke_people(old: str, new: str, expected: Change) -> None:
    """Upgrades known to have broken plugins are in the difference of the recordings, as hard where they were."""
    found = diff.between(store.load(old), store.load(new))
    assert any(
        (change.surface, change.symbol, change.hard) == (expected.surface, expected.symbol, expected.hard)
        and change.what.startswith(expected.what)
        for change in found
    ), [change for change in found if change.symbol == expected.symbol]


def test_patch_releases_without_changes() -> None:
    """Two releases with the same API have no difference at all."""
    for old, new in (("0.22.0", "0.22.1"), ("0.25.0", "0.25.1"), ("0.27.0", "0.27.1")):
        assert [] == diff.between(store.load(old), store.load(new)), (old, new)


def diff_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vllm_compat", "diff", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)


def test_the_command() -> None:
    """Text with the hard changes first; ``--json`` is the same changes."""
    text = diff_command("0.32.0", "0.33.0").stdout
    said = json.loads(diff_command("0.32.0", "0.33.0", "--json").stdout)
    hard = sum(change["hard"] for change in said)
    assert 0 < hard < len(said)
    assert text.startswith(f"HARD ({hard})\n")
    assert f"\nother ({len(said) - hard})\n" in text
    assert [True] * hard + [False] * (len(said) - hard) == [change["hard"] for change in said]


def test_the_command_for_some_surfaces() -> None:
    """``--surface`` leaves the rest out; one that does not exist is refused with the names of those that do."""
    said = json.loads(
        diff_command("0.32.0", "0.33.0", "--json", "--surface", "request", "--surface", "kv_cache").stdout
    )
    assert {"request", "kv_cache"} == {change["surface"] for change in said}
    refused = diff_command("0.32.0", "0.33.0", "--surface", "requests")
    assert (1, "") == (refused.returncode, refused.stdout)
    assert refused.stderr.startswith("VllmCompatError: the surface requests — needs: one of batch_rows, ")


@pytest.mark.parametrize(
    ("version", "release"),
    [
        ("0.32.0", "0.32.0"),
        ("v0.32", "0.32.0"),
        ("0.12.0.post2", "0.12.0"),
        ("0.26.0+cpu", "0.26.0"),
        ("0.29.1.dev202609091054", "0.29.1.dev202609091054"),
    ],
)
def test_a_recording_is_found_by_any_spelling(version: str, release: str) -> None:
    """Releases as people write them and as their builds are called, and nightlies."""
    assert release == store.find(version).release


@pytest.mark.parametrize(
    ("version", "found", "advice"),
    [
        ("0.99.0", f"next to it: {store.releases()[-1]}, the newest", "nox -s add_release -- 0.99.0"),
        ("0.9.1", "next to it: 0.10.2, the oldest", "compare with it"),
        ("0.17.2", "next to it: 0.17.1 and 0.18.0", "compare with one of them"),
        ("0.29.1.dev1", "next to it: 0.29.0 and 0.29.1.dev202609091054", "record --nightly 0.29.1.dev1"),
        ("0.32.0rc1", "next to it: 0.31.0 and 0.32.0", "compare with one of them"),
        ("0.1.dev8666+gabc", "next to it: 0.10.2, the oldest", "compare with it"),
        ("latest", "'latest', which is no version", "vllm-compat releases"),
    ],
)
def test_what_is_not_recorded_has_neighbours(version: str, found: str, advice: str) -> None:
    """The error names what is recorded beside it, and the command that would record it."""
    with pytest.raises(VllmCompatError) as caught:
        store.find(version)
    assert f"the API of vLLM {version}" == caught.value.asked
    assert found in caught.value.found
    assert advice in caught.value.advice

"""What `add_release.py diff` says of two recorded releases."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from api_record import diff, store
from api_record.calls import parse
from api_record.diff import Change
from api_record.store import RecordedApi

SCRIPT = Path(store.__file__).parents[1] / "add_release.py"


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


def test_the_same_call_is_no_change() -> None:
    """Nothing is said of what stayed."""
    assert [] == list(diff.calls(parse("(a, b=, *, c) -> int"), parse("(a, b=, *, c) -> int")))


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
    for old, new in (("0.11.1", "0.11.2"), ("0.22.0", "0.22.1"), ("0.25.0", "0.25.1"), ("0.27.0", "0.27.1")):
        assert [] == diff.between(store.load(old), store.load(new)), (old, new)


def test_the_command() -> None:
    """Text with the hard changes first; ``--json`` is the same changes."""
    run = [sys.executable, str(SCRIPT), "diff", "0.31.0", "0.32.0"]
    text = subprocess.run(run, capture_output=True, text=True, check=True, timeout=60).stdout
    said = json.loads(subprocess.run([*run, "--json"], capture_output=True, text=True, check=True, timeout=60).stdout)
    hard = sum(change["hard"] for change in said)
    assert text.startswith(f"HARD ({hard})\n")
    assert f"\nother ({len(said) - hard})\n" in text
    assert [True] * hard + [False] * (len(said) - hard) == [change["hard"] for change in said]

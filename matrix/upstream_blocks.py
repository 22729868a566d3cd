"""Rendered blocks about vLLM's own tests: the verdict by release, and which constructions were left to vLLM."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from markdown_table import table
from upstream.ledger import reasons


def verdict(run: Mapping[str, Any] | None) -> str:
    """How many of the tests that pass as they are pass with our factories; "" without a run."""
    if run is None:
        return ""
    counts = run["numbers"]["counts"]
    return f"{counts['passed']} of {counts['passed'] + counts['failed']}"


def upstream(runs: Sequence[Mapping[str, Any]]) -> str:
    """A row per release, newest first; what is left to vLLM, and why; what fails as it is."""
    if not runs:
        return "No run yet."
    rows = []
    for run in runs:
        numbers = run["numbers"]
        counts, calls = numbers["counts"], numbers["calls"]
        left = sum(sum(of_factory.values()) for of_factory in numbers["left"].values())
        shown = (verdict(run), ", ".join(numbers["differing"]), counts["failed as it is"], counts["skipped"])
        made = [calls.get(name, 0) for name in _SHOWN]
        others = sum(calls.values()) - sum(made)
        took = f"{numbers['seconds'] / 60:.0f} min"
        rows.append((run["release"], *shown, *made, others, left, took, f"{run['date']}, {run['commit']}"))
    factories = [f"`{name}`" for name in _SHOWN]
    head = (
        "vLLM",
        "pass",
        "fail with ours",
        "fail as they are",
        "skipped",
        *factories,
        "others",
        "left",
        "took",
        "run",
    )
    return "\n\n".join(filter(None, (table(head, rows), _left(runs), _failing(runs))))


#: Factories with a column of their own.
_SHOWN = (
    "make_vllm_config",
    "make_kv_cache_config",
    "make_kv_cache_spec",
    "make_scheduler",
    "make_request",
    "make_block_hasher",
    "make_model_runner_output",
)


def _left(runs: Sequence[Mapping[str, Any]]) -> str:
    counted: Counter[tuple[str, str]] = Counter()
    for run in runs:
        for factory, keys in run["numbers"]["left"].items():
            counted.update({(factory, key): count for key, count in keys.items()})
    rows = [(f"`{factory}`", reasons()[key]["reason"], count) for (factory, key), count in sorted(counted.items())]
    return table(("left to vLLM instead of", "because", "in all releases"), rows)


def _failing(runs: Sequence[Mapping[str, Any]]) -> str:
    """Why tests fail as they are, and where; "" when none does."""
    where: dict[str, list[str]] = {}
    for run in runs:
        for says, count in run["numbers"]["as_they_are"].items():
            where.setdefault(says, []).append(f"{run['release']} ({count})")
    if not where:
        return ""
    return table(("fail as they are with", "in (tests)"), [(f"`{says}`", ", ".join(at)) for says, at in where.items()])

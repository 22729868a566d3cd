"""Rendered blocks about libraries that are patched: what their tests showed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from markdown_table import table

#: Heading -> (model, what it was compared with) of a figure.
_FIGURES = {
    "tiny Llama against transformers": ("llama", "transformers"),
    "our own extraction": ("llama", "vllm_compat"),
    "tiny Kimi against transformers": ("kimi", "transformers"),
    "our own extraction ": ("kimi", "vllm_compat"),
    "script, against transformers": ("kimi", "transformers, script"),
    "TP 2": ("kimi", "transformers, TP 2"),
}
_IDS_SAID = {"passed": "equal", "skipped": ""}
_IDS = "test_script.py::test_ids_and_masks_are_those_of_its_own_pin"


def speculators(runs: Iterable[Mapping[str, Any]]) -> str:
    """A row per release and version of speculators, newest release first."""
    rows = []
    for run in runs:
        for version, numbers in run["numbers"].items():
            counts = numbers["counts"]
            shown = [counts.get("passed", 0), counts.get("failed", 0), counts.get("skipped", 0)]
            figures = [_figure(numbers["figures"], *place) for place in _FIGURES.values()]
            outcome = numbers["tests"].get(_IDS, "skipped")
            ids = _IDS_SAID.get(outcome if isinstance(outcome, str) else outcome[0], "NOT EQUAL")
            rows.append((run["release"], version, *shown, *figures[:4], ids, *figures[4:], run["commit"]))
    if not rows:
        return "No run yet."
    heads = [*_FIGURES]
    head = (
        "vLLM",
        "speculators",
        "passed",
        "failed",
        "skipped",
        *heads[:4],
        "script: ids and masks",
        *heads[4:],
        "commit",
    )
    return table(head, rows)


def _figure(figures: Mapping[str, Mapping[str, float]], model: str, against: str) -> str:
    error = figures.get(model, {}).get(against)
    return "" if error is None else f"{error:.1e}"

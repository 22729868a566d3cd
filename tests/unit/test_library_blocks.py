"""The table of what a patched library was tried on."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "matrix"))

import library_blocks

IDS = "test_script.py::test_ids_and_masks_are_those_of_its_own_pin"


def run(tests: dict[str, Any]) -> dict[str, Any]:
    figures = {"llama": {"transformers": 0.0095}, "kimi": {"transformers, TP 2": 0.013}}
    numbers = {"counts": {"passed": 3, "skipped": 1}, "figures": figures, "tests": tests}
    return {"release": "0.32.0", "commit": "abc", "numbers": {"0.3.0": numbers}}


@pytest.mark.parametrize(
    ("tests", "said"),
    [({IDS: "passed"}, "equal"), ({IDS: ["failed", "x"]}, "NOT EQUAL"), ({IDS: ["skipped", "x"]}, ""), ({}, "")],
    ids=str,
)
def test_a_row(tests: dict[str, Any], said: str) -> None:
    """Counts, each figure in its column, and what the script's ids showed; a blank for what was not run."""
    head, _, row = library_blocks.speculators([run(tests)]).splitlines()
    cells = dict(zip(*([cell.strip() for cell in line.split("|")[1:-1]] for line in (head, row)), strict=True))
    assert ("3", "0", "1") == (cells["passed"], cells["failed"], cells["skipped"])
    assert said == cells["script: ids and masks"]
    assert ("9.5e-03", "1.3e-02", "") == (
        cells["tiny Llama against transformers"],
        cells["TP 2"],
        cells["tiny Kimi against transformers"],
    )


def test_no_run() -> None:
    """A sentence, not an empty table."""
    assert "No run yet." == library_blocks.speculators([])

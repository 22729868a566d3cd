"""What the tests of a library on a release showed, from the junit file of each version of the library."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from cells.results import outcome_of
from vllm_compat import DataError

#: What ``tests/live/speculators/beside.py`` writes beside a test.
PROPERTY = "speculators_figure"


def read(junits: Sequence[Path], folder: str = "tests.live.speculators") -> dict[str, Any]:
    """Version of the library -> what its run showed; a run may be in several files.

    Returns:
        counts: Outcome -> number of tests. tests: Test -> "passed", or [outcome, reason]. seconds: Of the run. figures:
        Model -> what it was compared with -> the largest error of a boundary over a batch.

    Raises:
        DataError: a file has no figure, so that nothing says which version it is about, or a run is there twice.
    """
    made: dict[str, dict[str, Any]] = {}
    for junit in junits:
        version, tests, figures, seconds = _one(junit, folder)
        run = made.setdefault(version, {"counts": {}, "seconds": 0, "figures": {}, "tests": {}})
        twice = sorted(tests.keys() & run["tests"].keys())
        if twice:
            raise DataError(f"recording {junit}", needed="each test once", found=f"{twice[0]} in another file too")
        run["tests"] = dict(sorted({**run["tests"], **tests}.items()))
        run["seconds"] += seconds
        for model, errors in figures.items():
            run["figures"].setdefault(model, {}).update(errors)
    for run in made.values():
        outcomes = Counter(outcome if isinstance(outcome, str) else outcome[0] for outcome in run["tests"].values())
        run["counts"] = dict(sorted(outcomes.items()))
        run["figures"] = {model: dict(sorted(run["figures"][model].items())) for model in sorted(run["figures"])}
    return dict(sorted(made.items()))


def _one(junit: Path, folder: str) -> tuple[str, dict[str, Any], dict[str, dict[str, float]], int]:
    """Version, tests, figures and seconds of one file."""
    suites = list(ElementTree.parse(junit).getroot().iter("testsuite"))  # noqa: S314 - pytest wrote it here
    tests: dict[str, Any] = {}
    figures: dict[str, dict[str, float]] = {}
    versions = set()
    for case in (case for suite in suites for case in suite.iter("testcase")):
        parent, _, module = case.get("classname", "").rpartition(".")
        if parent != folder:
            continue
        name, outcome = f"{module}.py::{case.get('name')}", outcome_of(case)
        if name not in tests or outcome != "passed":
            tests[name] = outcome
        for item in (item for item in case.iter("property") if item.get("name") == PROPERTY):
            version, model, against, error = json.loads(item.get("value", ""))
            versions.add(version)
            mine = figures.setdefault(model, {})
            mine[against] = max(error, mine.get(against, 0.0))
    if len(versions) != 1:
        raise DataError(f"recording {junit}", needed="the run of one version", found=f"{sorted(versions)}")
    return versions.pop(), tests, figures, round(sum(float(suite.get("time", 0)) for suite in suites))

"""What a run of the live tests showed, from its junit file."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from vllm_compat import DataError

STATES = Path(__file__).parents[2] / "tests" / "live" / "states.py"

_BOUNDARIES = re.compile(r"test_every_boundary_equals_transformers\[(?P<model>.+)-(?P<dtype>[a-z]+\d+)\]")
_PROPERTY = "relative_error_per_boundary"


def read(junit: Path) -> dict[str, Any]:
    """The numbers of a run.

    Returns:
        counts: Outcome -> number of tests; outcomes are passed, failed, deviation (of vLLM's own, expected to fail)
        and skipped. tests: Test -> "passed", or [outcome, reason]. seconds: Of the whole run. relative_error: Model ->
        dtype -> error of every boundary against transformers, of the tests that passed; tolerance: What they allow.

    Raises:
        DataError: there is no live test in the file.
    """
    suites = list(ElementTree.parse(junit).getroot().iter("testsuite"))  # noqa: S314 - a file that pytest wrote here
    tests: dict[str, Any] = {}
    errors: dict[str, dict[str, list[float]]] = {}
    for case in (case for suite in suites for case in suite.iter("testcase")):
        folder, _, module = case.get("classname", "").rpartition(".")
        if folder != "tests.live":
            continue
        name = f"{module}.py::{case.get('name')}"
        outcome = outcome_of(case)
        # The call and the teardown of one test are two cases when both failed.
        if name not in tests or outcome != "passed":
            tests[name] = outcome
        found = _BOUNDARIES.fullmatch(case.get("name", ""))
        for item in case.iter("property"):
            if found is not None and item.get("name") == _PROPERTY and outcome == "passed":
                listed = ast.literal_eval(item.get("value", ""))
                errors.setdefault(found["model"], {})[found["dtype"]] = [float(error) for error in listed]
    if not tests:
        raise DataError(
            f"recording {junit}",
            needed="cases of tests/live",
            found="none",
            advice='make it with nox -s "live(<release>)"',
        )
    outcomes = Counter(outcome if isinstance(outcome, str) else outcome[0] for outcome in tests.values())
    return {
        "counts": dict(sorted(outcomes.items())),
        "seconds": round(sum(float(suite.get("time", 0)) for suite in suites)),
        "tolerance": _tolerance(),
        "relative_error": {model: dict(sorted(errors[model].items())) for model in sorted(errors)},
        "tests": dict(sorted(tests.items())),
    }


def began(junit: Path) -> str:
    """When the run began, in ISO format."""
    suite = next(ElementTree.parse(junit).getroot().iter("testsuite"))  # noqa: S314 - as above
    return str(suite.get("timestamp"))


def outcome_of(case: ElementTree.Element) -> str | list[str]:
    """What came of a test: "passed", or [failed, deviation or skipped, its reason]."""
    for kind in ("failure", "error"):
        found = case.find(kind)
        if found is not None:
            return ["failed", line(found.get("message", ""))]
    skipped = case.find("skipped")
    if skipped is None:
        return "passed"
    kind = "deviation" if skipped.get("type") == "pytest.xfail" else "skipped"
    return [kind, line(skipped.get("message", ""))]


def line(message: str) -> str:
    """The first line of a message, without addresses and paths, which differ from run to run."""
    first = message.strip().splitlines()[0] if message.strip() else ""
    return re.sub(r"(/\S+)+/|0x[0-9a-f]+", "…", first)[:200]


def _tolerance() -> dict[str, float]:
    """What the tests allow, read from their source: importing it would import torch."""
    for node in ast.parse(STATES.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "TOLERANCE":
            made: dict[str, float] = ast.literal_eval(node.value)
            return made
    raise DataError("the tolerances of the capture tests", needed=f"TOLERANCE = {{…}} in {STATES.name}")

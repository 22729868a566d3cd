"""The verdict: every test that passes as it is passes with our factories."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from cells.results import line, outcome_of

from upstream.deselected import entries
from upstream.ledger import total
from upstream.run import OURS, PLAIN
from vllm_compat import DataError

#: Factories that a run without a single call of is no proof of.
REQUIRED = (
    "ensure_none_hash",
    "make_block_hasher",
    "make_kv_cache_config",
    "make_kv_cache_spec",
    "make_model_runner_output",
    "make_request",
    "make_sampling_params",
    "make_scheduler",
    "make_structured_output_manager",
    "make_vllm_config",
)


def read(folder: Path) -> dict[str, Any]:
    """The numbers of both runs.

    Returns:
        counts: passed (both ways), failed (with our factories only), "failed as it is" and skipped. differing: Test ->
        what it says with our factories. as_they_are: Beginning of a failure -> tests that end so as they are. calls,
        left: as in ``ledger.Ledger``. deselected: Test -> reason. seconds: Of both runs.

    Raises:
        DataError: no test passes as it is, the runs had other tests, or a factory of ``REQUIRED`` was never called.
    """
    plain, ours = (_tests(folder / name) for name in (PLAIN, OURS))
    if plain.keys() != ours.keys():
        only = sorted(plain.keys() ^ ours.keys())
        raise DataError(f"judging {folder}", needed="the same tests in both runs", found=f"not in both: {only[:5]}")
    passing = [test for test, outcome in plain.items() if outcome == "passed"]
    if not passing:
        raise DataError(f"judging {folder}", needed="tests that pass as they are", found=f"none of {len(plain)}")
    counted = total(folder)
    missing = [factory for factory in REQUIRED if not counted["calls"].get(factory)]
    if missing:
        raise DataError(
            f"judging {folder}",
            needed="constructions replaced by each factory",
            found=f"none by {', '.join(missing)}",
            advice="see which constructors matrix/upstream/replaced.py replaces",
        )
    differing = {test: ours[test][1] for test in passing if ours[test] != "passed"}
    kinds = Counter(outcome[0] for outcome in plain.values() if outcome != "passed")
    return {
        "counts": {
            "passed": len(passing) - len(differing),
            "failed": len(differing),
            "failed as it is": kinds["failed"],
            "skipped": kinds["skipped"],
        },
        "seconds": round(sum(_seconds(folder / name) for name in (PLAIN, OURS))),
        "differing": differing,
        "as_they_are": dict(Counter(outcome[1] for outcome in plain.values() if outcome[0] == "failed").most_common()),
        **counted,
        "deselected": entries(),
    }


def _tests(junit: Path) -> dict[str, Any]:
    """Test -> "passed", or [outcome, what it says]."""
    found: dict[str, Any] = {}
    for case in ElementTree.parse(junit).getroot().iter("testcase"):  # noqa: S314 - a file that pytest wrote here
        name = f"{case.get('classname', '').removeprefix('tests.v1.core.')}::{case.get('name')}"
        outcome = _outcome(case)
        # The call and the teardown of one test are two cases when both failed.
        if name not in found or outcome != "passed":
            found[name] = outcome
    return found


def _outcome(case: ElementTree.Element) -> str | list[str]:
    """As in every other result, but with all of a message's lines: pydantic's first one says nothing."""
    outcome = outcome_of(case)
    for kind in ("failure", "error"):
        found = case.find(kind)
        if found is not None:
            return ["failed", line(" ".join(found.get("message", "").split()))]
    return outcome


def _seconds(junit: Path) -> float:
    suites = ElementTree.parse(junit).getroot().iter("testsuite")  # noqa: S314 - as above
    return sum(float(suite.get("time", 0)) for suite in suites)

"""Write down what a run measured, in ``results/``; ``render.py`` makes the tables of it.

    python matrix/record.py kimi runs/tiny/summary.json
    python matrix/record.py boundaries boundaries.xml

Run it on the machine that measured, with the Python that has its vLLM. The second file is what this leaves::

    nox -s tests -- tests/live/test_capture_models.py --junitxml=boundaries.xml
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from vllm_compat import DataError, VllmCompatError, installed
from vllm_compat.kimi.config import Config, load_config
from vllm_compat.kimi.manifest import STAGES, read_manifest

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "matrix" / "results"

_TEST = re.compile(r"test_every_boundary_equals_transformers\[(?P<model>.+)-(?P<dtype>[a-z]+\d+)\]")
_PROPERTY = "relative_error_per_boundary"


def kimi(summary: Path) -> tuple[str, dict[str, Any]]:
    """The result of a complete run of the preset tiny, from its summary.json.

    DataError: a stage is missing, or the run is not the preset as it stands now.
    """
    run = summary.parent
    manifests = [made for stage in STAGES if (made := read_manifest(run, stage)) is not None]
    if len(manifests) < len(STAGES):
        missing = sorted(set(STAGES) - {made.stage for made in manifests})
        raise DataError(f"recording {run}", needed="every stage complete", found=f"not: {', '.join(missing)}")
    different = _differences(load_config(run / "config.toml"), load_config("tiny"))
    if different:
        raise DataError(
            f"recording {run} as the preset tiny",
            needed="the preset's settings",
            found="; ".join(different),
            advice="run the preset in a new directory",
        )
    engine, _, distribution = manifests[-1].versions["vllm"].partition(" ")
    return "kimi-tiny", {
        **provenance(min(made.started for made in manifests), max(made.finished for made in manifests)),
        "release": engine,
        "distribution": distribution.strip("()"),
        "command": "vllm-compat kimi run --preset tiny",
        "numbers": json.loads(summary.read_text(encoding="utf-8")),
    }


def boundaries(junit: Path) -> tuple[str, dict[str, Any]]:
    """The result of tests/live/test_capture_models.py from its junit file; DataError when a test did not pass."""
    suites = list(ElementTree.parse(junit).getroot().iter("testsuite"))  # noqa: S314 - a file that pytest wrote here
    errors: dict[str, dict[str, list[float]]] = {}
    for case in (case for suite in suites for case in suite.iter("testcase")):
        if any(case.find(outcome) is not None for outcome in ("failure", "error", "skipped")):
            raise DataError(f"recording {junit}", needed="tests that pass", found=f"{case.get('name')} did not")
        test = _TEST.fullmatch(case.get("name", ""))
        for item in case.iter("property"):
            if test is not None and item.get("name") == _PROPERTY:
                listed = ast.literal_eval(item.get("value", ""))
                errors.setdefault(test["model"], {})[test["dtype"]] = [float(error) for error in listed]
    if not errors:
        raise DataError(
            f"recording {junit}",
            needed=f"tests with the property {_PROPERTY}",
            found="none",
            advice="make it with the command at the head of matrix/record.py",
        )
    here = installed()
    began = suites[0].get("timestamp", "")
    return f"boundaries-{here.version}", {
        **provenance(began, began),
        "release": here.version,
        "distribution": here.distribution,
        "command": "nox -s tests -- tests/live/test_capture_models.py",
        "numbers": {
            "tolerance": _tolerance(),
            "relative_error": {model: dict(sorted(errors[model].items())) for model in sorted(errors)},
        },
    }


def provenance(began: str, ended: str) -> dict[str, Any]:
    """When, on what, and with which code: the newest commit at the time the run began."""
    rev = ["git", "-C", str(ROOT), "rev-list", "-1", f"--before={began}", "HEAD"]
    commit = subprocess.run(rev, capture_output=True, text=True, check=True).stdout.strip()
    return {
        "date": datetime.fromisoformat(ended).date().isoformat(),
        "commit": commit[:12],
        "machine": {"cores": len(os.sched_getaffinity(0)), "architecture": platform.machine()},
    }


def _differences(run: Config, preset: Config) -> list[str]:
    """section.key of every setting that differs; ``run_dir`` may."""
    theirs, ours = dataclasses.asdict(run), dataclasses.asdict(preset)
    found = []
    for section, values in ours.items():
        if isinstance(values, Mapping):
            there = theirs[section]
            found += [f"{section}.{k} is {there[k]}, not {v}" for k, v in values.items() if there[k] != v]
        elif section != "run_dir" and theirs[section] != values:
            found.append(f"{section} is {theirs[section]}, not {values}")
    return found


def _tolerance() -> dict[str, float]:
    """What the tests allow, read from their source: importing it would import torch."""
    tree = ast.parse((ROOT / "tests" / "live" / "states.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "TOLERANCE":
            tolerance: dict[str, float] = ast.literal_eval(node.value)
            return tolerance
    raise DataError("the tolerances of the capture tests", needed="TOLERANCE = {…} in tests/live/states.py")


def main(arguments: list[str]) -> int:
    """Write one results file; 1 when there is nothing that may be recorded."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("what", choices=("kimi", "boundaries"))
    parser.add_argument("file", type=Path, help="summary.json of a run, or a junit file")
    given = parser.parse_args(arguments)
    try:
        name, result = {"kimi": kimi, "boundaries": boundaries}[given.what](given.file)
    except (VllmCompatError, OSError) as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 1
    path = RESULTS / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{path.relative_to(ROOT)}: now run `python matrix/render.py`")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

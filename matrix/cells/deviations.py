"""Known deviations of vLLM's releases, ``matrix/deviations.toml``."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from cells.recipe import numbers

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DEVIATIONS = Path(__file__).parents[1] / "deviations.toml"


@dataclass(frozen=True)
class Deviation:
    """Tests that fail for a reason of vLLM's own; the fields are explained at the head of the file."""

    tests: tuple[str, ...]
    releases: str
    reason: str
    upstream: str

    def covers(self, release: tuple[int, ...]) -> bool:
        first, _, last = self.releases.partition("-")
        return numbers(first) <= release and (not last or release <= numbers(last))

    def matches(self, test: str) -> bool:
        """Whether it is about a test, given as its node id below ``tests/live``."""
        return any(fnmatchcase(test, pattern) for pattern in self.tests)


def load(path: Path = DEVIATIONS) -> tuple[Deviation, ...]:
    """Every deviation."""
    rows = tomllib.loads(path.read_text(encoding="utf-8"))["deviation"]
    return tuple(Deviation(tuple(row.pop("tests")), **row) for row in rows)

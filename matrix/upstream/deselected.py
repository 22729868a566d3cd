"""Which tests are not run: ``deselected.toml``."""

from __future__ import annotations

import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DESELECTED = Path(__file__).with_name("deselected.toml")
CORE = "tests/v1/core"
#: Releases of whose tests the package index has nothing: wheels only, no source distribution.
WITHOUT_SOURCES = ("0.15.0", "0.15.1")


def entries() -> dict[str, str]:
    """Test or file, below tests/v1/core -> reason."""
    rows = tomllib.loads(DESELECTED.read_text(encoding="utf-8"))["deselected"]
    return {test: row["reason"] for row in rows for test in row["tests"]}


def options(home: Path) -> list[str]:
    """Options of pytest for a release's tests; a file that the release does not have needs none."""
    made = []
    for test in entries():
        path = f"{CORE}/{test}"
        if (home / path.partition("::")[0]).exists():
            made.append(f"--deselect={path}" if "::" in test else f"--ignore={path}")
    return made

"""Contract tests: adapters against the recorded API of every release, with no vLLM installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

MATRIX = Path(__file__).parents[2] / "matrix"
sys.path.insert(0, str(MATRIX))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What the adapters do not reach yet, counted, so that no green run hides it."""
    from windows import releases_before_every_adapter

    missing = releases_before_every_adapter()
    pairs = sum(len(releases) for releases in missing.values())
    if pairs:
        terminalreporter.write_line(
            f"contract: no adapter for {pairs} pairs of surface and release older than the surface's oldest adapter: "
            + ", ".join(f"{surface} {names[0]}..{names[-1]}" for surface, names in missing.items() if names)
        )

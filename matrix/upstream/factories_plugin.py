"""Pytest plugin: vLLM's tests construct with our factories (``pytest -p upstream.factories_plugin``).

``UPSTREAM_TESTS`` names the folder of the tests, ``UPSTREAM_LEDGER`` the one that each process writes its
counts into.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from upstream import replaced, rewriting

# Before pytest imports the first test module, and ahead of its own finder.
rewriting.install(Path(os.environ["UPSTREAM_TESTS"]), replaced.ours)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write what this process counted."""
    worker = getattr(session.config, "workerinput", {}).get("workerid", "main")
    replaced.LEDGER.write(Path(os.environ["UPSTREAM_LEDGER"], f"ledger-{worker}.json"))

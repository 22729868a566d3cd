"""Pytest plugin of both runs: the fixtures of vLLM's ``conftest.py`` that these tests use.

The file itself imports test dependencies of the whole project.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture
def caplog_vllm(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What vLLM's logger says, which keeps to itself otherwise."""
    logger = logging.getLogger("vllm")
    before, logger.propagate = logger.propagate, True
    with caplog.at_level(logging.INFO):
        yield caplog
    logger.propagate = before

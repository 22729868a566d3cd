"""Nobody has to remember to look: the tests say when vLLM has published a release that is not in the table."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from api_record import index

from vllm_compat import releases
from vllm_compat._versions import parse_release


def test_the_table_has_every_release_of_the_package_index() -> None:
    """Every stable release on the index that pip is configured for has a row, from the oldest row on.

    When this fails, run the command that it names (docs/adding-a-release.md).
    """
    asked = [sys.executable, str(Path(str(index.__file__))), "vllm"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=120)
    if done.returncode == index.UNREACHABLE:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    known = [row.numbers for row in releases.all_releases()]
    there = {version: parse_release(version) or () for version in done.stdout.split()}
    missing = [version for version, numbers in there.items() if numbers not in known and numbers > known[0]]
    assert not missing, "; ".join(f"nox -s add_release -- {version}" for version in missing)
    if known[-1] not in there.values():
        pytest.skip(f"the index is behind: it does not have {releases.newest().version}")

"""The command that runs the whole matrix: its budgets, and that an old result does not pass for a new one."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "matrix"))

import whole


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of uv's that takes no time to measure."""
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path))


def test_the_newest_patch_of_each_minor_comes_first() -> None:
    """A budget that ends early has then seen most of what differs."""
    there = ["0.9.1", "0.10.0", "0.10.1", "0.10.10", "0.11.0"]
    assert whole.newest_patches_first(there) == ["0.11.0", "0.10.10", "0.9.1", "0.10.1", "0.10.0"]


def test_a_file_with_two_names_is_counted_once(tmp_path: Path) -> None:
    """Uv links an environment's files from its cache."""
    cache, environment = tmp_path / "cache", tmp_path / "environment"
    cache.mkdir()
    (environment / "lib").mkdir(parents=True)
    (cache / "torch").write_bytes(b"x" * 100_000)
    os.link(cache / "torch", environment / "lib" / "torch")
    (environment / "own").write_bytes(b"x" * 50_000)

    assert whole.size([cache, environment, tmp_path / "missing"]) == sum(
        path.stat().st_blocks * 512 for path in (cache / "torch", environment / "own")
    )


def test_only_a_result_of_this_run_counts() -> None:
    """A cell that wrote nothing has no outcome, though a result of an earlier day lies there."""
    assert "passed" in whole.outcome_of("0.16.0", began=0)
    assert whole.outcome_of("0.16.0", began=time.time() + 1) == "no result: it failed before its tests"


@pytest.mark.parametrize(
    ("outcome", "green"),
    [
        ("710 passed, 4 deviation", True),
        ("1 failed, 710 passed", False),
        ("no result: it failed before its tests", False),
    ],
)
def test_a_failure_is_not_green(outcome: str, green: bool) -> None:
    assert green == whole.is_green(outcome)


def test_without_time_nothing_is_begun(capsys: pytest.CaptureFixture[str]) -> None:
    assert whole.main(["--cells", "0.16.0", "live-nightly", "--hours", "0", "--prefix", "false"]) == 1
    assert "not begun, for want of time or disk: 0.16.0, live-nightly" in capsys.readouterr().out


def test_without_disk_nothing_is_begun(capsys: pytest.CaptureFixture[str]) -> None:
    assert whole.main(["--cells", "0.16.0", "--gigabytes", "-1000", "--prefix", "false"]) == 1
    assert "not begun, for want of time or disk: 0.16.0" in capsys.readouterr().out


def test_a_cell_that_cannot_run_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """``false`` in front of the command: it ends at once and writes nothing."""
    assert whole.main(["--cells", "0.16.0", "--prefix", "false", "--keep"]) == 1
    assert "0.16.0" in (said := capsys.readouterr().out)
    assert "no result" in said

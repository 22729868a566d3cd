"""What replicas refuse before Ray is asked for anything; the rest is in tests/live/test_replicas.py."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from vllm_compat import ConfigError
from vllm_compat.kimi.replicas import refuse_temporary_folder


@pytest.mark.parametrize("variable", ["RAY_TMPDIR", "TMPDIR"])
def test_temporary_files_below_the_environment(variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's workers do not start there, and the run would wait for them for ever."""
    monkeypatch.setattr(tempfile, "tempdir", None)  # what it found before
    for name in ("RAY_TMPDIR", "TMPDIR", "VIRTUAL_ENV"):
        monkeypatch.delenv(name, raising=False)
    below, beside = tmp_path / "venv" / "tmp", tmp_path / "venv2"
    below.mkdir(parents=True)
    beside.mkdir()

    monkeypatch.setenv(variable, str(below))
    refuse_temporary_folder()  # no environment
    monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path / "venv"))
    with pytest.raises(ConfigError, match="set RAY_TMPDIR to another one"):
        refuse_temporary_folder()
    monkeypatch.setenv("RAY_TMPDIR", str(beside))
    refuse_temporary_folder()

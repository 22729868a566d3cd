"""Regeneration that captures: rows and states are those of generating first and prefilling afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from here import CPU_MLA, IN_PROCESS, RELEASE
from states import relative_error

from vllm_compat.kimi.config import load_config
from vllm_compat.kimi.extract import extract_stage
from vllm_compat.kimi.prepare import prepare_stage
from vllm_compat.kimi.progress import NullProgress
from vllm_compat.kimi.rows import read_rows
from vllm_compat.kimi.store import Store

pytestmark = pytest.mark.skipif(
    RELEASE < (0, 14), reason="DeepSeek's models are off in these CPU builds (deviations.toml); not tried"
)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function: prepare and extract of the tiny target; returns the run's folder and extract's metrics."""
    if not CPU_MLA:
        monkeypatch.setenv("VLLM_MLA_DISABLE", "1")

    def made(name: str, *settings: str) -> tuple[Path, dict[str, Any]]:
        executor = [f"target.engine_args.{key}={value}" for key, value in IN_PROCESS.items()]
        small = ["prepare.max_conversations=8", "prepare.heldout_fraction=0.2", "prepare.max_new_tokens=20"]
        small += ["extract.dtype=float32", "extract.baseline_rows=0", f"run_dir={tmp_path / name}"]
        cfg = load_config("tiny", [*small, *executor, *settings])
        prepare_stage(cfg, NullProgress())
        return cfg.run_dir, extract_stage(cfg, NullProgress())

    return made


def stored(folder: Path) -> dict[str, Any]:
    """Sample id -> sample, of both splits."""
    return {s.sample_id: s for split in ("train", "heldout") for s in Store(folder / "extract" / split)}


def rows(folder: Path) -> dict[str, Any]:
    return {r.row_id: r for split in ("train", "heldout") for r in read_rows(folder / "prepare" / f"{split}.parquet")}


def test_one_pass_equals_two(run: Any) -> None:
    """The same answers, those cut by length and those of several turns too; no row is prefilled a second time."""
    two, metrics = run("two")
    assert 0 == metrics["rows_captured_with_their_answer"]
    one, metrics = run("one", "prepare.one_pass=true")
    expected, found = rows(two), rows(one)
    assert expected == found
    assert any(row.turn > 0 for row in found.values())
    assert len(found) == metrics["rows_captured_with_their_answer"]
    assert 0 == metrics["tokens_this_run"]
    a, b = stored(two), stored(one)
    assert a.keys() == b.keys() == found.keys()
    for name in a:
        assert a[name].token_ids.tolist() == b[name].token_ids.tolist() == found[name].input_ids
        assert a[name].loss_mask.tolist() == b[name].loss_mask.tolist()
        assert relative_error(b[name].hidden_states, a[name].hidden_states).max() < 1e-4


def test_states_that_do_not_fit_are_computed(run: Any) -> None:
    """Other layers than were captured with the answers: every row is prefilled, and nothing is mixed."""
    folder, metrics = run("run", "prepare.one_pass=true")
    whole = stored(folder)
    assert 0 == metrics["tokens_this_run"]
    for split in ("train", "heldout"):
        (folder / "extract" / split).rename(folder / "extract" / f"{split}-before")
    _, metrics = run("run", "prepare.one_pass=false", "extract.layers=[4]")
    assert 0 == metrics["rows_captured_with_their_answer"]
    for name, sample in stored(folder).items():
        assert relative_error(sample.hidden_states, whole[name].hidden_states[:, [1, 3]]).max() < 1e-4

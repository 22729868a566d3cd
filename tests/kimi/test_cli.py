"""`vllm-compat kimi …` as a user types it: exit codes, messages without tracebacks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from run_samples import write_run
from store_samples import write
from typer.testing import CliRunner, Result

from vllm_compat.kimi import pipeline
from vllm_compat.kimi.cli import app
from vllm_compat.kimi.config import Config, save_config
from vllm_compat.kimi.manifest import STAGES

MakeConfig = Callable[..., Config]


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def begun(make_config: MakeConfig) -> Path:
    """A run directory with its configuration, as `run` leaves it."""
    cfg = make_config([])
    save_config(cfg, cfg.run_dir / "config.toml")
    return cfg.run_dir


def test_help_lists_every_command() -> None:
    """All stages and the tools."""
    text = call("--help").output
    for name in (*STAGES, "run", "report", "verify", "dry-run"):
        assert name in text
        assert call(name, "--help").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run",), "--preset (kimi-k2.5, tiny)"),
        (("run", "--preset", "huge"), "a preset: kimi-k2.5, tiny"),
        (("run", "--preset", "tiny", "--config", "x.toml"), "one of the two"),
        (("train", "--preset", "tiny", "--set", "train.lrr=1"), "did you mean 'lr'"),
        (("run", "--preset", "kimi-k2.5"), "prepare.conversations"),
        (("extract", "--preset", "tiny", "--set", "x"), "section.key=value"),
        (("verify", "--run-dir", "no/such/run"), "config.toml"),
    ],
)
def test_mistakes_exit_with_2_and_one_paragraph(arguments: tuple[str, ...], message: str) -> None:
    """What the user typed is wrong: the reason on stderr, no traceback."""
    result = call(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output
    assert result.stdout == ""


def test_a_stage_without_its_input_exits_with_2(begun: Path) -> None:
    """extract before prepare."""
    result = call("extract", "--run-dir", begun)
    assert result.exit_code == 2
    assert "run the stage prepare first" in result.stderr


def test_run_dir_alone_goes_on_with_its_own_configuration(begun: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No need to repeat preset and overrides; --set still changes something."""
    seen: list[tuple[Config, list[str] | None, bool]] = []
    monkeypatch.setattr(pipeline, "run", lambda cfg, stages, _console, *, force: seen.append((cfg, stages, force)))
    assert call("train", "--run-dir", begun, "--set", "train.lr=0.5", "--force").exit_code == 0
    assert call("run", "--run-dir", begun).exit_code == 0
    (first, stages, force), (second, all_stages, no_force) = seen
    assert (0.5, ["train"], True) == (first.train.lr, stages, force)
    assert (None, False, begun) == (all_stages, no_force, second.run_dir)


def test_ctrl_c_says_how_to_go_on(begun: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 130 as shells expect, no traceback."""

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline, "run", interrupted)
    result = call("run", "--run-dir", begun)
    assert result.exit_code == 130
    assert "the same command goes on" in result.stderr


def test_report_writes_report_and_summary(begun: Path) -> None:
    """From manifests alone."""
    write_run(begun)
    result = call("report", "--run-dir", begun)
    assert (result.exit_code, result.stdout.strip()) == (0, str(begun / "report.html"))
    assert json.loads((begun / "summary.json").read_text())["vocab"]["coverage"] == 0.9931


def test_verify_and_repair(begun: Path) -> None:
    """Whole: what was read. Damaged: exit code 1 and the shard's name. --repair: set aside, and whole
    again.
    """
    for split in ("train", "heldout"):
        write(begun / "extract" / split, 0, 12)
    result = call("verify", "--depth", "bytes", "--run-dir", begun)
    assert result.exit_code == 0
    assert result.stdout.count("12 samples") == 2
    shard = begun / "extract/heldout/shard-000000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    result = call("verify", "--depth", "bytes", "--run-dir", begun)
    assert result.exit_code == 1
    assert "heldout" in result.stderr
    assert "shard-000000" in result.stderr
    result = call("verify", "--depth", "bytes", "--run-dir", begun, "--repair")
    assert result.exit_code == 0
    assert "heldout: set aside shard-000000" in result.stdout
    assert shard.with_name(shard.name + ".damaged").exists()


def test_dry_run_of_the_tiny_preset(tmp_path: Path) -> None:
    """Runs as it is in a checkout; --json for programs; a wrong configuration exits with 2."""
    result = call("dry-run", "--preset", "tiny", "--run-dir", tmp_path, "--json")
    assert result.exit_code == 0, result.output
    assert {"ok"} == {check["status"] for check in json.loads(result.stdout)}
    result = call("dry-run", "--preset", "tiny", "--run-dir", tmp_path, "--set", "extract.layers=[8]")
    assert result.exit_code == 2
    assert "wrong    layers" in result.stdout

"""The order of stages, what is skipped, and what an interruption leaves."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kimi_tokenizers import make_tokenizer
from rich.console import Console
from run_samples import METRICS

from vllm_compat.errors import ConfigError, DataError, StoreError
from vllm_compat.kimi import pipeline
from vllm_compat.kimi.config import Config, load_config
from vllm_compat.kimi.files import lock
from vllm_compat.kimi.manifest import STAGES, read_manifest
from vllm_compat.kimi.progress import Progress
from vllm_compat.kimi.stages import STAGE_TABLE, Stage

MakeConfig = Callable[..., Config]


class Stages:
    """Stages of the same names and files as the real ones, which write a few bytes and return sample metrics.

    calls: what has run. fails: stage -> exception to raise in it. content: stage -> what it writes.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fails: dict[str, BaseException] = {}
        self.content: dict[str, str] = {}

    def entry_point(self, stage: Stage) -> Callable[[Config, Progress], dict[str, Any]]:
        def function(cfg: Config, progress: Progress) -> dict[str, Any]:
            self.calls.append(stage.name)
            with progress.task(stage.name, total=2) as outer, progress.task("inside", total=None):
                outer.advance(1)
                for name in stage.outputs:
                    path = cfg.run_dir / name
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_text(self.content.get(stage.name, "content"))
                if stage.name in self.fails:
                    raise self.fails[stage.name]
            return METRICS[stage.name]

        return function


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> Stages:
    made = Stages()

    def entry_point(self: Stage) -> Callable[[Config, Progress], dict[str, Any]]:
        return made.entry_point(self)

    monkeypatch.setattr(Stage, "entry_point", entry_point)
    return made


@pytest.fixture
def cfg(make_config: MakeConfig, tmp_path: Path) -> Config:
    """A run with a target directory and conversations, so that inputs have fingerprints."""
    (tmp_path / "no-model").mkdir()
    (tmp_path / "no-model/config.json").write_text("{}")
    return make_config([{"messages": []}])


def run(cfg: Config, *names: str, force: bool = False) -> tuple[dict[str, Any], str]:
    """Summary and console text."""
    stream = io.StringIO()
    console = Console(file=stream, width=60)
    return pipeline.run(cfg, list(names) or None, console, force=force), stream.getvalue()


def test_all_stages_run_in_order_once(cfg: Config, stages: Stages) -> None:
    """One line per stage with its numbers, manifests, summary, report; the second run does nothing."""
    summary, text = run(cfg)
    assert list(STAGES) == stages.calls
    assert [*STAGES, "report"] == [line.split()[0] for line in text.splitlines()]
    assert "acceptance length 2.47" in text
    assert summary["evaluate"]["acceptance_length"] == 2.4712
    assert (cfg.run_dir / "report.html").is_file()
    assert cfg == load_config(cfg.run_dir / "config.toml")
    stages.calls.clear()
    again, text = run(cfg)
    assert stages.calls == []
    assert text.count("up to date") == len(STAGES)
    assert again == summary


@pytest.mark.parametrize(
    ("override", "first"),
    [
        ("prepare.max_length=100", "prepare"),
        ("target.dtype=float32", "prepare"),
        ("seed=7", "prepare"),
        ("extract.shard_mb=3", "extract"),
        ("vocab.draft_vocab_size=9", "vocab"),
        ("train.lr=1.0", "train"),
        ("export.dtype=float32", "export"),
        ("evaluate.num_prompts=3", "evaluate"),
    ],
)
def test_a_changed_setting_runs_its_stage_and_everything_after(
    cfg: Config, stages: Stages, override: str, first: str
) -> None:
    """Nothing before the first stage that reads the setting, all after it, and the line says what changed."""
    run(cfg)
    stages.calls.clear()
    _, text = run(load_config(cfg.run_dir / "config.toml", [override]))
    assert list(STAGES[STAGES.index(first) :]) == stages.calls
    assert f"changed: {override.partition('=')[0]}" in text


def test_changed_inputs_run_their_stages(cfg: Config, stages: Stages) -> None:
    """Other conversations, another model, an output that was replaced or lost."""
    run(cfg)
    places = {
        Path(cfg.prepare.conversations): "prepare",
        Path(cfg.target.model) / "config.json": "prepare",
        cfg.run_dir / "prepare/train.parquet": "prepare",
        cfg.run_dir / "extract/heldout/index.json": "extract",
        cfg.run_dir / "vocab/vocab.safetensors": "vocab",
        cfg.run_dir / "train/draft.safetensors": "train",
        cfg.run_dir / "export/config.json": "export",
    }
    for path, first in places.items():
        stages.calls.clear()
        path.write_text(f"changed {path.name}")
        run(cfg)
        assert list(STAGES[STAGES.index(first) :]) == stages.calls, path


def test_a_stage_whose_earlier_stage_gave_something_else_runs_again(cfg: Config, stages: Stages) -> None:
    """Also when the stages are run one by one, in separate calls."""
    run(cfg)
    stages.content["vocab"] = "another map"
    run(cfg, "vocab", force=True)
    stages.calls.clear()
    run(cfg, "export")
    assert ["export"] == stages.calls


def test_one_stage_alone_needs_the_ones_before(cfg: Config, stages: Stages) -> None:
    """The error names the files and the stage that makes them."""
    with pytest.raises(DataError, match="run the stage prepare first") as caught:
        run(cfg, "extract")
    assert "prepare/train.parquet" in caught.value.needed
    assert stages.calls == []
    run(cfg, "extract", "prepare")  # given in any order, run in the right one
    assert ["prepare", "extract"] == stages.calls


def test_force_runs_what_is_up_to_date(cfg: Config, stages: Stages) -> None:
    """--force."""
    run(cfg)
    stages.calls.clear()
    run(cfg, "vocab", force=True)
    assert ["vocab"] == stages.calls


@pytest.mark.parametrize("error", [KeyboardInterrupt(), DataError("bad")])
def test_an_interrupted_stage_is_not_complete(cfg: Config, stages: Stages, error: BaseException) -> None:
    """Ctrl-C or an error in train: everything before is kept, train has no manifest, the next run goes on
    there.
    """
    stages.fails["train"] = error
    with pytest.raises(type(error)):
        run(cfg)
    assert read_manifest(cfg.run_dir, "vocab") is not None
    assert read_manifest(cfg.run_dir, "train") is None
    stages.fails.clear()
    stages.calls.clear()
    run(cfg)
    assert ["train", "export", "evaluate"] == stages.calls


def test_a_rerun_that_is_interrupted_does_not_leave_the_old_manifest(cfg: Config, stages: Stages) -> None:
    """The manifest of the earlier run must not vouch for half-changed files."""
    run(cfg)
    stages.fails["extract"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        run(load_config(cfg.run_dir / "config.toml", ["extract.shard_mb=3"]))
    assert read_manifest(cfg.run_dir, "extract") is None


def test_two_runs_in_one_directory_are_refused(cfg: Config, stages: Stages) -> None:
    """The second is told who is at work."""
    held = lock(cfg.run_dir / ".lock", "test")
    with pytest.raises(StoreError, match=f"process {os.getpid()}"):
        run(cfg)
    os.close(held)
    run(cfg)


def test_only_the_first_process_of_torchrun_writes(
    cfg: Config, stages: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others train along, and leave lock, manifests and console alone."""
    run(cfg, "prepare", "extract", "vocab")
    stages.calls.clear()
    monkeypatch.setenv("RANK", "1")
    held = lock(cfg.run_dir / ".lock", "rank 0")
    _, text = run(cfg, "train")
    os.close(held)
    assert ["train"] == stages.calls
    assert text == ""
    assert read_manifest(cfg.run_dir, "train") is None


def test_unknown_stages_are_named(cfg: Config) -> None:
    """The valid names are listed."""
    with pytest.raises(ConfigError, match="prepare, extract, vocab"):
        run(cfg, "prepair")


def test_the_table_is_consistent() -> None:
    """Every input file is an output of an earlier stage, and the outputs lie in the stage's own directory."""
    made: set[str] = set()
    for name, stage in STAGE_TABLE.items():
        files = {item for item in stage.inputs if "/" in item}
        assert files <= made, name
        assert all(output.startswith(f"{name}/") for output in stage.outputs)
        made |= set(stage.outputs)


def test_prepare_really_runs_without_vllm(tmp_path: Path) -> None:
    """The real stage through the real pipeline, in a process where importing vllm fails: original answers,
    rows, manifest, summary, report.
    """
    make_tokenizer().save_pretrained(tmp_path / "target")
    (tmp_path / "target/config.json").write_text("{}")
    chats = [
        {"messages": [{"role": "user", "content": f"Q{i}"}, {"role": "assistant", "content": "A"}]} for i in range(9)
    ]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    (tmp_path / "config.toml").write_text(
        f'run_dir = "{tmp_path}/run"\n[target]\nmodel = "{tmp_path}/target"\n'
        f'[prepare]\nconversations = "{tmp_path}/data.jsonl"\nregenerate = false\nheldout_fraction = 0.4\n'
    )
    program = (
        "import sys; sys.modules['vllm'] = None\n"
        "from vllm_compat.kimi import pipeline\n"
        "from vllm_compat.kimi.config import load_config\n"
        f"cfg = load_config({str(tmp_path / 'config.toml')!r})\n"
        "print(pipeline.run(cfg, ['prepare'])['prepare']['rows'])\n"
        "from vllm_compat.kimi.report import report\nreport(cfg)\n"
        "assert 'torch' not in sys.modules or sys.modules['vllm'] is None\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "9"), done.stderr
    manifest = read_manifest(tmp_path / "run", "prepare")
    assert manifest is not None
    assert set(manifest.inputs) == {"model", "conversations"}
    assert set(manifest.outputs) == {"prepare/train.parquet", "prepare/heldout.parquet"}
    assert (tmp_path / "run/report.html").is_file()

"""The stages vocab, train and export on disk, and what evaluate takes from them.

On the shipped target, with random states: they carry nothing to learn but the rows themselves.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from vllm_compat.errors import ConfigError, DataError
from vllm_compat.kimi.config import Config, load_config
from vllm_compat.kimi.export import export_stage, export_untrained, load_exported
from vllm_compat.kimi.offline import estimate_stage
from vllm_compat.kimi.progress import NullProgress
from vllm_compat.kimi.rows import Row, RowWriter
from vllm_compat.kimi.store import Provenance, Sample, StoreWriter
from vllm_compat.kimi.target import TargetHead
from vllm_compat.kimi.train import train_stage
from vllm_compat.kimi.vocab import VocabMap, vocab_stage

SHAPE: dict[str, Any] = {
    "layers": (2, 4, 5, 8),
    "hidden_size": 256,
    "num_hidden_layers": 8,
    "dtype": "bfloat16",
}
ORIGIN = dict.fromkeys(
    ("model_fingerprint", "vllm_version", "distribution", "runner", "created_with", "rows_fingerprint"), "x"
)


@pytest.fixture
def run(tmp_path: Path) -> Config:
    """A run with prepared rows and extracted states."""
    settings = [
        "epochs=2",
        "batch_tokens=128",
        "ttt_steps=2",
        "log_every=1",
        "threads=none",
        "max_seconds=none",
    ]
    cfg = load_config(
        "tiny",
        [f"run_dir={tmp_path / 'run'}", "vocab.draft_vocab_size=300", *(f"train.{s}" for s in settings)],
    )
    generator = torch.Generator().manual_seed(0)
    provenance = Provenance(**SHAPE, **ORIGIN)
    with RowWriter(cfg.run_dir / "prepare") as rows:
        for split, count in (("train", 8), ("heldout", 3)):
            with StoreWriter(cfg.run_dir / "extract" / split, provenance, 1 << 20) as store:
                for i in range(count):
                    ids = torch.randint(0, 400, (24,), generator=generator)
                    mask = [0] * 14 + [1] * 10
                    name = f"{split}{i}/0"
                    rows.add(split, Row(name, f"{split}{i}", 0, ids.tolist(), 14, mask, "regenerated"))
                    states = torch.randn(24, 4, 256, generator=generator).bfloat16()
                    store.add(Sample(name, ids.int(), torch.tensor(mask, dtype=torch.uint8), states))
    return cfg


def test_from_rows_to_an_exported_head(run: Config) -> None:
    """Each stage leaves what the next one reads, and metrics that JSON can hold."""
    made = {
        "vocab": vocab_stage(run, NullProgress()),
        "train": train_stage(run, NullProgress()),
        "export": export_stage(run, NullProgress()),
        "estimate": estimate_stage(run),
    }
    json.dumps(made, allow_nan=False)
    untrained = export_untrained(run, run.run_dir / "evaluate" / "untrained")
    target = TargetHead.load(run.target.model)
    head, vocab = load_exported(run.run_dir / "export", target)
    start, _ = load_exported(untrained, target)

    assert 80 == made["vocab"]["loss_tokens"]
    assert 0 < made["vocab"]["coverage"] <= 1
    assert made["train"]["loss"] < made["train"]["first_loss"]
    assert made["train"]["steps"] == len((run.run_dir / "train" / "metrics.jsonl").read_text().splitlines())
    assert made["train"]["heldout"]["loss"] > 0
    assert (2, 4, 5) == head.config.aux_layers == start.config.aux_layers
    assert 300 == len(vocab.d2t)
    assert set(range(2028, 2048)) <= set(vocab.target_ids.tolist())
    assert not torch.equal(head.fc.weight, start.fc.weight)
    trained = load_file(run.run_dir / "train" / "draft.safetensors")
    torch.testing.assert_close(head.fc.weight, trained["fc.weight"].bfloat16().float(), atol=0, rtol=0)
    assert made["estimate"]["rows"] == 3
    assert 1 <= made["estimate"]["acceptance_length"] <= 5


def test_estimate_of_chosen_rows(run: Config) -> None:
    """The same rows as a served measurement can be named; an unknown one is an error."""
    vocab_stage(run, NullProgress())
    train_stage(run, NullProgress())
    export_stage(run, NullProgress())

    assert 1 == estimate_stage(run, ["heldout1/0"])["rows"]
    with pytest.raises(DataError, match="1 of them"):
        estimate_stage(run, ["heldout1/0", "train1/0"])


def test_states_of_another_convention_are_refused(run: Config, tmp_path: Path) -> None:
    """States after the final norm, or of another model, do not train a head for this target."""
    vocab_stage(run, NullProgress())
    other = replace(run, run_dir=tmp_path / "other")
    VocabMap.load(run.run_dir / "vocab" / "vocab.safetensors").save(other.run_dir / "vocab" / "vocab.safetensors")
    changed = {**SHAPE, "final_norm_applied": True}
    with StoreWriter(other.run_dir / "extract" / "train", Provenance(**changed, **ORIGIN), 1 << 20) as store:
        states = torch.zeros(4, 4, 256).bfloat16()
        store.add(Sample("a/0", torch.zeros(4).int(), torch.ones(4, dtype=torch.uint8), states))

    with pytest.raises(ConfigError, match="final norm applied"):
        train_stage(other, NullProgress())


def test_stages_say_what_must_run_first(run: Config) -> None:
    """Without the stage before, the message names it."""
    with pytest.raises(DataError, match="'vocab' first"):
        train_stage(run, NullProgress())
    with pytest.raises(DataError, match="'train' first"):
        export_stage(run, NullProgress())


def test_trainer_imports_without_vllm() -> None:
    """Training needs no vLLM: its modules import where `import vllm` fails."""
    modules = "train export offline vocab target draft ttt losses dataset".split()
    code = "import sys; sys.modules['vllm'] = None\n" + "\n".join(f"import vllm_compat.kimi.{m}" for m in modules)
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )

    assert 0 == done.returncode, done.stderr

"""The training loop: it learns, resumes bit for bit, and refuses what would spoil a head."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draft_heads import Rows, draft_config, random_rows, target_head, vocab_map

from vllm_compat.errors import ConfigError, DataError
from vllm_compat.kimi import train
from vllm_compat.kimi.checkpoint import load_checkpoint
from vllm_compat.kimi.config import TrainConfig
from vllm_compat.kimi.draft import init_draft
from vllm_compat.kimi.progress import NullProgress
from vllm_compat.kimi.train import Trainer, learning_rate, measure

SETTINGS: dict[str, Any] = {
    "epochs": 4, "batch_tokens": 60, "lr": 3e-3, "warmup_steps": 2, "ttt_steps": 3, "dtype": "float32",
    "log_every": 1, "checkpoint_every": 100,
}  # fmt: skip


def trainer(folder: Path, rows: Rows | None = None, vocab_seed_size: int = 30, **changes: Any) -> Trainer:
    target, vocab = target_head(), vocab_map(vocab_seed_size)
    draft = init_draft(draft_config(draft_vocab_size=vocab_seed_size), target, vocab, seed=0)
    cfg = TrainConfig(**{**SETTINGS, **changes})
    return Trainer(cfg, draft, target, vocab, rows or random_rows(12), folder, {"rows": "r"}, seed=5)


def losses(folder: Path) -> list[tuple[int, float, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"], line["grad_norm"]) for line in lines]


def weights(made: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in made.draft.state_dict().items()}


def test_it_learns(tmp_path: Path) -> None:
    """The loss falls on rows it has seen, and every metric is there and sane."""
    made = trainer(tmp_path, epochs=30)
    last = made.run(NullProgress())
    measured = measure(made.step_module, made.samples, 200, 0.8)

    assert made.first_loss is not None
    assert last["loss"] < 0.5 * made.first_loss
    assert made.total == made.step == last["step"]
    assert 30 * sum(made.samples.lengths) == last["tokens"]
    assert 3 == len(last["acceptance"]) == len(last["agreement"]) == len(last["kl"])
    assert all(0 <= share <= 1 for share in [*last["acceptance"], *last["agreement"], last["in_vocab"]])
    assert 0.5 * made.first_loss > measured["loss"]


@pytest.mark.parametrize("log_every", [1, 4])
def test_resume_is_bit_exact(tmp_path: Path, log_every: int) -> None:
    """Stopped anywhere (within an epoch, at its end, within a logging window) and resumed, the run is the
    same run: losses, gradient norms and weights agree in every bit."""
    straight = trainer(tmp_path / "a", log_every=log_every)
    straight.run(NullProgress())
    per_epoch = len(straight.order.epoch(0))
    assert straight.total >= 3 * per_epoch > 6
    for stop_at in (2, per_epoch, per_epoch + 3):
        first = trainer(tmp_path / f"b{stop_at}", log_every=log_every)
        first.run(NullProgress(), stop=lambda step, stop_at=stop_at: step == stop_at)
        assert stop_at == first.step
        torch.manual_seed(1234)
        second = trainer(tmp_path / f"b{stop_at}", log_every=log_every)
        assert stop_at == second.step
        second.run(NullProgress())

        assert losses(tmp_path / "a") == losses(tmp_path / f"b{stop_at}")
        for name, tensor in weights(straight).items():
            assert torch.equal(tensor, weights(second)[name]), name


def test_crash_behind_a_checkpoint(tmp_path: Path) -> None:
    """Metrics written after the last checkpoint are cut off on the resume, and the steps are done again,
    equally."""
    straight = trainer(tmp_path / "a")
    straight.run(NullProgress())
    crashing = trainer(tmp_path / "b", checkpoint_every=4)

    def power_cut(step: int) -> bool:
        if step == 6:
            raise KeyboardInterrupt
        return False

    with pytest.raises(KeyboardInterrupt):
        crashing.run(NullProgress(), stop=power_cut)
    assert 6 == len(losses(tmp_path / "b"))
    with (tmp_path / "b" / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 7, "lo')
    (tmp_path / "b" / "checkpoint" / "step-00000099-0").mkdir()  # died while saving
    resumed = trainer(tmp_path / "b", checkpoint_every=4)

    assert 4 == resumed.step
    assert 4 == len(losses(tmp_path / "b"))
    resumed.run(NullProgress())
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    assert 1 == len(list((tmp_path / "b" / "checkpoint").glob("step-*")))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"vocab_seed_size": 29}, "vocabulary map"),
        ({"lr": 1e-4}, "train.lr: 0.003 in the checkpoint, 0.0001 now"),
        ({"ttt_steps": 2}, "train.ttt_steps"),
    ],
)
def test_a_changed_training_is_not_resumed(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    """A new vocabulary map would give lm_head's rows another meaning: refused, and the checkpoint stays."""
    trainer(tmp_path).run(NullProgress(), stop=lambda step: step == 2)

    with pytest.raises(ConfigError, match=named):
        trainer(tmp_path, **change)
    assert 2 == trainer(tmp_path).step


def test_same_size_other_map_is_refused(tmp_path: Path) -> None:
    """Also when only the contents of the map differ (SpecForge PR 534: nothing else shows it)."""
    made = trainer(tmp_path)
    made.run(NullProgress(), stop=lambda step: step == 1)
    other = vocab_map(30)
    ids = other.target_ids.clone()
    ids[0] = next(i for i in range(48) if i < int(ids[1]) and i != int(ids[0]))
    t2d = torch.zeros_like(other.t2d)
    t2d[ids] = True
    changed = type(other)(ids - torch.arange(30), t2d, 1.0)

    with pytest.raises(ConfigError, match="vocabulary map"):
        Trainer(made.cfg, made.draft, target_head(), changed, made.samples, tmp_path, {"rows": "r"}, 5)


def test_a_finished_training(tmp_path: Path) -> None:
    """Run again it does nothing; with other settings it starts over, since there is nothing to lose
    half-way."""
    done = trainer(tmp_path)
    done.run(NullProgress())
    again = trainer(tmp_path)
    last = again.run(NullProgress())

    assert done.last == last
    assert all(torch.equal(tensor, weights(again)[name]) for name, tensor in weights(done).items())
    assert 0 == trainer(tmp_path, lr=1e-4).step
    assert not (tmp_path / "metrics.jsonl").exists()


def test_more_epochs_go_on(tmp_path: Path) -> None:
    """A finished run continues when epochs is raised."""
    steps = trainer(tmp_path)
    steps.run(NullProgress())
    longer = trainer(tmp_path, epochs=6)
    longer.run(NullProgress())

    assert longer.step > steps.step == 4 * len(steps.order.epoch(0)) - (steps.step - steps.total)


def test_one_bad_row_stops_and_is_named(tmp_path: Path) -> None:
    """A row with an infinite state: the row is named, the weights are still finite, the checkpoint is the
    healthy one."""
    rows = random_rows(12)
    rows[7].hidden_states[2, 1, 0] = float("inf")
    made = trainer(tmp_path, rows, checkpoint_every=1)

    with pytest.raises(DataError, match=r"here: loss nan; rows c7/0 —") as caught:
        made.run(NullProgress())
    assert "did not touch the weights" in str(caught.value)
    assert all(torch.isfinite(tensor).all() for tensor in weights(made).values())
    loaded = load_checkpoint(tmp_path / "checkpoint")
    if loaded:
        assert all(torch.isfinite(tensor).all() for tensor in loaded[0].values())


def test_time_limit(tmp_path: Path) -> None:
    """max_seconds ends the run with a checkpoint, and a resume does not go on beyond it."""
    made = trainer(tmp_path, epochs=100_000, max_seconds=0.5)
    made.run(NullProgress())

    assert made.finished
    assert made.seconds < 5
    assert 0 < made.step < 100_000
    assert made.step == trainer(tmp_path, epochs=100_000, max_seconds=0.5).step
    again = trainer(tmp_path, epochs=100_000, max_seconds=0.5)
    again.run(NullProgress())
    assert made.step == again.step


def test_schedule_fits_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the time will not do for all steps, the schedule is shortened, so that the rate still ends near 0.

    By a clock on which every step takes 10 ms, however busy the machine is.
    """
    ticks = itertools.count()
    monkeypatch.setattr(train, "time", SimpleNamespace(monotonic=lambda: 0.01 * next(ticks)))
    made = trainer(tmp_path, epochs=100_000, max_seconds=1.0, log_every=1000)
    made.run(NullProgress())

    assert made.total < 100_000
    assert made.last["lr"] < 0.3 * made.cfg.lr


def test_schedule() -> None:
    """Linear warm-up, cosine to 0, no step beyond."""
    rates = [learning_rate(step, 10, 1.0, 2) for step in range(11)]

    assert [0.5, 1.0, 1.0] == rates[:3]
    assert 0.5 == pytest.approx(rates[6])
    assert 0 == pytest.approx(rates[10])
    assert rates[2:] == sorted(rates[2:], reverse=True)


def test_bfloat16(tmp_path: Path) -> None:
    """Autocast training with float32 weights learns too."""
    made = trainer(tmp_path, dtype="bfloat16", epochs=20)
    last = made.run(NullProgress())

    assert made.first_loss is not None
    assert last["loss"] < 0.7 * made.first_loss
    assert torch.float32 == made.draft.fc.weight.dtype


def test_float16_is_refused(tmp_path: Path) -> None:
    """There is no loss scaling here; the advice names what to use."""
    with pytest.raises(ConfigError, match="bfloat16"):
        trainer(tmp_path, dtype="float16")


def two_rows(folder: Path, batch_tokens: int) -> Trainer:
    """Trained on two short rows: one batch of both, or one batch each."""
    made = trainer(folder, random_rows(2, longest=14), batch_tokens=batch_tokens, epochs=3, lr=1e-2, grad_clip=1e9)
    made.run(NullProgress())
    return made


#: Ends without Python's shutdown. On a CPU the threads of gloo outlive their group (torch 2.13: it is never freed once
#: torch._dynamo is loaded), and one that needs the interpreter while it shuts down aborts the process.
RANK = """
import os, sys, torch
from pathlib import Path
from torch import distributed
from test_train import two_rows
from vllm_compat.kimi.train import rank_device
torch.set_num_threads(1)
folder = Path(sys.argv[1])
with rank_device():
    made = two_rows(folder / "two", batch_tokens=15)
    if made.rank == 0:
        torch.save({**made.draft.state_dict(), "norm": made.last["grad_norm"]}, folder / "two.pt")
assert not distributed.is_initialized()
sys.stdout.flush()
os._exit(0)
"""


def test_two_ranks_equal_one(tmp_path: Path) -> None:
    """Under torchrun the gradient is that of the ranks' batches together, each position counting once."""
    here = Path(__file__).parent
    paths = [str(here), str(here.parents[1]), os.environ.get("PYTHONPATH", "")]
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    ranks = subprocess.Popen(
        [*torchrun, str(script), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    one = two_rows(tmp_path / "one", batch_tokens=60)
    output, _ = ranks.communicate(timeout=240)
    assert 0 == ranks.returncode, output
    assert one.step == 3
    two = torch.load(tmp_path / "two.pt")
    assert one.last["grad_norm"] == pytest.approx(two["norm"], rel=1e-4)
    for name, tensor in weights(one).items():
        torch.testing.assert_close(two[name], tensor, atol=2e-5, rtol=1e-4)

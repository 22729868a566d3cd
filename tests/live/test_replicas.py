"""Replicas through a local Ray, one of them killed: the store is that of a single replica."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_compat.kimi.store import Store

pytest.importorskip("ray", reason="Ray is in the newest release's cell only (matrix/constraints)")
psutil: Any = pytest.importorskip("psutil")

SETTINGS = [
    "target.dtype=float32",
    "prepare.max_conversations=40",
    "prepare.regenerate=false",
    "extract.shard_mb=1",
    "extract.self_check=false",
    "extract.baseline_rows=0",
]


def command(stage: str, run_dir: Path, *settings: str) -> list[str]:
    chosen = [part for setting in (*SETTINGS, *settings) for part in ("--set", setting)]
    return [sys.executable, "-m", "vllm_compat", "kimi", stage, "--preset", "tiny", "--run-dir", str(run_dir), *chosen]


def run(stage: str, run_dir: Path, *settings: str) -> None:
    done = subprocess.run(command(stage, run_dir, *settings), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def replicas_of(process: subprocess.Popen[str]) -> list[Any]:
    """The processes of the replicas that a run has started."""
    below = psutil.Process(process.pid).children(recursive=True)
    return [one for one in below if any("Replica" in part for part in one.cmdline())]


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, Store]:
    """(of one replica, of two, of which one was killed after the first shard)."""
    path = tmp_path_factory.mktemp("replicas")
    for name in ("one", "two"):
        run("prepare", path / name)
    run("extract", path / "one")
    store = path / "two" / "extract" / "train"
    extract = subprocess.Popen(
        command("extract", path / "two", "extract.replicas=2"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        deadline = time.monotonic() + 240
        while not list(store.glob("shard-*")) and extract.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        there = replicas_of(extract)
        assert len(there) == 2, [one.cmdline() for one in there]
        there[0].send_signal(signal.SIGKILL)
        said, _ = extract.communicate(timeout=240)
        assert extract.returncode == 0, said[-4000:] + (path / "two" / "engine.log").read_text()[-4000:]
    finally:
        if extract.poll() is None:
            os.kill(extract.pid, signal.SIGTERM)
            extract.wait(30)
    return tuple(Store(path / name / "extract" / "train") for name in ("one", "two"))  # type: ignore[return-value]


def test_nothing_is_lost_or_doubled(stores: tuple[Store, Store]) -> None:
    """The same rows in the same order in the same files, though one of two replicas died."""
    one, two = stores
    assert two.verify()
    assert list(one.ids) == list(two.ids)
    assert [(shard.file, [place.id for place in shard.samples]) for shard in one.shards] == [
        (shard.file, [place.id for place in shard.samples]) for shard in two.shards
    ]
    assert len(two.shards) > 3


def test_the_states_are_the_same(stores: tuple[Store, Store]) -> None:
    """To bfloat16: the replicas' batches have other neighbours."""
    for a, b in zip(*stores, strict=True):
        assert torch.equal(a.token_ids, b.token_ids)
        assert torch.equal(a.loss_mask, b.loss_mask)
        ours, theirs = b.hidden_states.float(), a.hidden_states.float()
        assert (ours - theirs).norm() / theirs.norm() < 5e-3


FAILING = """
import ray
from vllm_compat import StoreError
from vllm_compat.kimi.replicas import answer_of

ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)

@ray.remote
def failing():
    raise StoreError("a shard", needed="room", found="none", advice="make some")

try:
    answer_of(ray, failing.remote())
except StoreError as error:
    print(type(error) is StoreError, error)
"""


def test_what_a_replica_raises_arrives_as_it_was() -> None:
    """Our own error with its fields, and not Ray's with a traceback for a message."""
    done = subprocess.run([sys.executable, "-c", FAILING], capture_output=True, text=True, timeout=120, check=False)
    assert "True a shard — needs: room — here: none — do: make some" == done.stdout.strip(), done.stderr[-2000:]

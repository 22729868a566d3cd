"""The store survives what happens to long jobs: kill -9 at any moment, a full disk, a second writer."""

from __future__ import annotations

import errno
import itertools
import multiprocessing
import os
import random
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from store_samples import check, provenance, sample, write

from vllm_compat import StoreError
from vllm_compat.kimi import files
from vllm_compat.kimi.shards import shard_name
from vllm_compat.kimi.store import Sample, Store, StoreWriter

SAMPLES = 120
WRITERS = (1, 3)  # shards written at once
_PAUSE = 0.006  # after each sample: all of them take at least 0.7 s, however fast the machine


def _writer_process(path: Path, ready: Connection, writers: int) -> None:
    """Write all samples, resuming; tell `ready` when the writing begins."""
    import torch

    torch.set_num_threads(1)
    samples = [sample(i) for i in range(SAMPLES)]
    ready.send("ready")
    with StoreWriter(path, provenance(), 1000, writers=writers) as writer:
        for item in samples:
            if item.sample_id not in writer.done:
                writer.add(item)
                time.sleep(_PAUSE)


@pytest.fixture(scope="module")
def processes() -> Any:
    """Processes forked from a server that has torch loaded: cheap enough to kill dozens of them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "pytest", "vllm_compat.kimi.store", "store_samples"])
    return context


def _start(processes: Any, path: Path, writers: int) -> Any:
    ours, theirs = processes.Pipe()
    process = processes.Process(target=_writer_process, args=(path, theirs, writers))
    process.start()
    theirs.close()
    assert ours.recv() == "ready"
    return process


@pytest.mark.parametrize("writers", WRITERS)
def test_kill_9_at_any_moment_loses_and_doubles_nothing(tmp_path: Path, processes: Any, writers: int) -> None:
    """Kill the writer again and again. What a reader sees in between is whole and only grows; in the end
    every sample is there exactly once, bit for bit.
    """
    times = random.Random(20260101)
    killed = 0
    seen: set[str] = set()
    for _ in range(400):
        process = _start(processes, tmp_path / "store", writers)
        process.join(times.uniform(0, 0.1))
        if process.is_alive():
            process.kill()
            killed += 1
        process.join()
        if (tmp_path / "store/index.json").exists():
            store = Store(tmp_path / "store")
            store.verify()
            assert len(set(store.ids)) == len(store.ids)
            assert seen <= set(store.ids)
            seen = set(store.ids)
        if process.exitcode == 0:
            break
    assert process.exitcode == 0
    assert killed >= 5
    check(Store(tmp_path / "store"), SAMPLES)
    assert not list((tmp_path / "store").glob("*.damaged"))
    assert not list((tmp_path / "store").glob(".tmp-*"))


OPERATIONS = ("pwritev", "pwrite", "fsync", "replace", "unlink")


def _killed_process(path: Path, at: int, half: bool, writers: int) -> None:
    """Write samples, and die by SIGKILL instead of the file operation number `at`, or halfway through its write."""
    counter = itertools.count(1)

    def wrap(real: Any) -> Any:
        def operation(*args: Any, **more: Any) -> Any:
            if next(counter) == at:
                if half and real.__name__ == "pwrite":
                    real(args[0], args[1][: len(args[1]) // 2], *args[2:])
                if half and real.__name__ == "pwritev":
                    real(args[0], [args[1][0][: len(args[1][0]) // 2]], *args[2:])
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **more)

        return operation

    for name in OPERATIONS:
        setattr(os, name, wrap(getattr(os, name)))
    write(path, 0, 12, shard_bytes=3000, writers=writers)


@pytest.mark.parametrize("writers", WRITERS)
@pytest.mark.parametrize("half", [False, True])
def test_kill_9_at_every_file_operation(tmp_path: Path, processes: Any, half: bool, writers: int) -> None:
    """Between any two operations, and in the middle of a write: what is published is whole, the next writer needs no
    help, and it makes exactly what is missing.
    """
    kept = set()
    for at in range(1, 400):
        path = tmp_path / str(at)
        process = processes.Process(target=_killed_process, args=(path, at, half, writers))
        process.start()
        process.join()
        before = 0
        if (path / "index.json").exists():
            store = Store(path)
            store.verify()
            before = len(store)
        if process.exitcode == 0:
            break
        assert -signal.SIGKILL == process.exitcode
        kept.add(before)
        with StoreWriter(path, provenance(), 3000) as writer:
            missing = [i for i in range(12) if sample(i).sample_id not in writer.done]
            for i in missing:
                writer.add(sample(i))
        check(Store(path), 12)
        Store(path).verify()
        assert not list(path.glob("*.damaged"))
        assert not list(path.glob(".tmp-*"))
    assert process.exitcode == 0
    assert at > 20
    assert {0, 12} < kept  # from nothing to everything, and something in between


def _reopen(path: Path) -> list[str]:
    with StoreWriter(path, provenance(), 1000) as writer:
        return writer.recovered


def _forget_last_shard(path: Path) -> Path:
    """The state after a kill between publishing a shard and writing the index."""
    import json

    index = json.loads((path / "index.json").read_text())
    last = index["shards"].pop()
    (path / "index.json").write_text(json.dumps(index))
    return path / str(last["file"])


def test_killed_before_the_first_index(tmp_path: Path) -> None:
    """Only the lock file and a temporary index are there: the next writer starts the store."""
    (tmp_path / "writer.lock").write_text("123\n")
    (tmp_path / ".tmp-index.json.123").write_text('{"form')
    assert _reopen(tmp_path) == ["removed the unfinished .tmp-index.json.123"]
    assert len(Store(tmp_path)) == 0


def test_killed_while_writing_a_shard(tmp_path: Path) -> None:
    """A half-written temporary shard goes; the samples in it are made again."""
    write(tmp_path, 0, 10)
    (tmp_path / ".tmp-shard-000009.safetensors.77").write_bytes(b"\x40\x00\x00\x00\x00\x00\x00\x00{")
    assert _reopen(tmp_path) == ["removed the unfinished .tmp-shard-000009.safetensors.77"]
    check(Store(tmp_path), 10)


def test_killed_between_shard_and_index(tmp_path: Path) -> None:
    """The complete shard is adopted: none of its samples is made again."""
    write(tmp_path, 0, 10)
    shard = _forget_last_shard(tmp_path)
    assert len(Store(tmp_path)) < 10
    (said,) = _reopen(tmp_path)
    assert said.startswith(f"adopted {shard.name}")
    check(Store(tmp_path), 10)
    assert Store(tmp_path).verify()["samples"] == 10
    assert _reopen(tmp_path) == []


def test_a_lost_index_is_made_again_from_the_shards(tmp_path: Path) -> None:
    """Every shard carries what its index entry says."""
    write(tmp_path, 0, 30)
    before = (tmp_path / "index.json").read_bytes()
    (tmp_path / "index.json").unlink()
    assert len(_reopen(tmp_path)) == len(Store(tmp_path).shards)
    assert before == (tmp_path / "index.json").read_bytes()


def test_a_lost_index_does_not_let_other_provenance_in(tmp_path: Path) -> None:
    """Shards of another model are refused, not adopted, and not touched."""
    write(tmp_path, 0, 5)
    names = sorted(path.name for path in tmp_path.glob("shard-*"))
    (tmp_path / "index.json").unlink()
    with pytest.raises(StoreError, match="model_fingerprint"):
        StoreWriter(tmp_path, provenance(model_fingerprint="x"), 1000)
    assert names == sorted(path.name for path in tmp_path.glob("shard-*"))


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "foreign"])
def test_an_unindexed_shard_that_is_broken_is_set_aside(tmp_path: Path, damage: str) -> None:
    """It is not adopted and not deleted; its samples are made again under a number of their own."""
    write(tmp_path, 0, 10)
    shard = _forget_last_shard(tmp_path)
    content = bytearray(shard.read_bytes())
    if damage == "truncated":
        content = content[:-5]
    elif damage == "flipped":
        content[-20] ^= 4
    elif damage == "empty":
        content = bytearray()
    else:
        content = bytearray(b"\x02\x00\x00\x00\x00\x00\x00\x00{}")  # a safetensors file, but no shard
    shard.write_bytes(content)
    (said,) = _reopen(tmp_path)
    assert said.startswith(f"set aside {shard.name}")
    assert bytes(content) == (tmp_path / f"{shard.name}.damaged").read_bytes()
    write(tmp_path, 0, 10)
    check(Store(tmp_path), 10)
    assert not shard.exists()


def test_a_shard_with_samples_that_are_there_already_is_set_aside(tmp_path: Path) -> None:
    """A copy of a shard does not double samples."""
    write(tmp_path, 0, 10)
    first = tmp_path / "shard-000000.safetensors"
    (tmp_path / "shard-000007.safetensors").write_bytes(first.read_bytes())
    (said,) = _reopen(tmp_path)
    assert "in the index already" in said
    check(Store(tmp_path), 10)


def test_an_error_in_the_caller_publishes_nothing(tmp_path: Path) -> None:
    """What is buffered when the caller fails may be what is wrong: it stays out, and the lock is free
    again.
    """
    write(tmp_path, 0, 4)
    writer = StoreWriter(tmp_path, provenance(), 10**9)

    def interrupted() -> None:
        with writer:
            writer.add(sample(4))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    check(Store(tmp_path), 4)
    with pytest.raises(StoreError, match="closed"):
        writer.add(sample(4))
    write(tmp_path, 0, 5)
    check(Store(tmp_path), 5)


def test_a_second_writer_is_refused_by_pid_until_the_first_is_gone(tmp_path: Path, processes: Any) -> None:
    """The lock names its holder and dies with it, kill -9 included."""
    ours, theirs = processes.Pipe()
    process = processes.Process(target=_hold, args=(tmp_path, theirs))
    process.start()
    theirs.close()  # so that a child that dies ends the wait
    assert ours.recv() == "held"
    with pytest.raises(StoreError, match=f"process {process.pid} is writing"):
        StoreWriter(tmp_path, provenance(), 1000)
    process.kill()
    process.join()
    write(tmp_path, 0, 3)
    check(Store(tmp_path), 3)


def _hold(path: Path, ready: Connection) -> None:
    with StoreWriter(path, provenance(), 1000):
        ready.send("held")
        time.sleep(60)


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    mount = tmp_path / "small"
    mount.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(mount)], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {made.stderr.decode().strip()}")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


@pytest.mark.parametrize("writers", WRITERS)
def test_a_full_disk_is_an_error_that_loses_nothing(small_tmpfs: Path, writers: int) -> None:
    """StoreError says how much room it takes; the shards before it stay whole, no temporary file is left
    behind, and after making room the same command goes on.
    """
    ballast = small_tmpfs / "ballast"
    ballast.write_bytes(bytes(40_000))
    with pytest.raises(StoreError, match="free bytes"):
        write(small_tmpfs, 0, SAMPLES, shard_bytes=3000, writers=writers)
    store = Store(small_tmpfs)
    assert store.verify()["samples"] == len(store) > 0
    assert not list(small_tmpfs.glob(".tmp-*"))
    ballast.unlink()
    write(small_tmpfs, 0, 40, shard_bytes=3000, writers=writers)
    check(Store(small_tmpfs), 40)


def test_a_file_size_limit_is_an_error_that_keeps_the_buffer(tmp_path: Path) -> None:
    """The same by RLIMIT_FSIZE (needs no root): the writer keeps its buffer and can publish it once there is
    room.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    writer = StoreWriter(tmp_path, provenance(), 10**9)
    for i in range(20):
        writer.add(sample(i))
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, hard))
    try:
        with pytest.raises(StoreError, match="free bytes"):
            writer.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.glob("shard-*"))
    assert not list(tmp_path.glob(".tmp-*"))
    assert len(Store(tmp_path)) == 0
    writer.close()
    check(Store(tmp_path), 20)


def test_writes_that_come_short_are_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system may write less than asked: here in the middle of a buffer, at the end of one, or across several."""
    real = os.pwritev

    def short(fd: int, views: Any, at: int) -> int:
        whole = b"".join(views)
        return real(fd, [whole[: random.Random(at).choice((1, 77, len(views[0]), 1000))]], at)

    monkeypatch.setattr(os, "pwritev", short)
    write(tmp_path, 0, 40, shard_bytes=5000)
    monkeypatch.undo()
    Store(tmp_path).verify()
    check(Store(tmp_path), 40)


def test_a_header_that_comes_short_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its place is a hole in the file until it is written, so that it too may find a disk nearly full."""
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, data[:100], at))
    write(tmp_path, 0, 40, shard_bytes=5000)
    monkeypatch.undo()
    Store(tmp_path).verify()
    check(Store(tmp_path), 40)


@pytest.mark.parametrize("goes_on", [True, False])
def test_an_error_after_the_index_was_renamed(goes_on: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a file system far away: what the index names is there, whether the writer tries again or ends."""
    write(tmp_path, 0, 20, shard_bytes=1)
    writer = StoreWriter(tmp_path, provenance(), 10**9)
    writer.add(sample(20))
    before = (tmp_path / "index.json").read_bytes()

    def failing(folder: Path) -> None:
        if (folder / "index.json").read_bytes() != before:
            raise OSError(errno.EIO, "directory")

    monkeypatch.setattr(files, "fsync_directory", failing)
    with pytest.raises(StoreError, match="directory"):
        writer.flush()
    monkeypatch.undo()
    if goes_on:
        writer.close()
    else:
        writer._release()
        StoreWriter(tmp_path, provenance(), 10**9).close()
    Store(tmp_path).verify()
    check(Store(tmp_path), 21)


def test_room_for_a_shard_but_not_for_the_index(tmp_path: Path) -> None:
    """The shard goes again: neither lost nor, at the next try, there twice."""
    write(tmp_path, 0, 60, shard_bytes=1)
    writer = StoreWriter(tmp_path, provenance(), 10**9)
    writer.add(sample(60))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8000, hard))
    assert (tmp_path / "index.json").stat().st_size > 8000
    try:
        with pytest.raises(StoreError, match="free bytes"):
            writer.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    check(Store(tmp_path), 60)
    writer.close()
    check(Store(tmp_path), 61)
    assert len(list(tmp_path.glob("shard-*"))) == 61


def _bad(i: int) -> Sample:
    item = sample(i)
    item.hidden_states[0, 1, 3] = float("nan")
    return item


def test_nan_samples_are_left_out_up_to_a_number_and_not_made_again(tmp_path: Path) -> None:
    """Each is listed with its reason; those around it are stored; one too many stops with its name."""
    with StoreWriter(tmp_path, provenance(), 1000, max_bad=2) as writer:
        for i in range(10):
            writer.add(_bad(i) if i in (3, 7) else sample(i))
    wanted = {sample(i).sample_id for i in range(10)} - {sample(3).sample_id, sample(7).sample_id}
    assert wanted == set(Store(tmp_path).ids)
    with StoreWriter(tmp_path, provenance(), 1000, max_bad=2) as writer:
        assert {sample(i).sample_id for i in range(10)} == writer.done
        assert [sample(3).sample_id, sample(7).sample_id] == list(writer.refused)
        assert "token 0, boundary 4" in writer.refused[sample(3).sample_id]
        writer.add(sample(11))
        with pytest.raises(StoreError, match=r"conversation-10/0.*but for 2 samples.*max_bad_rows"):
            writer.add(_bad(10))
    assert len(Store(tmp_path)) == 9


@pytest.mark.parametrize("writers", WRITERS)
def test_an_error_of_the_writing_thread_reaches_the_caller(tmp_path: Path, writers: int) -> None:
    """A disk that is full stops the run once every writer has a shard, not at its end; then all can be written."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    writer = StoreWriter(tmp_path, provenance(), 1, writers=writers)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))

    def fill() -> None:
        for i in range(2 + writers):
            writer.add(sample(i))

    try:
        with pytest.raises(StoreError, match=r"shard-000000.*File too large"):
            fill()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    writer.close()
    check(Store(tmp_path), 1 + writers)
    assert [shard_name(i) for i in range(1 + writers)] == [shard.file for shard in Store(tmp_path).shards]


def _on_a_slow_disk(path: Path, said: Connection, writers: int) -> None:
    """Write 256 MiB of samples to a disk of about 100 MiB/s, and say what memory it took."""
    import torch

    shard_bytes = 16 << 20
    real = os.pwritev
    disk = threading.Lock()  # one, however many threads write

    def slow(fd: int, views: Any, at: int) -> int:
        with disk:
            time.sleep(sum(map(len, views)) / (100 << 20))
            return real(fd, views, at)

    wide = provenance(hidden_size=4096)
    states = torch.randn(256, 4, 4096).bfloat16()  # 8 MiB
    ids, mask = torch.zeros(256, dtype=torch.int32), torch.ones(256, dtype=torch.uint8)
    os.pwritev = slow
    with StoreWriter(path, wide, shard_bytes, writers=writers) as writer:
        writer.add(Sample("first", ids.clone(), mask.clone(), states.clone()))  # what is loaded on first use
        writer.flush()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for i in range(32):
            writer.add(Sample(str(i), ids.clone(), mask.clone(), states.clone()))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    said.send(((peak - before) << 10, writer.waited))


@pytest.mark.parametrize("writers", WRITERS)
def test_a_slow_disk_holds_the_caller_back_and_memory_stays_bounded(
    tmp_path: Path, processes: Any, writers: int
) -> None:
    """A shard of 16 MiB per writer, the next one and a sample; not the 256 MiB that the caller makes meanwhile."""
    ours, theirs = processes.Pipe()
    process = processes.Process(target=_on_a_slow_disk, args=(tmp_path, theirs, writers))
    process.start()
    theirs.close()
    grown, waited = ours.recv()
    process.join()
    store = Store(tmp_path)
    store.verify()
    assert len(store) == 33
    assert grown < ((1 + writers) * 24 + 2 * 8 + 8) << 20  # half as much again: what malloc keeps of what was freed
    assert waited > 1


def test_every_rename_is_fsynced_before_and_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut must not leave a name without its content: each file is fsynced before its rename, the
    directory after it, and the index only comes after its shard.
    """
    write(tmp_path, 0, 1)
    events: list[str] = []
    real_fsync, real_replace = os.fsync, os.replace

    def fsync(fd: int) -> None:
        events.append(f"fsync {Path(f'/proc/self/fd/{fd}').readlink().name}")
        real_fsync(fd)

    def replace(source: Any, target: Any, **more: Any) -> None:
        events.append(f"rename {Path(source).name} {Path(target).name}")
        real_replace(source, target, **more)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    write(tmp_path, 0, 2)
    mine = os.getpid()
    shard, index = f".tmp-shard-000001.safetensors.{mine}", f".tmp-index.json.{mine}"
    assert [
        f"fsync {shard}",
        f"rename {shard} shard-000001.safetensors",
        f"fsync {tmp_path.name}",
        f"fsync {index}",
        f"rename {index} index.json",
        f"fsync {tmp_path.name}",
    ] == events

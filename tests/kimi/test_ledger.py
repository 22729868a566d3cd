"""A store that several workers fill: the shards of a single writer, whoever dies, and nothing of the dead."""

from __future__ import annotations

from pathlib import Path

import pytest
from store_samples import provenance, sample

from vllm_compat import StoreError
from vllm_compat.kimi.claims import Claim
from vllm_compat.kimi.codec import encode
from vllm_compat.kimi.ledger import Ledger, draft_name
from vllm_compat.kimi.rows import Row, RowWriter
from vllm_compat.kimi.shard_file import write_shard
from vllm_compat.kimi.shards import Shard
from vllm_compat.kimi.store import Store, StoreWriter

COUNT, SHARD = 40, 1500
SAMPLES = {one.sample_id: one for one in map(sample, range(COUNT))}


@pytest.fixture
def rows_path(tmp_path: Path) -> Path:
    with RowWriter(tmp_path) as writer:
        for name, one in SAMPLES.items():
            ids = one.token_ids.tolist()
            writer.add("train", Row(name, name.partition("/")[0], 0, ids, 1, one.loss_mask.tolist(), "original"))
    return tmp_path / "train.parquet"


@pytest.fixture
def single(tmp_path: Path) -> Store:
    """What one writer makes of the rows."""
    with StoreWriter(tmp_path / "single", provenance(), SHARD) as store:
        for one in SAMPLES.values():
            store.add(one)
    return Store(tmp_path / "single")


def open_ledger(tmp_path: Path, rows_path: Path, most: int = 0) -> Ledger:
    return Ledger(tmp_path / "shared", provenance(), rows_path, SHARD, most)


def draft(ledger: Ledger, worker: str, claim: Claim) -> Shard:
    samples = [encode(SAMPLES[row.row_id], ledger.provenance) for row in claim.rows]
    return write_shard(ledger.path / draft_name(worker, claim.number), samples, ledger.provenance)


def work(ledger: Ledger, worker: str) -> None:
    while (claim := ledger.take(worker)) is not None:
        ledger.publish(worker, claim.number, draft(ledger, worker, claim), {})


def take(ledger: Ledger, worker: str) -> Claim:
    claim = ledger.take(worker)
    assert claim is not None
    return claim


def files(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir() if file.name != "writer.lock"}


def test_the_files_are_those_of_a_single_writer(tmp_path: Path, rows_path: Path, single: Store) -> None:
    """Byte by byte, with a worker that dies holding two claims, one of them written and not handed over."""
    ledger = open_ledger(tmp_path, rows_path)
    first = take(ledger, "a")
    second = take(ledger, "b")
    take(ledger, "a")
    ledger.publish("b", second.number, draft(ledger, "b", second), {})
    draft(ledger, "a", first)
    assert [0, 2] == ledger.give_back("a")
    work(ledger, "c")

    assert ([], 0) == ledger.close()
    assert files(single.path) == files(ledger.path)


def test_a_worker_that_was_thought_dead_changes_nothing(tmp_path: Path, rows_path: Path, single: Store) -> None:
    ledger = open_ledger(tmp_path, rows_path)
    claim = take(ledger, "a")
    late = draft(ledger, "a", claim)
    ledger.give_back("a")
    work(ledger, "b")
    ledger.publish("a", claim.number, late, {})

    ledger.close()
    assert files(single.path) == files(ledger.path)


def test_a_ledger_that_was_killed_goes_on(tmp_path: Path, rows_path: Path) -> None:
    """What it had published stays; what lay there unpublished is removed and made again."""
    ledger = open_ledger(tmp_path, rows_path)
    claim = take(ledger, "a")
    ledger.publish("a", claim.number, draft(ledger, "a", claim), {})
    draft(ledger, "a", take(ledger, "a"))
    with pytest.raises(StoreError, match="rows"):
        ledger.close()
    published = files(ledger.path)

    again = open_ledger(tmp_path, rows_path)
    work(again, "b")
    again.close()
    store = Store(again.path)
    store.verify()
    assert sorted(SAMPLES) == sorted(store.ids)
    assert published["shard-000000.safetensors"] == files(again.path)["shard-000000.safetensors"]


def test_refused_rows_are_counted_and_limited(tmp_path: Path, rows_path: Path) -> None:
    """As a single writer does it: listed, not tried again, and one too many is an error."""
    ledger = open_ledger(tmp_path, rows_path, most=1)
    claim = take(ledger, "a")
    bad, *good = claim.rows
    ledger.publish("a", claim.number, draft(ledger, "a", Claim(claim.number, tuple(good))), {bad.row_id: "NaN"})
    claim = take(ledger, "a")
    with pytest.raises(StoreError, match="finite"):
        ledger.publish("a", claim.number, None, {row.row_id: "NaN" for row in claim.rows})
    with pytest.raises(StoreError):
        ledger.close()

    again = open_ledger(tmp_path, rows_path, most=1)
    work(again, "b")
    assert 1 == again.close()[1]
    assert sorted(SAMPLES.keys() - {bad.row_id}) == sorted(Store(again.path).ids)


def test_one_ledger_at_a_time(tmp_path: Path, rows_path: Path) -> None:
    ledger = open_ledger(tmp_path, rows_path)
    with pytest.raises(StoreError, match="writing to the store"):
        open_ledger(tmp_path, rows_path)
    with pytest.raises(StoreError, match="no worker left"):
        ledger.close()

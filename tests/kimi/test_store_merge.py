"""One store out of several, and what a store says of itself on the command line."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from store_samples import check, provenance, sample, write
from typer.testing import CliRunner

from vllm_compat import StoreError
from vllm_compat.kimi.cli import app
from vllm_compat.kimi.store import Sample, Store, StoreWriter
from vllm_compat.kimi.store_merge import merge


def test_replicas_become_one_store(tmp_path: Path) -> None:
    """Every sample once, whole; one that two replicas made is counted."""
    write(tmp_path / "a", 0, 20)
    write(tmp_path / "b", 15, 40)
    assert {"samples": 40, "doubled": 5} == merge(tmp_path / "all", [tmp_path / "a", tmp_path / "b"])
    check(Store(tmp_path / "all"), 40)
    Store(tmp_path / "all").verify()
    check(Store(tmp_path / "a"), 20)
    # A second time, and after an interruption: nothing is added.
    assert {"samples": 40, "doubled": 5} == merge(tmp_path / "all", [tmp_path / "a", tmp_path / "b"])
    check(Store(tmp_path / "all"), 40)


def test_an_interrupted_merge_goes_on(tmp_path: Path) -> None:
    """What it published before stays."""
    write(tmp_path / "a", 0, 20)
    merge(tmp_path / "all", [tmp_path / "a"])
    write(tmp_path / "b", 20, 30)
    (tmp_path / "all" / ".tmp-shard-000099.safetensors.1").write_bytes(b"half")
    assert {"samples": 30, "doubled": 0} == merge(tmp_path / "all", [tmp_path / "a", tmp_path / "b"])
    check(Store(tmp_path / "all"), 30)


def test_fp8_is_copied_bit_for_bit(tmp_path: Path) -> None:
    """Not decoded and encoded again; the error that `stat` says stays that of the states."""
    where = provenance(dtype="float8_e4m3fn", finals="loss")
    for name, numbers in (("a", range(8)), ("b", range(8, 12))):
        with StoreWriter(tmp_path / name, where, 2000) as writer:
            for i in numbers:
                writer.add(sample(i))
    merge(tmp_path / "all", [tmp_path / "a", tmp_path / "b"])
    both = [*Store(tmp_path / "a"), *Store(tmp_path / "b")]
    for expected, found in zip(both, Store(tmp_path / "all"), strict=True):
        torch.testing.assert_close(expected.hidden_states, found.hidden_states, rtol=0, atol=0, equal_nan=True)
    merge(tmp_path / "again", [tmp_path / "a"])
    assert Store(tmp_path / "a").quantisation_error == Store(tmp_path / "again").quantisation_error


def test_other_rows_are_welcome_another_model_is_not(tmp_path: Path) -> None:
    """The rows' fingerprint becomes one of all of them; anything else that differs is named."""
    write(tmp_path / "a", 0, 5)
    for name, changes in (("rows", {"rows_fingerprint": "x" * 64}), ("model", {"model_fingerprint": "x" * 64})):
        with StoreWriter(tmp_path / name, provenance(**changes), 1000) as writer:
            writer.add(sample(7))
    merge(tmp_path / "all", [tmp_path / "a", tmp_path / "rows"])
    assert Store(tmp_path / "all").provenance.rows_fingerprint not in ("r" * 64, "x" * 64)
    with pytest.raises(StoreError, match=r"model_fingerprint: xx.* / mm"):
        merge(tmp_path / "other", [tmp_path / "a", tmp_path / "model"])
    assert not (tmp_path / "other" / "index.json").exists()


def test_one_id_for_two_rows_is_refused(tmp_path: Path) -> None:
    """Two data sets that number their conversations from 0: taking one of each would lose rows in silence."""
    write(tmp_path / "a", 0, 5)
    with StoreWriter(tmp_path / "b", provenance(), 1000) as writer:
        writer.add(dataclasses.replace(sample(9), sample_id=sample(3).sample_id))
    with pytest.raises(StoreError, match=r"conversation-3/0.*other tokens"):
        merge(tmp_path / "all", [tmp_path / "a", tmp_path / "b"])


def test_a_damaged_source_is_refused(tmp_path: Path) -> None:
    """Its shard is named; nothing of it is taken over with a new checksum."""
    write(tmp_path / "a", 0, 5)
    flip(tmp_path / "a/shard-000000.safetensors")
    with pytest.raises(StoreError, match="shard-000000"):
        merge(tmp_path / "all", [tmp_path / "a"])
    assert len(Store(tmp_path / "all")) == 0


def flip(shard: Path) -> None:
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)


def call(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["store", *map(str, arguments)])
    return result.exit_code, result.output


def test_commands(tmp_path: Path) -> None:
    """verify, stat, merge and repair of a store by its path; exit code 1 and the shard's name when damaged."""
    write(tmp_path / "a", 0, 20)
    code, said = call("verify", tmp_path / "a")
    assert code == 0
    assert "20 samples" in said
    assert "all as written" in said
    assert (0, "40 samples, 0 doubled\n") == call("merge", tmp_path / "all", tmp_path / "a", _second(tmp_path))
    flip(tmp_path / "a/shard-000001.safetensors")
    code, said = call("verify", tmp_path / "a")
    assert code == 1
    assert "shard-000001" in said
    assert f"vllm-compat kimi store repair {tmp_path / 'a'}" in said.replace("\n", " ")
    code, said = call("repair", tmp_path / "a")
    assert code == 0
    assert "set aside shard-000001" in said
    assert "all as written" in said
    write(tmp_path / "a", 0, 20)
    check(Store(tmp_path / "a"), 20)
    (tmp_path / "a/index.json").write_text("{")
    code, said = call("verify", tmp_path / "a")
    assert code == 1
    assert "store repair" in said
    code, said = call("repair", tmp_path / "a")
    assert code == 0
    assert "made index.json again" in said
    check(Store(tmp_path / "a"), 20)


def _second(tmp_path: Path) -> Path:
    write(tmp_path / "b", 20, 40)
    return tmp_path / "b"


def test_stat(tmp_path: Path) -> None:
    """Counts, bytes per token, the fp8 error per aux boundary; --json for programs."""
    with StoreWriter(tmp_path / "s", provenance(dtype="float8_e4m3fn"), 10**6) as writer:
        for i in (6, 13):
            made = sample(i)
            writer.add(Sample(made.sample_id, made.token_ids, made.loss_mask, made.hidden_states))
    code, said = call("stat", tmp_path / "s", "--json")
    numbers = json.loads(said)
    assert code == 0
    assert {"shards": 1, "samples": 2, "tokens": 14, "final states": 14}.items() <= numbers.items()
    assert {"shortest": 7, "median": 7, "longest": 7} == numbers["tokens per sample"]
    assert ["2", "4", "5"] == list(numbers["relative fp8 error"])
    assert all(0.01 < error < 0.04 for error in numbers["relative fp8 error"].values())
    assert provenance(dtype="float8_e4m3fn").to_json() == numbers["provenance"]
    assert "float8_e4m3fn" in call("stat", tmp_path / "s")[1]
    assert call("stat", tmp_path / "nowhere")[0] == 1

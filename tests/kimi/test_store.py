"""The sample store: what goes in comes out, and nothing wrong gets in."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from store_samples import HIDDEN, LAYERS, as_stored, check, in_dtype, provenance, sample, write

from vllm_compat import StoreError
from vllm_compat.kimi.dataset import collate
from vllm_compat.kimi.store import Provenance, Sample, Store, StoreWriter, repair


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    shard_bytes=st.integers(1, 20_000),
    reopen=st.sets(st.integers(0, 11)),
    dtype=st.sampled_from(["bfloat16", "float16", "float32"]),
    finals=st.sampled_from(["all", "loss"]),
)
def test_round_trip(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[int],
    shard_bytes: int,
    reopen: set[int],
    dtype: str,
    finals: str,
) -> None:
    """Any lengths, any shard size, closed and reopened at any point: the same tensors, bit for bit, in
    order; final states where they are asked for.
    """
    path = tmp_path_factory.mktemp("store")
    made = [in_dtype(sample(i, length), dtype) for i, length in enumerate(lengths)]
    where = provenance(dtype=dtype, finals=finals)
    writer = StoreWriter(path, where, shard_bytes)
    for i, item in enumerate(made):
        if i in reopen:
            writer.close()
            writer = StoreWriter(path, where, shard_bytes)
            assert {s.sample_id for s in made[:i]} == writer.done
        writer.add(item)
    writer.close()
    store = Store(path)
    assert {
        "shards": len(store.shards),
        "samples": len(made),
        "tokens": sum(lengths),
    }.items() <= store.verify().items()
    assert lengths == store.lengths
    assert [s.sample_id for s in made] == store.ids
    for expected, found in zip(made, store, strict=True):
        assert expected.sample_id == found.sample_id
        assert torch.equal(expected.token_ids, found.token_ids)
        assert torch.equal(expected.loss_mask, found.loss_mask)
        assert expected.hidden_states.dtype == found.hidden_states.dtype
        states = as_stored(expected, finals)
        torch.testing.assert_close(states, found.hidden_states, rtol=0, atol=0, equal_nan=True)


def test_final_states_are_kept_where_the_next_token_carries_loss(tmp_path: Path) -> None:
    """Those are what chains need as teachers (`dataset.collate`), and no more is on disk."""
    mask = torch.tensor([0, 0, 1, 1, 0, 1], dtype=torch.uint8)
    item = dataclasses.replace(sample(0, 6), loss_mask=mask)
    with StoreWriter(tmp_path, provenance(finals="loss"), 10**6) as writer:
        writer.add(item)
    with safe_open(tmp_path / "shard-000000.safetensors", "pt") as file:
        assert [1, 2, 4] == file.get_tensor("final_positions").tolist()
        assert torch.equal(item.hidden_states[[1, 2, 4], -1], file.get_tensor("final_states"))
        assert (6, len(LAYERS) - 1, HIDDEN) == tuple(file.get_slice("hidden_states").get_shape())
    batch = collate([Store(tmp_path)[0]], 4)
    assert torch.equal(collate([item], 4).finals, batch.finals)
    assert not batch.finals.isnan().any()


def test_fp8_halves_the_bytes_and_says_its_error(tmp_path: Path) -> None:
    """Aux states in e4m3 with a scale per 128 values, final states as they were; the error is that of reading back."""
    generator = torch.Generator().manual_seed(0)
    # Channels of very different size, as a residual stream has them; a group of zeros; a width that is no multiple.
    size = torch.cat((torch.full((128,), 1e-3), torch.full((128,), 30.0), torch.zeros(128), torch.full((16,), 1.0)))
    states = (torch.randn(50, 3, 400, generator=generator) * size).bfloat16()
    ids = torch.arange(50, dtype=torch.int32)
    item = Sample("a/0", ids, torch.ones(50, dtype=torch.uint8), states)
    where = provenance(layers=(2, 4, 8), hidden_size=400, dtype="float8_e4m3fn")
    with StoreWriter(tmp_path, where, 10**6) as writer:
        writer.add(item)
    store = Store(tmp_path)
    store.verify()
    found = store[0].hidden_states
    assert torch.equal(states[:, -1], found[:, -1])
    assert torch.equal(states[:, :, 256:384], found[:, :, 256:384])
    for channels in (slice(0, 128), slice(128, 256), slice(384, 400)):
        aux = states[:, :-1, channels].float()
        error = (found[:, :-1, channels].float() - aux).norm() / aux.norm()
        assert 0.01 < float(error) < 0.04  # 3 bits of mantissa
    errors = [
        float((found[:, i].float() - states[:, i].float()).norm() / states[:, i].float().norm()) for i in range(2)
    ]
    assert store.quantisation_error == pytest.approx(errors, rel=1e-2)
    with safe_open(tmp_path / "shard-000000.safetensors", "pt") as file:
        assert (50, 2, 4) == tuple(file.get_slice("hidden_states_scale").get_shape())
        assert torch.float8_e4m3fn == file.get_tensor("hidden_states").dtype


def test_layout_on_disk(tmp_path: Path) -> None:
    """The format of docs/store.md: what a reader with safetensors and json alone finds."""
    write(tmp_path, 0, 3, shard_bytes=10**6)
    index = json.loads((tmp_path / "index.json").read_text())
    assert index["format"] == 2
    assert index["provenance"]["layers"] == list(LAYERS)
    (shard,) = index["shards"]
    content = (tmp_path / "shard-000000.safetensors").read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    lengths = [len(sample(i).token_ids) for i in range(3)]
    assert {
        "file": "shard-000000.safetensors",
        "bytes": len(content),
        "checksum": hashlib.sha256(xxhash.xxh3_128_digest(content[start:])).hexdigest(),
        "header_sha256": hashlib.sha256(content[:start]).hexdigest(),
        "samples": 3,
        "tokens": sum(lengths),
        "quantisation": None,
    } == shard
    with safe_open(tmp_path / shard["file"], "pt") as file:
        metadata = file.metadata()
        assert index["provenance"] == json.loads(metadata["provenance"])
        assert shard["checksum"] == metadata["checksum"]
        for i, item in enumerate(json.loads(metadata["samples"])):
            rows = slice(item["start"], item["start"] + item["length"])
            assert sample(i).sample_id == item["id"]
            for name in ("token_ids", "loss_mask", "hidden_states"):
                assert torch.equal(getattr(sample(i), name), file.get_slice(name)[rows])
    assert sum(map(len, load_file(tmp_path / shard["file"]).values())) == 3 * sum(lengths)


def test_the_index_does_not_grow_with_the_samples(tmp_path: Path) -> None:
    """It is written anew with every shard."""
    write(tmp_path / "few", 0, 10, shard_bytes=10**6)
    write(tmp_path / "many", 0, 200, shard_bytes=10**6)
    few, many = ((tmp_path / name / "index.json").stat().st_size for name in ("few", "many"))
    assert many < few + 10


def test_shards_are_full_before_the_next_one(tmp_path: Path) -> None:
    """A shard holds at least shard_bytes of states, except the last."""
    write(tmp_path, 0, 40, shard_bytes=3000)
    sizes = [shard.tokens * len(LAYERS) * HIDDEN * 2 for shard in Store(tmp_path).shards]
    assert len(sizes) > 3
    assert all(size >= 3000 for size in sizes[:-1])
    assert all(size < 3000 + 7 * len(LAYERS) * HIDDEN * 2 for size in sizes)


def test_reading_a_sample_reads_only_its_bytes(tmp_path: Path) -> None:
    """The tensor that comes back owns its span of the shard, not the whole file."""
    write(tmp_path, 0, 50, shard_bytes=10**6)
    states = Store(tmp_path)[3].hidden_states
    assert states.untyped_storage().nbytes() == states.nbytes


def test_a_store_can_be_sent_to_a_worker(tmp_path: Path) -> None:
    """Data loader workers get a pickled copy; open maps do not travel."""
    write(tmp_path, 0, 5)
    store = Store(tmp_path)
    check(store, 5)
    check(pickle.loads(pickle.dumps(store)), 5)


def test_the_writer_takes_tensors_over_without_a_copy(tmp_path: Path) -> None:
    """From capture to disk the states are not copied again in memory."""
    item = sample(3)
    with StoreWriter(tmp_path, provenance(), 10**6) as writer:
        writer.add(item)
        assert item.hidden_states.data_ptr() == writer._buffered[0].hidden_states.data_ptr()


@pytest.mark.parametrize("cut", ["rows", "rows, layers and channels"])
def test_a_view_of_a_bigger_buffer_is_stored_alone(tmp_path: Path, cut: str) -> None:
    """States cut out of a batch are stored as the sample that they are, and do not keep the batch in memory."""
    whole = sample(6)
    length = len(whole.token_ids)
    if cut == "rows":
        buffer = torch.zeros(length + 9, len(LAYERS), HIDDEN, dtype=torch.bfloat16)
        view = buffer[4 : 4 + length]
    else:
        buffer = torch.zeros(length, len(LAYERS) + 2, HIDDEN + 5, dtype=torch.bfloat16)
        view = buffer[:, 1:-1, 2:-3]
    view.copy_(whole.hidden_states)
    with StoreWriter(tmp_path, provenance(), 10**6) as writer:
        writer.add(Sample(whole.sample_id, whole.token_ids, whole.loss_mask, view))
        buffer.zero_()
    assert torch.equal(whole.hidden_states, Store(tmp_path)[0].hidden_states)


def _changed(**changes: Any) -> Sample:
    item = sample(6)
    fields = {name: getattr(item, name) for name in ("sample_id", "token_ids", "loss_mask", "hidden_states")}
    return Sample(**{**fields, **changes})


def _with(value: float) -> Sample:
    item = sample(6)
    item.hidden_states[4, 2, 1] = value
    return item


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (_with(float("nan")), "first at token 4, boundary 5"),
        (_with(float("inf")), "NaN or infinite"),
        (_changed(hidden_states=sample(6).hidden_states[:, :3]), r"not \(7, 4, 16\)"),
        (_changed(hidden_states=sample(6).hidden_states[1:]), r"not \(7, 4, 16\)"),
        (_changed(hidden_states=sample(6).hidden_states.float()), "float32"),
        (_changed(token_ids=sample(6).token_ids.long()), "int64"),
        (_changed(loss_mask=sample(6).loss_mask.bool()), "bool"),
        (_changed(loss_mask=sample(6).loss_mask[1:]), "6 entries"),
        (sample(6, 0), "no tokens"),
        (sample(1), "already"),
        (sample(2), "already"),
    ],
)
def test_a_bad_sample_is_refused_by_name_and_the_store_goes_on(tmp_path: Path, bad: Sample, message: str) -> None:
    """NaN, wrong shapes and types, an id that is there (on disk or still buffered): StoreError naming the
    sample; the samples around it are stored.
    """
    write(tmp_path, 0, 2)
    with StoreWriter(tmp_path, provenance(), 10**6) as writer:
        writer.add(sample(2))
        with pytest.raises(StoreError, match=message) as caught:
            writer.add(bad)
        assert bad.sample_id in caught.value.asked
        writer.add(sample(3))
    check(Store(tmp_path), 4)


def test_done_grows_with_every_shard(tmp_path: Path) -> None:
    """`.done` is what is on disk, also within one writer; a buffered sample is not in it."""
    with StoreWriter(tmp_path, provenance(), 1) as writer:
        writer.add(sample(0))
        writer.flush()
        assert {sample(0).sample_id} == writer.done == set(Store(tmp_path).ids)
        with pytest.raises(StoreError, match="already"):
            writer.add(sample(0))
        writer.shard_bytes = 10**9
        writer.add(sample(1))
        assert sample(1).sample_id not in writer.done


def test_other_provenance_is_refused_with_both_values(tmp_path: Path) -> None:
    """States of another model, release or layer set must not be mixed in."""
    write(tmp_path, 0, 2)
    with pytest.raises(StoreError) as caught:
        StoreWriter(tmp_path, provenance(vllm_version="0.33.0", layers=(1, 4, 5, 8)), 1000)
    assert "vllm_version: 0.32.0 / 0.33.0" in caught.value.found
    assert "layers: [2, 4, 5, 8] / [1, 4, 5, 8]" in caught.value.found
    assert "rows_fingerprint" not in caught.value.found
    write(tmp_path, 0, 3)  # the refusal let go of the lock
    check(Store(tmp_path), 3)


@pytest.mark.parametrize("layers", [(2, 4, 5, 7), (2, 4, 5), (8, 2), (2, 2, 8), ()])
def test_the_final_boundary_must_be_last(layers: tuple[int, ...]) -> None:
    """Without the state after all layers there is no teacher; the input of the last layer (N-1) is not it."""
    with pytest.raises(StoreError, match="final boundary 8 last"):
        provenance(layers=layers)


def test_provenance_survives_json() -> None:
    """All fields, and a missing or unknown one is refused."""
    value = provenance().to_json()
    assert provenance() == Provenance.from_json(json.loads(json.dumps(value)))
    assert provenance().differences(Provenance.from_json(value)) == ""
    with pytest.raises(StoreError, match="unknown: \\['extra'\\]"):
        Provenance.from_json({**value, "extra": 1})


def test_an_empty_store_and_no_store(tmp_path: Path) -> None:
    """A store without samples is a store; a directory without an index is none."""
    write(tmp_path / "empty", 0, 0)
    assert len(Store(tmp_path / "empty")) == 0
    assert Store(tmp_path / "empty").verify()["samples"] == 0
    with pytest.raises(StoreError, match="run extract"):
        Store(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", '{"format": 1}', "{"])
def test_an_index_of_another_format_is_refused(tmp_path: Path, text: str) -> None:
    """Not a KeyError."""
    (tmp_path / "index.json").write_text(text)
    with pytest.raises(StoreError):
        Store(tmp_path)


def test_an_unknown_sample_is_named(tmp_path: Path) -> None:
    """by_id says which id is not there."""
    write(tmp_path, 0, 2)
    with pytest.raises(StoreError, match="'nobody/0'"):
        Store(tmp_path).by_id("nobody/0")


def test_a_truncated_shard_is_found_at_once(tmp_path: Path) -> None:
    """Opening compares sizes, so a cut file never gives a short sample."""
    write(tmp_path, 0, 9)
    shard = tmp_path / "shard-000001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    for action in (Store, lambda path: StoreWriter(path, provenance(), 1000)):
        with pytest.raises(StoreError, match="truncated") as caught:
            action(tmp_path)
        assert "shard-000001" in caught.value.asked


def test_a_missing_shard_is_found_at_once(tmp_path: Path) -> None:
    """The index names a file that is not there."""
    write(tmp_path, 0, 9)
    (tmp_path / "shard-000000.safetensors").unlink()
    with pytest.raises(StoreError, match="missing"):
        Store(tmp_path)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_flipped_bit_is_found_by_verify(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Header, metadata, ids or states: one bit in any place of a shard is reported with the shard's name."""
    path = tmp_path_factory.mktemp("store")
    write(path, 0, 6)
    shard = path / data.draw(st.sampled_from([shard.file for shard in Store(path).shards]))
    content = bytearray(shard.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= 1 << data.draw(st.integers(0, 7))
    shard.write_bytes(content)
    with pytest.raises(StoreError) as caught:
        Store(path).verify()
    assert shard.name in caught.value.asked


def test_repair_sets_damaged_shards_aside_and_their_samples_are_made_again(tmp_path: Path) -> None:
    """Nothing is deleted; the rest of the store stays; the next writer knows what to make."""
    write(tmp_path, 0, 30)
    before = Store(tmp_path)
    bad = before.shards[1]
    shard = tmp_path / bad.file
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    (tmp_path / before.shards[2].file).unlink()
    said = repair(tmp_path)
    assert len(said) == 2
    assert bytes(content) == shard.with_name(shard.name + ".damaged").read_bytes()
    left = {place.id for damaged in before.shards[1:3] for place in damaged.samples}
    assert set(before.ids) - set(Store(tmp_path).ids) == left
    write(tmp_path, 0, 30)
    check(Store(tmp_path), 30)
    assert repair(tmp_path) == []


def test_the_examples_of_the_documentation_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/store.md: a sample with safetensors and json alone, and the checksum of a shard of several pieces."""
    where = provenance(hidden_size=4096)
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(300 + i, 4, 4096, generator=generator).bfloat16() for i in range(4)]  # of 9.8 MB
    with StoreWriter(tmp_path, where, 10**9) as writer:
        for i, made in enumerate(states):
            ids = torch.arange(i, i + len(made), dtype=torch.int32)
            writer.add(Sample(f"conversation-{i}/0", ids, torch.ones(len(made), dtype=torch.uint8), made))
    text = (Path(__file__).parents[2] / "docs" / "store.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    found: dict[str, Any] = {}
    for block in text.split("```python\n")[1:]:
        exec(block.split("```")[0], found)
    assert found["one"]["id"] == "conversation-3/0"
    assert torch.equal(torch.arange(3, 306, dtype=torch.int32), found["token_ids"])
    assert torch.equal(states[3], found["states"])
    assert Store(tmp_path).shards[0].checksum == found["checksum"]
    assert Store(tmp_path).verify()["samples"] == 4

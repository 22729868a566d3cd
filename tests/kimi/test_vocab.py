"""The draft vocabulary."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_compat.errors import ConfigError, DataError
from vllm_compat.kimi.vocab import VocabMap, build_vocab, count_loss_tokens


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_tables_agree(data: st.DataObject) -> None:
    """d2t (offsets) and t2d (mask) name the same ascending ids; specials are in; the rest is the most
    frequent."""
    counts = torch.tensor(data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=30).filter(any)))
    special = data.draw(st.sets(st.integers(0, len(counts) - 1), max_size=4))
    size = data.draw(st.integers(max(1, len(special)), len(counts) + 2))
    made = build_vocab(counts, size, special)
    ids = made.target_ids.tolist()

    assert min(size, len(counts)) == len(ids) == len(set(ids))
    assert sorted(ids) == ids == made.t2d.nonzero().flatten().tolist()
    assert special <= set(ids)
    assert list(range(len(ids))) == made.draft_ids[made.target_ids].tolist()
    assert float(counts[ids].sum() / counts.sum()) == pytest.approx(made.coverage)
    outside = [int(counts[i]) for i in range(len(counts)) if i not in ids]
    inside = [int(counts[i]) for i in ids if i not in special]
    if outside and inside:
        assert max(outside) <= min(inside)


def test_full_vocabulary_is_the_identity() -> None:
    """Offsets 0, everything marked, coverage 1."""
    made = build_vocab(torch.tensor([3, 0, 1]), 5, [])

    assert made.is_full
    assert [0, 0, 0] == made.d2t.tolist()
    assert 1.0 == made.coverage


def test_ties_and_unseen_tokens_go_by_id() -> None:
    """The map is a function of the counts: ties to the lower id, unseen tokens fill up from the lowest."""
    assert [0, 2, 4] == build_vocab(torch.tensor([0, 0, 7, 0, 7]), 3, []).target_ids.tolist()


def test_round_trip_and_fingerprint(tmp_path: Path) -> None:
    """save and load are inverse, coverage included; the fingerprint tells maps apart."""
    made = build_vocab(torch.tensor([1, 5, 2, 9]), 2, [])
    made.save(tmp_path / "vocab.safetensors")
    back = VocabMap.load(tmp_path / "vocab.safetensors")

    assert torch.equal(made.d2t, back.d2t)
    assert torch.equal(made.t2d, back.t2d)
    assert made.coverage == back.coverage
    assert made.fingerprint() == back.fingerprint() != build_vocab(torch.tensor([9, 5, 2, 1]), 2, []).fingerprint()


def test_a_torn_file_is_refused(tmp_path: Path) -> None:
    """Tables that do not belong together, or no file, say what to do."""
    made = build_vocab(torch.tensor([1, 5, 2, 9]), 2, [])
    VocabMap(made.d2t, made.t2d.roll(1), 1.0).save(tmp_path / "bad.safetensors")

    with pytest.raises(DataError, match="stage 'vocab' again"):
        VocabMap.load(tmp_path / "bad.safetensors")
    with pytest.raises(DataError, match="run the stage 'vocab' first"):
        VocabMap.load(tmp_path / "none.safetensors")


def test_only_loss_tokens_count() -> None:
    """Prompt tokens are not drafted, so they do not compete."""
    counts = count_loss_tokens([([0, 1, 1, 2], [0, 0, 1, 1]), ([3, 3], [1, 1])], 5)

    assert [0, 1, 1, 2, 0] == counts.tolist()
    with pytest.raises(DataError, match="id 7"):
        count_loss_tokens([([7], [1])], 5)


def test_impossible_requests() -> None:
    """No loss tokens, too small for the specials, specials of another tokenizer."""
    counts = torch.tensor([1, 1, 1])
    with pytest.raises(DataError, match="every loss mask is zero"):
        build_vocab(torch.zeros(3, dtype=torch.int64), 2, [])
    with pytest.raises(ConfigError, match="at least 2"):
        build_vocab(counts, 1, [0, 1])
    with pytest.raises(ConfigError, match="below the target's vocabulary size 3"):
        build_vocab(counts, 2, [3])

"""Next tokens from stored final states, with three tensors of the target."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from store_samples import provenance, sample

from vllm_compat.kimi import rebuild
from vllm_compat.kimi.rebuild import check_stored, kept_positions, predict
from vllm_compat.kimi.store import Sample, Store, StoreWriter
from vllm_compat.kimi.target import TargetHead
from vllm_compat.kimi.verify import Verified

VOCAB, HIDDEN = 40, 16


@pytest.fixture
def head(tmp_path: Path) -> TargetHead:
    """From the checkpoint of a quantised target: its experts are packed integers, which nobody reads."""
    generator = torch.Generator().manual_seed(0)
    model = tmp_path / "model"
    model.mkdir()
    config = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": 8, "rms_norm_eps": 1e-5}
    (model / "config.json").write_text(json.dumps(config))
    tensors = {
        "model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN, generator=generator).bfloat16(),
        "model.norm.weight": torch.rand(HIDDEN, generator=generator).bfloat16(),
        "lm_head.weight": torch.randn(VOCAB, HIDDEN, generator=generator).bfloat16(),
        "model.layers.1.mlp.experts.0.up_proj.weight_packed": torch.zeros(8, 2, dtype=torch.int32),
        "model.layers.1.mlp.experts.0.up_proj.weight_scale": torch.ones(8, 1).bfloat16(),
    }
    save_file(tensors, model / "model.safetensors")
    return TargetHead.load(model).to("cpu", torch.float32)


def likeliest(head: TargetHead, states: torch.Tensor) -> torch.Tensor:
    normed = states.float() * torch.rsqrt(states.float().square().mean(-1, keepdim=True) + head.eps) * head.norm
    return (normed @ head.lm_head.T).log_softmax(-1)


def test_blocks_change_nothing(head: TargetHead, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real vocabulary does not fit into memory for a whole row."""
    finals = sample(0, 33).hidden_states[:, -1]
    asked = torch.randint(0, VOCAB, (33, 2), generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(rebuild, "_BLOCK", 5 * VOCAB)
    found = predict(head, finals, asked)
    expected = likeliest(head, finals)
    torch.testing.assert_close(expected.gather(1, asked), found.asked)
    assert torch.equal(expected.argmax(-1), found.best)
    torch.testing.assert_close(expected.amax(-1), found.best_logprob)


@pytest.mark.parametrize(("finals", "dtype"), [("all", "bfloat16"), ("loss", "bfloat16"), ("loss", "float8_e4m3fn")])
def test_rows_that_the_target_wrote_are_predicted(head: TargetHead, tmp_path: Path, finals: str, dtype: str) -> None:
    """Every loss token is the likeliest by the state before it; by the state of another boundary it is not."""
    where = provenance(dtype=dtype, finals=finals)
    mask = torch.tensor([0] * 20 + [1] * 30, dtype=torch.uint8)
    for name, boundary in (("right", -1), ("early", -2)):
        with StoreWriter(tmp_path / name, where, 10**6) as writer:
            for i in range(4):
                made = sample(i, 50)
                ids = made.token_ids % VOCAB
                ids[1:] = likeliest(head, made.hidden_states[:-1, boundary]).argmax(-1)
                writer.add(Sample(made.sample_id, ids.int(), mask, made.hidden_states))
    right = check_stored(Store(tmp_path / "right"), head)
    assert (4, 120, 1.0) == (right.rows, right.loss_tokens, right.agreement)
    early = check_stored(Store(tmp_path / "early"), head)
    assert early.agreement < 0.3
    assert early.logprob < right.logprob - 1


def test_positions_without_a_stored_state_are_left_out(tmp_path: Path) -> None:
    """And the last token of a row, which has no next one."""
    mask = torch.tensor([0, 0, 1, 1, 0, 1], dtype=torch.uint8)
    made = sample(0, 6)
    for finals, expected in (("all", [0, 1, 2, 3, 4]), ("loss", [1, 2, 4])):
        with StoreWriter(tmp_path / finals, provenance(finals=finals), 10**6) as writer:
            writer.add(Sample(made.sample_id, made.token_ids, mask, made.hidden_states))
        assert expected == kept_positions(Store(tmp_path / finals)[0]).tolist()


@pytest.mark.parametrize(
    ("changes", "ok"),
    [
        ({}, True),
        ({"mean_abs_logprob_error": 0.06}, False),
        ({"next_token_agreement": 0.98}, False),
        ({"parity": {"in one batch": 0.01, "in chunks": 0.051}}, False),
        ({"parity": {"in one batch": 0.01, "in chunks": None}}, True),
        ({"mean_abs_logprob_error": float("nan")}, False),
        ({"parity": {"in one batch": float("nan")}}, False),
    ],
)
def test_one_number_beyond_its_limit_is_enough(changes: dict[str, object], ok: bool) -> None:
    """NaN is beyond any limit; what vLLM cannot do here is not."""
    numbers: dict[str, object] = {
        "rows": 4,
        "tokens": 100,
        "mean_abs_logprob_error": 0.01,
        "max_abs_logprob_error": 0.5,
        "tolerance": 0.05,
        "next_token_agreement": 1.0,
        "parity_tolerance": 0.05,
        "parity": {"in one batch": 0.01},
    }
    found = Verified(**{**numbers, **changes})  # type: ignore[arg-type]
    assert ok == found.ok
    assert len(found.lines()) == 2 + len(found.parity)

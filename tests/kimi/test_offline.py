"""The acceptance length without an engine, against a replay that follows serving token by token."""

from __future__ import annotations

import pytest
import torch
from draft_heads import AUX, VOCAB, Row, Rows, draft_config, random_draft, random_rows, target_head, vocab_map
from test_ttt import Served

from vllm_compat.errors import DataError
from vllm_compat.kimi.draft import Draft, init_draft
from vllm_compat.kimi.offline import estimate_acceptance


def easy_rows(draft: Draft, count: int = 5) -> Rows:
    """Rows whose answers the head often guesses: mostly its own greedy continuation."""
    ids = vocab_map().target_ids.tolist()
    rows = random_rows(count, longest=24, answer=14)
    generator = torch.Generator().manual_seed(1)
    for row in rows.rows:
        tokens = row.token_ids.tolist()
        for t in range(len(tokens) - 2):
            if row.loss_mask[t + 2] and torch.rand(1, generator=generator) < 0.8:
                stream = Served(draft).propose(tokens[: t + 2], row.hidden_states[: t + 1, : len(AUX)], [])[0]
                tokens[t + 2] = ids[int(draft.logits(stream[None]).argmax())]
        row.token_ids = torch.tensor(tokens, dtype=torch.int32)
    return rows


def serve(draft: Draft, row: Row, drafts: int) -> tuple[list[int], list[int]]:
    """Accepted drafts and emitted tokens of each target step, as vLLM does it for a target that says
    `row`."""
    ids, answer = vocab_map().target_ids.tolist(), row.token_ids.tolist()
    t = int(row.loss_mask.nonzero()[0]) - 1  # the prefill emitted x_{t+1}
    accepted, emitted = [], []
    while t + 2 < len(answer):
        proposed: list[int] = []
        for _ in range(drafts):
            streams = Served(draft).propose(answer[: t + 2], row.hidden_states[: t + 1, : len(AUX)], proposed)
            proposed.append(ids[int(draft.logits(streams[-1][None]).argmax())])
        count = 0
        while count < drafts and t + 2 + count < len(answer) and proposed[count] == answer[t + 2 + count]:
            count += 1
        accepted.append(count)
        emitted.append(min(count + 1, len(answer) - t - 2))
        t += count + 1
    return accepted, emitted


@pytest.mark.parametrize("drafts", [1, 3])
def test_equals_serving(drafts: int) -> None:
    """Acceptance length, per-position rates and tokens per step of a token-by-token replay with a draft KV
    cache."""
    draft = random_draft()
    rows = easy_rows(draft)
    got = estimate_acceptance(draft, vocab_map(), rows, drafts)
    steps = [serve(draft, row, drafts) for row in rows.rows]
    accepted = [count for one in steps for count in one[0]]
    emitted = [count for one in steps for count in one[1]]

    assert sum(accepted) > len(accepted) / 3, "the rows are too hard to tell anything"
    assert len(accepted) == got["steps"]
    assert 1 + sum(accepted) / len(accepted) == pytest.approx(got["acceptance_length"])
    assert sum(emitted) / len(emitted) == pytest.approx(got["tokens_per_step"])
    expected = [sum(count > k for count in accepted) / len(accepted) for k in range(drafts)]
    assert expected == pytest.approx(got["per_position"])
    assert sum(int(row.loss_mask.sum()) - 1 for row in rows.rows) == sum(emitted)


def test_batching_changes_nothing() -> None:
    """One row at a time or all together."""
    draft = random_draft()
    rows = easy_rows(draft)

    assert estimate_acceptance(draft, vocab_map(), rows, 3, batch_tokens=1) == estimate_acceptance(
        draft, vocab_map(), rows, 3, batch_tokens=10_000
    )


def test_bounds() -> None:
    """A head that is always right emits k + 1 tokens per step, one that is never right 1."""
    target, vocab = target_head(), vocab_map()
    draft = init_draft(draft_config(), target, vocab, 0)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.zero_()
    always = int(vocab.target_ids[0])  # all logits are 0: argmax is draft id 0
    rows = random_rows(4, longest=30, answer=13)
    for row in rows.rows:
        row.token_ids = torch.full_like(row.token_ids, always)
    best = estimate_acceptance(draft, vocab, rows, 3)
    for row in rows.rows:
        row.token_ids = torch.full_like(row.token_ids, VOCAB - 1)
    worst = estimate_acceptance(draft, vocab, rows, 3)

    assert [1.0, 0.0] == [worst["acceptance_length"], sum(worst["per_position"])]
    assert best["acceptance_length"] > 3
    assert best["accepted"] == sum(int(row.loss_mask.sum()) - 1 for row in rows.rows) - (
        best["tokens_per_step"] * best["steps"] - best["accepted"]
    )


def test_nothing_to_draft() -> None:
    """Rows without answers are an error, not a division by zero."""
    row = random_rows(1)[0]
    row.loss_mask = torch.zeros_like(row.loss_mask)

    with pytest.raises(DataError, match="acceptance length"):
        estimate_acceptance(random_draft(), vocab_map(), Rows([row]), 3)

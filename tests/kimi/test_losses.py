"""Loss, acceptance numbers, and the alignment of rows."""

from __future__ import annotations

import pytest
import torch
from draft_heads import Row, Rows, random_draft, random_rows, target_head, vocab_map

from vllm_compat.errors import DataError
from vllm_compat.kimi import losses
from vllm_compat.kimi.dataset import BatchOrder, chain_starts, collate, require_chains
from vllm_compat.kimi.losses import Teacher, TeacherHead, step_stats
from vllm_compat.kimi.training_step import TrainingStep, summarise, weighted_loss


class Fixed(torch.nn.Module):
    """A "head" whose logits are its input."""

    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        return logits


def teacher_of(whole: torch.Tensor, kept: list[int]) -> Teacher:
    inside = torch.tensor([int(i) in kept for i in whole.argmax(-1)])
    return Teacher(whole[:, kept], whole.logsumexp(-1), inside)


def test_divergence_of_a_perfect_head_is_zero() -> None:
    """A head with the teacher's logits has no loss and full agreement; a shifted one has."""
    whole = torch.randn(7, 10)
    teacher = teacher_of(whole, list(range(10)))
    index, text = torch.arange(7), whole.argmax(-1)
    right = step_stats(Fixed(), whole, teacher, index, text)
    wrong = step_stats(Fixed(), whole.roll(1, 0), teacher, index, text)

    assert 0 == pytest.approx(float(right.kl_sum), abs=1e-6)
    assert (7, 7, 7) == (int(right.scored), int(right.agree), int(right.hits.sum()))
    assert 7 == pytest.approx(float(right.mass))
    assert float(wrong.kl_sum) > 0.1
    assert float(wrong.mass) < 7


def test_divergence_against_torch() -> None:
    """Forward KL over the draft vocabulary, teacher renormalised to it."""
    whole, head, kept = torch.randn(5, 10), torch.randn(5, 4), [1, 3, 6, 7]
    teacher = Teacher(whole[:, kept], whole.logsumexp(-1), torch.ones(5, dtype=torch.bool))
    got = step_stats(Fixed(), head, teacher, torch.arange(5), torch.zeros(5, dtype=torch.int64))
    p = whole.softmax(-1)[:, kept]
    expected = torch.nn.functional.kl_div(head.log_softmax(-1), p / p.sum(-1, keepdim=True), reduction="sum")

    torch.testing.assert_close(got.kl_sum, expected)
    torch.testing.assert_close(got.mass, torch.minimum(p, head.softmax(-1)).sum())


def test_positions_outside_the_draft_vocabulary() -> None:
    """They carry no loss and no gradient, even if infinite, but count in acceptance with agreement 0."""
    whole = torch.zeros(2, 4)
    whole[0, 3], whole[0, 1], whole[1, 0] = 9.0, 1.0, 9.0  # draft id 1 is only the best that can be drafted
    head = torch.zeros(2, 3, requires_grad=True)
    with torch.no_grad():
        head[0, 0] = float("-inf")
    stats = step_stats(Fixed(), head, teacher_of(whole, [0, 1, 2]), torch.arange(2), torch.tensor([-1, 0]))
    stats.kl_sum.backward()

    assert 1 == int(stats.scored)
    assert 1 == int(stats.agree)
    assert [False, True] == stats.hits.tolist()
    assert torch.isfinite(stats.kl_sum)
    assert head.grad is not None
    assert 0 < float(head.grad[1].abs().sum())


def test_head_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large vocabulary goes through lm_head in recomputed blocks: same numbers, same gradients."""
    torch.manual_seed(0)
    head, states = torch.nn.Linear(8, 6), torch.randn(9, 8)
    teacher = teacher_of(torch.randn(5, 12), [0, 2, 4, 6, 8, 10])
    index, text = torch.arange(9) % 5, torch.arange(9) % 6

    def run() -> tuple[losses.StepStats, torch.Tensor]:
        head.zero_grad()
        stats = step_stats(head, states, teacher, index, text)
        stats.kl_sum.backward()
        return stats, head.weight.grad.clone()

    whole, gradient = run()
    monkeypatch.setattr(losses, "_MAX_LOGITS", 12)
    blocks, blocked_gradient = run()
    for name in ("kl_sum", "scored", "mass", "agree", "hits"):
        torch.testing.assert_close(getattr(blocks, name), getattr(whole, name))
    torch.testing.assert_close(blocked_gradient, gradient)


def test_teacher_head() -> None:
    """norm then lm_head of the target, restricted to the draft vocabulary, the normaliser over the whole."""
    target, vocab = target_head(), vocab_map()
    states = torch.randn(60, 32, generator=torch.Generator().manual_seed(0))
    teacher = TeacherHead(target, vocab, torch.float32)(states)
    whole = target.logits(states)

    torch.testing.assert_close(teacher.logits, whole[:, vocab.t2d])
    torch.testing.assert_close(teacher.log_total, whole.logsumexp(-1))
    assert vocab.t2d[whole.argmax(-1)].tolist() == teacher.in_vocab.tolist()
    assert 0 < int(teacher.in_vocab.sum()) < 60


def test_alignment() -> None:
    """Chains start where vLLM drafts: never for the answer's first token, never past the end or into another
    turn."""
    mask = torch.tensor([0, 0, 0, 1, 1, 1, 1])
    starts, depth = chain_starts(mask, 3)

    assert [2, 3, 4] == starts.tolist()  # x_4, x_5, x_6 are drafted; x_3 is the prefill's own
    assert [3, 2, 1] == depth.tolist()
    assert [] == chain_starts(torch.tensor([0, 0, 1, 0, 1]), 2)[0].tolist()
    assert ([0, 1], [2, 1]) == tuple(x.tolist() for x in chain_starts(torch.tensor([0, 1, 1, 1, 0, 1]), 4))


def test_collated_teacher_positions() -> None:
    """Step k of a chain at t is taught by the final state at t + 1 + k of its own row."""
    rows = random_rows(5)
    batch = collate(rows.rows, 4)
    for chain, (row, start, depth) in enumerate(zip(batch.rows, batch.starts, batch.depth, strict=True)):
        for k in range(int(depth)):
            expected = rows[int(row)].hidden_states[int(start) + 1 + k, -1]
            assert torch.equal(expected, batch.finals[batch.teacher[chain, k]])
    assert sum(rows.lengths) == batch.tokens
    chains = zip(batch.rows.tolist(), batch.starts.tolist(), batch.depth.tolist(), strict=True)
    assert len(batch.finals) == len({(row, start + k) for row, start, depth in chains for k in range(depth)})


def test_batch_is_the_sum_of_its_rows() -> None:
    """Statistics and loss sums of a padded batch are those of its rows one by one."""
    module = TrainingStep(random_draft(), target_head(), vocab_map(), 3, torch.float32)
    rows = random_rows(5)
    sums, statistics = module(collate(rows.rows, 3))
    alone = [module(collate([row], 3)) for row in rows.rows]

    torch.testing.assert_close(sums, torch.stack([one[0] for one in alone]).sum(0), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(statistics, torch.stack([one[1] for one in alone]).sum(0), rtol=1e-5, atol=1e-5)


def test_weighting() -> None:
    """Means per step, weighted by decay^k, over the weights' sum: independent of how many positions a step
    has."""
    loss = weighted_loss(torch.tensor([10.0, 9.0]), torch.tensor([5, 3]), decay=0.5)

    assert (2.0 + 0.5 * 3.0) / 1.5 == pytest.approx(float(loss))
    assert 0 == float(weighted_loss(torch.zeros(2), torch.zeros(2), decay=0.5))


def test_summary() -> None:
    """positions 4, 3 of them scored; agreement and acceptance over all 4, KL over the scored."""
    made = summarise(torch.tensor([[4, 3, 6.0, 2.0, 2, 2], [2, 2, 2.0, 1.0, 1, 1]]), decay=1.0)

    assert [2.0, 1.0] == made["kl"]
    assert [0.5, 0.5] == made["agreement"]
    assert 1 + 3 / 4 == made["acceptance_length"]
    assert 5 / 6 == pytest.approx(made["in_vocab"])
    assert 1.5 == made["loss"]


def test_every_rank_gets_a_batch_though_there_is_but_one() -> None:
    """Or the others would wait for it for ever."""
    epochs = [BatchOrder((5, 5), batch_tokens=128, seed=1, world=8, rank=rank).epoch(0) for rank in range(8)]
    assert [1] * 8 == [len(epoch) for epoch in epochs]


def test_order_depends_on_seed_and_epoch_only() -> None:
    """Every row once per epoch, in a batch within the budget; another epoch or seed gives another order."""
    lengths = tuple(7 + i * 13 % 50 for i in range(100))
    order = BatchOrder(lengths, batch_tokens=128, seed=1, window=2)
    torch.manual_seed(9)
    first = order.epoch(0)
    torch.rand(3)

    assert first == order.epoch(0)
    assert first != order.epoch(1)
    assert first != BatchOrder(lengths, 128, seed=2, window=2).epoch(0)
    assert list(range(100)) == sorted(row for batch in first for row in batch)
    assert all(len(batch) * max(lengths[row] for row in batch) <= 128 for batch in first)


def test_ranks_share_the_work() -> None:
    """All ranks together see every row; each takes the same number of steps."""
    lengths = tuple(range(5, 40))
    whole = BatchOrder(lengths, 60, seed=0).epoch(0)
    ranks = [BatchOrder(lengths, 60, seed=0, rank=r, world=3).epoch(0) for r in range(3)]

    assert 1 == len({len(rank) for rank in ranks})
    assert {tuple(b) for b in whole} == {tuple(b) for rank in ranks for b in rank}


def test_a_mask_of_zeros_is_an_error() -> None:
    """Data without a single token to learn from (a template mismatch) stops with advice."""
    rows = [Row(r.sample_id, r.token_ids, torch.zeros_like(r.loss_mask), r.hidden_states) for r in random_rows(3).rows]

    with pytest.raises(DataError, match=r"zero.*markers"):
        require_chains(Rows(rows))
    require_chains(Rows([*rows, random_rows(1)[0]]))


def test_rows_without_chains_do_no_harm() -> None:
    """A batch of them has a zero loss with a gradient, not a NaN."""
    row = random_rows(1)[0]
    row.loss_mask = torch.zeros_like(row.loss_mask)
    module = TrainingStep(random_draft(), target_head(), vocab_map(), 2, torch.float32)
    sums, statistics = module(collate([row], 2))
    weighted_loss(sums, statistics[:, 1], 0.8).backward()

    assert 0 == float(sums.detach().sum())
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in module.draft.parameters())

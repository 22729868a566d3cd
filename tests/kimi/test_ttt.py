"""Training-time test computes what vLLM's proposer computes when it serves the head."""

from __future__ import annotations

import math

import pytest
import torch
from draft_heads import AUX, HIDDEN, TARGET, random_draft, random_rows, target_head, vocab_map

from vllm_compat.kimi import ttt
from vllm_compat.kimi.dataset import collate
from vllm_compat.kimi.draft import Draft
from vllm_compat.kimi.training_step import TrainingStep
from vllm_compat.kimi.ttt import Chains


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.pow(2).mean() + TARGET["rms_norm_eps"]).sqrt() * weight


def yarn_angle(pair: int, dim: int, position: int) -> float:
    """YaRN, written from the paper's formulas for one pair of features."""
    scaling = TARGET["rope_scaling"]
    base, factor, original = (
        TARGET["rope_theta"],
        scaling["factor"],
        scaling["original_max_position_embeddings"],
    )

    def turns_to_pair(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(turns_to_pair(scaling["beta_fast"])), 0)
    high = min(math.ceil(turns_to_pair(scaling["beta_slow"])), dim - 1)
    ramp = min(max((pair - low) / (high - low), 0.0), 1.0)
    frequency = base ** (-2 * pair / dim)
    return position * (frequency * (1 - ramp) + frequency / factor * ramp)


def mscale(m: float) -> float:
    return 0.1 * m * math.log(TARGET["rope_scaling"]["factor"]) + 1


def rotate(x: torch.Tensor, position: int, amplitude: float, interleaved: bool) -> torch.Tensor:
    """One head, one position, pair by pair."""
    dim, out = len(x), x.clone()
    for pair in range(dim // 2):
        i, j = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + dim // 2)
        cos, sin = (amplitude * f(yarn_angle(pair, dim, position)) for f in (math.cos, math.sin))
        out[i], out[j] = x[i] * cos - x[j] * sin, x[j] * cos + x[i] * sin
    return out


class Served:
    """vLLM's draft model and its KV cache for one request, one position at a time (deepseek_eagle3.py,
    llama_eagle3.py, llm_base_proposer.py, all 0.32.0), written straight from there and not from the
    trainer."""

    def __init__(self, draft: Draft) -> None:
        self.w = {name: tensor.detach() for name, tensor in draft.state_dict().items()}
        self.embed = draft.embed_tokens
        self.mla = draft.config.architecture == "mla"
        self.heads = draft.config.num_attention_heads
        self.cache: dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}

    def forward(self, token: int, hidden: torch.Tensor, position: int) -> torch.Tensor:
        """Writes the slot of `position`, attends to slots 0 … position, returns the stream before the last
        norm."""
        w, a = self.w, "midlayer.self_attn."
        embeds = norm(self.embed[token], w["midlayer.input_layernorm.weight"])
        x = torch.cat((embeds, norm(hidden, w["midlayer.hidden_norm.weight"])))
        if self.mla:
            nope, rope, v = (TARGET[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
            q_c = norm(w[a + "q_a_proj.weight"] @ x, w[a + "q_a_layernorm.weight"])
            q = (w[a + "q_b_proj.weight"] @ q_c).view(self.heads, nope + rope)
            latent = w[a + "kv_a_proj_with_mqa.weight"] @ x
            kv_c = norm(latent[: TARGET["kv_lora_rank"]], w[a + "kv_a_layernorm.weight"])
            kv = (w[a + "kv_b_proj.weight"] @ kv_c).view(self.heads, nope + v)
            amplitude = mscale(0.7) / mscale(1.0)
            k_pe = rotate(latent[TARGET["kv_lora_rank"] :], position, amplitude, interleaved=True)
            queries = [
                torch.cat((q[h, :nope], rotate(q[h, nope:], position, amplitude, interleaved=True)))
                for h in range(self.heads)
            ]
            keys = [torch.cat((kv[h, :nope], k_pe)) for h in range(self.heads)]
            values = [kv[h, nope:] for h in range(self.heads)]
            scale = (nope + rope) ** -0.5 * mscale(1.0) ** 2
        else:
            dim = TARGET["v_head_dim"]
            amplitude = mscale(0.7) / mscale(1.0)
            q, k, value = ((w[a + f"{name}_proj.weight"] @ x).view(self.heads, dim) for name in ("q", "k", "v"))
            queries = [rotate(row, position, amplitude, interleaved=False) for row in q]
            keys = [rotate(row, position, amplitude, interleaved=False) for row in k]
            values = list(value)
            scale = dim**-0.5
        self.cache[position] = (keys, values)
        attended = []
        for h in range(self.heads):
            slots = [self.cache[p] for p in range(position + 1)]
            weights = torch.stack([queries[h] @ slot[0][h] * scale for slot in slots]).softmax(0)
            attended.append(sum(weight * slot[1][h] for weight, slot in zip(weights, slots, strict=True)))
        stream = hidden + w[a + "o_proj.weight"] @ torch.cat(attended)
        y = norm(stream, w["midlayer.post_attention_layernorm.weight"])
        gate, up = w["midlayer.mlp.gate_proj.weight"] @ y, w["midlayer.mlp.up_proj.weight"] @ y
        return stream + w["midlayer.mlp.down_proj.weight"] @ (gate * gate.sigmoid() * up)

    def propose(self, tokens: list[int], aux: torch.Tensor, put: list[int]) -> list[torch.Tensor]:
        """Streams of the draft steps when the target has emitted `tokens` (one more than `aux` has rows) and
        `put` are the tokens taken for the drafts. Slots of earlier proposals are overwritten, as in vLLM."""
        for t in range(len(aux)):
            feature = self.w["fc.weight"] @ aux[t].flatten()
            hidden = self.forward(tokens[t + 1], feature, t)
        streams = [hidden]
        for k, token in enumerate(put, start=1):
            hidden = self.forward(token, hidden, len(aux) - 1 + k)
            streams.append(hidden)
        return streams


@pytest.mark.parametrize("architecture", ["mla", "llama"])
def test_chains_equal_serving(architecture: str) -> None:
    """Every step of every chain has the stream that the served head has at the same place."""
    draft, rows, steps = random_draft(architecture), random_rows(4), 4
    batch = collate(rows.rows, steps)
    chains = Chains(draft, batch.token_ids, batch.features, batch.rows, batch.starts)
    streams = [chains.hidden]
    for k in range(1, steps):
        place = (batch.starts + 1 + k).clamp(max=batch.token_ids.shape[1] - 1)
        chains.advance(batch.token_ids[batch.rows, place])
        streams.append(chains.hidden)
    compared = 0
    for chain, (row, start, depth) in enumerate(zip(batch.rows, batch.starts, batch.depth, strict=True)):
        sample, t = rows[int(row)], int(start)
        ids = sample.token_ids.tolist()
        expected = Served(draft).propose(
            ids[: t + 2], sample.hidden_states[: t + 1, : len(AUX)], ids[t + 2 : t + 1 + int(depth)]
        )
        for k, stream in enumerate(expected):
            torch.testing.assert_close(streams[k][chain], stream, atol=2e-5, rtol=2e-5)
            compared += 1
    assert int(batch.depth.sum()) == compared
    assert compared > 3 * steps


@pytest.mark.parametrize("architecture", ["mla", "llama"])
def test_training_scores_the_served_drafts(architecture: str) -> None:
    """Loss and acceptance of each training step are those of the served head's drafts against the target's
    next distribution: token, position, feature and teacher are all in line."""
    draft, rows, steps = random_draft(architecture), random_rows(4), 3
    target, vocab = target_head(), vocab_map()
    sums, statistics = TrainingStep(draft, target, vocab, steps, torch.float32)(collate(rows.rows, steps))
    expected = torch.zeros(steps, 6, dtype=torch.float64)
    for row in rows.rows:
        ids, first = row.token_ids.tolist(), int(row.loss_mask.nonzero()[0])
        for emitted in range(first, len(ids) - 1):  # the target has just emitted ids[emitted]
            drafted = ids[emitted + 1 :][:steps]
            streams = Served(draft).propose(ids[: emitted + 1], row.hidden_states[:emitted, : len(AUX)], drafted[:-1])
            right = True
            for k, (stream, token) in enumerate(zip(streams, drafted, strict=True)):
                p = target.logits(row.hidden_states[emitted + k, -1]).softmax(-1)
                q = draft.logits(stream).softmax(-1).detach()
                inside = bool(vocab.t2d[p.argmax()])
                renormalised = p[vocab.t2d] / p[vocab.t2d].sum()
                kl = (renormalised * (renormalised / q).log()).sum()
                best, shared = int(vocab.target_ids[q.argmax()]), torch.minimum(p[vocab.t2d], q).sum()
                right = right and best == token
                expected[k] += torch.tensor([1, inside, inside * kl, shared, best == int(p.argmax()), right])

    torch.testing.assert_close(statistics, expected, atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(sums.double(), expected[:, 2], atol=1e-3, rtol=1e-4)


def test_second_proposal_starts_clean() -> None:
    """Keys of rejected or accepted drafts do not reach the next proposal: chains at different starts are
    independent."""
    draft, sample = random_draft(), random_rows(1)[0]
    ids, aux = sample.token_ids.tolist(), sample.hidden_states[:, : len(AUX)]
    served = Served(draft)
    served.propose(ids[:5], aux[:4], [1, 2, 3])
    again = served.propose(ids[:7], aux[:6], ids[7:8])
    fresh = Served(draft).propose(ids[:7], aux[:6], ids[7:8])
    torch.testing.assert_close(torch.stack(again), torch.stack(fresh), atol=0, rtol=0)


def test_rows_and_padding_do_not_mix() -> None:
    """A row's chains are the same alone and beside longer rows; padding content has no influence."""
    draft, rows = random_draft(), random_rows(5)
    batch = collate(rows.rows, 1)
    together = Chains(draft, batch.token_ids, batch.features, batch.rows, batch.starts).hidden
    junk_ids, junk_features = batch.token_ids.clone(), batch.features.clone()
    for i, length in enumerate(rows.lengths):
        junk_ids[i, length:], junk_features[i, length:] = 7, 1e4
    junk = Chains(draft, junk_ids, junk_features, batch.rows, batch.starts).hidden
    torch.testing.assert_close(junk, together, atol=0, rtol=0)
    for i in range(len(rows)):
        one = collate([rows[i]], 1)
        alone = Chains(draft, one.token_ids, one.features, one.rows, one.starts).hidden
        torch.testing.assert_close(together[batch.rows == i], alone, atol=1e-5, rtol=1e-5)


def test_blocks_of_queries_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long rows are attended in recomputed blocks: same loss, same gradients."""

    def gradients() -> list[torch.Tensor]:
        draft = random_draft()
        module = TrainingStep(draft, target_head(), vocab_map(), 3, torch.float32)
        module(collate(random_rows(4).rows, 3))[0].sum().backward()
        return [parameter.grad for parameter in draft.parameters()]

    whole = gradients()
    monkeypatch.setattr(ttt, "_MAX_SCORES", 1)
    for blocked, expected in zip(gradients(), whole, strict=True):
        torch.testing.assert_close(blocked, expected, atol=1e-5, rtol=1e-4)


def test_kept_chains_go_on_unchanged() -> None:
    """Dropping chains does not disturb the others."""
    draft, batch = random_draft(), collate(random_rows(4).rows, 3)
    chosen = torch.arange(0, len(batch.rows), 2)
    tokens = torch.arange(len(batch.rows)) % 40
    every = Chains(draft, batch.token_ids, batch.features, batch.rows, batch.starts)
    some = Chains(draft, batch.token_ids, batch.features, batch.rows, batch.starts)
    every.advance(tokens)
    some.advance(tokens)
    some.keep(chosen)
    every.advance(tokens + 1)
    some.advance(tokens[chosen] + 1)
    torch.testing.assert_close(some.hidden, every.hidden[chosen], atol=1e-6, rtol=1e-6)
    assert (len(chosen), HIDDEN) == tuple(some.hidden.shape)

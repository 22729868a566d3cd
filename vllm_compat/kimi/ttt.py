"""Draft chains: what vLLM's proposer computes, for many start positions at once.

A chain starts at a position t of a row whose token x_{t+1} the target has just emitted (vLLM 0.32.0,
v1/spec_decode/llm_base_proposer.py, `propose`):

  step 0   feature(t), embedding of x_{t+1}, rope position t; attends to the step-0 keys of positions 0 … t
  step k   the head's own stream of step k-1, embedding of the token put at t+1+k, rope position t+k; attends
           to the step-0 keys of 0 … t and to the keys of its own steps 1 … k

The key that step k writes is seen by later steps of the same chain only: once the target has verified the
tokens, vLLM runs step 0 over them again with the target's features. So every chain is independent of the
others, and the whole of EAGLE-3's "training-time test" is: step-0 keys for all positions, and one extra
("diagonal") key per later step.

Cost. Keys and values of step 0 are needed at every position, but queries, MLP and lm_head at the chain starts
only; in a chat row these are the answer's tokens, often a tenth of the row. Everything per chain is therefore
a flat [M, …] tensor, and only the attention itself is laid out per row.
"""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint

from .draft import Draft

# Attention scores held at once (256 MiB in float32); more are computed in blocks of queries.
_MAX_SCORES = 1 << 26


class Chains:
    """M chains over a padded batch of rows, after step 0. `advance` does one more step.

    Args:
        draft: The head.
        token_ids: int64 [B, T], padded at the right with any valid id.
        features: [B, T, aux * H], the target's aux states in ascending boundary order.
        rows, starts: int64 [M], row and position t of each chain, t <= length of the row - 2, sorted by row.

    Attributes:
        hidden: [M, H], residual stream of the last step, before the final norm: `draft.logits(hidden)`
            predicts.
        step: 0 after construction.
    """

    def __init__(
        self,
        draft: Draft,
        token_ids: torch.Tensor,
        features: torch.Tensor,
        rows: torch.Tensor,
        starts: torch.Tensor,
    ) -> None:
        self.draft, self.rows, self.starts, self.step = draft, rows, starts, 0
        layer = draft.midlayer
        positions = torch.arange(token_ids.shape[1] - 1, device=token_ids.device)
        context = draft.fc(features[:, :-1])
        inputs = layer.attention_input(draft.embed(token_ids[:, 1:]), context)
        self._keys, self._values = layer.self_attn.keys_values(inputs, positions)
        self._own_keys: list[torch.Tensor] = []
        self._own_values: list[torch.Tensor] = []
        self._slots, self._slot_starts = _slots(rows, starts, len(token_ids))
        query = layer.self_attn.queries(inputs[rows, starts], starts)
        self.hidden = layer.finish(context[rows, starts], self._attend(query))

    def advance(self, tokens: torch.Tensor) -> None:
        """One step: `tokens` int64 [M] are the target ids put at position t + 1 + step."""
        self.step += 1
        layer = self.draft.midlayer
        positions = self.starts + self.step
        inputs = layer.attention_input(self.draft.embed(tokens), self.hidden)
        key, value = layer.self_attn.keys_values(inputs, positions)
        self._own_keys.append(key)
        self._own_values.append(value)
        query = layer.self_attn.queries(inputs, positions)
        self.hidden = layer.finish(self.hidden, self._attend(query))

    def keep(self, chosen: torch.Tensor) -> None:
        """Go on with the chains `chosen` (int64 indices, ascending) only."""
        self.rows, self.starts, self.hidden = self.rows[chosen], self.starts[chosen], self.hidden[chosen]
        self._slots = self._slots[chosen]
        self._own_keys = [key[chosen] for key in self._own_keys]
        self._own_values = [value[chosen] for value in self._own_values]

    def _attend(self, query: torch.Tensor) -> torch.Tensor:
        """[M, heads, dk] -> [M, heads, dv]."""
        rows, slots = self.rows, self._slots
        batch, width = self._slot_starts.shape
        padded = query.new_zeros(batch, width, *query.shape[1:])
        padded[rows, slots] = query
        # Scores in float32 whatever autocast makes of a sum: CUDA's keeps sums in float32, the CPU's does not.
        own = query.new_zeros(batch, width, query.shape[1], len(self._own_keys), dtype=torch.float32)
        if self._own_keys:
            own[rows, slots] = torch.stack(
                [(query * key).sum(-1, dtype=torch.float32) for key in self._own_keys], dim=-1
            )
        block = max(1, _MAX_SCORES // (batch * query.shape[1] * self._keys.shape[1]))
        parts = [
            self._attend_block(padded[:, i : i + block], own[:, i : i + block], self._slot_starts[:, i : i + block])
            if block >= width
            else checkpoint(
                self._attend_block,
                padded[:, i : i + block],
                own[:, i : i + block],
                self._slot_starts[:, i : i + block],
                use_reentrant=False,
            )
            for i in range(0, width, block)
        ]
        attended = torch.cat([part[0] for part in parts], dim=1)[rows, slots]
        weights = torch.cat([part[1] for part in parts], dim=1)[rows, slots]
        for step, value in enumerate(self._own_values):
            attended = attended + weights[..., step, None] * value
        return attended

    def _attend_block(
        self, query: torch.Tensor, own: torch.Tensor, starts: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Query [B, Q, h, dk], own scores [B, Q, h, k] -> base part [B, Q, h, dv], own weights."""
        scale = self.draft.midlayer.self_attn.scale
        scores = torch.einsum("bqhd,bthd->bqht", query, self._keys)
        visible = torch.arange(scores.shape[-1], device=starts.device) <= starts[..., None, None]
        scores = scores.masked_fill(~visible, float("-inf"))
        weights = (torch.cat((scores.float(), own), dim=-1) * scale).softmax(-1).to(query.dtype)
        base, diagonal = weights.split((scores.shape[-1], own.shape[-1]), dim=-1)
        return torch.einsum("bqht,bthd->bqhd", base, self._values), diagonal


def _slots(rows: torch.Tensor, starts: torch.Tensor, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each chain's index within its row, int64 [M], and the starts laid out per row, [B, Q].

    An unused slot gets start 0, so that it attends to something: an all-masked softmax is NaN, and NaN
    survives even where it is never read, in the gradient.
    """
    counts = torch.bincount(rows, minlength=batch)
    first = counts.cumsum(0) - counts
    slots = torch.arange(len(rows), device=rows.device) - first[rows]
    laid_out = starts.new_zeros(batch, max(1, int(counts.max())))
    laid_out[rows, slots] = starts
    return slots, laid_out

"""Grouped-query attention of an EAGLE-3 head: vLLM's LlamaAttention with a twice as wide input."""

from __future__ import annotations

import torch
from torch import nn

from .draft_config import DraftConfig
from .rope import cos_sin, rotate_halves


class LlamaAttention(nn.Module):
    """Projections only; `ttt.py` attends. x is [..., 2H] (normed embedding, normed feature)."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        width = 2 * config.hidden_size
        self.q_proj = nn.Linear(width, self.heads * head_dim, bias=False)
        self.k_proj = nn.Linear(width, self.kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(width, self.kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * head_dim, config.hidden_size, bias=False)

        self.scale = head_dim**-0.5
        self.amplitude = config.rope.llama_amplitude()
        frequencies = config.rope.inverse_frequencies(head_dim)
        self.register_buffer("inverse_frequencies", frequencies, persistent=False)

    def queries(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[..., heads, head_dim]."""
        return self._rotate(self.q_proj(x).unflatten(-1, (self.heads, -1)), positions)

    def keys_values(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Both [..., heads, head_dim]: a group's key and value are repeated for its query heads."""
        keys = self._rotate(self.k_proj(x).unflatten(-1, (self.kv_heads, -1)), positions)
        values = self.v_proj(x).unflatten(-1, (self.kv_heads, -1))
        group = self.heads // self.kv_heads
        return keys.repeat_interleave(group, dim=-2), values.repeat_interleave(group, dim=-2)

    def output(self, attended: torch.Tensor) -> torch.Tensor:
        """[..., heads, head_dim] -> [..., H]."""
        projected: torch.Tensor = self.o_proj(attended.flatten(-2))
        return projected

    def _rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return rotate_halves(x, *cos_sin(self.inverse_frequencies, positions, self.amplitude))

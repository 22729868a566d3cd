"""Multi-head latent attention of an EAGLE-3 head: vLLM's DeepseekV2MLAAttention with a twice as wide input.

Parameter names are the checkpoint's. vLLM stacks q_a_proj and kv_a_proj_with_mqa into one matrix when it
loads them.
"""

from __future__ import annotations

import torch
from torch import nn

from .draft_config import DraftConfig
from .layers import RMSNorm
from .rope import cos_sin, rotate_interleaved


class MlaAttention(nn.Module):
    """Projections only; `ttt.py` attends. x is [..., 2H] (normed embedding, normed feature)."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.heads = config.num_attention_heads
        self.kv_lora_rank = config.kv_lora_rank
        self.nope, self.rope_dim, self.v_dim = (
            config.qk_nope_head_dim,
            config.qk_rope_head_dim,
            config.v_head_dim,
        )
        width, query_width = 2 * config.hidden_size, self.heads * (self.nope + self.rope_dim)
        if config.q_lora_rank is None:
            self.q_proj = nn.Linear(width, query_width, bias=False)
        else:
            self.q_a_proj = nn.Linear(width, config.q_lora_rank, bias=False)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, config.rms_norm_eps)
            self.q_b_proj = nn.Linear(config.q_lora_rank, query_width, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(width, self.kv_lora_rank + self.rope_dim, bias=False)
        self.kv_a_layernorm = RMSNorm(self.kv_lora_rank, config.rms_norm_eps)
        self.kv_b_proj = nn.Linear(self.kv_lora_rank, self.heads * (self.nope + self.v_dim), bias=False)
        self.o_proj = nn.Linear(self.heads * self.v_dim, config.hidden_size, bias=False)

        self.scale = (self.nope + self.rope_dim) ** -0.5 * config.rope.mla_softmax_factor()
        self.amplitude = config.rope.mla_amplitude()
        frequencies = config.rope.inverse_frequencies(self.rope_dim)
        self.register_buffer("inverse_frequencies", frequencies, persistent=False)

    def queries(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[..., heads, nope + rope]."""
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))) if hasattr(self, "q_a_proj") else self.q_proj(x)
        q = q.unflatten(-1, (self.heads, -1))
        plain, rotary = q.split((self.nope, self.rope_dim), dim=-1)
        return torch.cat((plain, self._rotate(rotary, positions)), dim=-1)

    def keys_values(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[..., heads, nope + rope] and [..., heads, v]. The rotary part of a key is one for all heads."""
        latent, rotary = self.kv_a_proj_with_mqa(x).split((self.kv_lora_rank, self.rope_dim), dim=-1)
        expanded = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (self.heads, -1))
        plain, values = expanded.split((self.nope, self.v_dim), dim=-1)
        rotary = self._rotate(rotary.unsqueeze(-2), positions).expand(*plain.shape[:-1], self.rope_dim)
        return torch.cat((plain, rotary), dim=-1), values

    def output(self, attended: torch.Tensor) -> torch.Tensor:
        """[..., heads, v] -> [..., H]."""
        projected: torch.Tensor = self.o_proj(attended.flatten(-2))
        return projected

    def _rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return rotate_interleaved(x, *cos_sin(self.inverse_frequencies, positions, self.amplitude))

"""Rotary embedding of a draft head, as vLLM computes it from the config it is served with.

A head must rotate exactly like its target (TorchSpec PRs 54, 58 and 61 are three ways to miss that). What the
config says is read as transformers 5 and vLLM 0.32 read it: `rope_scaling` wins over `rope_parameters`,
`rope_theta` beside them fills a missing one, `type` is an old spelling of `rope_type`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from vllm_compat.errors import ConfigError

ROPE_KEYS = ("rope_parameters", "rope_scaling", "rope_theta", "max_position_embeddings")


@dataclass(frozen=True)
class Rope:
    """The normalised rope settings of a config; two configs that rotate alike give equal values.

    `kind` is "default" or "yarn". None means that the config leaves it to the consumer's default, which
    differs between vLLM's DeepSeek rotary (mscale 1, mscale_all_dim 0) and its plain YaRN.
    """

    kind: str
    theta: float
    factor: float = 1.0
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Rope:
        """Read a text config (a plain dict of config.json); ConfigError for what a draft cannot copy."""
        raw = config.get("rope_scaling") or config.get("rope_parameters") or {}
        kind = raw.get("rope_type", raw.get("type", "default"))
        theta = float(raw.get("rope_theta") or config.get("rope_theta") or 10000.0)
        if any(isinstance(value, Mapping) for value in raw.values()):
            kind = "one rope per layer type"
        if raw.get("partial_rotary_factor", config.get("partial_rotary_factor") or 1.0) != 1.0:
            kind = "partial rotary"
        if kind == "default":
            return cls(kind="default", theta=theta)
        if kind not in ("yarn", "deepseek_yarn"):
            raise ConfigError(
                asked="a draft head with the target's rotary embedding",
                needed="rope_type default or yarn",
                found=f"{kind} in {dict(raw)}",
                advice="train a head for a target with one of these, or extend vllm_compat/kimi/rope.py",
            )
        optional = {
            name: None if raw.get(name) is None else float(raw[name])
            for name in ("mscale", "mscale_all_dim", "attention_factor")
        }
        return cls(
            kind="yarn",
            theta=theta,
            factor=float(raw["factor"]),
            original_max_position=int(raw.get("original_max_position_embeddings") or config["max_position_embeddings"]),
            beta_fast=float(raw.get("beta_fast", 32)),
            beta_slow=float(raw.get("beta_slow", 1)),
            **optional,
        )

    def inverse_frequencies(self, dim: int) -> torch.Tensor:
        """float32 [dim / 2]. vLLM: rotary_embedding/deepseek_scaling_rope.py and yarn_scaling_rope.py."""
        powers = self.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
        if self.kind == "default":
            return 1.0 / powers
        low = max(math.floor(self._rotations_to_dim(self.beta_fast, dim)), 0)
        high: float = min(math.ceil(self._rotations_to_dim(self.beta_slow, dim)), dim - 1)
        if low == high:
            high += 0.001  # vLLM does the same against a division by zero
        ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
        keep = 1 - ramp  # 1 = extrapolate (fast dims), 0 = interpolate (slow dims)
        return (1.0 / (self.factor * powers)) * (1 - keep) + (1.0 / powers) * keep

    def _rotations_to_dim(self, rotations: float, dim: int) -> float:
        turns = self.original_max_position / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(self.theta))

    def mla_amplitude(self) -> float:
        """Factor on cos and sin in vLLM's DeepseekScalingRotaryEmbedding."""
        if self.kind == "default":
            return 1.0
        mscale = 1.0 if self.mscale is None else self.mscale
        return yarn_mscale(self.factor, mscale) / yarn_mscale(self.factor, self.mscale_all_dim or 0.0)

    def mla_softmax_factor(self) -> float:
        """Factor on the softmax scale of vLLM's DeepseekV2MLAAttention: mscale_all_dim's mscale, squared."""
        if self.kind == "default" or self.attention_factor == 1.0:
            return 1.0
        return yarn_mscale(self.factor, self.mscale_all_dim or 0.0) ** 2

    def llama_amplitude(self) -> float:
        """Factor on cos and sin in vLLM's YaRNScalingRotaryEmbedding (a Llama head has no softmax factor)."""
        if self.kind == "default":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return yarn_mscale(self.factor, self.mscale) / yarn_mscale(self.factor, self.mscale_all_dim)
        return yarn_mscale(self.factor, 1.0)


def yarn_mscale(factor: float, mscale: float) -> float:
    """vLLM: rotary_embedding/common.py, yarn_get_mscale."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def cos_sin(
    inverse_frequencies: torch.Tensor, positions: torch.Tensor, amplitude: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 cos and sin, each [*positions.shape, 1, dim / 2]: the 1 stands for the heads."""
    angles = positions.to(torch.float32)[..., None, None] * inverse_frequencies
    return angles.cos() * amplitude, angles.sin() * amplitude


def rotate_interleaved(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """GPT-J style, pairs (0, 1), (2, 3), …: DeepSeek and Kimi. x [..., heads, dim]."""
    even, odd = x[..., ::2].float(), x[..., 1::2].float()
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2).to(x.dtype)


def rotate_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """NeoX style, pairs (0, dim/2), (1, dim/2 + 1), …: Llama. x [..., heads, dim]."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)

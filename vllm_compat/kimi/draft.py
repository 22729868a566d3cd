"""The EAGLE-3 draft head in plain PyTorch: vLLM's function, under the checkpoint's parameter names.

Sources, vLLM 0.32.0: models/deepseek_eagle3.py and models/llama_eagle3.py. At position t the head takes

- the target's aux states at t, concatenated in ascending boundary order and projected by `fc` (3H -> H): the
  feature;
- the embedding of the *next* token x_{t+1},

and predicts x_{t+2}. Plain configs leave norm_before_residual, norm_output and fc_norm off, so the residual
stream starts from the feature before `hidden_norm`, and the next step's feature is the stream *before* the
last norm.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from .draft_config import DraftConfig
from .draft_llama import LlamaAttention
from .draft_mla import MlaAttention
from .layers import GatedMLP, RMSNorm

if TYPE_CHECKING:
    from .target import TargetHead
    from .vocab import VocabMap


class Midlayer(nn.Module):
    """The head's only decoder layer. Between `attention_input` and `finish`, ttt.py attends."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.self_attn = MlaAttention(config) if config.architecture == "mla" else LlamaAttention(config)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def attention_input(self, embeds: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """[..., H] and [..., H] -> [..., 2H], the embedding first."""
        return torch.cat((self.input_layernorm(embeds), self.hidden_norm(hidden)), dim=-1)

    def finish(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Residual stream after the layer, [..., H]. `attended` is [..., heads, dim]."""
        stream = hidden + self.self_attn.output(attended)
        output: torch.Tensor = stream + self.mlp(self.post_attention_layernorm(stream))
        return output


class Draft(nn.Module):
    """An EAGLE-3 head. Its `state_dict()` is what vLLM loads, without d2t, t2d and the (target's) embedding.

    Args:
        config: Shape of the head.
        embed_tokens: The target's embedding [V, H], frozen, not part of the state dict. May be left out
            (None) where only the names and shapes matter.
    """

    embed_tokens: torch.Tensor

    def __init__(self, config: DraftConfig, embed_tokens: torch.Tensor | None = None) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.aux_layers) * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = Midlayer(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        table = torch.empty(0, config.hidden_size) if embed_tokens is None else embed_tokens.detach()
        self.register_buffer("embed_tokens", table, persistent=False)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Target token ids -> [..., H] in the dtype of the head's weights."""
        return nn.functional.embedding(token_ids, self.embed_tokens).to(self.fc.weight.dtype)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Residual stream [..., H] -> logits over the draft vocabulary [..., Vd]."""
        scores: torch.Tensor = self.lm_head(self.norm(hidden))
        return scores


def init_draft(config: DraftConfig, target: TargetHead, vocab: VocabMap, seed: int) -> Draft:
    """The head before its first optimiser step; the *untrained head* of an evaluation is exactly this.

    - `lm_head` and `norm` are copies of the target's rows of the draft vocabulary and of its final norm;
    - `fc` passes the last aux state through and ignores the others, so that the untrained head reads the
      target's own residual stream three layers early (a "logit lens": it knows x_{t+1}, not x_{t+2});
    - the other matrices are normal with standard deviation 1/sqrt(fan_in), norms are ones.

    The result depends on `seed` and the arguments only, not on the global random state. Weights are float32.
    """
    draft = Draft(config, target.embed_tokens)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            if parameter.dim() == 2 and name not in ("fc.weight", "lm_head.weight"):
                parameter.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator)
        draft.fc.weight.zero_()
        draft.fc.weight[:, -config.hidden_size :] = torch.eye(config.hidden_size)
        draft.norm.weight.copy_(target.norm)
        draft.lm_head.weight.copy_(target.lm_head[vocab.target_ids])
    return draft

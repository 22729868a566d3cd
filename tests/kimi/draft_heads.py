"""Tiny targets, heads and rows for the trainer's tests: random numbers, shapes of a few dozen."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from vllm_compat.kimi.draft import Draft, init_draft
from vllm_compat.kimi.draft_config import DraftConfig
from vllm_compat.kimi.target import TargetHead
from vllm_compat.kimi.vocab import VocabMap, build_vocab

VOCAB, HIDDEN, LAYERS, AUX = 48, 32, 8, (2, 4, 5)

# Kimi's keys, everything small. mscale differs from mscale_all_dim so that both rope amplitudes are not 1.
TARGET: dict[str, Any] = {
    "model_type": "kimi_k2",
    "hidden_size": HIDDEN,
    "intermediate_size": 40,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 6,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rope_theta": 50000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.0,
    },
}


@dataclass
class Row:
    """As store.Sample."""

    sample_id: str
    token_ids: torch.Tensor
    loss_mask: torch.Tensor
    hidden_states: torch.Tensor


@dataclass
class Rows:
    """As store.Store."""

    rows: list[Row] = field(default_factory=list)

    @property
    def lengths(self) -> list[int]:
        return [len(row.token_ids) for row in self.rows]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        return self.rows[index]


def target_head(seed: int = 0, **changes: Any) -> TargetHead:
    generator = torch.Generator().manual_seed(seed)
    config = {**TARGET, **changes}
    vocab, hidden = config["vocab_size"], config["hidden_size"]
    return TargetHead(
        config=config,
        embed_tokens=torch.randn(vocab, hidden, generator=generator),
        norm=1 + 0.1 * torch.randn(hidden, generator=generator),
        lm_head=torch.randn(vocab, hidden, generator=generator),
        eps=config["rms_norm_eps"],
    )


def vocab_map(size: int = 30, total: int = VOCAB) -> VocabMap:
    """Every second token, roughly, so that draft ids and target ids differ."""
    counts = torch.arange(total) * 7 % 11 + 1
    return build_vocab(counts, size, special_ids=[total - 1])


def draft_config(architecture: str = "mla", draft_vocab_size: int = 30, **changes: Any) -> DraftConfig:
    return DraftConfig.from_target(
        {**TARGET, **changes}, architecture=architecture, aux_layers=AUX, draft_vocab_size=draft_vocab_size
    )


def random_draft(architecture: str = "mla", seed: int = 0, **changes: Any) -> Draft:
    """Every parameter random and of natural size, norms included, so that no term of the head is
    negligible."""
    config = draft_config(architecture, **changes)
    draft = init_draft(config, target_head(**changes), vocab_map(config.draft_vocab_size), seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                parameter.normal_(0, parameter.shape[1] ** -0.5, generator=generator)
    return draft


def random_rows(
    count: int = 6, seed: int = 0, longest: int = 20, answer: int = 6, ids: torch.Tensor | None = None
) -> Rows:
    """Rows whose last `answer` or fewer tokens carry loss. `ids`: the tokens to draw from."""
    generator = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=generator))

    rows = []
    for i in range(count):
        length = number(8, longest)
        answered = number(3, min(answer, length - 3))
        tokens = torch.randint(0, VOCAB, (length,), generator=generator, dtype=torch.int32)
        if ids is not None:
            tokens = ids[torch.randint(0, len(ids), (length,), generator=generator)].to(torch.int32)
        mask = torch.zeros(length, dtype=torch.uint8)
        mask[length - answered :] = 1
        states = torch.randn(length, len(AUX) + 1, HIDDEN, generator=generator)
        rows.append(Row(f"c{i}/0", tokens, mask, states))
    return Rows(rows)

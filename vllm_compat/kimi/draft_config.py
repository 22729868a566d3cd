"""The shape of a draft head, taken from its target's text config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from vllm_compat.errors import ConfigError

from .rope import ROPE_KEYS, Rope

ARCHITECTURES = {"mla": "Eagle3DeepseekV2ForCausalLM", "llama": "LlamaForCausalLMEagle3"}
# "deepseek_v3" would make vLLM turn an MLA head into an MTP model and refuse it; "kimi_k2" it leaves alone.
MODEL_TYPES = {"mla": "kimi_k2", "llama": "llama"}


@dataclass(frozen=True)
class DraftConfig:
    """Everything that fixes the head's function and tensor shapes. Lengths are features, not bytes.

    `aux_layers` are boundaries of the target, ascending, without the final one. `rope_config` holds the rope
    keys of the target's config.json as they stand there; `rope` is what they mean. The MLA fields are unused
    by a Llama head and `num_key_value_heads`, `head_dim` by an MLA head.
    """

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float
    aux_layers: tuple[int, ...]
    target_num_layers: int
    rope_config: dict[str, Any]
    q_lora_rank: int | None = None
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    num_key_value_heads: int = 0
    head_dim: int = 0

    @property
    def rope(self) -> Rope:
        return Rope.from_config(self.rope_config)

    @classmethod
    def from_target(
        cls,
        target: Mapping[str, Any],
        *,
        architecture: str,
        aux_layers: Sequence[int],
        draft_vocab_size: int,
        intermediate_size: int | None = None,
        num_heads: int | None = None,
    ) -> DraftConfig:
        """A head for a target whose text config is `target` (a plain dict of config.json).

        `intermediate_size` and `num_heads` None take the target's (dense MLP, attention heads). ConfigError
        when the target has no MLA for an MLA head, or an activation that vLLM's draft modules do not have.
        """
        if architecture not in ARCHITECTURES:
            raise ConfigError(
                asked=f"train.architecture = {architecture!r}",
                needed="one of " + ", ".join(ARCHITECTURES),
            )
        if target.get("hidden_act", "silu") != "silu":
            raise ConfigError(
                asked="a draft head for this target",
                needed="hidden_act silu, the only one of vLLM's draft MLPs",
                found=str(target["hidden_act"]),
            )
        heads = num_heads or int(target["num_attention_heads"])
        shared: dict[str, Any] = {
            "architecture": architecture,
            "hidden_size": int(target["hidden_size"]),
            "intermediate_size": intermediate_size or int(target["intermediate_size"]),
            "num_attention_heads": heads,
            "vocab_size": int(target["vocab_size"]),
            "draft_vocab_size": min(draft_vocab_size, int(target["vocab_size"])),
            "rms_norm_eps": float(target.get("rms_norm_eps", 1e-6)),
            "aux_layers": tuple(int(k) for k in aux_layers),
            "target_num_layers": int(target["num_hidden_layers"]),
            "rope_config": {key: target[key] for key in ROPE_KEYS if target.get(key) is not None},
        }
        mla = {"kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"}
        if architecture == "llama":
            return cls(**shared, **_llama_heads(target, heads))
        missing = sorted(key for key in mla if not target.get(key))
        if missing:
            raise ConfigError(
                asked="train.architecture = 'mla'",
                needed="a target with multi-head latent attention",
                found=f"no {', '.join(missing)} in the config (model_type {target.get('model_type')})",
                advice="set train.architecture = 'llama'",
            )
        rank = target.get("q_lora_rank")
        sizes: dict[str, Any] = {key: int(target[key]) for key in mla}
        return cls(**shared, **sizes, q_lora_rank=None if rank is None else int(rank))

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; `from_dict` is the inverse."""
        return {**asdict(self), "aux_layers": list(self.aux_layers)}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> DraftConfig:
        return cls(**{**value, "aux_layers": tuple(value["aux_layers"])})


def _llama_heads(target: Mapping[str, Any], heads: int) -> dict[str, Any]:
    """A Llama head's head_dim, always written out: hidden / heads is 112 for Kimi, and 128 is meant."""
    if target.get("kv_lora_rank"):
        return {"head_dim": int(target["v_head_dim"]), "num_key_value_heads": heads}
    head_dim = target.get("head_dim") or int(target["hidden_size"]) // int(target["num_attention_heads"])
    groups = int(target.get("num_key_value_heads") or heads)
    return {"head_dim": int(head_dim), "num_key_value_heads": groups if heads % groups == 0 else heads}

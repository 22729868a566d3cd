"""The draft head's shape, names and initialisation. (That it computes what vLLM computes: test_ttt.py.)"""

from __future__ import annotations

import math

import pytest
import torch
from draft_heads import AUX, HIDDEN, TARGET, draft_config, random_rows, target_head, vocab_map

from vllm_compat.errors import ConfigError
from vllm_compat.kimi.dataset import collate
from vllm_compat.kimi.draft import Draft, init_draft
from vllm_compat.kimi.draft_config import DraftConfig
from vllm_compat.kimi.rope import Rope
from vllm_compat.kimi.ttt import Chains

SHARED = {
    "fc.weight": (HIDDEN, 3 * HIDDEN),
    "midlayer.mlp.gate_proj.weight": (40, HIDDEN),
    "midlayer.mlp.up_proj.weight": (40, HIDDEN),
    "midlayer.mlp.down_proj.weight": (HIDDEN, 40),
    "midlayer.input_layernorm.weight": (HIDDEN,),
    "midlayer.hidden_norm.weight": (HIDDEN,),
    "midlayer.post_attention_layernorm.weight": (HIDDEN,),
    "norm.weight": (HIDDEN,),
    "lm_head.weight": (30, HIDDEN),
}
MLA = {
    "q_a_proj": (12, 2 * HIDDEN),
    "q_a_layernorm": (12,),
    "q_b_proj": (2 * 16, 12),
    "kv_a_proj_with_mqa": (16 + 8, 2 * HIDDEN),
    "kv_a_layernorm": (16,),
    "kv_b_proj": (2 * (8 + 6), 16),
    "o_proj": (HIDDEN, 2 * 6),
}
LLAMA = {
    "q_proj": (12, 2 * HIDDEN),
    "k_proj": (12, 2 * HIDDEN),
    "v_proj": (12, 2 * HIDDEN),
    "o_proj": (HIDDEN, 12),
}


@pytest.mark.parametrize(("architecture", "attention"), [("mla", MLA), ("llama", LLAMA)])
def test_state_dict_is_the_checkpoint(architecture: str, attention: dict[str, tuple[int, ...]]) -> None:
    """Names and shapes are those of the published heads; the embedding is not among them."""
    expected = SHARED | {f"midlayer.self_attn.{name}.weight": shape for name, shape in attention.items()}
    state = Draft(draft_config(architecture), torch.zeros(48, HIDDEN)).state_dict()

    assert expected == {name: tuple(tensor.shape) for name, tensor in state.items()}


def test_mla_without_query_compression() -> None:
    """q_lora_rank null (DeepSeek-V2-Lite's way) gives one q_proj."""
    names = Draft(draft_config(q_lora_rank=None)).state_dict()

    assert "midlayer.self_attn.q_proj.weight" in names
    assert not any("q_a" in name or "q_b" in name for name in names)


def test_untrained_head_reads_the_last_aux_state() -> None:
    """Before any step, fc passes the last aux state through, and norm and lm_head are the target's own."""
    target, vocab = target_head(), vocab_map()
    draft = init_draft(draft_config(), target, vocab, seed=3)
    states = torch.randn(5, len(AUX) * HIDDEN)

    torch.testing.assert_close(draft.fc(states), states[:, -HIDDEN:])
    torch.testing.assert_close(draft.logits(states[:, :HIDDEN]), target.logits(states[:, :HIDDEN])[:, vocab.target_ids])


def test_initialisation_is_a_function_of_the_seed() -> None:
    """Same seed, same head, whatever the global random state; another seed, another head."""
    made = []
    for seed, noise in ((1, 5), (1, 6), (2, 5)):
        torch.manual_seed(noise)
        made.append(init_draft(draft_config(), target_head(), vocab_map(), seed).midlayer.mlp.up_proj.weight)

    assert torch.equal(made[0], made[1])
    assert not torch.equal(made[0], made[2])


def test_overrides_and_head_dim() -> None:
    """Heads and MLP width can be set; a Llama head's head_dim is the target's value width, not hidden /
    heads."""
    config = DraftConfig.from_target(
        TARGET, architecture="llama", aux_layers=AUX, draft_vocab_size=30, intermediate_size=64, num_heads=4
    )

    assert (64, 4, 4, 6) == (
        config.intermediate_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim
    )  # fmt: skip
    assert config == DraftConfig.from_dict(config.to_dict())


def test_grouped_queries() -> None:
    """A Llama head of a target with fewer key heads repeats them for its query heads."""
    plain = {key: value for key, value in TARGET.items() if key not in ("kv_lora_rank", "v_head_dim")}
    config = DraftConfig.from_target(
        {**plain, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
        architecture="llama", aux_layers=AUX, draft_vocab_size=30,
    )  # fmt: skip
    draft = Draft(config, target_head().embed_tokens)
    keys, values = draft.midlayer.self_attn.keys_values(torch.randn(3, 2 * HIDDEN), torch.arange(3))

    assert (2 * 8, 2 * HIDDEN) == tuple(draft.state_dict()["midlayer.self_attn.k_proj.weight"].shape)
    assert torch.equal(keys[:, 0], keys[:, 1])
    assert torch.equal(values[:, 2], values[:, 3])
    assert not torch.equal(values[:, 1], values[:, 2])
    batch = collate(random_rows(2).rows, 1)
    assert torch.isfinite(Chains(draft, batch.token_ids, batch.features, batch.rows, batch.starts).hidden).all()


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"kv_lora_rank": None}, "kv_lora_rank"), ({"hidden_act": "gelu"}, "gelu")],
)
def test_a_target_that_does_not_fit_is_refused(changes: dict[str, object], named: str) -> None:
    """An MLA head needs an MLA target, and vLLM's draft MLP knows silu only."""
    with pytest.raises(ConfigError, match=named):
        draft_config(**changes)


def test_rope_spellings_are_one() -> None:
    """transformers 4 (`rope_scaling`, `type`, theta outside) and 5 (`rope_parameters`) mean the same."""
    old = {"rope_theta": 5e4, "max_position_embeddings": 99, "rope_scaling": {"type": "yarn", "factor": 4.0}}
    new = {
        "max_position_embeddings": 99,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 5e4, "factor": 4},
    }

    assert Rope.from_config(old) == Rope.from_config(new)
    assert 99 == Rope.from_config(old).original_max_position
    assert Rope("default", 1e4) == Rope.from_config({})


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_type": "llama3", "factor": 2},
        {"full_attention": {"rope_type": "default"}},
        {"rope_type": "default", "partial_rotary_factor": 0.5},
    ],
)
def test_unknown_rope_is_refused(settings: dict[str, object]) -> None:
    """A rotary kind that the head cannot copy is an error, not a silent default."""
    with pytest.raises(ConfigError, match="rotary"):
        Rope.from_config({"rope_parameters": settings, "max_position_embeddings": 64})


def test_softmax_factor() -> None:
    """DeepSeek YaRN multiplies the softmax scale by mscale(all_dim)^2; attention_factor 1 turns it off (vLLM
    0.32)."""
    yarn = {
        "type": "yarn",
        "factor": 64.0,
        "original_max_position_embeddings": 4096,
        "mscale": 1,
        "mscale_all_dim": 1,
    }
    kimi = Rope.from_config({"rope_theta": 5e4, "rope_scaling": yarn})
    off = Rope.from_config({"rope_theta": 5e4, "rope_scaling": {**yarn, "attention_factor": 1.0}})

    assert (0.1 * math.log(64) + 1) ** 2 == pytest.approx(kimi.mla_softmax_factor())
    assert 1.0 == off.mla_softmax_factor()
    assert 1.0 == kimi.mla_amplitude() == kimi.llama_amplitude()


@pytest.mark.parametrize("betas", [(32.0, 1.0), (1.0, 1.0)])
@pytest.mark.parametrize("dim", [64, 16])
def test_yarn_against_transformers(betas: tuple[float, float], dim: int) -> None:
    """Frequencies and amplitude are those of transformers' YaRN, with DeepSeek's betas and with Kimi's."""
    from transformers import DeepseekV3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {**TARGET["rope_scaling"], "beta_fast": betas[0], "beta_slow": betas[1]}
    reference = DeepseekV3Config(
        max_position_embeddings=512, qk_rope_head_dim=dim, rope_scaling=dict(scaling), rope_theta=5e4
    )
    frequencies, amplitude = ROPE_INIT_FUNCTIONS["yarn"](reference, torch.device("cpu"))
    rope = Rope.from_config({**TARGET, "rope_scaling": scaling})

    torch.testing.assert_close(rope.inverse_frequencies(dim), frequencies)
    assert amplitude == pytest.approx(rope.mla_amplitude()) == pytest.approx(rope.llama_amplitude())


def test_mla_against_transformers() -> None:
    """Projections, rotation and softmax scale are those of transformers' DeepseekV3Attention."""
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
        DeepseekV3Attention,
        DeepseekV3RotaryEmbedding,
    )

    draft = Draft(draft_config())
    ours, length = draft.midlayer.self_attn, 7
    keys = (
        "q_lora_rank",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "rms_norm_eps",
    )
    reference = DeepseekV3Config(
        hidden_size=2 * HIDDEN, num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=512,
        rope_theta=TARGET["rope_theta"], rope_scaling=dict(TARGET["rope_scaling"]),
        **{key: TARGET[key] for key in keys},
    )  # fmt: skip
    reference._attn_implementation = "eager"
    theirs = DeepseekV3Attention(reference, layer_idx=0).eval()
    state = {name: tensor.detach().clone() for name, tensor in ours.state_dict().items()}
    state["o_proj.weight"] = torch.cat((state["o_proj.weight"], torch.zeros(HIDDEN, 12)))
    theirs.load_state_dict(state)
    # transformers fixes the norms' eps of q_a and kv_a at 1e-6, vLLM takes the config's.
    theirs.q_a_layernorm.variance_epsilon = theirs.kv_a_layernorm.variance_epsilon = TARGET["rms_norm_eps"]
    x, positions = torch.randn(1, length, 2 * HIDDEN), torch.arange(length)[None]
    mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
    expected, _ = theirs(x, DeepseekV3RotaryEmbedding(reference)(x, positions), attention_mask=mask)

    q = ours.queries(x[0], positions[0])
    k, v = ours.keys_values(x[0], positions[0])
    weights = (torch.einsum("qhd,khd->hqk", q, k) * ours.scale + mask[0, 0]).softmax(-1)
    got = ours.output(torch.einsum("hqk,khd->qhd", weights, v))
    torch.testing.assert_close(got, expected[0, :, :HIDDEN], atol=1e-5, rtol=1e-4)

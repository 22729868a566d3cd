"""KV cache planning without workers, and a loop whose KV cache is shared through a connector."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from here import BLOCK_SIZE, EAGER, HOLDS_CONNECTORS_BACK, RELEASE, by_release
from recording_connector import RecordingConnector
from states import Reference, captured_states, open_loop, relative_error

import vllm_compat as vc


def _config(model: str, **options: Any) -> Any:
    return vc.make_vllm_config(
        model=model,
        **{"dtype": "float32", **EAGER, "max_model_len": 256, "block_size": 32, **options},
    )


def test_pipeline_stages_hold_their_own_layers(tiny_llama: str) -> None:
    """Every layer is on exactly one of two stages, on both of its tensor-parallel ranks."""
    config = _config(tiny_llama, pipeline_parallel_size=2, tensor_parallel_size=2)
    specs = vc.make_kv_cache_specs(config)
    assert [set(specs[0]), set(specs[2])] == [set(specs[1]), set(specs[3])]
    assert not set(specs[0]) & set(specs[2])
    assert len(specs[0]) + len(specs[2]) == 7
    assert {1} == {spec.num_kv_heads for worker in specs for spec in worker.values()}
    assert config.parallel_config.rank == 0


@pytest.mark.skipif(RELEASE < (0, 24), reason="specs say non_causal from 0.24.0 on")
def test_non_causal_layers_turn_chunks_and_caching_off(tiny_llama: str) -> None:
    """As in EngineCore: both assume that a token never looks ahead."""
    for non_causal in (False, True):
        config = _config(tiny_llama, enable_prefix_caching=True)
        spec = vc.make_kv_cache_spec(
            "full_attention",
            block_size=32,
            num_kv_heads=2,
            head_size=32,
            dtype=torch.float32,
            non_causal=non_causal,
        )
        vc.make_kv_cache_config(config, {"model.layers.0.self_attn.attn": spec}, num_blocks=16)
        assert config.scheduler_config.enable_chunked_prefill is not non_causal
        assert config.cache_config.enable_prefix_caching is not non_causal


@pytest.mark.parametrize("size", [{"num_blocks": 12}, {"available_memory": 12 * 7 * 2 * 32 * 2 * 32 * 4}])
def test_size_in_blocks_or_bytes(tiny_llama: str, size: dict[str, int]) -> None:
    """Seven layers, keys and values, 32 tokens a block, two heads of 32 floats: both ways give twelve blocks."""
    config = _config(tiny_llama)
    kv = vc.make_kv_cache_config(config, **size)
    assert kv.num_blocks == 12
    assert config.cache_config.num_gpu_blocks == 12
    assert config.cache_config.num_gpu_blocks_override is None
    # What a scheduler and a KV connector read later (EngineCore._initialize_kv_caches).
    assert config.cache_config.block_size == 32
    if RELEASE >= (0, 24):
        assert config.cache_config.kv_cache_size_tokens == 12 * 32
    if RELEASE >= (0, 29):
        assert kv.kv_cache_layout == config.cache_config.kv_cache_layout is not None
    if RELEASE >= (0, 32):
        assert kv.hash_block_size == kv.cache_hit_alignment_tokens == 32


@pytest.mark.parametrize(
    ("size", "needed"),
    [({}, "exactly one"), ({"num_blocks": 1, "available_memory": 1}, "exactly one"), ({"num_blocks": 0}, "at least 1")],
)
def test_sizes_that_are_none_are_refused(tiny_llama: str, size: dict[str, int], needed: str) -> None:
    """With what to pass instead."""
    with pytest.raises(vc.VllmCompatError, match=needed) as caught:
        vc.make_kv_cache_config(_config(tiny_llama), **size)
    assert caught.value.advice


def test_a_plan_that_does_not_fit_changes_nothing(tiny_llama: str) -> None:
    """vLLM refuses two blocks for 256 tokens; the config still says 256 then, so a second plan is not a shorter one."""
    config = _config(tiny_llama)
    with pytest.raises(ValueError, match="max seq len"):
        vc.make_kv_cache_config(config, num_blocks=2)
    assert config.model_config.max_model_len == 256
    assert config.cache_config.num_gpu_blocks_override is None
    assert vc.make_kv_cache_config(config, num_blocks=12).num_blocks == 12


@pytest.mark.skipif(RELEASE < (0, 11), reason="the CPU backend of 0.10 refuses sliding windows")
def test_sliding_windows_are_not_taken_for_full_attention(tiny_llama: str) -> None:
    """Layers of one window have blocks freed behind it: specs of such a model come from its executor only."""
    config = _config(tiny_llama, hf_overrides={"sliding_window": 64})
    with pytest.raises(vc.UnsupportedField, match="its loaded executor"):
        vc.make_kv_cache_specs(config)


def test_an_unknown_kind_is_refused() -> None:
    """The message lists the kinds."""
    with pytest.raises(vc.VllmCompatError, match="full_attention, mla_attention, sliding_window"):
        vc.make_kv_cache_spec("linear", block_size=1, num_kv_heads=1, head_size=1, dtype=torch.float32)


def test_a_connector_brings_tokens(
    tiny_llama: str, prompts: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second engine takes the prompt's KV from the first one's files and generates the same tokens.

    The connector is made for both sides with the KVCacheConfig, told what its workers say of themselves, as by
    EngineCore, and asked once per request about its blocks. A captured request takes nothing from it: its states are
    computed, or where vLLM cannot hold the connector back, the capture does not begin.
    """
    for noted in ("told", "groups", "made"):
        monkeypatch.setattr(RecordingConnector, noted, [])
    transfer = vc.make_kv_transfer_config(RecordingConnector, extra={"folder": str(tmp_path)})
    prompt = max(prompts, key=len)
    params = vc.make_sampling_params(temperature=0.0, max_tokens=6, ignore_eos=True)
    runs = []
    for _ in range(2):
        with open_loop(tiny_llama, block_size=BLOCK_SIZE, kv_transfer_config=transfer) as loop:
            runs += list(loop.generate([prompt], params))
            assert not loop.scheduler.requests  # the blocks kept for saving are free again
    first, second = runs
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE > 0
    assert first.token_ids == second.token_ids
    assert [1, 1] == RecordingConnector.groups
    assert [{(0, 0): "worker"}] * by_release(("0", 0), ("0.23.0", 2)) == RecordingConnector.told
    assert {("WORKER", RELEASE >= (0, 11, 1)), ("SCHEDULER", RELEASE >= (0, 11, 1))} == set(RecordingConnector.made)
    assert len(RecordingConnector.made) == 4

    with open_loop(tiny_llama, block_size=BLOCK_SIZE, kv_transfer_config=transfer) as loop:
        if not HOLDS_CONNECTORS_BACK:
            with pytest.raises(vc.CaptureError, match="KV connector RecordingConnector"):
                vc.capture_hidden_states(loop, (7,))
            return
        (captured,) = captured_states(loop, (7,), [prompt], params)
    assert len(captured.token_ids) == len(prompt) + 5
    reference = Reference(tiny_llama, torch.float32)(captured.token_ids)[:, [7]]
    assert relative_error(captured.hidden_states, reference).max() < 1e-4

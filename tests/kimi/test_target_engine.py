"""What the stages ask of vLLM: engine arguments and seeds, as data."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_compat.kimi.config import load_config
from vllm_compat.kimi.extract import ENGINE_ARGS
from vllm_compat.kimi.generate import answer_seed
from vllm_compat.kimi.target_engine import PATCHES, engine_arguments
from vllm_compat.patches import CATALOGUE

CONVERSATIONS = ["prepare.conversations=my.jsonl"]
PINNED = (1201101248, 872845860, 1264058244)


@pytest.mark.parametrize("preset", ["tiny", "kimi-k2.5"])
def test_extraction_can_capture(preset: str) -> None:
    """Without an option of the user's: hooks need eager mode, and a cached token has no state."""
    target = load_config(preset, CONVERSATIONS).target
    arguments = engine_arguments(target, max_num_seqs=8, **ENGINE_ARGS)
    assert arguments["enforce_eager"] is True
    assert arguments["enable_prefix_caching"] is False
    assert arguments["tensor_parallel_size"] == target.tensor_parallel_size


def test_the_head_is_sharded_like_its_target() -> None:
    """vLLM checks the head for the size that it really runs at, only if nobody claims another one."""
    target = load_config("kimi-k2.5", CONVERSATIONS).target
    arguments = engine_arguments(target, max_num_seqs=8, draft=Path("head"), num_draft_tokens=3)
    assert arguments["speculative_config"] == {"method": "eagle3", "model": "head", "num_speculative_tokens": 3}
    assert arguments["tensor_parallel_size"] == 8


def test_options_of_the_target_win() -> None:
    """Over the stage's own."""
    target = load_config("tiny", ["target.engine_args={block_size=16, max_num_seqs=3}"]).target
    arguments = engine_arguments(target, max_num_seqs=8, max_num_batched_tokens=64, block_size=32)
    assert (16, 3, 64) == (arguments["block_size"], arguments["max_num_seqs"], arguments["max_num_batched_tokens"])
    assert "speculative_config" not in arguments


def test_the_pipeline_knows_every_patch_of_vllms_cpu_backend() -> None:
    """A run needs no hand of the user's on any release; each name is one that the catalogue has."""
    assert sorted(patch.name for patch in CATALOGUE if patch.platform == "cpu") == sorted(PATCHES)


def test_seeds_are_the_same_everywhere() -> None:
    """A run that is resumed on another machine or Python writes the same answers; every prompt has its own."""
    assert (answer_seed(0, [1, 2, 3]), answer_seed(0, []), answer_seed(7, [163_586])) == PINNED
    near = [[1, 2, 3], [1, 23], [12, 3], [1, 2], [3, 2, 1], [-1], [-2]]
    assert len({answer_seed(seed, prompt) for seed in (0, 1) for prompt in near}) == 2 * len(near)
    assert all(0 <= answer_seed(0, [n]) < 2**31 for n in range(1000))

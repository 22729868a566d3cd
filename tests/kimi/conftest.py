"""Fixtures of the pipeline's tests: tokenizers of each Kimi generation, and configurations that run in
tmp_path.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kimi_tokenizers import TOOL_MARKERS, TURN_MARKERS, make_tokenizer

from vllm_compat.kimi.config import Config, load_config


@pytest.fixture(scope="session")
def k25() -> Any:
    """A tokenizer with K2.5's template (prefilled think tags)."""
    return make_tokenizer("k2.5")


@pytest.fixture(scope="session")
def k2() -> Any:
    """A tokenizer of K2-Instruct's kind: no think tokens at all."""
    return make_tokenizer("k2", [*TURN_MARKERS, *TOOL_MARKERS])


@pytest.fixture(scope="session")
def k2_thinking() -> Any:
    """A tokenizer with K2-Thinking's template (the target writes `<think>` itself)."""
    return make_tokenizer("k2-thinking")


@pytest.fixture
def make_config(tmp_path: Path) -> Callable[..., Config]:
    """make_config(conversations, **{"prepare.max_length": 64}): a Config that runs in tmp_path."""

    def make(conversations: list[Any] | str | Path, **overrides: Any) -> Config:
        if isinstance(conversations, list):
            path = tmp_path / "conversations.jsonl"
            lines = [item if isinstance(item, str) else json.dumps(item) for item in conversations]
            path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
            conversations = path
        (tmp_path / "config.toml").write_text(
            f'run_dir = "{tmp_path / "run"}"\n[target]\nmodel = "{tmp_path / "no-model"}"\n[prepare]\n'
            f'conversations = "{conversations}"\nregenerate = false\nheldout_fraction = 0.0\n'
        )
        return load_config(tmp_path / "config.toml", [f"{key}={_toml(value)}" for key, value in overrides.items()])

    def _toml(value: Any) -> str:
        return str(value).lower() if isinstance(value, bool) else str(value)

    return make

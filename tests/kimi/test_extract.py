"""What extraction refuses before an engine is started."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_compat import DataError
from vllm_compat.kimi.config import Config
from vllm_compat.kimi.extract import extract_stage
from vllm_compat.kimi.progress import NullProgress
from vllm_compat.kimi.rows import Row, RowWriter

FIXTURE = Path(__file__).parents[1] / "fixtures" / "tiny-kimi"


def test_a_row_longer_than_the_model_is_named_before_anything_is_computed(make_config: Callable[..., Config]) -> None:
    """vLLM would refuse it hours later, in the middle of the run. max_model_len - 1 tokens still fit."""
    settings = {"target.model": f'"{FIXTURE}"', "target.max_model_len": 64, "prepare.max_length": 63}
    cfg = make_config([], **settings)
    with RowWriter(cfg.run_dir / "prepare") as writer:
        for name, length in (("fits/0", 63), ("long/0", 64)):
            ids = list(range(length))
            writer.add("train", Row(name, name, 0, ids, 1, [0] + [1] * (length - 1), "original"))
    with pytest.raises(DataError, match=r"long/0.*at most 63 tokens.*64 tokens.*prepare\.max_length"):
        extract_stage(cfg, NullProgress())
    assert not (cfg.run_dir / "extract").exists()

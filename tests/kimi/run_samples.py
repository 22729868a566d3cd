"""Manifests as a complete tiny run leaves them, for the tests of report, summary and pipeline."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from vllm_compat.kimi.manifest import STAGES, Manifest, versions, write_manifest

METRICS: dict[str, dict[str, Any]] = {
    "prepare": {
        "rows": 1403,
        "train_rows": 1262,
        "heldout_rows": 141,
        "tokens": 188_123,
        "loss_tokens": 31_020,
        "malformed": 2,
        "malformed_examples": [{"place": "line 3", "reason": "not JSON <b>"}],
        "duplicates": 1,
        "dropped": {"the answer contains a turn marker": 4},
        "generated_tokens": 31_100,
        "distinct_bigram_ratio": 0.94,
    },
    "extract": {
        "layers": [2, 4, 5, 8],
        "rows": 1403,
        "tokens": 188_123,
        "bytes": 290_000_000,
        "tokens_per_second": 5210.3,
        "plain_prefill_tokens_per_second": 5630.0,
        "ratio_to_prefill": 0.9254,
        "self_check": {
            "ok": True,
            "mean_abs_logprob_error": 0.0012,
            "next_token_agreement": 1.0,
            "tokens": 2100,
        },
        "recovered": [],
    },
    "vocab": {"vocab_size": 2048, "draft_vocab_size": 1024, "coverage": 0.9931, "special_tokens": 20},
    "train": {
        "loss": 1.023,
        "first_loss": 4.11,
        "steps": 395,
        "tokens": 400_000,
        "tokens_per_second": 4300.0,
        "parameters": 1_234_567,
        "acceptance": [0.6, 0.5, 0.4, 0.3],
    },
    "export": {"architecture": "Eagle3DeepseekV2ForCausalLM", "aux_layers": [2, 4, 5], "bytes": 2_500_000},
    "evaluate": {
        "acceptance_length": 2.4712,
        "per_position": [0.62, 0.41, 0.27, 0.17],
        "steps": 812,
        "untrained_acceptance_length": 1.012,
        "untrained_per_position": [0.01, 0.002, 0.0, 0.0],
        "estimated_acceptance_length": 2.4491,
        "estimated_per_position": [0.6, 0.4, 0.28, 0.17],
        "token_identical": True,
        "tokens_per_second": 310.0,
        "tokens_per_second_without_head": 201.0,
    },
}


def write_run(run_dir: Path, stages: tuple[str, ...] = STAGES, **changes: dict[str, Any]) -> None:
    """Manifests of `stages`, with changed metrics; training lines too when "train" is among them."""
    for stage in stages:
        write_manifest(
            run_dir,
            Manifest(
                stage,
                "complete",
                "2026-01-01T10:00:00+00:00",
                "2026-01-01T10:01:00+00:00",
                60.0,
                {stage: {"some_key": 3}, "seed": 0},
                {"model": "a" * 64},
                {},
                {**METRICS[stage], **changes.get(stage, {})},
                versions(),
            ),
        )
    if "train" in stages:
        lines = [
            {
                "step": s,
                "loss": 3.2 * math.exp(-s / 120) + 0.9,
                "acceptance": [(0.62 - 0.1 * k) * s / 400 for k in range(4)],
            }
            for s in range(5, 400, 5)
        ]
        (run_dir / "train/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

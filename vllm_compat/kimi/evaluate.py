"""evaluate: vLLM serves target and head on held-out conversations, and the acceptance length is counted.

Acceptance length = tokens emitted per target step that verified drafts, the bonus token included. The first token of an
answer comes from the prefill and is no such step. A step that ends the answer on an accepted draft emits no bonus;
vLLM's own counters, 1 + accepted / steps, count one there all the same, and are a little higher.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_compat import DataError, FinishedRequest, make_sampling_params

from .degeneracy import distinct_bigrams, mean_ratio
from .export import export_untrained
from .generate import greedy
from .offline import estimate_stage
from .progress import Progress
from .prompts import find_markers, load_tokenizer
from .rows import read_rows
from .settings import Config
from .target_engine import open_target


def evaluate_stage(cfg: Config, progress: Progress) -> dict[str, Any]:
    """Serve the held-out prompts without a head, with the trained one and with an untrained one; returns the metrics.

    Raises:
        DataError: no held-out prompts.
    """
    chosen = heldout_prompts(cfg)
    prompts = list(chosen.values())
    end = find_markers(load_tokenizer(cfg.target)).end
    plain, plain_rate = _serve(cfg, prompts, end, None, progress, "target alone")
    trained, trained_rate = _serve(cfg, prompts, end, cfg.run_dir / "export", progress, "target + head")
    k = cfg.evaluate.num_draft_tokens
    identical = [a.token_ids == b.token_ids for a, b in zip(plain, trained, strict=True)]
    metrics = acceptance(trained, k)
    metrics |= {
        "num_draft_tokens": k,
        "prompts": len(prompts),
        "tokens": sum(len(done.token_ids) for done in trained),
        "token_identical": all(identical),
        "identical_prompts": sum(identical),
        "distinct_bigram_ratio": mean_ratio(distinct_bigrams(done.token_ids) for done in trained),
        "tokens_per_second": round(trained_rate, 1),
        "tokens_per_second_without_head": round(plain_rate, 1),
        "untrained_acceptance_length": None,
        "untrained_per_position": None,
    }
    if cfg.evaluate.untrained:
        folder = export_untrained(cfg, cfg.run_dir / "evaluate" / "untrained")
        served, _ = _serve(cfg, prompts, end, folder, progress, "target + untrained head")
        untrained = acceptance(served, k)
        metrics["untrained_acceptance_length"] = untrained["acceptance_length"]
        metrics["untrained_per_position"] = untrained["per_position"]
    # On the very rows that were served, so that the two numbers can be compared.
    estimate = estimate_stage(cfg, list(chosen))
    metrics["estimated_acceptance_length"] = round(estimate["tokens_per_step"], 4)
    metrics["estimated_per_position"] = [round(p, 4) for p in estimate["per_position"]]
    return metrics


def heldout_prompts(cfg: Config) -> dict[str, list[int]]:
    """Row id -> prompt of held-out rows, spread over all of them, at most ``evaluate.num_prompts``.

    Rows with at least two answer tokens: the first comes from the prefill, so a shorter answer has no draft to accept.
    """
    rows = [
        (row.row_id, row.input_ids[: row.prompt_length])
        for row in read_rows(cfg.run_dir / "prepare" / "heldout.parquet")
        if row.prompt_length + cfg.evaluate.max_new_tokens <= cfg.target.max_model_len and sum(row.loss_mask) > 1
    ]
    if not rows:
        raise DataError(
            "evaluating on held-out conversations",
            needed="held-out prompts that leave room for evaluate.max_new_tokens",
            found="none",
            advice="raise prepare.heldout_fraction or target.max_model_len",
        )
    stride = max(1, len(rows) // cfg.evaluate.num_prompts)
    return dict(rows[::stride][: cfg.evaluate.num_prompts])


def _serve(
    cfg: Config, prompts: Sequence[Sequence[int]], end: int, draft: Path | None, progress: Progress, what: str
) -> tuple[list[FinishedRequest], float]:
    """The answers, which stop at the token ``end``, and tokens per second of generating them."""
    params = make_sampling_params(
        temperature=cfg.evaluate.temperature,
        max_tokens=cfg.evaluate.max_new_tokens,
        stop_token_ids=[end],
        seed=cfg.seed,
        detokenize=False,
    )
    with open_target(
        cfg.target,
        max_num_seqs=cfg.evaluate.max_num_seqs,
        draft=draft,
        num_draft_tokens=cfg.evaluate.num_draft_tokens,
        enable_prefix_caching=False,
    ) as loop:
        greedy(loop, prompts[:1], params, progress, f"warming up: {what}")
        began = time.monotonic()
        finished = greedy(loop, prompts, params, progress, what)
        seconds = time.monotonic() - began
    return finished, sum(len(done.token_ids) for done in finished) / seconds


def acceptance(finished: Sequence[FinishedRequest], num_draft_tokens: int) -> dict[str, Any]:
    """Acceptance length, and per position the share of steps in which that draft was accepted."""
    steps = [step for done in finished for step in done.draft_steps]
    if not steps:
        raise DataError(
            "counting accepted drafts",
            needed="answers of at least two tokens with drafts in them",
            found=f"{len(finished)} answers and no verified draft",
            advice="raise evaluate.max_new_tokens; check that the head was loaded (speculative_config)",
        )
    return {
        "acceptance_length": round(sum(step.emitted for step in steps) / len(steps), 4),
        "per_position": [
            round(sum(step.accepted > position for step in steps) / len(steps), 4)
            for position in range(num_draft_tokens)
        ],
        "steps": len(steps),
        "drafted": sum(step.drafted for step in steps),
        "accepted": sum(step.accepted for step in steps),
    }

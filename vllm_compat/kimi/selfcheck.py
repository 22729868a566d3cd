"""Extraction checks itself: the stored final state must rebuild what the engine said.

norm + lm_head of boundary N give a distribution for every next token. The engine's own ``prompt_logprobs`` and its own
next token are the same distribution, computed inside vLLM. A wrong layer id, a state after instead of before the norm,
swapped or missing rows: each shows here, on the user's own model, before a week of GPU time is spent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from vllm_compat import EngineLoop, SelfCheckFailed, capture_hidden_states, make_sampling_params

from .rows import Row
from .target import TargetHead

#: Mean absolute difference of log-probabilities (natural) that rounding alone explains, by the coarser of the dtypes of
#: engine and store. Measured on the tiny target: 1e-6 with both in float32, 0.0008 with a bfloat16 store, 0.0075 with a
#: bfloat16 engine; and 0.25, whatever the dtypes, for a state that is one layer early.
TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2, "float16": 1e-2}
#: Share of greedy next tokens that must agree: rounding flips near ties only.
AGREEMENT = 0.99
ROWS = 16


@dataclass(frozen=True)
class SelfCheck:
    """What the check found. ``ok`` is what the stage acts on."""

    ok: bool
    mean_abs_logprob_error: float
    max_abs_logprob_error: float
    tolerance: float
    next_token_agreement: float
    tokens: int
    rows: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def self_check(
    loop: EngineLoop, rows: Sequence[Row], head: TargetHead, layers: Sequence[int], stored_dtype: torch.dtype
) -> SelfCheck:
    """Run ``rows`` through the engine with prompt log-probabilities and compare.

    Args:
        loop: The target.
        rows: A first batch.
        head: Embedding, norm and lm_head of the target.
        layers: The boundaries being extracted, the final one last.
        stored_dtype: States are rounded to it first, as the store will.

    Raises:
        SelfCheckFailed: with the numbers.
    """
    params = make_sampling_params(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    errors: list[torch.Tensor] = []
    near: list[bool] = []
    tokens = 0
    engine_dtype = loop.vllm_config.model_config.dtype
    coarser = max(stored_dtype, engine_dtype, key=lambda dtype: torch.finfo(dtype).eps)
    name = str(coarser).removeprefix("torch.")
    with capture_hidden_states(loop, layers) as capture:
        for done in loop.generate([row.input_ids for row in rows], params):
            final = capture.pop(done.request_id).hidden_states[:, -1].to(stored_dtype)
            ours = head.logits(final.float()).log_softmax(-1)
            ids = done.prompt_token_ids
            theirs = torch.tensor([row[token] for row, token in zip(done.prompt_logprobs or (), ids[1:], strict=True)])
            errors.append((ours[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0] - theirs).abs())
            best = ours[-1].max()
            # The engine's greedy token, or one that rounding cannot tell from it.
            near.append(bool(ours[-1, done.token_ids[0]] >= best - 2 * TOLERANCE[name]))
            tokens += len(ids)
    error = torch.cat(errors)
    result = SelfCheck(
        ok=float(error.mean()) <= TOLERANCE[name] and sum(near) >= AGREEMENT * len(near),
        mean_abs_logprob_error=round(float(error.mean()), 6),
        max_abs_logprob_error=round(float(error.max()), 6),
        tolerance=TOLERANCE[name],
        next_token_agreement=round(sum(near) / len(near), 4),
        tokens=tokens,
        rows=len(rows),
    )
    if not result.ok:
        raise SelfCheckFailed(
            f"hidden states at boundaries {list(layers)} of this target",
            needed=f"mean |Δ log p| <= {result.tolerance} and {AGREEMENT:.0%} of next tokens, rebuilt from boundary "
            f"{layers[-1]} by the final norm and lm_head",
            found=f"mean |Δ log p| {result.mean_abs_logprob_error}, max {result.max_abs_logprob_error}, next tokens "
            f"{result.next_token_agreement:.1%}, over {result.tokens} tokens",
            advice="the final state is not what the engine computes logits from: check that the checkpoint's norm and "
            "lm_head are the served ones; report it with `vllm-compat doctor`",
        )
    return result

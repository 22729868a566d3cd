"""Existing stores against what was written, the target that they are from, and vLLM.

The last is the same comparison as extraction's own self-check, with what is on disk in place of what was just
captured; and the states once more, under everything that must not change them: a batch or one by one, whole or in
chunks, a cold or a warm prefix cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from vllm_compat import EngineLoop, SelfCheckFailed, StoreError, capture_hidden_states, make_sampling_params

from .engine_log import redirected
from .extract import ENGINE_ARGS
from .fingerprints import model_fingerprint
from .rebuild import check_stored, kept_positions, predict
from .rows import SPLITS
from .selfcheck import AGREEMENT, TOLERANCE
from .settings import Config
from .shards import DTYPES, FP8, Sample
from .store import Store
from .store import repair as set_aside
from .store_cli import as_written
from .target import TargetHead
from .target_engine import open_target

CHUNK = 64  # tokens: rows of any length are cut
#: Norm of the difference over norm of the states, largest boundary, by the coarser dtype of engine and store. Measured
#: on the tiny target: 0.002 with an engine in float32 and a store in bfloat16, 0.01 with both in bfloat16, 0.03 in fp8;
#: and 0.3 and more for the states of another row or layer.
PARITY = {"float32": 1e-3, "float16": 1e-2, "bfloat16": 5e-2, FP8: 8e-2}


@dataclass(frozen=True)
class Verified:
    """What was found; `ok` unless a number is beyond its limit.

    mean_abs_logprob_error, max_abs_logprob_error: natural, against the engine's prompt_logprobs. next_token_agreement:
    share of positions where the engine's likeliest token is the likeliest here too, or rounding cannot tell the two
    apart. parity: way of computing -> relative error of the states, None where vLLM cannot do that here.
    """

    rows: int
    tokens: int
    mean_abs_logprob_error: float
    max_abs_logprob_error: float
    tolerance: float
    next_token_agreement: float
    parity_tolerance: float
    parity: dict[str, float | None] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        states = [error for error in self.parity.values() if error is not None]
        return (
            self.mean_abs_logprob_error <= self.tolerance
            and self.next_token_agreement >= AGREEMENT
            and all(error <= self.parity_tolerance for error in states)
        )

    def require(self, store: Store) -> None:
        """SelfCheckFailed when a number is beyond its limit."""
        if not self.ok:
            raise SelfCheckFailed(
                f"the states in {store.path}",
                needed="those that this target computes",
                found="; ".join(self.lines()),
                advice=f"they were extracted with vLLM {store.provenance.vllm_version}: extract again, or report it "
                "with `vllm-compat doctor`",
            )

    def lines(self) -> list[str]:
        """For people."""
        mean, largest = self.mean_abs_logprob_error, self.max_abs_logprob_error
        limit = f"at most {self.tolerance:g}, largest {largest:.2g}"
        said = [
            f"log-probabilities, {self.tokens:,} tokens of {self.rows} rows: mean |Δ log p| {mean:.2g} ({limit})",
            f"next tokens: {self.next_token_agreement:.2%} as the engine's (at least {AGREEMENT:.0%})",
        ]
        for way, error in self.parity.items():
            found = "not here: vLLM switches it off for this model" if error is None else f"differ by {error:.2g}"
            said.append(
                f"states computed {way}: {found}" + ("" if error is None else f" (at most {self.parity_tolerance:g})")
            )
        return said


def verify_run(cfg: Config, depth: str, rows: int, *, repair: bool, say: Callable[[str], None]) -> None:
    """`vllm-compat kimi verify`: the stores of a run; `say` gets each line.

    Raises:
        StoreError: something is not as it was written, or not this target's.
        SelfCheckFailed: it is not what the engine computes.
    """
    for split in SPLITS:
        path = cfg.run_dir / "extract" / split
        for sentence in set_aside(path) if repair else ():
            say(f"{split}: {sentence}")
        say(f"{split}: {as_written(Store(path).verify())}")
    store = Store(cfg.run_dir / "extract" / SPLITS[0])
    if depth == "bytes" or not len(store):
        return
    _check_model(cfg, store)
    head = TargetHead.load(cfg.target.model).to("cpu", torch.float32)
    samples = some(store, rows)
    check = check_stored(samples, head)
    say(
        f"stored final states: {check.agreement:.1%} of {check.loss_tokens:,} loss tokens in {check.rows} rows are the "
        f"likeliest, mean log p {check.logprob:.3f}"
    )
    if depth == "engine":
        with redirected(cfg.run_dir / "engine.log"):
            made = compare(cfg, store, samples, head)
        for line in made.lines():
            say(line)
        made.require(store)


def _check_model(cfg: Config, store: Store) -> None:
    if store.provenance.model_fingerprint != model_fingerprint(cfg.target.model):
        raise StoreError(
            f"verifying {store.path} with {cfg.target.model}",
            needed="the model that its states are from",
            found="another one (model_fingerprint)",
            advice="give the run's own configuration",
        )


def compare(cfg: Config, store: Store, samples: Sequence[Sample], head: TargetHead) -> Verified:
    """Run samples of a store through the target again. `head`: in float32."""
    with open_target(
        cfg.target,
        max_num_seqs=cfg.extract.max_num_seqs,
        max_num_batched_tokens=cfg.extract.max_num_batched_tokens,
        **ENGINE_ARGS,
    ) as loop:
        dtype = _coarser(store.provenance.dtype, loop)
        errors, near = logprobs(loop, samples, head, TOLERANCE["bfloat16" if dtype == FP8 else dtype])
        parity: dict[str, float | None] = {
            "in one batch": difference(loop, samples, store),
            "one by one": max(difference(loop, [sample], store) for sample in samples[:4]),
        }
    # "language_model_only" and the like stay; what is asked for here is what may change nothing.
    chunked = {**ENGINE_ARGS, "enable_prefix_caching": True, "enable_chunked_prefill": True}
    with open_target(cfg.target, max_num_seqs=4, max_num_batched_tokens=CHUNK, **chunked) as loop:
        cuts = loop.vllm_config.scheduler_config.max_num_batched_tokens <= CHUNK
        caches = bool(loop.vllm_config.cache_config.enable_prefix_caching)
        parity[f"in chunks of {CHUNK} tokens"] = difference(loop, samples[:4], store) if cuts else None
        if caches:
            for _ in loop.generate([sample.token_ids.tolist() for sample in samples[:4]], _params()):
                pass
        parity["with a warm prefix cache"] = difference(loop, samples[:4], store) if caches else None
    return Verified(
        rows=len(samples),
        tokens=len(errors),
        mean_abs_logprob_error=float(errors.mean()),
        max_abs_logprob_error=float(errors.max()),
        tolerance=TOLERANCE["bfloat16" if dtype == FP8 else dtype],
        next_token_agreement=float(near.float().mean()),
        parity_tolerance=PARITY[dtype],
        parity=parity,
    )


def some(store: Store, count: int) -> list[Sample]:
    """At most `count` samples, from all over a store."""
    stride = max(1, len(store) // max(1, count))
    return [store[i] for i in range(0, len(store), stride)][:count]


def _coarser(stored: str, loop: EngineLoop) -> str:
    if stored == FP8:
        return FP8
    engine: torch.dtype = loop.vllm_config.model_config.dtype
    coarser = max(DTYPES[stored], engine, key=lambda dtype: torch.finfo(dtype).eps)
    return str(coarser).removeprefix("torch.")


def _params(**more: int) -> object:
    return make_sampling_params(temperature=0.0, max_tokens=1, detokenize=False, **more)


def logprobs(
    loop: EngineLoop, samples: Sequence[Sample], head: TargetHead, tolerance: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """|Δ log p| of each next token whose final state is stored, and whether the likeliest one agrees."""
    errors, near = [], []
    prompts = [sample.token_ids.tolist() for sample in samples]
    for sample, done in zip(samples, loop.generate(prompts, _params(prompt_logprobs=1)), strict=True):
        at = kept_positions(sample)
        rows = [(done.prompt_logprobs or ())[position] for position in at.tolist()]
        following = sample.token_ids[at + 1].long()
        engine_best = torch.tensor([max(row, key=lambda token: row[token]) for row in rows], dtype=torch.int64)
        found = predict(head, sample.hidden_states[at, -1], torch.stack((following, engine_best), dim=1))
        theirs = torch.tensor([row[token] for row, token in zip(rows, following.tolist(), strict=True)])
        errors.append((found.asked[:, 0] - theirs).abs())
        near.append(found.asked[:, 1] >= found.best_logprob - 2 * tolerance)
    return torch.cat(errors), torch.cat(near)


def difference(loop: EngineLoop, samples: Sequence[Sample], store: Store) -> float:
    """Capture again: norm of the difference to the stored states over their norm, of the boundary that differs most."""
    wrong = torch.zeros(len(store.provenance.layers), dtype=torch.float64)
    power = torch.zeros_like(wrong)
    with capture_hidden_states(loop, store.provenance.layers) as capture:
        prompts = [sample.token_ids.tolist() for sample in samples]
        for sample, done in zip(samples, loop.generate(prompts, _params()), strict=True):
            stored = sample.hidden_states.double()
            again = capture.pop(done.request_id).hidden_states.double()
            kept = stored.isfinite()
            wrong += torch.where(kept, stored - again, 0.0).square().sum((0, 2))
            power += torch.where(kept, stored, 0.0).square().sum((0, 2))
    return float((wrong / power.clamp(min=1e-30)).sqrt().max())

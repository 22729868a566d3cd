"""The run in numbers: summary.json for programs, one line per stage for people."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .files import write_json
from .manifest import STAGES, read_manifest


def write_summary(run_dir: Path) -> dict[str, Any]:
    """Write <run>/summary.json: one object per complete stage with its metrics, atomically."""
    manifests = {stage: read_manifest(run_dir, stage) for stage in STAGES}
    summary: dict[str, Any] = {
        "stages": [stage for stage, manifest in manifests.items() if manifest is not None],
        "seconds": round(sum(manifest.seconds for manifest in manifests.values() if manifest is not None), 2),
    }
    for stage, manifest in manifests.items():
        if manifest is not None:
            summary[stage] = {**manifest.metrics, "seconds": manifest.seconds}
    write_json(run_dir / "summary.json", summary)
    return summary


def stage_line(stage: str, metrics: Mapping[str, Any]) -> str:
    """The stage's key numbers in one line, without its name."""
    try:
        parts = _LINES[stage](metrics)
    except KeyError:  # metrics of another version of the stage: a plain list is better than no line
        parts = [f"{key} {value}" for key, value in metrics.items() if isinstance(value, (int, float, str))]
    return " · ".join(part for part in parts if part)


def _prepare(m: Mapping[str, Any]) -> list[str]:
    trouble = [
        f"{number(m.get('malformed', 0))} malformed" if m.get("malformed") else "",
        f"{number(m.get('duplicates', 0))} duplicates" if m.get("duplicates") else "",
        f"{number(sum(m.get('dropped', {}).values()))} rows dropped" if m.get("dropped") else "",
        f"{number(m['contaminated'])} of them held out too" if m.get("contaminated") else "",
    ]
    return [
        f"{number(m['rows'])} rows ({number(m['train_rows'])} train, {number(m['heldout_rows'])} held out)",
        f"{number(m['tokens'])} tokens, {number(m['loss_tokens'])} with loss",
        f"{number(m['generated_tokens'])} regenerated" if m.get("generated_tokens") else "",
        *trouble,
    ]


def _extract(m: Mapping[str, Any]) -> list[str]:
    check = m.get("self_check")
    rate, ratio = m.get("tokens_per_second"), m.get("ratio_to_prefill")
    checked = "self-check off"
    if check:
        agreement = f"next token {check['next_token_agreement']:.1%}"
        checked = f"self-check: logprob error {check['mean_abs_logprob_error']:.1g}, {agreement}"
    return [
        f"{number(m['tokens'])} tokens" + (f" at {number(rate)} tok/s" if rate else ", all there already"),
        f"{ratio:.2f} of plain prefill" if ratio else "",
        checked,
        f"fp8 error {max(errors):.2%}" if (errors := m.get("fp8_relative_error")) else "",
        f"{number(m['refused'])} rows NaN" if m.get("refused") else "",
    ]


def _vocab(m: Mapping[str, Any]) -> list[str]:
    return [f"{number(m['draft_vocab_size'])} of {number(m['vocab_size'])} tokens cover {m['coverage']:.2%}"]


def _train(m: Mapping[str, Any]) -> list[str]:
    first = m.get("first_loss")
    return [
        (f"loss {first:.3f} -> {m['loss']:.3f}" if first is not None else f"loss {m['loss']:.3f}"),
        f"{number(m['steps'])} steps",
        f"{number(m['tokens_per_second'])} tok/s" if m.get("tokens_per_second") else "",
        f"{number(m['parameters'])} parameters" if m.get("parameters") else "",
    ]


def _export(m: Mapping[str, Any]) -> list[str]:
    return [
        str(m["architecture"]),
        f"aux boundaries {', '.join(map(str, m['aux_layers']))}",
        f"{m['bytes'] / 2**20:.1f} MiB",
    ]


def _evaluate(m: Mapping[str, Any]) -> list[str]:
    untrained, estimate = m.get("untrained_acceptance_length"), m.get("estimated_acceptance_length")
    identical = m.get("token_identical")
    return [
        f"acceptance length {m['acceptance_length']:.2f}",
        f"untrained head {untrained:.2f}" if untrained is not None else "",
        f"offline estimate {estimate:.2f}" if estimate is not None else "",
        "" if identical is None else "output token-identical" if identical else "OUTPUT DIFFERS from the target alone",
    ]


_LINES = {
    "prepare": _prepare,
    "extract": _extract,
    "vocab": _vocab,
    "train": _train,
    "export": _export,
    "evaluate": _evaluate,
}


def number(value: float) -> str:
    """12345.6 -> "12,346"; small ones keep three digits."""
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 100 else f"{value:.3g}"

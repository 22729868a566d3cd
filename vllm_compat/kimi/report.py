"""report.html: a run on one page that needs no other file, from its manifests and train/metrics.jsonl."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .files import write_atomic
from .manifest import STAGES, Manifest, read_manifest
from .plots import plot_acceptance, plot_loss, plot_rate
from .summary import number, stage_line

if TYPE_CHECKING:
    from .config import Config

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2933; max-width: 60rem; margin: 2rem auto;
padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: 0; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
p.sub { color: #616e7c; margin-top: .2rem; } img { max-width: 100%; height: auto; }
table { border-collapse: collapse; width: 100%; } td, th { padding: .25rem .8rem .25rem 0; text-align: left;
vertical-align: top; border-bottom: 1px solid #e4e7eb; } td.n { text-align: right; white-space: nowrap;
font-variant-numeric: tabular-nums; } td.c, code { font-family: ui-monospace, monospace; font-size: .85em;
overflow-wrap: anywhere; } th { color: #616e7c; font-weight: 600; } .bad { color: #b23a48; font-weight: 600; }
details { margin: .4rem 0; } summary { cursor: pointer; }
"""

# What a reader wants first: (stage, key, name, unit, what it means).
_KEY_NUMBERS = (
    ("evaluate", "acceptance_length", "acceptance length", "tokens / target step",
     "tokens emitted per step of the target, its own (bonus) token included; 1 would be no gain"),
    ("evaluate", "untrained_acceptance_length", "… of an untrained head", "tokens / target step",
     "the same head before its first training step"),
    ("evaluate", "estimated_acceptance_length", "… estimated offline", "tokens / target step",
     "greedy chains on the held-out rows' stored states, without an engine"),
    ("evaluate", "token_identical", "output as without the head", "", "greedy answers, token by token"),
    ("evaluate", "tokens_per_second", "generation with the head", "tokens / s", "all prompts of evaluate"),
    ("evaluate", "tokens_per_second_without_head", "generation without it", "tokens / s", "the same prompts"),
    ("extract", "tokens_per_second", "extraction", "tokens / s", "prompts in, states durably on disk"),
    ("extract", "ratio_to_prefill", "extraction / plain prefill", "", "1: as fast as capturing nothing"),
    ("vocab", "coverage", "coverage of the draft vocabulary", "", "share of loss tokens it can propose"),
    ("train", "first_loss", "first loss", "nats", "KL to the target, weighted over TTT steps"),
    ("train", "loss", "last loss", "nats", "the same, at the end"),
    ("prepare", "tokens", "tokens", "", "prompts and answers of all rows"),
    ("prepare", "loss_tokens", "tokens with loss", "", "the target's own tokens, <|im_end|> included"),
    ("prepare", "contaminated", "training rows left out", "", "their prompt or answer is in the held-out set"),
    ("extract", "refused", "rows with NaN states", "", "left out, listed in refused.jsonl"),
    ("extract", "fp8_relative_error", "error of the states in fp8", "", "relative, per aux boundary"),
    ("prepare", "distinct_bigram_ratio", "distinct bigrams in the answers", "",
     "near 0: the target loops, and acceptance says nothing"),
)  # fmt: skip


def report(cfg: Config) -> Path:
    """Write <run>/report.html and <run>/plots/*.png; stages that have not run are left out."""
    manifests = {stage: made for stage in STAGES if (made := read_manifest(cfg.run_dir, stage)) is not None}
    pictures = _pictures(cfg.run_dir, manifests)
    for name, (_, png) in pictures.items():
        write_atomic(cfg.run_dir / "plots" / f"{name}.png", png)
    path = cfg.run_dir / "report.html"
    write_atomic(path, _page(cfg, manifests, pictures))
    return path


def _pictures(run_dir: Path, manifests: Mapping[str, Manifest]) -> dict[str, tuple[str, bytes]]:
    """Name -> (caption, PNG)."""
    made = {}
    lines = _training_lines(run_dir / "train" / "metrics.jsonl") if "train" in manifests else []
    if lines:
        made["loss"] = ("From train/metrics.jsonl; each point is the mean since the last.", plot_loss(lines))
    numbers = manifests["evaluate"].metrics if "evaluate" in manifests else {}
    if numbers.get("per_position"):
        caption = f"Of {number(numbers.get('steps', 0))} target steps on held-out prompts."
        series = (numbers.get("untrained_per_position"), numbers.get("estimated_per_position"))
        made["acceptance"] = (caption, plot_acceptance(numbers["per_position"], *series))
    numbers = manifests["extract"].metrics if "extract" in manifests else {}
    rate, prefill = numbers.get("tokens_per_second"), numbers.get("plain_prefill_tokens_per_second")
    if rate and prefill:
        made["rate"] = ("Both on the same engine and rows of this run.", plot_rate(rate, prefill))
    return made


def _training_lines(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def _page(cfg: Config, manifests: Mapping[str, Manifest], pictures: Mapping[str, tuple[str, bytes]]) -> str:
    missing = [stage for stage in STAGES if stage not in manifests]
    parts = [
        f"<h1>EAGLE-3 head for {escape(Path(cfg.target.model).name)}</h1>",
        f'<p class="sub">{escape(_when(manifests))}</p>',
        f"<p>Not run yet: {', '.join(missing)}.</p>" if missing else "",
        _warnings(manifests),
        _key_numbers(manifests),
        *(_figure(name, *picture) for name, picture in pictures.items()),
        "<h2>Stages</h2>",
        _rows(
            ("stage", "what came out", "seconds", "finished (UTC)"),
            ([s, stage_line(s, m.metrics), f"{m.seconds:,.1f}", m.finished] for s, m in manifests.items()),
        ),
        "<h2>All numbers</h2>",
        *(_details(f"{s}/manifest.json: metrics", _flat(m.metrics)) for s, m in manifests.items()),
        "<h2>Configuration and provenance</h2>",
        *(_details(f"{s}: configuration", _flat(m.config)) for s, m in manifests.items()),
        *(_details(f"{s}: inputs (sha256 or fingerprint)", m.inputs) for s, m in manifests.items()),
        *(_details(f"{s}: outputs (sha256)", m.outputs) for s, m in manifests.items() if m.outputs),
        *(_details(f"{s}: versions", m.versions) for s, m in manifests.items()),
    ]
    body = "\n".join(part for part in parts if part)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>EAGLE-3 run</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>'
        f"<body>\n{body}\n</body></html>\n"
    )


def _when(manifests: Mapping[str, Manifest]) -> str:
    if not manifests:
        return "no stage is complete"
    last = list(manifests.values())[-1]
    seconds = sum(manifest.seconds for manifest in manifests.values())
    engine = next((m.versions for m in reversed(list(manifests.values())) if "vllm" in m.versions), {})
    patched = f", patched: {engine['patches']}" if "patches" in engine else ""
    return f"{last.finished} · vLLM {engine.get('vllm', 'none')}{patched} · {seconds:,.0f} s in all stages"


def _warnings(manifests: Mapping[str, Manifest]) -> str:
    """What a reader must not overlook."""
    said = []
    evaluate = manifests["evaluate"].metrics if "evaluate" in manifests else {}
    if evaluate.get("token_identical") is False:
        said.append("The output with the head differs from the target's own: do not serve this head as lossless.")
    check = manifests["extract"].metrics.get("self_check") if "extract" in manifests else None
    if "extract" in manifests and not check:
        said.append("The self-check of the extraction was off.")
    ratios = [m.metrics.get("distinct_bigram_ratio") for s, m in manifests.items() if s in ("prepare", "evaluate")]
    if any(ratio is not None and ratio < 0.5 for ratio in ratios):
        said.append("The target's answers repeat themselves: acceptance on loops says nothing about other text.")
    return "".join(f'<p class="bad">{escape(text)}</p>' for text in said)


def _key_numbers(manifests: Mapping[str, Manifest]) -> str:
    rows = []
    for stage, key, name, unit, meaning in _KEY_NUMBERS:
        value = manifests[stage].metrics.get(key) if stage in manifests else None
        if value is not None:
            rows.append([name, _value(value), unit, meaning, f"{stage}/manifest.json: {key}"])
    if not rows:
        return ""
    return "<h2>Key numbers</h2>" + _rows(("number", "value", "unit", "meaning", "from"), rows)


def _rows(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "".join("<tr>" + "".join(_cell(i, str(cell)) for i, cell in enumerate(row)) + "</tr>\n" for row in rows)
    return f"<table><tr>{head}</tr>\n{body}</table>"


def _cell(column: int, text: str) -> str:
    numeric = text.replace(",", "").replace(".", "", 1).replace("%", "").isdigit()
    kind = "n" if numeric and column else "c" if "manifest.json" in text else ""
    return f'<td class="{kind}">{escape(text)}</td>' if kind else f"<td>{escape(text)}</td>"


def _figure(name: str, caption: str, png: bytes) -> str:
    data = base64.b64encode(png).decode()
    return (
        f'<h2>{escape(name.capitalize())}</h2><img alt="{escape(name)}" src="data:image/png;base64,{data}">'
        f'<p class="sub">{escape(caption)}</p>'
    )


def _details(title: str, values: Mapping[str, Any]) -> str:
    rows = "".join(
        f'<tr><td>{escape(str(key))}</td><td class="c">{escape(_value(value))}</td></tr>\n'
        for key, value in values.items()
    )
    return f"<details><summary>{escape(title)}</summary><table>{rows}</table></details>"


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts as dotted keys."""
    made: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, dict):
            made |= _flat(item, f"{prefix}{key}.")
        else:
            made[f"{prefix}{key}"] = item
    return made


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list):
        return ", ".join(_value(item) for item in value) or "none"
    return "none" if value is None else str(value)

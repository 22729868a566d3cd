"""Report, plots and summary: readable, self-contained, and content with what there is."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser

import pytest
from PIL import Image
from run_samples import METRICS, write_run

from vllm_compat.kimi.config import Config
from vllm_compat.kimi.manifest import STAGES
from vllm_compat.kimi.plots import plot_acceptance, plot_loss, plot_rate
from vllm_compat.kimi.report import report
from vllm_compat.kimi.summary import stage_line, write_summary

MakeConfig = Callable[..., Config]


class _Page(HTMLParser):
    """What a browser would load, and whether every tag is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.references: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.references += [value or "" for key, value in attrs if key in ("src", "href")]
        if tag not in ("img", "meta"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def page_of(cfg: Config) -> str:
    text = report(cfg).read_text(encoding="utf-8")
    parsed = _Page(text)
    assert parsed.open == []
    assert all(reference.startswith("data:image/png;base64,") for reference in parsed.references)
    return text


def test_a_complete_run_is_one_page_without_references(make_config: MakeConfig) -> None:
    """Key numbers with units and origin, three pictures inside the page and beside it, configuration,
    provenance.
    """
    cfg = make_config([])
    write_run(cfg.run_dir)
    page = page_of(cfg)
    for text in (
        "2.471",
        "1.012",
        "2.449",
        "tokens / target step",
        "evaluate/manifest.json: acceptance_length",
    ):
        assert text in page
    for text in ("5,210", "99.31%", "model", "a" * 64, "some_key"):
        assert text in page
    pictures = re.findall(r"data:image/png;base64,([^\"]+)", page)
    assert {"acceptance.png", "loss.png", "rate.png"} == {path.name for path in (cfg.run_dir / "plots").iterdir()}
    on_disk = {path.read_bytes() for path in (cfg.run_dir / "plots").iterdir()}
    assert {base64.b64decode(picture) for picture in pictures} == on_disk
    assert 'class="bad"' not in page


def test_a_patched_engine_is_named_at_the_top(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside vLLM's version: the numbers are those of both."""
    monkeypatch.setattr("vllm_compat.kimi.manifest.enabled", lambda: ("cpu-rms-norm",))
    cfg = make_config([])
    write_run(cfg.run_dir)
    assert re.search(r"vLLM [^·]*, patched: cpu-rms-norm · ", page_of(cfg))


@pytest.mark.parametrize("number", range(len(STAGES) + 1))
def test_later_stages_may_be_missing(make_config: MakeConfig, number: int) -> None:
    """After each stage the report says what is there and names what is not."""
    cfg = make_config([])
    write_run(cfg.run_dir, STAGES[:number])
    page = page_of(cfg)
    missing = ", ".join(STAGES[number:])
    assert (f"Not run yet: {missing}." in page) == bool(missing)


def test_data_cannot_write_html(make_config: MakeConfig) -> None:
    """Text of the input (a malformed line) is shown, never interpreted."""
    cfg = make_config([])
    write_run(cfg.run_dir, train={"device": "<script>alert(1)</script>"})
    page = page_of(cfg)
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert "<b>" not in page


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        ({"evaluate": {"token_identical": False}}, "differs from the target"),
        ({"extract": {"self_check": None}}, "self-check"),
        ({"evaluate": {"distinct_bigram_ratio": 0.1}}, "repeat themselves"),
    ],
)
def test_what_must_not_be_overlooked_is_said(
    make_config: MakeConfig, changes: dict[str, dict[str, object]], warning: str
) -> None:
    """Different output, no self-check, looping answers: a sentence at the top, not a number in a table."""
    cfg = make_config([])
    write_run(cfg.run_dir, **changes)
    page = page_of(cfg)
    assert warning in page.split("<h2>")[0]


def test_optional_numbers_may_be_none(make_config: MakeConfig) -> None:
    """A run that resumed a finished extraction has no rate; an evaluation may go without the untrained
    head.
    """
    cfg = make_config([])
    nothing = {"tokens_per_second": None, "ratio_to_prefill": None, "plain_prefill_tokens_per_second": None}
    untrained = {"untrained_acceptance_length": None, "untrained_per_position": None}
    write_run(cfg.run_dir, extract=nothing, evaluate=untrained)
    page_of(cfg)
    assert not (cfg.run_dir / "plots/rate.png").exists()
    assert "all there already" in stage_line("extract", {**METRICS["extract"], **nothing})


@pytest.mark.parametrize(
    "png",
    [
        lambda: plot_loss([{"step": 1, "loss": 2.0}]),
        lambda: plot_loss([{"step": s, "loss": 2.0, "acceptance": [0.5] * 9} for s in range(30)]),
        lambda: plot_acceptance([0.0] * 4, None, None),
        lambda: plot_acceptance([1.0] * 7, [1.0] * 7, [1.0] * 7),
        lambda: plot_rate(1.0, 90_000.0),
    ],
)
def test_plots_of_extreme_values_are_pictures(png: Callable[[], bytes]) -> None:
    """One point, more TTT steps than colours, all zero, all one."""
    picture = Image.open(io.BytesIO(png())).convert("L")
    assert picture.width > 500
    dark = sum(picture.histogram()[:128])
    assert dark > 500  # there is ink on it


def test_summary_has_the_keys_that_others_read(make_config: MakeConfig) -> None:
    """Nested by stage; the keys that the issue names are where it says."""
    cfg = make_config([])
    write_run(cfg.run_dir)
    assert write_summary(cfg.run_dir) == json.loads((cfg.run_dir / "summary.json").read_text())
    summary = json.loads((cfg.run_dir / "summary.json").read_text())
    for path in (
        "extract.tokens_per_second",
        "extract.ratio_to_prefill",
        "extract.self_check",
        "vocab.coverage",
        "train.loss",
        "train.first_loss",
        "evaluate.acceptance_length",
        "evaluate.untrained_acceptance_length",
        "evaluate.estimated_acceptance_length",
        "evaluate.per_position",
        "evaluate.token_identical",
    ):
        stage, key = path.split(".")
        assert METRICS[stage][key] == summary[stage][key]
    assert list(STAGES) == summary["stages"]


def test_stage_lines_have_the_key_numbers() -> None:
    """One line per stage, with units where a number needs one."""
    lines = {stage: stage_line(stage, METRICS[stage]) for stage in STAGES}
    assert "1,403 rows (1,262 train, 141 held out)" in lines["prepare"]
    assert "2 malformed" in lines["prepare"]
    assert "5,210 tok/s · 0.93 of plain prefill" in lines["extract"]
    assert "next token 100.0%" in lines["extract"]
    assert "1,024 of 2,048 tokens cover 99.31%" in lines["vocab"]
    assert "loss 4.110 -> 1.023" in lines["train"]
    assert "acceptance length 2.47 · untrained head 1.01 · offline estimate 2.45" in lines["evaluate"]
    assert "DIFFERS" in stage_line("evaluate", {**METRICS["evaluate"], "token_identical": False})
    assert stage_line("vocab", {"coverage": 0.5}) == "coverage 0.5"
    assert all("\n" not in line for line in lines.values())

"""The pictures of a run as PNG: loss, acceptance per position, extraction rate.

matplotlib's object API on the Agg canvas: no display, no global state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INK, _GRID = "#1f2933", "#d9dee4"
_TRAINED, _UNTRAINED, _OFFLINE = "#1f6fb2", "#b0b7c0", "#e08a1e"
_STEPS = ("#1f6fb2", "#e08a1e", "#3c9a5f", "#b23a48", "#7a5ea8", "#6b7280", "#2aa5a0", "#c2571a")


def plot_loss(lines: Sequence[Mapping[str, Any]]) -> bytes:
    """Training loss, and the acceptance of each training-time-test step, over optimiser steps.

    lines: of train/metrics.jsonl: step, loss, and per TTT step `acceptance` (shared probability mass, 0…1).
    """
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    steps = [line["step"] for line in lines]
    depth = max((len(line.get("acceptance", ())) for line in lines), default=0)
    figure, axes = _figure(2 if depth else 1, width=9.6 if depth else 5.6)
    marker = "o" if len(steps) < 12 else None
    axes[0].plot(steps, [line["loss"] for line in lines], color=_TRAINED, linewidth=1.8, marker=marker, markersize=4)
    axes[0].set(title="Training loss", xlabel="optimiser step", ylabel="KL to the target (nats)")
    axes[0].set_ylim(bottom=0)
    for k in range(depth):
        values = [line["acceptance"][k] for line in lines]
        label = f"draft token {k + 1}"
        axes[1].plot(
            steps,
            values,
            color=_STEPS[k % len(_STEPS)],
            linewidth=1.8,
            label=label,
            marker=marker,
            markersize=4,
        )
    if depth:
        axes[1].set(title="Acceptance in training", xlabel="optimiser step", ylabel="probability mass shared")
        axes[1].set_ylim(0, 1)
        axes[1].yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes[1].legend(frameon=False, fontsize=9, loc="best")
    for axis in axes:
        axis.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    return _png(figure)


def plot_acceptance(
    trained: Sequence[float], untrained: Sequence[float] | None, offline: Sequence[float] | None
) -> bytes:
    """Share of target steps in which the draft token at each position was accepted, measured in serving.

    Beside it the untrained head (same shape, random weights) and the offline estimate of the trained one.
    """
    from matplotlib.ticker import PercentFormatter

    series = [("trained, served by vLLM", trained, _TRAINED)]
    if offline:
        series.append(("trained, offline estimate", offline, _OFFLINE))
    if untrained:
        series.append(("untrained, served by vLLM", untrained, _UNTRAINED))
    figure, (axis,) = _figure(1, width=7.2)
    width = 0.8 / len(series)
    for i, (label, values, color) in enumerate(series):
        places = [k + 1 + (i - (len(series) - 1) / 2) * width for k in range(len(values))]
        bars = axis.bar(places, values, width=width * 0.92, color=color, label=label)
        axis.bar_label(bars, labels=[f"{value:.0%}" for value in values], fontsize=8, color=_INK, padding=2)
    highest = max((max(values) for _, values, _ in series), default=0.0)
    axis.set(title="Draft tokens accepted", xlabel="position of the draft token", ylabel="share of target steps")
    axis.set_xticks(range(1, len(trained) + 1))
    axis.set_ylim(0, min(1.1, max(0.1, highest * 1.25)))
    axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axis.grid(visible=False, axis="x")
    axis.legend(frameon=False, fontsize=9, loc="upper right")
    return _png(figure)


def plot_rate(extraction: float, prefill: float) -> bytes:
    """Tokens per second: extraction to a durable store, and the same engine's plain prefill."""
    from matplotlib.ticker import FuncFormatter

    figure, (axis,) = _figure(1, width=6.4, height=2.3)
    bars = axis.barh(
        ["plain prefill", "extraction to disk"],
        [prefill, extraction],
        height=0.55,
        color=[_UNTRAINED, _TRAINED],
    )
    labels = [f"{prefill:,.0f} tok/s", f"{extraction:,.0f} tok/s = {extraction / prefill:.0%}"]
    axis.bar_label(bars, labels=labels, padding=5, fontsize=9, color=_INK)
    axis.set(title="Extraction rate", xlabel="tokens per second")
    axis.set_xlim(0, max(extraction, prefill) * 1.38)
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axis.grid(visible=False)
    return _png(figure)


def _figure(columns: int, width: float, height: float = 3.6) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=130, layout="constrained", facecolor="white")
    axes = [figure.add_subplot(1, columns, i + 1) for i in range(columns)]
    for axis in axes:
        axis.grid(visible=True, color=_GRID, linewidth=0.8)
        axis.set_axisbelow(True)
        axis.tick_params(colors=_INK, labelsize=9, length=0)
        for side, spine in axis.spines.items():
            spine.set_visible(side in ("left", "bottom"))
            spine.set_color(_GRID)
        axis.title.set_color(_INK)
        axis.title.set_fontsize(11)
        axis.xaxis.label.set_color(_INK)
        axis.yaxis.label.set_color(_INK)
    return figure, axes


def _png(figure: Figure) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    stream = BytesIO()
    FigureCanvasAgg(figure).print_png(stream)
    return stream.getvalue()

"""Whether generated text loops: a loop is accepted nearly whole, and then says nothing about a head."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise


def distinct_bigrams(ids: Sequence[int]) -> float | None:
    """Different bigrams / bigrams of one answer; near 0 for a loop, None for an answer of one token or none."""
    pairs = list(pairwise(ids))
    return len(set(pairs)) / len(pairs) if pairs else None


def mean_ratio(ratios: Iterable[float | None]) -> float | None:
    """Mean of those that are numbers, to 4 digits; None when there is none."""
    known = [ratio for ratio in ratios if ratio is not None]
    return round(sum(known) / len(known), 4) if known else None

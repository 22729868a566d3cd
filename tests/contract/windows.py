"""Which releases an adapter serves, and what its needs meet in a recorded release."""

from __future__ import annotations

import functools

from cells.recipe import numbers
from fit import attributes, choose, fields, misfit, problems, signature

from vllm_compat.adapters.base import Adapter
from vllm_compat.adapters.select import SURFACES, adapters_of
from vllm_compat.recorded import store
from vllm_compat.recorded.store import RecordedApi

__all__ = ["attributes", "choose", "fields", "misfit", "problems", "signature"]  # of matrix/fit.py

Numbers = tuple[int, ...]


@functools.cache
def recorded() -> tuple[RecordedApi, ...]:
    """Every recorded release, oldest first."""
    return tuple(store.all_recorded())


@functools.cache
def window(adapter: type[Adapter]) -> list[RecordedApi]:
    """The recorded releases that name this adapter: from its ``since`` until the next newer adapter's."""
    newer = [other.since for other in adapters_of(adapter.surface) if other.since > adapter.since]
    return [api for api in recorded() if adapter.since <= api.numbers and all(api.numbers < since for since in newer)]


def all_adapters() -> list[type[Adapter]]:
    return [adapter for surface in SURFACES for adapter in adapters_of(surface)]


def releases_before_every_adapter() -> dict[str, list[str]]:
    """Surface -> recorded releases that are older than its oldest adapter."""
    return {
        surface: [api.release for api in recorded() if api.numbers < min(a.since for a in adapters_of(surface))]
        for surface in SURFACES
    }


def promised(release: str, life: str) -> bool:
    """Whether a release lies in "0.22.0-0.30.0", in "0.28.0" (and newer), or in "" (all)."""
    first, _, last = life.partition("-")
    return (not first or numbers(first) <= numbers(release)) and (not last or numbers(release) <= numbers(last))


@functools.cache
def nightlies() -> tuple[RecordedApi, ...]:
    """Every recorded nightly, oldest first."""
    return tuple(store.all_recorded(store.NIGHTLY))

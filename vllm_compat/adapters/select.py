"""Which adapter serves a surface: the release names it, the live signature confirms it."""

from __future__ import annotations

import functools
import importlib
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from vllm_compat.adapters.base import Adapter
from vllm_compat.errors import SignatureMismatch
from vllm_compat.installed import installed

#: Surface -> module of this package that holds its adapters as ``ADAPTERS``, newest first.
SURFACES: dict[str, str] = {
    "vllm_config": "config",
    "sampling_params": "sampling_params",
    "pooling_params": "pooling_params",
    "lora_request": "lora_request",
    "request": "request",
    "engine_core_request": "engine_core_request",
    "block_hashing": "block_hashing",
    "kv_cache": "kv_cache",
    "kv_cache_manager": "kv_cache_manager",
    "structured_output": "structured_output",
    "scheduler": "scheduler",
    "scheduler_output": "scheduler_output",
    "batch_rows": "batch_rows",
    "executor": "executor",
    "input_processor": "input_processor",
    "model_runner_output": "model_runner_output",
    "engine_core_output": "engine_core_output",
    "step": "step",
}

_lock = threading.RLock()


@dataclass(frozen=True)
class Selection:
    """An adapter that was chosen, and why.

    Attributes:
        surface: Name of the surface.
        adapter: The class chosen.
        named: The class that the release alone would have named; differs from ``adapter`` when the shape decided.
        reason: One sentence for ``doctor``.
    """

    surface: str
    adapter: type[Adapter]
    named: type[Adapter]
    reason: str


def adapters_of(surface: str) -> tuple[type[Adapter], ...]:
    """All adapters of a surface, newest first."""
    module = importlib.import_module(f"vllm_compat.adapters.{SURFACES[surface]}")
    adapters: tuple[type[Adapter], ...] = module.ADAPTERS
    return adapters


def misfit(adapter: type[Adapter]) -> str:
    """Why the installed vLLM does not have what ``adapter`` calls; "" when it does."""
    return "; ".join(filter(None, (need.live_misfit() for need in adapter.needs)))


@functools.cache
def _choose(surface: str) -> Selection:
    here = installed()
    candidates = adapters_of(surface)
    named = candidates[0]
    if here.release is not None:
        named = next((a for a in candidates if a.since <= here.release), candidates[-1])
    by_release = f"vLLM {here.version}" if here.release is not None else f"vLLM {here.version!r} (release unknown)"
    # Neighbours in order of distance: a nightly or a fork most often looks like the release next to it.
    at = candidates.index(named)
    order = sorted(candidates, key=lambda a: abs(candidates.index(a) - at))
    problems: dict[type[Adapter], str] = {}
    for adapter in order:
        problems[adapter] = misfit(adapter)
        if problems[adapter]:
            continue
        if adapter is named:
            reason = f"{by_release} names it and its live signatures fit"
        else:
            reason = f"{by_release} names '{named.label()}', but {problems[named]}; this one fits"
        return Selection(surface, adapter, named, reason)
    raise _mismatch(surface, named, problems[named])


def _mismatch(surface: str, named: type[Adapter], problem: str) -> SignatureMismatch:
    expected: tuple[str, ...] = ()
    live: tuple[str, ...] = ()
    symbol, verb = named.label(), "Passed"
    for need in named.needs:
        if not need.live_misfit():
            continue
        symbol, expected = need.symbol, need.passes
        if not expected:
            expected, verb = need.reads, "Read"
        with suppress(ImportError, AttributeError, TypeError):
            live = need.live().names
        break
    return SignatureMismatch(
        f"{surface} of vLLM {installed().version}",
        symbol=symbol,
        expected=expected,
        live=live,
        found=f"{problem}. {verb} here: ({', '.join(expected)}); live: ({', '.join(live)})",
        advice="update vllm-compat, or report this signature with the output of `vllm-compat doctor`",
    )


def adapter(surface: str) -> Any:
    """An instance of the adapter that serves ``surface`` here. Chosen once per process.

    Raises:
        VllmNotInstalled: there is no vLLM. SignatureMismatch: no adapter fits; carries both signatures.
    """
    with _lock:
        return _choose(surface).adapter()


def explain() -> list[Selection | SignatureMismatch]:
    """The selection of every surface, for ``doctor``. Imports vLLM."""
    results: list[Selection | SignatureMismatch] = []
    for surface in SURFACES:
        try:
            with _lock:
                results.append(_choose(surface))
        except SignatureMismatch as error:
            results.append(error)
    return results

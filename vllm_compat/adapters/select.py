"""Which adapter serves a surface: the release names it, the live signature confirms it."""

from __future__ import annotations

import functools
import importlib
import sys
import threading
import warnings
from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from vllm_compat import releases
from vllm_compat.adapters.base import Adapter
from vllm_compat.errors import SignatureMismatch, UnsupportedRelease, UnverifiedRelease
from vllm_compat.installed import OVERRIDE_VARIABLE, Release, installed

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
    "aux_states": "aux_states",
    "executor": "executor",
    "input_processor": "input_processor",
    "model_runner_output": "model_runner_output",
    "engine_core_output": "engine_core_output",
    "step": "step",
    "kv_connector": "kv_connector",
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

    @functools.cached_property
    def instance(self) -> Adapter:
        """Adapters hold no state, so one is enough."""
        return self.adapter()


def adapters_of(surface: str) -> tuple[type[Adapter], ...]:
    """All adapters of a surface, newest first."""
    return _module(surface).ADAPTERS  # type: ignore[no-any-return]


def _module(surface: str) -> ModuleType:
    return importlib.import_module(f"vllm_compat.adapters.{SURFACES[surface]}")


def misfit(adapter: type[Adapter]) -> str:
    """Why the installed vLLM does not have what ``adapter`` calls; "" when it does."""
    return "; ".join(filter(None, (need.live_misfit() for need in adapter.needs)))


def by_number(surface: str, release: Release | None) -> type[Adapter]:
    """The adapter that a release names: the newest that is not newer; of an unknown release the newest of all."""
    candidates = adapters_of(surface)
    if release is None:
        return candidates[0]
    return next((adapter for adapter in candidates if adapter.since <= release), candidates[-1])


def in_order(surface: str, release: Release | None, *, is_dev: bool) -> list[type[Adapter]]:
    """The adapters of a surface in the order in which they are tried on a build; the first that fits is taken.

    First the one that the number names, then its neighbours in order of distance: a fork most often looks like the
    release next to it.

    A nightly is ahead of its number: 0.25.2.dev202607130930 has a part of what comes with 0.26.0, and on the way to
    0.28.0 some have what only 0.29.0 was released with. So newer adapters are tried before the one that the number
    names, newest first. One that earlier releases fit too (``UNSEEN`` of its module) proves nothing by fitting; of
    these only those of the next release are tried.
    """
    candidates = adapters_of(surface)
    named = by_number(surface, release)
    at = candidates.index(named)
    near = sorted(candidates, key=lambda adapter: abs(candidates.index(adapter) - at))
    following = next((row.numbers for row in releases.all_releases() if release and row.numbers >= release), None)
    if not is_dev or following is None:
        return near
    unseen = getattr(_module(surface), "UNSEEN", ())
    ahead = [adapter for adapter in candidates[:at] if adapter.since <= following or adapter not in unseen]
    return [*ahead, *(adapter for adapter in near if adapter not in ahead)]


@functools.cache
def _choose(surface: str) -> Selection:
    here = installed()
    _refuse_what_is_too_old(here.release)
    named = by_number(surface, here.release)
    by_release = f"vLLM {here.version}" if here.release is not None else f"vLLM {here.version!r} (release unknown)"
    problems: dict[type[Adapter], str] = {}
    for adapter in in_order(surface, here.release, is_dev=here.is_dev):
        problems[adapter] = misfit(adapter)
        if problems[adapter]:
            continue
        if adapter is named:
            reason = f"{by_release} names it and its live signatures fit"
        elif problems.get(named):
            reason = f"{by_release} names '{named.label()}', but {problems[named]}; this one fits"
        else:
            reason = f"{by_release} is ahead of its number, which names '{named.label()}'; this one fits"
        return Selection(surface, adapter, named, reason)
    raise _mismatch(surface, named, problems[named])


def _refuse_what_is_too_old(release: Release | None) -> None:
    oldest = releases.oldest()
    if release is not None and release < oldest.numbers:
        here = installed()
        raise UnsupportedRelease(
            "vLLM's internals through vllm_compat",
            needed=f"vLLM {oldest.version} or newer",
            found=f"vLLM {here.version} ({here.distribution or 'source tree'})",
            advice="upgrade vLLM; for a fork with numbers of its own "
            f"set {OVERRIDE_VARIABLE} to the release that it is made from, or to dev to go by its signatures",
        )


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
        VllmNotInstalled: there is no vLLM. UnsupportedRelease: it is older than any release that is served.
        SignatureMismatch: no adapter fits; carries both signatures.

    Warns:
        UnverifiedRelease: once per process, where the installed build is not a release of the table.
    """
    with _lock:
        chosen = _choose(surface)
        if not _said:
            _say_if_unverified(chosen)
    return chosen.instance


_said = False


def _say_if_unverified(chosen: Selection) -> None:
    global _said
    _said = True
    here = installed()
    why = releases.unverified(here.release, is_dev=here.is_dev)
    if why:
        instead = f"; the {chosen.surface} is served by its shape" if chosen.adapter is not chosen.named else ""
        what = f"vLLM {here.version} is unverified ({why}): its live signatures fit so far{instead}. "
        warnings.warn(UnverifiedRelease(f"{what}`vllm-compat doctor` has the details."), stacklevel=_to_caller())


def _to_caller() -> int:
    """The stack level, as `_say_if_unverified` counts, of the first frame outside this package."""
    level, frame = 1, sys._getframe(1)
    while frame.f_globals.get("__name__", "").partition(".")[0] == __name__.partition(".")[0]:
        if frame.f_back is None:
            break
        level, frame = level + 1, frame.f_back
    return level


def serving(surface: str) -> type[Adapter] | None:
    """The adapter that serves a surface here; None when none fits. Imports vLLM."""
    try:
        with _lock:
            return _choose(surface).adapter
    except SignatureMismatch:
        return None


def explain() -> list[Selection | SignatureMismatch]:
    """The selection of every surface, for ``doctor``. Imports vLLM.

    Raises:
        UnsupportedRelease: it is older than any release that is served.
    """
    results: list[Selection | SignatureMismatch] = []
    for surface in SURFACES:
        try:
            with _lock:
                results.append(_choose(surface))
        except SignatureMismatch as error:
            results.append(error)
    return results

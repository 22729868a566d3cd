"""Which releases an adapter serves, and what its needs meet in a recorded release."""

from __future__ import annotations

import functools

from vllm_compat.adapters.base import Adapter, Need
from vllm_compat.adapters.select import SURFACES, adapters_of
from vllm_compat.adapters.signature import Parameter, Signature
from vllm_compat.recorded import store
from vllm_compat.recorded.store import RecordedApi

Numbers = tuple[int, ...]


@functools.cache
def recorded() -> tuple[RecordedApi, ...]:
    """Every recorded release, oldest first."""
    return tuple(store.all_recorded())


def numbers(release: str) -> Numbers:
    return tuple(map(int, release.split(".")))


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


def signature(api: RecordedApi, need: Need) -> Signature | None:
    """The recorded signature of what ``need`` names; None when the release does not have it."""
    call = api.call(need.symbol)
    if call is None:
        return None
    parameters = tuple(Parameter(p.name, p.required, p.kind) for p in call.parameters)
    return Signature(need.symbol, parameters, accepts_var_keyword=call.var_keyword)


def misfit(api: RecordedApi, need: Need) -> str:
    """Why a recorded release does not have what ``need`` calls and reads; "" when it does."""
    found = signature(api, need)
    if found is None:
        return "" if need.life else f"{need.symbol} is not there"
    lacking = sorted(set(need.reads) - attributes(api, need)) if need.reads else ()
    return "; ".join(filter(None, (need.misfit(found), need.unreadable(lacking))))


def attributes(api: RecordedApi, need: Need) -> frozenset[str]:
    """What an instance of the class that ``need`` names has in a recorded release."""
    return frozenset(api.attributes(need.symbol) or ())


def fields(api: RecordedApi, need: Need) -> frozenset[str]:
    """Those of its attributes that are fields: a dataclass, a struct and a tuple has them, a plain class none."""
    return frozenset(api.fields(need.symbol) or ())


def promised(release: str, life: str) -> bool:
    """Whether a release lies in "0.22.0-0.30.0", in "0.28.0" (and newer), or in "" (all)."""
    first, _, last = life.partition("-")
    return (not first or numbers(first) <= numbers(release)) and (not last or numbers(release) <= numbers(last))


@functools.cache
def nightlies() -> tuple[RecordedApi, ...]:
    """Every recorded nightly, oldest first."""
    return tuple(store.all_recorded(store.NIGHTLY))


def choose(surface: str, api: RecordedApi) -> tuple[type[Adapter], type[Adapter] | None]:
    """(the adapter that the release numbers name, the one whose needs fit), as ``select`` goes about it.

    The second is None where no adapter fits and vllm_compat refuses.
    """
    listed = adapters_of(surface)
    named = next((adapter for adapter in listed if adapter.since <= api.numbers), listed[-1])
    at = listed.index(named)
    order = sorted(listed, key=lambda adapter: abs(listed.index(adapter) - at))
    return named, next((a for a in order if not any(misfit(api, need) for need in a.needs)), None)

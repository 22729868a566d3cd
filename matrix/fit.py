"""Which adapter fits a recorded release, and what it says nothing of; no vLLM is needed."""

from __future__ import annotations

import functools

from vllm_compat.adapters.base import Adapter, Need
from vllm_compat.adapters.select import SURFACES, by_number, in_order
from vllm_compat.adapters.signature import Parameter, Signature
from vllm_compat.recorded.calls import Call
from vllm_compat.recorded.diff import arity
from vllm_compat.recorded.store import RecordedApi

#: Of a symbol in ``Adapter.left``: whatever else it has.
ANYTHING_ELSE = "*"


def signature(api: RecordedApi, need: Need) -> Signature | None:
    """The recorded signature of what ``need`` names; None when the release does not have it."""
    call = api.call(need.symbol)
    return None if call is None else _signature(need.symbol, call)


@functools.cache  # most releases have the same
def _signature(symbol: str, call: Call) -> Signature:
    parameters = tuple(Parameter(p.name, p.required, p.kind) for p in call.parameters)
    values = arity(call.returns)
    return Signature(symbol, parameters, accepts_var_keyword=call.var_keyword, returns=values if values > 1 else 0)


def misfit(api: RecordedApi, need: Need) -> str:
    """Why a recorded release does not have what ``need`` calls and reads; "" when it does."""
    found = signature(api, need)
    if found is None and not (need.read_only and api.symbol(need.symbol)):  # an enumeration is read, never called
        return "" if need.life else f"{need.symbol} is not there"
    lacking = sorted(set(need.reads) - attributes(api, need)) if need.reads else ()
    return "; ".join(filter(None, (need.misfit(found) if found else "", need.unreadable(lacking))))


def attributes(api: RecordedApi, need: Need) -> frozenset[str]:
    """What an instance of the class that ``need`` names has in a recorded release."""
    return frozenset(api.attributes(need.symbol) or ())


def fields(api: RecordedApi, need: Need) -> frozenset[str]:
    """Those of its attributes that are fields: a dataclass, a struct and a tuple has them, a plain class none."""
    return frozenset(api.fields(need.symbol) or ())


def problems(api: RecordedApi, adapter: type[Adapter]) -> list[str]:
    """Everything of an adapter that does not fit a recorded release."""
    return [problem for need in adapter.needs if (problem := misfit(api, need))]


def choose(surface: str, api: RecordedApi) -> tuple[type[Adapter], type[Adapter] | None]:
    """(the adapter that the release numbers name, the one whose needs fit), as ``select`` goes about it.

    The second is None where no adapter fits and vllm_compat refuses.
    """
    order = in_order(surface, api.numbers, is_dev=".dev" in api.release)
    return by_number(surface, api.numbers), next((a for a in order if not problems(api, a)), None)


def known(adapter: type[Adapter], need: Need) -> set[str]:
    """What an adapter says of a symbol: passed always, passed when set, read, or deliberately left."""
    return {*need.passes, *(need.options or {}), *need.reads, *adapter.left.get(need.short, ())}


def there(api: RecordedApi, need: Need) -> frozenset[str]:
    """What a recorded release has of it: parameters if it is called, fields if it is read."""
    found = signature(api, need)
    if found is None:
        return frozenset()
    return fields(api, need) if need.read_only else frozenset(found.names)


def unheard_of(api: RecordedApi, adapter: type[Adapter]) -> list[str]:
    """``Symbol.name`` of every parameter and field that a release has and an adapter says nothing of."""
    return [
        f"{need.short}.{name}"
        for need in adapter.needs
        if ANYTHING_ELSE not in (said := known(adapter, need))
        for name in sorted(there(api, need) - said)
    ]


def report(api: RecordedApi) -> tuple[list[str], list[str]]:
    """(surfaces that no longer fit by the adapter their number names, parameters nobody thought about): a line each."""
    unfit, new = [], []
    for surface in SURFACES:
        named, fits = choose(surface, api)
        if fits is not named:
            instead = f"'{fits.label()}' would be taken" if fits else "no other adapter fits either"
            unfit.append(f"{surface}: {'; '.join(problems(api, named))} ({instead})")
        else:
            names = unheard_of(api, named)
            if names:
                new.append(f"{surface}: {', '.join(names)}")
    return unfit, new

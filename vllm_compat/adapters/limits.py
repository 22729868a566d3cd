"""What a release cannot express: options that its adapters take and refuse to pass on (`UnsupportedField`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from vllm_compat.adapters.base import Adapter, Need, resolve
from vllm_compat.adapters.engine_args import LIVES, RENAMED
from vllm_compat.installed import Release, parse_release

__all__ = ["Limit", "engine_args_of", "of_adapter", "of_engine_args"]


@dataclass(frozen=True)
class Limit:
    """An option that is not there.

    Attributes:
        symbol: The symbol of vLLM that would take it, by `Need.short`.
        option: Its name; "" when the symbol itself is not there.
        needs: The releases that have it: "vLLM 0.31.0 or newer", "vLLM 0.22.0 to 0.30.0".
    """

    symbol: str
    option: str
    needs: str


def of_adapter(adapter: type[Adapter], release: Release | None) -> list[Limit]:
    """The options of an adapter that are not there, those that came first at the head.

    Args:
        adapter: The one that serves the surface.
        release: Release numbers; None to ask the live signatures, which imports vLLM.
    """
    found: dict[tuple[str, str], str] = {}
    for need in adapter.needs:
        if need.options and need.life and not _exists(need, release):
            found[need.short, ""] = need.life
            continue
        for option, life in (need.options or {}).items():
            if life and not _has(need, option, life, release):
                found[need.short, option] = life
    return _sorted(found)


def _exists(need: Need, release: Release | None) -> bool:
    if release is not None:
        return _lived(need.life, release)
    try:
        resolve(need.symbol)
    except (ImportError, AttributeError):
        return False
    return True


def _has(need: Need, option: str, life: str, release: Release | None) -> bool:
    if release is not None:
        return _lived(life, release)
    try:
        return need.live().accepts(option)
    except (ImportError, AttributeError, TypeError):
        return False


def of_engine_args(release: Release | None, known: Iterable[str] = ()) -> list[Limit]:
    """The options of EngineArgs that are not there, nor by another name (``engine_args.RENAMED``).

    Args:
        release: Release numbers; None to go by `known`.
        known: The options that EngineArgs has.
    """
    there = {*known} if release is None else {name for name, life in LIVES.items() if _lived(life, release)}
    lacking = {name: life for name, life in LIVES.items() if name not in there}
    for renamed in RENAMED:
        if renamed.new not in lacking:
            lacking.pop(renamed.old, None)
        elif renamed.back is not None and renamed.old not in lacking:
            lacking.pop(renamed.new, None)
    return _sorted({("EngineArgs", option): life for option, life in lacking.items()})


def engine_args_of() -> set[str]:
    """The options that the installed vLLM's EngineArgs has. Imports vLLM."""
    return {field.name for field in dataclasses.fields(resolve("vllm.engine.arg_utils:EngineArgs")) if field.init}


def _lived(life: str, release: Release) -> bool:
    first, _, last = life.partition("-")
    after, until = parse_release(first), parse_release(last)
    return (after is None or after <= release) and (until is None or release <= until)


def _sorted(lives: Mapping[tuple[str, str], str]) -> list[Limit]:
    limits = []
    for (symbol, option), life in sorted(lives.items(), key=lambda entry: (_first(entry[1]), entry[0])):
        first, _, last = life.partition("-")
        needs = f"{first} or newer" if not last else first if first == last else f"{first} to {last}"
        limits.append(Limit(symbol, option, f"vLLM {needs}"))
    return limits


def _first(life: str) -> Release:
    return parse_release(life.partition("-")[0]) or ()

"""Names that vLLM moved or renamed: the table ``moved.toml``, and finding one of them in the installed vLLM."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from vllm_compat.errors import UnsupportedName
from vllm_compat.installed import installed, parse_release

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_WORDS = ("instead", "note", "adapted")
_ABSENT = object()


@dataclass(frozen=True)
class Place:
    """Where a name is from a release on.

    Attributes:
        since: The first release, as numbers.
        symbol: ``"vllm.utils.math_utils:cdiv"``; "" where the name is gone.
    """

    since: tuple[int, ...]
    symbol: str


@dataclass(frozen=True)
class Move:
    """A row of the table; its columns are explained at the head of ``moved.toml``."""

    name: str
    topic: str
    places: tuple[Place, ...]
    instead: str = ""
    note: str = ""
    adapted: str = ""

    def at(self, release: tuple[int, ...]) -> str:
        """The symbol that a release has; "" where it has none."""
        return next((place.symbol for place in reversed(self.places) if place.since <= release), "")

    @property
    def life(self) -> str:
        """The releases that have the name, for people: "0.10.2 or newer", "from 0.10.2 on, before 0.12.0"."""
        first, last = self.places[0], self.places[-1]
        text = ".".join(map(str, first.since))
        return f"{text} or newer" if last.symbol else f"from {text} on, before {'.'.join(map(str, last.since))}"


@functools.cache
def table() -> Mapping[str, Move]:
    """Every row, by name."""
    text = resources.files("vllm_compat").joinpath("moved.toml").read_text(encoding="utf-8")
    return {
        name: _move(name, topic, columns)
        for topic, rows in tomllib.loads(text).items()
        for name, columns in rows.items()
    }


def _move(name: str, topic: str, columns: Mapping[str, str]) -> Move:
    places = []
    for release, where in columns.items():
        if release in _WORDS:
            continue
        since = parse_release(release)
        assert since is not None, f"moved.toml: {name} has the unknown column {release}"
        places.append(Place(since, where if ":" in where or not where else f"{where}:{name}"))
    return Move(name, topic, tuple(places), **{word: columns[word] for word in _WORDS if word in columns})


def find(name: str) -> tuple[str, Any]:
    """(symbol, live object) of a name of the table. The release names the place, the live import confirms it.

    A nightly or a fork may have the name where a neighbouring release has it: those places are tried next, the nearest
    first.

    Raises:
        UnsupportedName: it is in none of the known places. ImportError: its module is there and cannot be imported.
    """
    move = table()[name]
    release = installed().release
    named = len(move.places) - 1
    if release is not None:
        named = max((at for at, place in enumerate(move.places) if place.since <= release), default=0)
    for at in sorted(range(len(move.places)), key=lambda at: abs(at - named)):
        symbol = move.places[at].symbol
        value = _resolve(symbol) if symbol else _ABSENT
        if value is not _ABSENT:
            return symbol, value
    raise _nowhere(move)


def _resolve(symbol: str) -> Any:
    """The live object, or _ABSENT when its module or the name in it is not there."""
    module_name, _, attribute = symbol.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # The module itself, or a package above it; not what it imports.
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            return _ABSENT
        raise
    return getattr(module, attribute, _ABSENT)


def _nowhere(move: Move) -> UnsupportedName:
    here = installed()
    places = ", ".join(dict.fromkeys(place.symbol for place in reversed(move.places) if place.symbol))
    return UnsupportedName(
        f"{move.name} of vLLM",
        symbol=move.name,
        needed=f"vLLM {move.life}, which has {places}",
        found=f"{here}, which has it in none of these places",
        advice=f"use {move.instead}" if move.instead else "leave it out on this release, or use one that has it",
    )

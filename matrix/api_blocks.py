"""Rendered blocks that come from the recorded API: names that moved, methods of plugins' base classes that changed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from markdown_table import table

from vllm_compat.adapters import moves
from vllm_compat.adapters.moves import Move
from vllm_compat.recorded import diff, store
from vllm_compat.recorded.diff import Change
from vllm_compat.recorded.store import RecordedApi

#: Base classes of plugins, and whether methods that begin with an underscore count: those that vLLM means to be
#: overridden, or that plugins override because there is no other way.
BASES = {
    "Scheduler": True,
    "AsyncScheduler": True,
    "KVCacheManager": False,
    "StructuredOutputManager": False,
    "KVConnectorBase_V1": True,
    "Executor": True,
    "WorkerBase": True,
    "GPUModelRunner": False,
    "Platform": True,
}
#: What is said of a class that is not about its constructor.
_NOT_THE_CALL = ("attributes ", "bases: ", "can no longer be imported", "kind: ", "gone (", "moved to ")


def moved() -> str:
    """The table of moved names by topic; names that made the same moves share a row."""
    apis = list(store.all_recorded())
    topics: dict[str, dict[tuple[str, str, str], list[str]]] = {}
    for move in moves.table().values():
        row = _places(move), ", ".join(_broken(move, apis)), _note(move)
        topics.setdefault(move.topic, {}).setdefault(row, []).append(move.name)
    parts = []
    for topic, rows in topics.items():
        cells = [(", ".join(f"`{name}`" for name in names), *row) for row, names in rows.items()]
        parts.append(f"### {topic}\n\n{table(('name', 'where, from which release on', 'call broke in', ''), cells)}")
    return "\n\n".join(parts)


def _places(move: Move) -> str:
    lines = []
    for place in move.places:
        since = ".".join(map(str, place.since))
        module, _, name = place.symbol.partition(":")
        if not module:
            lines.append(f"gone {since}")
        else:
            lines.append(f"{since} `{module}`" if name == move.name else f"{since} `{module}`: `{name}`")
    return "<br>".join(lines)


def _note(move: Move) -> str:
    where = "elsewhere: " if move.places[-1].symbol else ""
    return "; ".join(part for part in (move.note, move.instead and f"{where}{move.instead}") if part)


def _broken(move: Move, apis: list[RecordedApi]) -> Iterator[str]:
    """Releases in which a call that worked may not work any more; none for a name that has one signature here."""
    for old, new in itertools.pairwise(apis if not move.adapted else []):
        before, after = (api.call(symbol) if (symbol := move.at(api.numbers)) else None for api in (old, new))
        if before is not None and after is not None and any(hard for hard, _ in diff.calls(before, after)):
            yield new.release


def plugin_changes() -> str:
    """A table per base class: release, method, what changed in a way that breaks an override or a call of it."""
    apis = list(store.all_recorded())
    found: dict[str, dict[tuple[str, str], list[str]]] = {name: {} for name in BASES}
    for old, new in itertools.pairwise(apis):
        for change in diff.between(old, new):
            base, _, method = change.symbol.partition(".")
            if not change.hard or base not in BASES:
                continue
            if not method and not change.what.startswith(_NOT_THE_CALL):
                method = "__init__"
            if method == "__init__" or (method and (BASES[base] or not method.startswith("_"))):
                found[base].setdefault((new.release, method), []).append(_shorter(change))
    parts = []
    for base, changes in found.items():
        rows = [(release, f"`{method}`", _joined(whats)) for (release, method), whats in changes.items()]
        parts.append(f"### {base}\n\n" + (table(("release", "method", "what changed"), rows) if rows else "Nothing."))
    return "\n\n".join(parts)


def _shorter(change: Change) -> str:
    return "gone" if change.what.startswith("gone: ") else change.what


def _joined(whats: list[str]) -> str:
    """One line; parameters that went the same way stand together."""
    together: dict[str, list[str]] = {}
    others: list[str] = []
    for what in whats:
        name, is_, way = what.partition(" is ")
        if is_:
            together.setdefault(way, []).append(f"`{name}`")
        elif what.startswith("returns "):
            old, _, new = what.removeprefix("returns ").partition(" -> ")
            others.append(f"returns `{new}`, not `{old}`")
        else:
            others.append(what)
    lines = [f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} {way}" for way, names in together.items()]
    return "; ".join([*lines, *others])

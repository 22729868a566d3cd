"""What changed between two recorded releases, by surface, hard changes first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from vllm_compat.errors import VllmCompatError
from vllm_compat.recorded.calls import Call, parse
from vllm_compat.recorded.store import Record, RecordedApi


@dataclass(frozen=True)
class Change:
    """One change.

    Attributes:
        surface, symbol: Where; a method is ``Class.method``.
        hard: A call that worked may not work any more: something is gone, newly required, or returns another shape.
        what: In words.
    """

    surface: str
    symbol: str
    hard: bool
    what: str


def between(old: RecordedApi, new: RecordedApi, surfaces: Iterable[str] = ()) -> list[Change]:
    """All changes, or those of some surfaces: hard ones first, then in the order of the surfaces.

    Raises:
        VllmCompatError: a surface is not recorded in either.
    """
    known = sorted(old.surfaces.keys() | new.surfaces.keys())
    wanted = set(surfaces)
    if wanted - {*known}:
        unknown = ", ".join(sorted(wanted - {*known}))
        raise VllmCompatError(f"the surface {unknown}", needed=f"one of {', '.join(known)}", found="no such surface")
    changes = []
    for surface in known if not wanted else sorted(wanted):
        before, after = old.surfaces.get(surface, {}), new.surfaces.get(surface, {})
        for key in sorted(before.keys() | after.keys()):
            found = list(_symbol(key, before.get(key), after.get(key), old, new))
            changes += [Change(surface, key + member, hard, what) for member, hard, what in found]
    return sorted(changes, key=lambda change: not change.hard)


Found = tuple[str, bool, str]


def _symbol(
    key: str, old: Record | None, new: Record | None, before: RecordedApi, after: RecordedApi
) -> Iterator[Found]:
    if old is None or new is None:
        if old is not None:
            now = ", ".join(after.elsewhere.get(key, ()))
            yield "", True, f"gone (was in {old['module']}{f'; one of that name is in {now}' if now else ''})"
        elif new is not None:
            yield "", False, f"new, in {new['module']}"
        return
    gone = [module for module in _modules(old) if module not in _modules(new)]
    if gone:
        yield "", True, f"can no longer be imported from {', '.join(gone)}; is in {new['module']}"
    elif old["module"] != new["module"]:
        yield "", False, f"moved to {new['module']}, still importable from {old['module']}"
    for name, hard in (("kind", False), ("value", True), ("bases", False)):
        if old.get(name) != new.get(name):
            yield "", hard, f"{name}: {old.get(name)} -> {new.get(name)}"
    if "call" in old and "call" in new:
        yield from (("", hard, what) for hard, what in calls(parse(old["call"]), parse(new["call"])))
    yield from _methods(old, new, before, after)
    for name, hard in (("members", True), ("attributes", True), ("deprecated", False), ("not_init", False)):
        yield from _names(name, old.get(name, []), new.get(name, []), hard=hard)


def _modules(record: Record) -> list[str]:
    return [record["module"], *record.get("also", ())]


def _methods(old: Record, new: Record, before: RecordedApi, after: RecordedApi) -> Iterator[Found]:
    own = old.get("methods", {}).keys() | new.get("methods", {}).keys()
    for name in sorted(own):
        was, now = before.method(old, name), after.method(new, name)
        if was is None and now is not None:
            yield f".{name}", "abstract" in parse(now).words, f"new: {now}"
        elif was is not None and now is None:
            yield f".{name}", True, f"gone: {was}"
        elif was is not None and now is not None:
            for hard, what in calls(parse(was), parse(now), overridden=bool(new.get("subclassed"))):
                yield f".{name}", hard, what


def _names(what: str, old: list[str], new: list[str], *, hard: bool) -> Iterator[Found]:
    gone, added = [n for n in old if n not in new], [n for n in new if n not in old]
    if gone:
        yield "", hard, f"{what} gone: {', '.join(gone)}"
    if added:
        yield "", False, f"{what} added: {', '.join(added)}"


def calls(old: Call, new: Call, *, overridden: bool = False) -> Iterator[tuple[bool, str]]:
    """(hard, what) for every difference of two calls.

    Args:
        old: The call before.
        new: The call after.
        overridden: It is a method that subclasses override: an override that does not take what vLLM may now pass, or
            returns what it used to return, breaks, so these are hard as well.
    """
    before = {parameter.name: parameter for parameter in old.parameters}
    after = {parameter.name: parameter for parameter in new.parameters}
    for name in [name for name in before if name not in after]:
        yield not new.var_keyword, f"{name} is gone"
    for name, parameter in after.items():
        if name not in before:
            if parameter.required:
                yield True, f"{name} is new and required"
            else:
                yield overridden, f"{name} is new"
        elif parameter.required and not before[name].required:
            yield True, f"{name} is now required"
        elif before[name].required and not parameter.required:
            yield False, f"{name} is now optional"
        if name in before and parameter.kind != before[name].kind:
            yield parameter.kind == "keyword_only", f"{name} is now {parameter.kind.replace('_', ' ')}"
    common = [name for name in before if name in after]
    if common != [name for name in after if name in before]:
        yield False, f"other order: ({', '.join(before)}) -> ({', '.join(after)})"
    for name in ("var_positional", "var_keyword"):
        if getattr(old, name) != getattr(new, name):
            stars = "*args" if name == "var_positional" else "**kwargs"
            yield getattr(old, name), f"{stars} is {'gone' if getattr(old, name) else 'new'}"
    if old.words != new.words:
        yield True, f"{' '.join(old.words) or 'plain'} -> {' '.join(new.words) or 'plain'}"
    if sorted(old.returns.split(" | ")) != sorted(new.returns.split(" | ")):  # the order of a union says nothing
        other = arity(old.returns) != arity(new.returns) or (overridden and bool(old.returns and new.returns))
        yield other, f"returns {old.returns or '?'} -> {new.returns or '?'}"


def arity(annotation: str) -> int:
    """How many values come back: the length of a tuple, also of one that may be None; 0 for None, 1 for the rest."""
    if annotation in ("", "None"):
        return 0
    annotation = annotation.removesuffix(" | None")
    if not annotation.startswith("tuple[") or annotation.endswith(", ...]"):
        return 1
    depth, count = 0, 1
    for character in annotation[len("tuple[") : -1]:
        depth += {"[": 1, "]": -1}.get(character, 0)
        if depth < 0:
            return 1  # tuple[…] | something else
        count += character == "," and depth == 0
    return count


def as_text(changes: list[Change]) -> str:
    """For people: hard changes first, then the rest, each by surface."""
    lines = []
    for hard, title in ((True, "HARD"), (False, "other")):
        chosen = [change for change in changes if change.hard is hard]
        lines.append(f"{title} ({len(chosen)})")
        surface = ""
        for change in chosen:
            if change.surface != surface:
                surface = change.surface
                lines.append(f"  {surface}")
            lines.append(f"    {change.symbol}: {change.what}")
    return "\n".join(lines)


def as_json(changes: list[Change]) -> list[dict[str, Any]]:
    """For programs."""
    return [asdict(change) for change in changes]

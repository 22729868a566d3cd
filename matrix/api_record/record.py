"""One symbol -> its record; all targets of a tree -> the recorded API of a release."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from api_record import classes
from api_record.functions import Function, of_function
from api_record.targets import Target
from api_record.tree import External, Symbol, Tree

Record = dict[str, Any]


def record_surfaces(tree: Tree, surfaces: Mapping[str, Sequence[Target]]) -> dict[str, dict[str, Record | None]]:
    """Surface -> target -> its record; None for a target that this release does not have."""
    recorded: dict[str, bool] = {}
    for targets in surfaces.values():
        for target in targets:
            symbol = _find(tree, target)[0]
            if symbol is not None:
                recorded[symbol.full_name] = target.subclassed
    return {
        surface: {target.key: record(tree, target, recorded) for target in targets}
        for surface, targets in surfaces.items()
    }


def find_elsewhere(
    files: Mapping[str, str], surfaces: Mapping[str, Mapping[str, Record | None]], targets: Sequence[Target]
) -> dict[str, list[str]]:
    """Names that no candidate module has -> modules that define one at their top level, which may be where it went.

    Args:
        files: Path of each Python file -> its text.
        surfaces: What was recorded.
        targets: The names to look for.
    """
    missing = {key for records in surfaces.values() for key, record in records.items() if record is None}
    names = {target.name for target in targets if target.key in missing}
    if not names:
        return {}
    any_of = "|".join(sorted(names))
    pattern = re.compile(
        rf"^(?:(?:class|def|async def) +(?P<defined>{any_of})\b|(?P<assigned>{any_of}) *(?::|=(?!=)))", re.MULTILINE
    )
    found: dict[str, set[str]] = {}
    for path, text in files.items():
        for match in pattern.finditer(text):
            module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            found.setdefault(match["defined"] or match["assigned"], set()).add(module)
    return {name: sorted(modules) for name, modules in sorted(found.items())}


def _find(tree: Tree, target: Target) -> tuple[Symbol | None, list[str]]:
    """The symbol in the first module that has it, and all candidates from which the same one can be imported."""
    found = {module: tree.find(module, target.name) for module in target.modules}
    symbol = next((value for value in found.values() if isinstance(value, Symbol)), None)
    same = [name for name, value in found.items() if isinstance(value, Symbol) and symbol and value.node is symbol.node]
    return symbol, same


def record(tree: Tree, target: Target, recorded: Mapping[str, bool] | None = None) -> Record | None:
    """The record of one target.

    ``module`` is where it is defined, ``also`` the other candidate modules that it can be imported from, ``name`` its
    name there where that is not the key. What a class
    inherits from one that is in ``recorded`` (full name -> whether plugins subclass it) is not repeated.
    """
    symbol, modules = _find(tree, target)
    if symbol is None:
        return None
    module = symbol.module.name
    result: Record = {"module": module}
    also = [name for name in modules if name != module]
    if also:
        result["also"] = also
    if target.key != target.name:
        result["name"] = target.name
    if symbol.name != target.name:
        result["alias_of"] = symbol.name
    if isinstance(symbol.node, ast.ClassDef) and target.located:
        result.update(_located_class(tree, symbol))
    elif isinstance(symbol.node, ast.ClassDef):
        result.update(_class(tree, symbol, recorded or {}, subclassed=target.subclassed))
    elif isinstance(symbol.node, ast.FunctionDef | ast.AsyncFunctionDef):
        words = ("async",) if isinstance(symbol.node, ast.AsyncFunctionDef) else ()
        result.update(kind="function", call=str(of_function(symbol.node, words=words)))
    else:
        value = symbol.node.value
        result.update(kind="value", value=ast.unparse(value)[:200] if value is not None else "")
    return result


def _located_class(tree: Tree, symbol: Symbol) -> Record:
    what = classes.kind(tree, symbol)
    return (
        {"kind": what}
        if what in ("enum", "protocol")
        else {"kind": what, "call": str(classes.constructor(tree, symbol))}
    )


def _class(tree: Tree, symbol: Symbol, recorded: Mapping[str, bool], *, subclassed: bool) -> Record:
    """Of a class that is only built and read (not ``subclassed``), what is recorded is public."""
    what = classes.kind(tree, symbol)
    result: Record = {"kind": what}
    parents = [_full_name(base) for base in classes.bases(tree, symbol)]
    if parents:
        result["bases"] = parents
    if what == "enum":
        result["members"] = classes.members(symbol)
        return result
    call = classes.constructor(tree, symbol)
    if what != "protocol":  # nobody calls one
        result["call"] = str(call)
    if subclassed:
        result["subclassed"] = True
    if what in ("dataclass", "pydantic_dataclass"):
        unset = [field.name for field in classes.fields(tree, symbol).values() if not field.init]
        if unset:
            result["not_init"] = unset
    methods: dict[str, str] = {}
    deprecated: list[str] = []
    attributes: set[str] = set()
    order = [base for base in classes.mro(tree, symbol) if isinstance(base, Symbol)]
    elsewhere: set[str] = set()
    for base in order[1:]:
        if base.full_name in recorded and recorded[base.full_name] >= subclassed:
            elsewhere |= {_full_name(above) for above in classes.mro(tree, base)}
    # From the far end of the resolution order, so that the nearest definition stands.
    for base in reversed(order):
        if base.full_name in elsewhere:
            continue
        for node in classes.own_methods(base):
            if node.name.startswith("__") or (not subclassed and node.name.startswith("_")):
                continue
            text = _method(node)
            methods[node.name] = text
            if text.startswith("property") and _deprecated(node):
                deprecated.append(node.name)
        if subclassed:
            attributes |= _attributes(base)
        elif what == "class":  # of the others the fields are recorded
            attributes |= {name for name in _attributes(base) if not name.startswith("_")}
    taken = {parameter.name for parameter in call.parameters}
    if methods:
        result["methods"] = dict(sorted(methods.items()))
    if attributes - set(methods):
        result["attributes"] = sorted(attributes - set(methods))
    only_read = sorted({name for name in deprecated if name not in taken})
    if only_read:
        result["deprecated"] = only_read
    return result


def _full_name(base: Symbol | External) -> str:
    return base.full_name if isinstance(base, Symbol) else base.name


def _method(node: Function) -> str:
    decorators = [ast.unparse(d).partition("(")[0].rpartition(".")[2] for d in node.decorator_list]
    words = []
    if "abstractmethod" in decorators:
        words.append("abstract")
    if isinstance(node, ast.AsyncFunctionDef):
        words.append("async")
    words += [word for word in ("classmethod", "staticmethod") if word in decorators]
    if {"property", "cached_property", "setter"} & set(decorators):
        words = [*words, "property"]
    return str(replace(of_function(node, drop_first="staticmethod" not in words), words=tuple(words)))


def _deprecated(node: Function) -> bool:
    """Whether a property says so: by a decorator, or by the warning that its body gives."""
    if any("deprecated" in ast.unparse(decorator) for decorator in node.decorator_list):
        return True
    calls = [inner for inner in ast.walk(node) if isinstance(inner, ast.Call)]
    return any("warn" in ast.unparse(call.func) and "eprecat" in ast.unparse(call) for call in calls)


def _attributes(symbol: Symbol) -> set[str]:
    """Names that the class's methods assign on ``self``, and those annotated or assigned in its body."""
    names = set()
    node = classes.class_node(symbol)
    for statement in node.body:
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        if isinstance(statement, ast.AnnAssign):
            targets = [statement.target]
        names |= {target.id for target in targets if isinstance(target, ast.Name)}
    for inner in ast.walk(node):
        if not (isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store)):
            continue
        if isinstance(inner.value, ast.Name) and inner.value.id == "self":
            names.add(inner.attr)
    return names

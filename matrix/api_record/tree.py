"""A source tree of Python modules, and what a name in one of them stands for."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Assign | ast.AnnAssign


class Files(Protocol):
    """Where the text of a file comes from: a folder, or a wheel."""

    def read(self, path: str) -> str | None:
        """The text of ``vllm/v1/request.py``; None when there is no such file."""


@dataclass(frozen=True)
class Folder:
    """An installed or unpacked source tree."""

    root: Path

    def read(self, path: str) -> str | None:
        file = self.root / path
        return file.read_text(encoding="utf-8") if file.is_file() else None


@dataclass(frozen=True)
class External:
    """Something that the tree does not define: ``dataclasses.dataclass``."""

    name: str


@dataclass(frozen=True)
class Import:
    """``from module import name``, or ``import module`` when ``name`` is empty."""

    module: str
    name: str = ""


@dataclass(eq=False)
class Module:
    """One parsed module."""

    name: str
    body: ast.Module
    is_package: bool
    bindings: dict[str, Definition | Import] = field(default_factory=dict)
    stars: list[str] = field(default_factory=list)

    def absolute(self, node: ast.ImportFrom) -> str:
        """The module that a ``from … import`` names."""
        if not node.level:
            return node.module or ""
        parts = self.name.split(".")
        parts = parts[: len(parts) - node.level + (1 if self.is_package else 0)]
        return ".".join([*parts, *([node.module] if node.module else [])])


@dataclass(frozen=True, eq=False)
class Symbol:
    """A definition and the module it stands in."""

    module: Module
    name: str
    node: Definition

    @property
    def full_name(self) -> str:
        return f"{self.module.name}:{self.name}"


class Tree:
    """All modules of a release, parsed when they are asked for."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._modules: dict[str, Module | None] = {}

    def module(self, name: str) -> Module | None:
        """The module of that name, or None."""
        if name not in self._modules:
            self._modules[name] = self._parse(name)
        return self._modules[name]

    def _parse(self, name: str) -> Module | None:
        path = name.replace(".", "/")
        for file, is_package in ((f"{path}.py", False), (f"{path}/__init__.py", True)):
            text = self._files.read(file)
            if text is not None:
                module = Module(name, ast.parse(text), is_package)
                _bind(module)
                return module
        return None

    def find(self, module_name: str, name: str) -> Symbol | External | None:
        """What ``from module_name import name`` gives; None when that raises."""
        return self._find(module_name, name, frozenset())

    def _find(self, module_name: str, name: str, seen: frozenset[tuple[str, str]]) -> Symbol | External | None:
        if (module_name, name) in seen:
            return None
        seen |= {(module_name, name)}
        module = self.module(module_name)
        if module is None:
            # No file of the tree: a package of somebody else, unless the tree has its top folder.
            top = module_name.partition(".")[0]
            return None if self.module(top) else External(f"{module_name}.{name}")
        bound = module.bindings.get(name)
        if isinstance(bound, Import):
            if not bound.name:
                return External(bound.module)
            found = self._find(bound.module, bound.name, seen)
            if found is None and self.module(f"{bound.module}.{bound.name}"):
                return External(f"{bound.module}.{bound.name}")
            return found
        if bound is not None:
            alias = _alias(bound, name)
            if alias is not None:
                target = self.expression(module, alias, seen)
                if isinstance(target, Symbol):
                    return target
            return Symbol(module, name, bound)
        for star in module.stars:
            found = None if name.startswith("_") else self._find(star, name, seen)
            if isinstance(found, Symbol):
                return found
        return None

    def expression(
        self, module: Module, node: ast.expr, seen: frozenset[tuple[str, str]] = frozenset()
    ) -> Symbol | External | None:
        """What a (dotted) name means inside a module. A name bound nowhere is a builtin."""
        if isinstance(node, ast.Subscript):
            return self.expression(module, node.value, seen)
        if isinstance(node, ast.Name):
            if node.id in module.bindings or module.stars:
                found = self._find(module.name, node.id, seen)
                if found is not None:
                    return found
            return External(node.id)
        if isinstance(node, ast.Attribute):
            owner = self.expression(module, node.value, seen)
            if isinstance(owner, External):
                return self._find(owner.name, node.attr, seen) or External(f"{owner.name}.{node.attr}")
        return None


def _alias(node: Definition, name: str) -> ast.expr | None:
    """``X`` of ``name = X``."""
    if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Name | ast.Attribute):
        return None if isinstance(node.value, ast.Name) and node.value.id == name else node.value
    return None


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run when a body runs, those inside ``if``, ``try`` and ``with`` included.

    What an ``if`` or a ``try`` comes to first is yielded last, so that it wins. Imports for the type checker are left
    out: nobody can import them.
    """
    for node in body:
        if isinstance(node, ast.If):
            if _is_type_checking(node.test):
                yield from statements(node.orelse)
                continue
            yield from statements(node.orelse)
            yield from statements(node.body)
        elif isinstance(node, ast.Try):
            for handler in node.handlers:
                yield from statements(handler.body)
            yield from statements([*node.body, *node.orelse, *node.finalbody])
        elif isinstance(node, ast.With):
            yield from statements(node.body)
        else:
            yield node


def _is_type_checking(test: ast.expr) -> bool:
    return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def _bind(module: Module) -> None:
    for node in statements(module.body.body):
        _bind_statement(module, node)
    for name, target in _lazy_names(module):
        module.bindings.setdefault(name, target)


def _bind_statement(module: Module, node: ast.stmt) -> None:
    if isinstance(node, ast.ClassDef):
        module.bindings[node.name] = node
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        if not is_overload(node):
            module.bindings[node.name] = node
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Name):
                module.bindings[target.id] = node
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        module.bindings[node.target.id] = node
    elif isinstance(node, ast.Import):
        for alias in node.names:
            top = alias.name.partition(".")[0]
            module.bindings[alias.asname or top] = Import(alias.name if alias.asname else top)
    elif isinstance(node, ast.ImportFrom):
        source = module.absolute(node)
        for alias in node.names:
            if alias.name == "*":
                module.stars.append(source)
            else:
                module.bindings[alias.asname or alias.name] = Import(source, alias.name)


def is_overload(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a ``def`` only describes a call for the type checker."""
    return any(ast.unparse(decorator).rpartition(".")[2] == "overload" for decorator in node.decorator_list)


def _lazy_names(module: Module) -> Iterator[tuple[str, Definition | Import]]:
    """Names that the module's ``__getattr__`` knows: in a table ``{"X": ".module:X"}``, imported or named in it."""
    getter = module.bindings.get("__getattr__")
    if not isinstance(getter, ast.FunctionDef):
        return
    for node in ast.walk(getter):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name, Import(module.absolute(node), alias.name)
    for node in module.body.body:
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if not isinstance(value, ast.Dict):
            continue
        for key, target in zip(value.keys, value.values, strict=True):
            if isinstance(key, ast.Constant) and isinstance(target, ast.Constant) and isinstance(target.value, str):
                source, colon, name = target.value.partition(":")
                if colon and isinstance(key.value, str):
                    yield key.value, Import(f"{module.name}{source}" if source.startswith(".") else source, name)
    for node in ast.walk(getter):  # if name == "current_platform": return …
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq):
            named = node.comparators[0]
            if isinstance(named, ast.Constant) and isinstance(named.value, str) and named.value.isidentifier():
                (made,) = ast.parse(f"{named.value} = __getattr__({named.value!r})").body
                assert isinstance(made, ast.Assign)
                yield named.value, made

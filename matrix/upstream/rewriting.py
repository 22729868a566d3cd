"""Test modules are imported with every call routed past us: ``f(x)`` becomes ``ours(f)(x)``.

A module that says ``from vllm.v1.request import Request`` keeps vLLM's class in every other use (isinstance, type
hints, ``Mock(spec=…)``); what a call makes can be made by somebody else. Calls in helpers, in decorators and at the top
of a module are routed as well.
"""

from __future__ import annotations

import ast
import builtins
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

_HOOK = "_vllm_compat_ours"
#: They look at the frame or the class of whoever calls them by name.
_OF_THE_CALLER = {"super", "locals", "globals", "vars", "dir", "eval", "exec"}


class _Calls(ast.NodeTransformer):
    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id in _OF_THE_CALLER:
            return node
        hook = ast.Call(func=ast.Name(id=_HOOK, ctx=ast.Load()), args=[node.func], keywords=[])
        node.func = ast.copy_location(hook, node.func)
        return node


def rewritten(source: str | bytes, path: str) -> CodeType:
    """The code of a module whose calls ask the hook first."""
    tree = ast.fix_missing_locations(_Calls().visit(ast.parse(source, path)))
    code: CodeType = compile(tree, path, "exec", dont_inherit=True)
    return code


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        # Not from the cache of compiled files, which the run without us shares.
        path = self.get_filename(fullname)
        return rewritten(self.get_data(path), path)


class _Finder(MetaPathFinder):
    """Finds the modules below one folder, ahead of pytest's own finder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        found = PathFinder.find_spec(fullname, path, target)
        if found is None or not isinstance(found.loader, SourceFileLoader) or found.origin is None:
            return None
        if self.folder not in Path(found.origin).resolve().parents:
            return None
        found.loader = _Loader(fullname, found.origin)
        return found


def install(folder: Path, ours: Callable[[Any], Any]) -> None:
    """Route the calls of modules below ``folder`` that are imported from now on through ``ours``."""
    setattr(builtins, _HOOK, ours)
    sys.meta_path.insert(0, _Finder(folder))

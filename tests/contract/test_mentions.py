"""Every symbol of vLLM that the adapters name is recorded, so nothing they touch can change unseen."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import windows

import vllm_compat
from vllm_compat.adapters.base import Adapter
from vllm_compat.recorded.store import RecordedApi

ROOT = Path(vllm_compat.__file__).parent
FILES = sorted([*ROOT.glob("adapters/*.py"), *ROOT.glob("capture/*.py"), *ROOT.glob("*.py")])
SYMBOL = re.compile(r"vllm(?:\.\w+)*:[A-Za-z_]\w*(?:\.\w+)*")
#: What is no API: the version string that doctor prints.
PLAIN = {"vllm:__version__"}


def symbols(tree: ast.Module, inside: ast.AST | None = None) -> Iterator[str]:
    """``module:Name`` strings of a file or of one node; f-strings and names are filled in with the file's constants."""
    constants = {
        node.targets[0].id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    }
    for node in ast.walk(inside or tree):
        text = ""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        elif isinstance(node, ast.Name):
            text = constants.get(node.id, "")
        elif isinstance(node, ast.JoinedStr):
            for part in node.values:
                if isinstance(part, ast.Constant):
                    text += str(part.value)
                elif isinstance(part, ast.FormattedValue) and isinstance(part.value, ast.Name):
                    text += constants.get(part.value.id, "?")
                else:
                    text += "?"
        if SYMBOL.fullmatch(text):
            yield text


PARSED = {file.name: ast.parse(file.read_text(encoding="utf-8")) for file in FILES}
MENTIONED = sorted({(name, symbol) for name, tree in PARSED.items() for symbol in symbols(tree)})


def exists(api: RecordedApi, symbol: str) -> bool:
    """Whether a release has it; of a member, whether it has the class or the method."""
    return api.call(symbol) is not None if "." in symbol.partition(":")[2] else api.symbol(symbol) is not None


def test_symbols_are_found_at_all() -> None:
    """The search itself works: it sees plain strings and f-strings."""
    assert ("request.py", "vllm.v1.request:Request") in MENTIONED
    assert ("step.py", "vllm.v1.executor.abstract:Executor.execute_model") in MENTIONED


@pytest.mark.parametrize(("file", "symbol"), MENTIONED, ids=lambda value: value)
def test_what_is_named_is_recorded(file: str, symbol: str) -> None:
    """A symbol that code of this project names is in the recording of at least one release.

    When this fails, add the symbol to matrix/api/targets.toml and record again (``add_release.py record --all``).
    """
    if symbol in PLAIN:
        return
    assert any(exists(api, symbol) for api in windows.recorded()), f"{file} names {symbol}, which no release has"


@pytest.mark.parametrize("adapter", windows.all_adapters(), ids=lambda adapter: adapter.__name__)
def test_what_an_adapter_names_is_there_in_its_window(adapter: type[Adapter]) -> None:
    """Also a symbol that it reaches without stating it as a need exists in every release that it serves."""
    tree = ast.parse(Path(inspect.getfile(adapter)).read_text(encoding="utf-8"))
    own = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == adapter.__name__)
    stated = {need.symbol for need in adapter.needs}
    gone = [
        f"{symbol} in {api.release}"
        for symbol in sorted(set(symbols(tree, own)) - stated)
        for api in windows.window(adapter)
        if not exists(api, symbol)
    ]
    assert not gone, f"{adapter.label()} names what is not there: {', '.join(gone)}"

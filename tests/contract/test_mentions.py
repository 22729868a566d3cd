"""Every symbol of vLLM that the adapters name is recorded, so nothing they touch can change unseen."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import windows

import vllm_compat

ROOT = Path(vllm_compat.__file__).parent
FILES = sorted([*ROOT.glob("adapters/*.py"), *ROOT.glob("capture/*.py"), *ROOT.glob("*.py")])
SYMBOL = re.compile(r"vllm(?:\.\w+)*:[A-Za-z_]\w*(?:\.\w+)*")
#: What is no API: the version string that doctor prints.
PLAIN = {"vllm:__version__"}


def symbols(file: Path) -> Iterator[str]:
    """``module:Name`` strings of a file; f-strings are filled in with the file's own constants."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    constants = {
        node.targets[0].id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    }
    for node in ast.walk(tree):
        text = ""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
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


MENTIONED = sorted({(file.name, symbol) for file in FILES for symbol in symbols(file)})


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
    module, _, path = symbol.partition(":")
    name, _, member = path.partition(".")
    holders = [record for api in windows.recorded() if (record := api.symbol(f"{module}:{name}")) is not None]
    assert holders, f"{file} names {symbol}, which no release is recorded to have"
    if member:
        assert any(api.call(symbol) is not None for api in windows.recorded()), f"no release has {symbol}"

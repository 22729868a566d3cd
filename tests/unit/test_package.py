"""``import vllm_compat``: the names it offers, and how little it loads."""

from __future__ import annotations

import importlib
import pkgutil
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

import vllm_compat
import vllm_compat.factories

HEAVY = (
    "vllm",
    "torch",
    "numpy",
    "typer",
    "rich",
    "transformers",
    "wrapt",
    "packaging",
    "importlib.metadata",
)


def test_importing_loads_nothing_heavy():
    """After the import none of the heavy packages is loaded, and the environment is as it was."""
    code = (
        "import os, sys; before = dict(os.environ)\n"
        "import vllm_compat\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules], before == dict(os.environ))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    # A .pth file of some other package may load a module before any code of ours runs; that is not our doing.
    bare = f"import sys; print([name for name in {HEAVY!r} if name in sys.modules], True)"
    expected = subprocess.run([sys.executable, "-c", bare], capture_output=True, text=True, check=True)
    assert expected.stdout == done.stdout


def test_importing_is_fast():
    """The import costs less than 60 ms of processor time over a bare interpreter.

    Processor time of the child, so that a busy machine does not decide; pairs of runs side by side, and the
    median of their differences, so that one slow start does not either.
    """
    resource = pytest.importorskip("resource", reason="processor time of child processes is a POSIX thing")

    def seconds(code: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return float(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)

    seconds("import vllm_compat")  # compiles the bytecode, once per installation
    differences = [seconds("import vllm_compat") - seconds("pass") for _ in range(7)]

    assert statistics.median(differences) < 0.060, differences


# KVConnectorBase is made from vLLM's own class, so tests/live/test_kv_connector.py has it.
@pytest.mark.parametrize("name", sorted({*vllm_compat.__all__} - {"KVConnectorBase"}))
def test_every_public_name_is_there(name):
    """Each name of __all__ resolves, is listed by dir(), and stays the same object."""
    if name == "capture_hidden_states":
        pytest.importorskip("torch", reason="capturing needs torch")

    value = getattr(vllm_compat, name)

    assert value is getattr(vllm_compat, name)
    assert name in dir(vllm_compat)


def test_public_names_are_those_of_their_modules():
    """What a module of the public layer exports is public in the package; none is forgotten."""
    exported = set()
    names = [module.name for module in pkgutil.iter_modules(vllm_compat.factories.__path__)]
    factories = [f"factories.{name}" for name in names if not name.startswith("_")]
    for module in (*factories, "hashing", "readers"):
        exported |= set(importlib.import_module(f"vllm_compat.{module}").__all__)

    assert exported - {"BlockHasher"} <= set(vllm_compat.__all__)


def test_unknown_names():
    """A misspelt name is an AttributeError, as anywhere else, so that hasattr and star imports work."""
    with pytest.raises(AttributeError, match="module 'vllm_compat' has no attribute 'make_requst'"):
        _ = vllm_compat.make_requst
    with pytest.raises(ImportError, match="make_requst"):
        exec("from vllm_compat import make_requst")


def test_functions_win_over_modules_of_the_same_name():
    """`installed` and `doctor` are functions in the package, whoever imported their modules."""
    for name in ("installed", "doctor"):
        importlib.import_module(f"vllm_compat.{name}")
        assert callable(getattr(vllm_compat, name)), name


def test_type_checkers_see_the_lazy_names():
    """Every lazily loaded name is imported for type checkers too, from the module that it comes from."""
    text = Path(str(vllm_compat.__file__)).read_text(encoding="utf-8")
    block = text[text.index("if TYPE_CHECKING:") : text.index("__version__ =")]

    for name, module in vllm_compat._HOME.items():
        imports = re.search(rf"from vllm_compat\.{module} import \(?([^)]*?)(\)|\n    from|\n\n)", block)
        assert imports is not None, module
        assert name in re.findall(r"\w+", imports.group(1)), name


def test_the_package_is_typed():
    """The marker file for type checkers (PEP 561) lies in the package."""
    assert (Path(str(vllm_compat.__file__)).parent / "py.typed").is_file()

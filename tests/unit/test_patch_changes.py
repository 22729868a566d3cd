"""Kinds of changes that a patch is made of: names lent to an import, names bound anew. The targets are written here."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_compat.errors import UnsupportedName
from vllm_compat.patches.lend import Lend
from vllm_compat.patches.replace import Replace

#: A library that takes names from a host which has some of them no longer.
FILES = {
    "host_of_names/__init__.py": "",
    "host_of_names/utils.py": "def kept():\n    return 'kept'\n",
    "library_of_names/__init__.py": "",
    "library_of_names/user.py": (
        "from host_of_names.utils import gone, kept\n"
        "from host_of_names.moved.away import helper\n"
        "from . import other\n\n\n"
        "class Thing:\n    pass\n"
    ),
    "library_of_names/other.py": "import host_of_names.utils\nSEEN = hasattr(host_of_names.utils, 'gone')\n",
    "library_of_names/broken.py": "from host_of_names.utils import gone\n1 / 0\n",
}
NAMES = ("host_of_names.utils:gone", "host_of_names.utils:kept", "host_of_names.moved.away:helper")


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    before = list(sys.meta_path)
    yield tmp_path
    assert before == sys.meta_path
    for name in [name for name in sys.modules if name.split(".")[0] in ("host_of_names", "library_of_names")]:
        del sys.modules[name]


@pytest.fixture
def lent(library: Path) -> Iterator[Any]:
    lend = Lend("library_of_names.user", NAMES)
    take_back = lend.apply(importlib.import_module(lend.module))
    yield lend
    take_back()


def test_without_it_the_import_fails(library: Path) -> None:
    """The library is broken on this host, so that the tests below test something."""
    with pytest.raises(ImportError, match="gone"):
        importlib.import_module("library_of_names.user")


def test_names_are_there_for_the_import_alone(lent: Lend) -> None:
    """The importer gets what it asks for; the host is afterwards as it was, and its module is loaded as ever."""
    assert ("sys", "meta_path, for library_of_names.user") == (lent.module, lent.attribute)
    user = importlib.import_module("library_of_names.user")
    host = sys.modules["host_of_names.utils"]
    assert not hasattr(host, "gone")
    assert "host_of_names.moved.away" not in sys.modules
    assert user.kept is host.kept
    assert "kept" == user.kept()
    assert type(user.__loader__).__name__ == "SourceFileLoader"
    assert type(user.__spec__.loader).__name__ == "SourceFileLoader"


@pytest.mark.parametrize("name", ["gone", "helper"])
def test_a_lent_name_says_what_it_is(lent: Lend, name: str) -> None:
    """Calling one is an error that names the place where it was."""
    user = importlib.import_module("library_of_names.user")
    with pytest.raises(UnsupportedName, match=name) as caught:
        getattr(user, name)(1, two=2)
    assert caught.value.symbol in NAMES


def test_what_is_taken_back_before_the_import_is_not_lent(library: Path) -> None:
    """The finder is gone, and the import fails as it did."""
    lend = Lend("library_of_names.user", NAMES)
    lend.apply(importlib.import_module(lend.module))()
    with pytest.raises(ImportError, match="gone"):
        importlib.import_module("library_of_names.user")


def test_an_import_that_fails_leaves_nothing_behind(library: Path) -> None:
    """The importer's own error comes through, and the host is clean."""
    lend = Lend("library_of_names.broken", NAMES)
    take_back = lend.apply(importlib.import_module(lend.module))
    with pytest.raises(ZeroDivisionError):
        importlib.import_module("library_of_names.broken")
    assert not hasattr(sys.modules["host_of_names.utils"], "gone")
    assert "host_of_names.moved.away" not in sys.modules
    take_back()


def test_a_host_that_is_broken_itself_is_not_covered_up(library: Path) -> None:
    """A module that is there and misses something of its own is not one that is gone."""
    (library / "host_of_names" / "moved.py").write_text("import no_such_module_anywhere\n")
    lend = Lend("library_of_names.user", NAMES)
    take_back = lend.apply(importlib.import_module(lend.module))
    with pytest.raises(ModuleNotFoundError, match="no_such_module_anywhere"):
        importlib.import_module("library_of_names.user")
    take_back()


def test_a_name_is_bound_anew_and_bound_back(library: Path) -> None:
    """In the module named and in no other: who took the object before keeps it."""
    (library / "library_of_names" / "user.py").write_text("from .other import SEEN\n\n\nclass Thing:\n    pass\n")
    user = importlib.import_module("library_of_names.user")
    other = importlib.import_module("library_of_names.other")
    before = dict(vars(user))
    take_back = Replace("library_of_names.user", "SEEN", lambda seen: ("was", seen)).apply(user)
    assert (("was", False), False) == (user.SEEN, other.SEEN)
    take_back()
    assert before.keys() == vars(user).keys()
    assert all(before[name] is value for name, value in vars(user).items())


def test_a_name_that_is_not_there_cannot_be_bound_anew(library: Path) -> None:
    """Like Wrap: a typo in a patch is an error, and nothing is changed."""
    other = importlib.import_module("library_of_names.other")
    with pytest.raises(AttributeError, match="missing"):
        Replace("library_of_names.other", "missing", lambda value: value).apply(other)
    assert not hasattr(other, "missing")


def test_a_name_may_be_lent_what_took_its_place(library: Path) -> None:
    """``make`` gets the place; what it returns is what the importer has."""
    lend = Lend("library_of_names.user", NAMES, make=lambda place: place.upper())
    take_back = lend.apply(importlib.import_module(lend.module))
    user = importlib.import_module("library_of_names.user")
    assert ("HOST_OF_NAMES.UTILS:GONE", "HOST_OF_NAMES.MOVED.AWAY:HELPER") == (user.gone, user.helper)
    take_back()

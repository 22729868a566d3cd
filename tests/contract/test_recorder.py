"""The recorder on small source trees: every kind of class that vLLM has, read without running it.

What Python itself says of the same source is the expected value wherever Python can run it.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from api_record.functions import annotation, of_function
from api_record.record import find_elsewhere, record, record_surfaces
from api_record.targets import Target, load
from api_record.tree import Folder, Tree

from vllm_compat.adapters.signature import signature_of
from vllm_compat.recorded.calls import Call, Parameter, parse
from vllm_compat.recorded.store import RecordedApi

Write = Callable[..., Tree]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """write({"pkg/a.py": source}) -> the tree; its modules can also be imported."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def tree(files: dict[str, str]) -> Tree:
        for name, text in {"pkg/__init__.py": "", **files}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text))
        importlib.invalidate_caches()
        return Tree(Folder(tmp_path))

    yield tree
    for name in [name for name in sys.modules if name == "pkg" or name.startswith("pkg.")]:
        del sys.modules[name]


def target(text: str, **options: Any) -> Target:
    return Target.parse(text, **options)


def live(module: str, name: str) -> tuple[list[tuple[str, bool, str]], bool]:
    """What Python says the class takes."""
    found = signature_of(getattr(importlib.import_module(module), name))
    return [(p.name, p.required, p.kind) for p in found.parameters], found.accepts_var_keyword


def static(call: str) -> tuple[list[tuple[str, bool, str]], bool]:
    found = parse(call)
    return [(p.name, p.required, p.kind) for p in found.parameters], found.var_keyword


CLASSES = {
    "plain class": (
        "class",
        "(request_id, priority=, *, hints=, **kwargs)",
        """
        class C:
            def __init__(self, request_id, priority=0, *, hints=None, **kwargs): ...
        """,
    ),
    "class without a constructor": ("class", "()", "class C: ..."),
    "positional only and *args": (
        "class",
        "(a, /, b=, *args, c)",
        """
        class C:
            def __init__(self, a, /, b=1, *args, c): ...
        """,
    ),
    "__new__": (
        "class",
        "(size)",
        """
        class C:
            def __new__(cls, size): ...
        """,
    ),
    "constructor of a base": (
        "class",
        "(a, b=)",
        """
        import abc
        class Above(abc.ABC):
            def __init__(self, a, b=1): ...
        class C(Above): ...
        """,
    ),
    "constructor along the resolution order": (
        "class",
        "(left)",
        """
        class Top:
            def __init__(self, top): ...
        class Left(Top):
            def __init__(self, left): ...
        class Right(Top): ...
        class C(Right, Left): ...
        """,
    ),
    "dataclass": (
        "dataclass",
        "(a, c=, f=, d=, *, b=, e)",
        """
        import dataclasses
        from dataclasses import InitVar, dataclass, field
        from typing import ClassVar
        @dataclass
        class C:
            a: int
            b: int = field(default=0, kw_only=True)
            c: list[int] = field(default_factory=list)
            made: int = field(default=1, init=False)
            count: ClassVar[int] = 0
            plain = 1
            f: InitVar[int] = 1
            d: "int" = 2
            e: dataclasses.InitVar[int] = dataclasses.field(kw_only=True)
            def __post_init__(self, f, e): ...
        """,
    ),
    "dataclass with KW_ONLY": (
        "dataclass",
        "(a, *, b, c=)",
        """
        from dataclasses import KW_ONLY, dataclass
        @dataclass(frozen=True)
        class C:
            a: int
            _: KW_ONLY
            b: int
            c: int = 1
        """,
    ),
    "keyword-only dataclass under a positional one": (
        "dataclass",
        "(block_size, *, size, heads)",
        """
        from dataclasses import dataclass
        @dataclass(frozen=True)
        class Spec:
            block_size: int
            size: int
        @dataclass(frozen=True, kw_only=True)
        class C(Spec):
            heads: int
            size: int
        """,
    ),
    "subclass of a dataclass that is none": (
        "dataclass",
        "(a)",
        """
        from dataclasses import dataclass
        @dataclass
        class Above:
            a: int
        class C(Above):
            b: int = 1
        """,
    ),
    "dataclass with its own __init__": (
        "dataclass",
        "(x)",
        """
        from dataclasses import dataclass
        @dataclass
        class C:
            a: int
            def __init__(self, x): self.a = x
        """,
    ),
    "dataclass that leaves the constructor to its base": (
        "dataclass",
        "(x)",
        """
        from dataclasses import dataclass
        class Above:
            def __init__(self, x): ...
        @dataclass(init=False)
        class C(Above):
            a: int
        """,
    ),
    "pydantic dataclass": (
        "pydantic_dataclass",
        "(model, limit, extra=, *, named=)",
        """
        from dataclasses import InitVar
        from dataclasses import field
        from pydantic import ConfigDict, Field
        from pydantic.dataclasses import dataclass
        @dataclass(config=ConfigDict(extra="forbid"))
        class C:
            model: str
            limit: int = Field(gt=0)
            extra: int | None = Field(default=None, ge=0)
            made: int = field(default=0, init=False)
            made_too: int = Field(default=0, init=False)
            named: int = Field(default_factory=int, kw_only=True)
        """,
    ),
    "msgspec struct": (
        "msgspec_struct",
        "(a, b=, c=)",
        """
        from typing import ClassVar
        import msgspec
        class Above(msgspec.Struct, array_like=True):
            a: int
            b: int = 0
            kind: ClassVar[str] = "x"
        class C(Above, omit_defaults=True):
            c: list[int] = msgspec.field(default_factory=list)
            @property
            def d(self): return 1
        """,
    ),
    "pydantic model that keeps what it does not know": (
        "pydantic_model",
        "(*, a, b=, **kwargs)",
        """
        from typing import ClassVar
        from pydantic import BaseModel, ConfigDict
        class Above(BaseModel):
            model_config = ConfigDict(extra="allow")
            a: int
        class C(Above):
            b: int = 1
            _private: int = 2
            _shared: ClassVar[int] = 3
        """,
    ),
    "pydantic model that forbids it again": (
        "pydantic_model",
        "(*, a)",
        """
        from pydantic import BaseModel, ConfigDict
        class Above(BaseModel):
            model_config = ConfigDict(extra="allow")
        class C(Above):
            model_config = ConfigDict(extra="forbid")
            a: int
        """,
    ),
    "keyword-only msgspec struct": (
        "msgspec_struct",
        "(a, *, b, c=)",
        """
        import msgspec
        class Above(msgspec.Struct):
            a: int
        class C(Above, kw_only=True):
            b: int
            c: int = msgspec.field(default=1)
        """,
    ),
    "named tuple": (
        "namedtuple",
        "(ids, counts=)",
        """
        from typing import NamedTuple
        class C(NamedTuple):
            ids: list[int]
            counts: list[int] | None = None
            def n(self): return 1
        """,
    ),
}


@pytest.mark.parametrize("case", CLASSES)
def test_every_kind_of_class(write: Write, case: str) -> None:
    """Kind and constructor are recorded as stated here, and as Python itself sees them."""
    kind, call, source = CLASSES[case]
    found = record(write({"pkg/a.py": source}), target("pkg.a : C"))
    assert found is not None
    assert (kind, call) == (found["kind"], found["call"])
    assert live("pkg.a", "C") == static(found["call"])


def test_fields_are_inherited_across_modules(write: Write) -> None:
    """A base in another module, imported relatively and through a package, gives its fields first."""
    tree = write(
        {
            "pkg/base.py": """
                from dataclasses import dataclass
                @dataclass
                class Base:
                    a: int
                    b: int = 1
                """,
            "pkg/sub/__init__.py": "from ..base import Base as Exported\n",
            "pkg/sub/a.py": """
                from dataclasses import dataclass
                from . import Exported
                @dataclass
                class C(Exported):
                    a: int
                    c: int = 2
                """,
        }
    )
    found = record(tree, target("pkg.sub.a : C"))
    assert found is not None
    assert ("(a, b=, c=)", ["pkg.base:Base"]) == (found["call"], found["bases"])
    assert live("pkg.sub.a", "C") == static(found["call"])


def test_a_decorator_of_the_tree_makes_a_pydantic_dataclass(write: Write) -> None:
    """``vllm.config.utils.config`` says by ``dataclass_transform`` that it makes dataclasses."""
    tree = write(
        {
            "pkg/utils.py": """
                from pydantic.dataclasses import dataclass
                from typing_extensions import dataclass_transform
                @dataclass_transform()
                def config(cls=None, *, config=None, **kwargs):
                    def decorate(cls): return dataclass(cls, config=config, **kwargs)
                    return decorate if cls is None else decorate(cls)
                """,
            "pkg/a.py": """
                from pkg.utils import config
                @config
                class C:
                    a: int
                    b: int = 1
                """,
        }
    )
    found = record(tree, target("pkg.a : C"))
    assert found is not None
    assert ("pydantic_dataclass", "(a, b=)") == (found["kind"], found["call"])
    assert live("pkg.a", "C") == static(found["call"])


def test_fields_that_are_not_taken_are_told_apart(write: Write) -> None:
    """``init=False`` is in ``not_init``; a deprecated property that no parameter stands for is in ``deprecated``."""
    tree = write(
        {
            "pkg/a.py": """
                import warnings
                from dataclasses import dataclass, field
                from typing_extensions import deprecated
                @dataclass
                class C:
                    a: int
                    made: int = field(default=1, init=False)
                    @property
                    @deprecated("use a")
                    def old(self): return self.a
                    @property
                    def older(self):
                        warnings.warn("older is deprecated", DeprecationWarning)
                        return self.a
                    @property
                    def fresh(self): return self.a
                """
        }
    )
    found = record(tree, target("pkg.a : C"))
    assert found is not None
    assert (["made"], ["old", "older"]) == (found["not_init"], found["deprecated"])
    assert "property" == found["methods"]["fresh"]


def test_a_deprecated_property_that_is_also_taken(write: Write) -> None:
    """What the constructor takes can be set, whatever reading it warns of."""
    tree = write(
        {
            "pkg/a.py": """
                from typing_extensions import deprecated
                class C:
                    def __init__(self, old): ...
                    @property
                    @deprecated("no")
                    def old(self): ...
                """
        }
    )
    assert "deprecated" not in (record(tree, target("pkg.a : C")) or {})


def test_an_enum_has_members(write: Write) -> None:
    """Names in order; private ones and methods are none."""
    tree = write(
        {
            "pkg/a.py": """
                import enum
                class C(str, enum.Enum):
                    _ignored = 1
                    A = "a"
                    B = "b"
                    def f(self): ...
                """
        }
    )
    found = record(tree, target("pkg.a : C"))
    assert found is not None
    assert ("enum", ["A", "B"]) == (found["kind"], found["members"])


def test_a_typed_dict_has_keys(write: Write) -> None:
    """Keys that may be missing count as having a default."""
    tree = write(
        {
            "pkg/a.py": """
                from typing_extensions import NotRequired, TypedDict
                class Base(TypedDict, total=False):
                    salt: str
                class C(Base):
                    ids: list[int]
                    text: NotRequired[str]
                """
        }
    )
    found = record(tree, target("pkg.a : C"))
    assert found is not None
    assert ("typed_dict", "(*, salt=, ids, text=)") == (found["kind"], found["call"])


def test_reexports_are_followed(write: Write) -> None:
    """Through ``from … import``, ``*``, an alias, ``__getattr__`` with a table, and one with imports in its body."""
    tree = write(
        {
            "pkg/real.py": "def f(a, b=1): ...\ng = f\n",
            "pkg/plain.py": "from pkg.real import f\n",
            "pkg/star.py": "from pkg.real import *\n",
            "pkg/lazy/__init__.py": """
                import typing
                NAMES = {"f": ".inner:f"}
                if typing.TYPE_CHECKING:
                    from pkg.real import f, only_for_the_checker
                else:
                    def __getattr__(name): ...
                """,
            "pkg/lazy/inner.py": "from ..real import f\n",
            "pkg/shim.py": """
                def __getattr__(name):
                    if name == "f":
                        from pkg.real import f
                        return f
                """,
            "pkg/checker.py": """
                from typing import TYPE_CHECKING
                if TYPE_CHECKING:
                    from pkg.real import f
                """,
        }
    )
    modules = ("pkg.plain", "pkg.star", "pkg.lazy", "pkg.shim", "pkg.checker", "pkg.nowhere")
    found = record(tree, target(f"{' | '.join(modules)} : f"))
    assert {"kind": "function", "call": "(a, b=)", "module": "pkg.real", "also": list(modules[:4])} == found
    alias = record(tree, target("pkg.real : g"))
    assert alias is not None
    assert ("f", "(a, b=)") == (alias["alias_of"], alias["call"])


def test_a_symbol_that_moved_is_found_where_it_is(write: Write) -> None:
    """Candidates are tried in order; the one found is recorded, and a symbol found in none has no record."""
    tree = write({"pkg/old.py": "def f(a): ...\n"})
    found = record(tree, target("pkg.new | pkg.old : f"))
    assert found is not None
    assert ("pkg.old", None) == (found["module"], found.get("also"))
    assert record(tree, target("pkg.new | pkg.other : f")) is None
    assert record(tree, target("pkg.old : g")) is None


def test_a_name_that_is_made_when_asked_for(write: Write) -> None:
    """Lazy names of a module: what ``__getattr__`` imports, and what it only knows by name."""
    tree = write(
        {
            "pkg/a.py": """
            def __getattr__(name):
                if name == "current":
                    return object()
                if name == "Lazy":
                    from pkg.b import Lazy
                    return Lazy
                raise AttributeError(name)
            """,
            "pkg/b.py": "class Lazy: ...",
        }
    )
    current, lazy = record(tree, target("pkg.a : current")), record(tree, target("pkg.a : Lazy"))
    assert current == {"module": "pkg.a", "kind": "value", "value": "__getattr__('current')"}
    assert lazy is not None
    assert "pkg.b" == lazy["module"]


def test_a_name_that_moved_to_where_nobody_looked(tmp_path: Path) -> None:
    """Modules that define a name which none of its places has are noted; imports and locals of that name are not."""
    files = {
        "pkg/new.py": "async def gone(a):\n    inner = 1\n",
        "pkg/sub/__init__.py": "gone: int = 3\n",
        "pkg/uses.py": "from pkg.new import gone\ngone(1)\nclass A:\n    gone = 2\n",
        "pkg/old.py": "class here: ...\n",
    }
    targets = [Target("gone", ("pkg.old",), "gone"), Target("here", ("pkg.old",), "here")]
    surfaces = {"moved": {"gone": None, "here": {"module": "pkg.old"}}}
    assert {"gone": ["pkg.new", "pkg.sub"]} == find_elsewhere(files, surfaces, targets)


def test_of_a_located_class_only_its_call_is_recorded(write: Write) -> None:
    """Where it is and how it is built; an enum and a protocol are not built."""
    tree = write(
        {
            "pkg/a.py": """
            import enum, typing
            class C:
                def __init__(self, a): self.a = a
                def m(self): ...
            class E(enum.Enum):
                X = 1
            class P(typing.Protocol):
                def m(self): ...
            """
        }
    )
    found = {name: record(tree, Target(name, ("pkg.a",), name, located=True)) for name in "CEP"}
    assert found["C"] == {"module": "pkg.a", "kind": "class", "call": "(a)"}
    assert found["E"] == {"module": "pkg.a", "kind": "enum"}
    assert found["P"] == {"module": "pkg.a", "kind": "protocol"}


def test_definitions_behind_conditions(write: Write) -> None:
    """The first branch of ``if`` and the body of ``try`` win; overloads are for the type checker only."""
    tree = write(
        {
            "pkg/a.py": """
                from typing import overload
                try:
                    import missing
                    def g(a): ...
                except ImportError:
                    def g(b): ...
                    def only(): ...
                if True:
                    def f(a): ...
                else:
                    def f(b): ...
                @overload
                def h(a: int): ...
                def h(a, b=1): ...
                @overload
                def k(a: int): ...
                """
        }
    )
    assert "(a)" == (record(tree, target("pkg.a : g")) or {})["call"]
    assert "()" == (record(tree, target("pkg.a : only")) or {})["call"]
    assert record(tree, target("pkg.a : k")) is None
    assert "(a)" == (record(tree, target("pkg.a : f")) or {})["call"]
    assert "(a, b=)" == (record(tree, target("pkg.a : h")) or {})["call"]


def test_methods_of_classes_that_plugins_subclass(write: Write) -> None:
    """Private members and what the base has are recorded, of other classes the public ones alone.

    What a recorded base has is not repeated.
    """
    source = """
        from abc import ABC, abstractmethod
        class Interface(ABC):
            @abstractmethod
            def schedule(self, throttle=False) -> "Output": ...
            def common(self): ...
        class C(Interface):
            limit: int = 1
            def __init__(self, config): self.config, self.seen, self._own = config, 0, 1
            def schedule(self, throttle=False) -> "Output": ...
            def _update(self, request, *, is_stale=False) -> tuple[int, bool]: ...
            @classmethod
            def make(cls, config): ...
            @staticmethod
            def helper(x): ...
            @property
            def size(self) -> int: ...
            async def wait(self): ...
        """
    tree = write({"pkg/a.py": source})
    methods = {
        "_update": "(request, *, is_stale=) -> tuple[int, bool]",
        "helper": "staticmethod (x)",
        "make": "classmethod (config)",
        "schedule": "(throttle=) -> Output",
        "size": "property -> int",
        "wait": "async ()",
    }
    whole = record(tree, target("pkg.a : C", subclassed=True))
    assert whole is not None
    assert {**methods, "common": "()"} == whole["methods"]
    assert (["_own", "config", "limit", "seen"], True) == (whole["attributes"], whole["subclassed"])
    above = record(tree, target("pkg.a : C", subclassed=True), {"pkg.a:Interface": True})
    assert above is not None
    assert methods == above["methods"]
    public = record(tree, target("pkg.a : C"))
    assert public is not None
    assert methods.keys() - {"_update"} | {"common"} == public["methods"].keys()
    assert ["config", "limit", "seen"] == public["attributes"]


def test_what_an_instance_has(write: Write) -> None:
    """Fields of classes that have them, what methods set, properties, and all that of recorded bases; no parameters."""
    source = """
        from dataclasses import dataclass, field
        class Base:
            def __init__(self, size): self.width = size
            @property
            def area(self): ...
        class Plain(Base):
            def __init__(self, size, color): self.paint = color
        @dataclass
        class Data:
            size: int
            seen: int = field(init=False)
            @property
            def area(self): ...
        """
    tree = write({"pkg/a.py": source})
    surface = [target(f"pkg.a : {name}", subclassed=name != "Data") for name in ("Base", "Plain", "Data")]
    api = RecordedApi("1.0.0", {}, record_surfaces(tree, {"all": surface}))
    assert {"width", "area"} == api.attributes("pkg.a:Base")
    assert {"width", "area", "paint"} == api.attributes("pkg.a:Plain")
    assert {"size", "seen", "area"} == api.attributes("pkg.a:Data")
    assert [set(), {"size", "seen"}] == [api.fields("pkg.a:Plain"), api.fields("pkg.a:Data")]
    assert (None, None) == (api.attributes("pkg.a:Gone"), api.fields("pkg.a:Gone"))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Optional[List[int]]", "list[int] | None"),
        ("Union[int, 'Request', None]", "int | Request | None"),
        ("typing.Dict[str, t.Any]", "dict[str, Any]"),
        ("'tuple[int, bool]'", "tuple[int, bool]"),
        ("Literal['a', 'b']", "Literal['a', 'b']"),
        ("Callable[[Request], Optional[int]]", "Callable[[Request], int | None]"),
    ],
)
def test_annotations_have_one_spelling(old: str, new: str) -> None:
    """vLLM's change from ``Optional[X]`` to ``X | None`` in 0.11.1 is no change of the API."""
    assert new == annotation(ast.parse(old, mode="eval").body)


@pytest.mark.parametrize(
    "text",
    [
        "()",
        "(a, b=)",
        "(a, /, b, *, c=, **kwargs) -> tuple[int, bool] | None",
        "(*args, c, **kwargs)",
        "(*args)",
        "abstract async classmethod (a=) -> Callable[[int], str]",
        "staticmethod (x)",
        "property -> int",
        "property",
    ],
)
def test_calls_are_read_back(text: str) -> None:
    """``parse`` is the inverse of ``str``."""
    assert text == str(parse(text))


def test_a_call_says_what_python_says() -> None:
    """The view of a ``def`` is that of ``inspect.signature``."""
    source = "def f(a, b=1, /, c=2, *args, d, e=3, **kwargs) -> int: ..."
    space: dict[str, Any] = {}
    exec(source, space)
    node = ast.parse(source).body[0]
    assert isinstance(node, ast.FunctionDef)
    call = of_function(node)
    kinds = inspect.signature(space["f"]).parameters.values()
    named = [p for p in kinds if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    assert [(p.name, p.default is p.empty, p.kind.name.lower()) for p in named] == [
        (p.name, p.required, p.kind) for p in call.parameters
    ]
    assert call == parse(str(call)) == Call(call.parameters, var_positional=True, var_keyword=True, returns="int")
    assert Parameter("d", required=True, kind="keyword_only") in call.parameters


def test_two_targets_cannot_share_a_key(tmp_path: Path) -> None:
    """A record would silently replace another; ``as`` tells them apart."""
    path = tmp_path / "targets.toml"
    path.write_text('[a]\nsymbols = ["m : X", "n : X"]\n')
    with pytest.raises(ValueError, match="two targets are called X"):
        load(path)
    path.write_text('[a]\nsymbols = ["m : X", "n | o : X as Y"]\n')
    assert [("X", ("m",), "X"), ("X", ("n", "o"), "Y")] == [(t.name, t.modules, t.key) for t in load(path)["a"]]

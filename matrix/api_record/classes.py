"""Classes: what kind they are, and what their constructor takes, inherited fields resolved."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, replace

from api_record.functions import of_function
from api_record.tree import External, Symbol, Tree, is_overload, statements
from vllm_compat.recorded.calls import Call, Parameter

_ENUMS = {f"enum.{name}" for name in ("Enum", "IntEnum", "Flag", "IntFlag", "StrEnum")}
_NAMED_TUPLES = {"typing.NamedTuple", "typing_extensions.NamedTuple"}
_TYPED_DICTS = {"typing.TypedDict", "typing_extensions.TypedDict"}
_PROTOCOLS = {"typing.Protocol", "typing_extensions.Protocol"}
#: Bases without a constructor of their own.
_INERT = {"object", "abc.ABC", "typing.Generic", *_PROTOCOLS}
_ANYTHING = Call(var_positional=True, var_keyword=True)

Base = Symbol | External


@dataclass(frozen=True)
class Field:
    """One field of a dataclass, struct or typed dict."""

    name: str
    required: bool
    init: bool = True
    kw_only: bool = False


def class_node(symbol: Symbol) -> ast.ClassDef:
    """The ``class`` statement of a symbol that is a class."""
    assert isinstance(symbol.node, ast.ClassDef)
    return symbol.node


def bases(tree: Tree, symbol: Symbol) -> list[Base]:
    """The bases as written, resolved; one that nothing is known of is External by its text."""
    found = []
    for base in class_node(symbol).bases:
        resolved = tree.expression(symbol.module, base)
        if isinstance(resolved, Symbol) and not isinstance(resolved.node, ast.ClassDef):
            resolved = None
        found.append(resolved or External(ast.unparse(base)))
    return found


def mro(tree: Tree, symbol: Symbol) -> list[Base]:
    """The method resolution order (C3) without ``object``."""

    def key(base: Base) -> str:
        return base.full_name if isinstance(base, Symbol) else base.name

    parents = bases(tree, symbol)
    queues = [mro(tree, base) if isinstance(base, Symbol) else [base] for base in parents] + [list(parents)]
    order: list[Base] = [symbol]
    while any(queues):
        tails = {key(base) for queue in queues for base in queue[1:]}
        heads = [queue[0] for queue in queues if queue]
        head = next((base for base in heads if key(base) not in tails), heads[0])
        order.append(head)
        queues = [[base for base in queue if key(base) != key(head)] for queue in queues]
    return order


def _externals(tree: Tree, symbol: Symbol) -> set[str]:
    return {base.name for base in mro(tree, symbol) if isinstance(base, External)}


def _own_dataclass(tree: Tree, symbol: Symbol) -> tuple[str, dict[str, ast.expr]] | None:
    """("dataclass" or "pydantic_dataclass", keywords of the decorator), or None."""
    for decorator in class_node(symbol).decorator_list:
        target = decorator.func if isinstance(decorator, ast.Call) else decorator
        keywords = {k.arg: k.value for k in decorator.keywords if k.arg} if isinstance(decorator, ast.Call) else {}
        meant = tree.expression(symbol.module, target)
        if isinstance(meant, External):
            if meant.name == "dataclasses.dataclass":
                return "dataclass", keywords
            if meant.name == "pydantic.dataclasses.dataclass":
                return "pydantic_dataclass", keywords
        elif meant is not None and isinstance(meant.node, ast.FunctionDef):
            # A decorator of the tree's own that says it makes dataclasses: vllm.config.utils.config since 0.16.0.
            transforms = [ast.unparse(d).partition("(")[0] for d in meant.node.decorator_list]
            if any(name.rpartition(".")[2] == "dataclass_transform" for name in transforms):
                return "pydantic_dataclass", keywords
    return None


def kind(tree: Tree, symbol: Symbol) -> str:
    """What the class is; the first of these that fits, else "class"."""
    outside = _externals(tree, symbol)
    if outside & _ENUMS:
        return "enum"
    if outside & _TYPED_DICTS:
        return "typed_dict"
    if outside & _NAMED_TUPLES:
        return "namedtuple"
    if "msgspec.Struct" in outside:
        return "msgspec_struct"
    if "pydantic.BaseModel" in outside:
        return "pydantic_model"
    for base in mro(tree, symbol):
        own = _own_dataclass(tree, base) if isinstance(base, Symbol) else None
        if own is not None:
            return own[0]
    if any(isinstance(base, External) and base.name in _PROTOCOLS for base in bases(tree, symbol)):
        return "protocol"
    return "class"


def members(symbol: Symbol) -> list[str]:
    """Names of an enum's members, in order."""
    names = []
    for node in statements(class_node(symbol).body):
        if isinstance(node, ast.Assign):
            names += [t.id for t in node.targets if isinstance(t, ast.Name) and not t.id.startswith("_")]
    return names


def fields(tree: Tree, symbol: Symbol) -> dict[str, Field]:
    """Fields of a class that has them, inherited ones first; a field defined again keeps its place."""
    what = kind(tree, symbol)
    found: dict[str, Field] = {}
    for base in reversed(mro(tree, symbol)):
        if not isinstance(base, Symbol):
            continue
        if what in ("dataclass", "pydantic_dataclass"):
            own = _own_dataclass(tree, base)
            if own is not None:
                found.update(_own_fields(tree, base, kw_only=_is_true(own[1].get("kw_only"))))
        else:
            keywords = {keyword.arg: keyword.value for keyword in class_node(base).keywords}
            total = not (what == "typed_dict" and _is_false(keywords.get("total")))
            found.update(_own_fields(tree, base, kw_only=_is_true(keywords.get("kw_only")), total=total))
    return found


def _own_fields(tree: Tree, symbol: Symbol, *, kw_only: bool, total: bool = True) -> dict[str, Field]:
    typed_dict = kind(tree, symbol) == "typed_dict"
    found: dict[str, Field] = {}
    for node in class_node(symbol).body:
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
            continue
        outer = _outer(node.annotation)
        if outer == "ClassVar":
            continue
        if outer == "KW_ONLY":
            kw_only = True
            continue
        name = node.target.id
        if name.startswith("_") and kind(tree, symbol) == "pydantic_model":
            continue  # a private attribute
        if typed_dict:
            found[name] = Field(name, required=outer == "Required" or (total and outer != "NotRequired"), kw_only=True)
        else:
            found[name] = _field(tree, symbol, name, node.value, kw_only=kw_only)
    return found


def _field(tree: Tree, symbol: Symbol, name: str, value: ast.expr | None, *, kw_only: bool) -> Field:
    if not isinstance(value, ast.Call):
        return Field(name, required=value is None, kw_only=kw_only)
    meant = tree.expression(symbol.module, value.func)
    called = meant.name if isinstance(meant, External) else ""
    if called not in {"dataclasses.field", "msgspec.field", "pydantic.Field", "pydantic.fields.Field"}:
        return Field(name, required=False, kw_only=kw_only)
    keywords = {keyword.arg: keyword.value for keyword in value.keywords}
    default = keywords.get("default", value.args[0] if value.args else None)
    given = (default is not None and ast.unparse(default) != "...") or "default_factory" in keywords
    if "kw_only" in keywords:
        kw_only = _is_true(keywords["kw_only"])
    return Field(name, required=not given, init=not _is_false(keywords.get("init")), kw_only=kw_only)


def _outer(annotation: ast.expr) -> str:
    """``ClassVar`` of ``typing.ClassVar[int]``, also when it is a string."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        annotation = ast.parse(annotation.value.strip(), mode="eval").body
    if isinstance(annotation, ast.Subscript):
        annotation = annotation.value
    return ast.unparse(annotation).rpartition(".")[2]


def _is_true(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def _is_false(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def own_methods(symbol: Symbol) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """The ``def`` statements of a class body, those for the type checker left out."""
    for node in statements(class_node(symbol).body):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not is_overload(node):
            yield node


def constructor(tree: Tree, symbol: Symbol) -> Call:
    """What calling the class takes: ``__init__`` or ``__new__``, or the one that its fields make."""
    what = kind(tree, symbol)
    if what in ("msgspec_struct", "namedtuple", "typed_dict", "pydantic_model"):
        call = _from_fields(fields(tree, symbol), keyword_only=what in ("typed_dict", "pydantic_model"))
        return replace(call, var_keyword=what == "pydantic_model" and _takes_anything(tree, symbol))
    for base in mro(tree, symbol):
        if isinstance(base, External):
            if base.name in _INERT or base.name in _ENUMS:
                continue
            return _ANYTHING
        written = {node.name: node for node in own_methods(base)}
        for name in ("__new__", "__init__"):
            if name in written:
                return replace(of_function(written[name], drop_first=True), returns="")
        own = _own_dataclass(tree, base)
        if own is not None and not _is_false(own[1].get("init")):
            return _from_fields(fields(tree, base))
    return Call()


def _takes_anything(tree: Tree, symbol: Symbol) -> bool:
    """Whether a pydantic model keeps keywords that are no fields: ``ConfigDict(extra="allow")``; the nearest counts."""
    for base in mro(tree, symbol):
        for node in class_node(base).body if isinstance(base, Symbol) else ():
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "model_config":
                keywords = {k.arg: k.value for k in ast.walk(node.value) if isinstance(k, ast.keyword)}
                if "extra" in keywords:
                    return bool(ast.literal_eval(keywords["extra"]) == "allow")
    return False


def _from_fields(found: dict[str, Field], *, keyword_only: bool = False) -> Call:
    taken = [field for field in found.values() if field.init]
    positional = [field for field in taken if not (field.kw_only or keyword_only)]
    keyword = [field for field in taken if field.kw_only or keyword_only]
    return Call(
        (
            *(Parameter(field.name, field.required) for field in positional),
            *(Parameter(field.name, field.required, "keyword_only") for field in keyword),
        )
    )

"""How a call is written down: ``(request_id, priority=, *, kv_hints=) -> Request``.

A name with ``=`` has a default; what follows ``*`` is keyword only, what stands before ``/`` positional only. The words
in front are ``abstract``, ``async``, ``classmethod``, ``staticmethod``; a property is ``property -> int``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

Kind = Literal["positional_only", "positional_or_keyword", "keyword_only"]
Function = ast.FunctionDef | ast.AsyncFunctionDef

_WORDS = ("abstract", "async", "classmethod", "staticmethod", "property")


@dataclass(frozen=True)
class Parameter:
    """One parameter: its name, whether it has no default, and how it can be passed."""

    name: str
    required: bool
    kind: Kind = "positional_or_keyword"


@dataclass(frozen=True)
class Call:
    """What can be passed, and what is annotated to come back ("" when nothing is).

    ``words`` says what kind of function it is, in the order of the module's docstring. ``var_positional`` and
    ``var_keyword`` stand for ``*args`` and ``**kwargs``.
    """

    parameters: tuple[Parameter, ...] = ()
    var_positional: bool = False
    var_keyword: bool = False
    returns: str = ""
    words: tuple[str, ...] = ()

    def __str__(self) -> str:
        words = " ".join((*self.words, ""))
        returns = f" -> {self.returns}" if self.returns else ""
        if "property" in self.words:
            return words.strip() + returns
        return f"{words}({', '.join(_items(self))}){returns}"


def _items(call: Call) -> Iterable[str]:
    kinds = [parameter.kind for parameter in call.parameters]
    starred = False
    for index, parameter in enumerate(call.parameters):
        if parameter.kind == "keyword_only" and not starred:
            starred = True
            yield "*args" if call.var_positional else "*"
        yield parameter.name if parameter.required else f"{parameter.name}="
        if parameter.kind == "positional_only" and "positional_only" not in kinds[index + 1 :]:
            yield "/"
    if call.var_positional and not starred:
        yield "*args"
    if call.var_keyword:
        yield "**kwargs"


def parse(text: str) -> Call:
    """The inverse of ``str(call)``."""
    words = []
    for word in _WORDS:
        if text.startswith(word):
            words.append(word)
            text = text[len(word) :].lstrip()
    if "property" in words:
        return Call(returns=text.removeprefix("-> "), words=tuple(words))
    inside, _, returns = text.partition(")")
    parameters: list[Parameter] = []
    kind: Kind = "positional_or_keyword"
    var_positional = var_keyword = False
    for item in filter(None, inside.removeprefix("(").split(", ")):
        if item == "/":
            parameters = [replace(parameter, kind="positional_only") for parameter in parameters]
        elif item.startswith("**"):
            var_keyword = True
        elif item.startswith("*"):
            var_positional, kind = item != "*", "keyword_only"
        else:
            parameters.append(Parameter(item.removesuffix("="), not item.endswith("="), kind))
    return Call(tuple(parameters), var_positional, var_keyword, returns.removeprefix(" -> "), tuple(words))


def of_function(node: Function, *, drop_first: bool = False, words: tuple[str, ...] = ()) -> Call:
    """The call of a ``def``. ``drop_first`` leaves out ``self`` or ``cls``."""
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    first_default = len(positional) - len(arguments.defaults)
    parameters = [
        Parameter(
            argument.arg,
            index < first_default,
            "positional_only" if index < len(arguments.posonlyargs) else "positional_or_keyword",
        )
        for index, argument in enumerate(positional)
    ]
    parameters += [
        Parameter(argument.arg, default is None, "keyword_only")
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    return Call(
        tuple(parameters[1:] if drop_first else parameters),
        var_positional=arguments.vararg is not None,
        var_keyword=arguments.kwarg is not None,
        returns=annotation(node.returns),
        words=words,
    )


def annotation(node: ast.expr | None) -> str:
    """An annotation's text in one spelling: ``Optional[List["X"]]`` and ``list[X] | None`` are the same."""
    if node is None:
        return ""
    return ast.unparse(_Spelling().visit(_copy(node)))


def _copy(node: ast.expr) -> ast.expr:
    return ast.parse(ast.unparse(node), mode="eval").body


_BUILTIN = {
    "List": "list",
    "Dict": "dict",
    "Tuple": "tuple",
    "Set": "set",
    "Type": "type",
    "FrozenSet": "frozenset",
}


class _Spelling(ast.NodeTransformer):
    """vLLM went from ``typing.Optional`` to ``| None`` in 0.11.1; that is no change of the API."""

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        if not isinstance(node.value, str):
            return node
        try:
            inner: ast.expr = self.visit(ast.parse(node.value.strip(), mode="eval").body)
        except SyntaxError:
            return node
        return inner

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Name(_BUILTIN.get(node.id, node.id))

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        if isinstance(node.value, ast.Name) and node.value.id in ("typing", "t"):
            return self.visit_Name(ast.Name(node.attr))
        return node

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        value = self.visit(node.value)
        name = value.id if isinstance(value, ast.Name) else ""
        if name == "Literal":  # its strings are values
            return ast.Subscript(value, node.slice, ast.Load())
        inner = self.visit(node.slice)
        if name == "Optional":
            return ast.BinOp(inner, ast.BitOr(), ast.Constant(None))
        if name == "Union" and isinstance(inner, ast.Tuple):
            union = inner.elts[0]
            for element in inner.elts[1:]:
                union = ast.BinOp(union, ast.BitOr(), element)
            return union
        return ast.Subscript(value, inner, ast.Load())

"""A ``def`` and its annotations in the form in which calls are recorded (``vllm_compat.recorded.calls``)."""

from __future__ import annotations

import ast

from vllm_compat.recorded.calls import Call, Parameter

Function = ast.FunctionDef | ast.AsyncFunctionDef


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

"""How a call is written down: ``(request_id, priority=, *, kv_hints=) -> Request``.

A name with ``=`` has a default; what follows ``*`` is keyword only, what stands before ``/`` positional only. The words
in front are ``abstract``, ``async``, ``classmethod``, ``staticmethod``; a property is ``property -> int``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

Kind = Literal["positional_only", "positional_or_keyword", "keyword_only"]

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


@functools.cache
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

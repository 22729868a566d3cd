"""The constructor view of a live class or function: which names it takes, and which of them it requires."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True)
class Parameter:
    """A name that can be passed by keyword, and whether it must be."""

    name: str
    required: bool


@dataclass(frozen=True)
class Signature:
    """What a symbol takes.

    Attributes:
        symbol: ``"module:attribute.path"``.
        parameters: In order, without ``self`` and without ``*args``/``**kwargs``.
        accepts_var_keyword: It has ``**kwargs``, so every name is accepted.
    """

    symbol: str
    parameters: tuple[Parameter, ...]
    accepts_var_keyword: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(parameter.name for parameter in self.parameters)

    @property
    def required(self) -> tuple[str, ...]:
        return tuple(parameter.name for parameter in self.parameters if parameter.required)

    def accepts(self, name: str) -> bool:
        """Whether ``name`` can be passed by keyword."""
        return self.accepts_var_keyword or name in self.names


def signature_of(target: Any, *, symbol: str = "", bound: bool = False) -> Signature:
    """The constructor view of ``target``.

    Args:
        target: A class of any kind (plain, dataclass, pydantic dataclass, msgspec.Struct, NamedTuple) or a callable.
        symbol: How to name it in messages.
        bound: ``target`` is a function taken from its class, so its first parameter is the instance.

    Raises:
        TypeError: it has no signature (a builtin without one).
    """
    symbol = symbol or f"{getattr(target, '__module__', '?')}:{getattr(target, '__qualname__', repr(target))}"
    if isinstance(target, type) and hasattr(target, "__struct_fields__"):
        return _struct(target, symbol)
    try:
        parameters = list(inspect.signature(target).parameters.values())
    except ValueError as error:
        raise TypeError(f"{symbol} has no signature that can be read: {error}") from error
    if bound:
        parameters = parameters[1:]
    return Signature(
        symbol,
        tuple(
            Parameter(p.name, p.default is inspect.Parameter.empty) for p in parameters if p.kind not in _VARIADIC
        ),
        any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters),
    )


def _struct(target: Any, symbol: str) -> Signature:
    # msgspec offers no inspect.signature for every version: the fields and their defaults are the constructor.
    import msgspec

    return Signature(
        symbol,
        tuple(
            Parameter(field.name, field.required) for field in msgspec.structs.fields(target)
        ),
    )

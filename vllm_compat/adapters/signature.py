"""The constructor view of a live class or function: which names it takes, and which of them it requires."""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType, MethodType
from typing import Any, Literal, get_args, get_origin

__all__ = ["Kind", "Parameter", "Signature", "attributes_lacking", "signature_of"]

Kind = Literal["positional_only", "positional_or_keyword", "keyword_only"]

_KINDS: dict[Any, Kind] = {
    inspect.Parameter.POSITIONAL_ONLY: "positional_only",
    inspect.Parameter.POSITIONAL_OR_KEYWORD: "positional_or_keyword",
    inspect.Parameter.KEYWORD_ONLY: "keyword_only",
}


@dataclass(frozen=True)
class Parameter:
    """One parameter.

    Attributes:
        name: Its name; for a pydantic field with an alias, the alias.
        required: It has no default, nor a default factory.
        kind: How it can be passed.
    """

    name: str
    required: bool
    kind: Kind = "positional_or_keyword"


@dataclass(frozen=True)
class Signature:
    """What a symbol takes.

    Attributes:
        symbol: ``"module:attribute.path"``.
        parameters: In order, without ``self`` and without ``*args`` and ``**kwargs``.
        accepts_var_keyword: It has ``**kwargs``, so any name is accepted.
        returns: How many values are annotated to come back together, as a tuple; 0 where nothing says so.
    """

    symbol: str
    parameters: tuple[Parameter, ...]
    accepts_var_keyword: bool = False
    returns: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all parameters, in order."""
        return tuple(parameter.name for parameter in self.parameters)

    @property
    def required(self) -> tuple[str, ...]:
        """Names of the parameters without a default, in order."""
        return tuple(parameter.name for parameter in self.parameters if parameter.required)

    @functools.cached_property
    def keywords(self) -> frozenset[str]:
        """Names that can be passed by keyword, ``**kwargs`` apart."""
        return frozenset(p.name for p in self.parameters if p.kind != "positional_only")

    def accepts(self, name: str) -> bool:
        """Whether `name` can be passed by keyword."""
        return name in self.keywords or self.accepts_var_keyword


def signature_of(target: Any, *, symbol: str = "", bound: bool = False) -> Signature:
    """Return the constructor view of `target`.

    Constructing and reading are two questions: vLLM keeps fields readable as deprecated properties after its
    constructors stopped taking them (``EngineCoreRequest.eos_token_id`` in 0.17), so ``hasattr`` cannot
    answer this one. ``inspect.signature`` can for plain classes, dataclasses and pydantic dataclasses
    (``InitVar`` in, fields with ``init=False`` out), ``msgspec.Struct``, ``NamedTuple`` and functions.

    Args:
        target: A class or a callable.
        symbol: How to name it in messages; its own qualified name if empty.
        bound: `target` is a function taken from its class, whose first parameter is the instance.

    Raises:
        TypeError: It is not callable, or a builtin whose signature Python does not know.
    """
    # Of classes and functions the answer is kept: reading a signature takes a hundred times as long as most of
    # vLLM's constructors. A method is a new object every time it is reached; its function is not.
    if isinstance(target, MethodType) and isinstance(target.__func__, FunctionType):
        return _read_once(target.__func__, symbol or _name_of(target), True)
    if isinstance(target, (type, FunctionType)):
        return _read_once(target, symbol or _name_of(target), bound)
    return _read(target, symbol or _name_of(target), bound)


def _name_of(target: Any) -> str:
    return f"{getattr(target, '__module__', '?')}:{getattr(target, '__qualname__', repr(target))}"


def _read(target: Any, symbol: str, bound: bool) -> Signature:
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError) as error:
        msg = f"{symbol} has no signature that can be read: {error}"
        raise TypeError(msg) from error
    parameters = list(signature.parameters.values())
    if bound and parameters and parameters[0].kind in _KINDS:
        del parameters[0]
    return Signature(
        symbol,
        tuple(
            Parameter(p.name, required=p.default is inspect.Parameter.empty, kind=_KINDS[p.kind])
            for p in parameters
            if p.kind in _KINDS
        ),
        accepts_var_keyword=any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters),
        returns=_values(signature.return_annotation),
    )


def _values(annotation: Any) -> int:
    """The length of an annotated tuple; 0 of anything else, and of an annotation that is only text."""
    values = get_args(annotation) if get_origin(annotation) is tuple else ()
    return 0 if ... in values else len(values)


_read_once = functools.lru_cache(maxsize=1024)(_read)


def attributes_lacking(cls: type, names: Iterable[str]) -> list[str]:
    """Those of ``names`` that no instance of ``cls`` has: no field, method or property, and never set by a method.

    What methods set is read from their code, because a class knows nothing of it before there is an instance. An
    attribute set on another object by the same name passes too; this tells releases apart, it does not verify vLLM.
    """
    known = {name for base in cls.__mro__ for name in (*vars(base), *vars(base).get("__dataclass_fields__", ()))}
    lacking = [name for name in names if name not in known]
    if lacking:
        for code in _codes(cls):
            stored = set(lacking) & set(code.co_names)
            if stored:  # reading an attribute names it as well
                stored &= {step.argval for step in dis.get_instructions(code) if step.opname == "STORE_ATTR"}
                lacking = [name for name in lacking if name not in stored]
            if not lacking:
                break
    return lacking


def _codes(cls: type) -> Iterator[CodeType]:
    """The code of a class's methods, its own and inherited ones."""
    for base in cls.__mro__:
        for member in vars(base).values():
            function = inspect.unwrap(getattr(member, "__func__", member))
            if inspect.isfunction(function):
                yield function.__code__

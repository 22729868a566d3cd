"""What an adapter is: the knowledge of one surface of vLLM over one range of releases."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any, ClassVar, NoReturn

from vllm_compat._unset import UNSET
from vllm_compat.adapters.signature import Signature, attributes_lacking, signature_of
from vllm_compat.errors import UnsupportedField
from vllm_compat.installed import installed, parse_release

Release = tuple[int, ...]


def resolve(symbol: str) -> Any:
    """The live object behind ``"module:attribute.path"``.

    Raises:
        ImportError: the module is not there. AttributeError: the module has no such name.
    """
    module, path = _split(symbol)
    value: Any = sys.modules.get(module) or importlib.import_module(module)
    for name in path:
        owner, value = value, getattr(value, name)
        # vllm.transformers_utils.tokenizer of 0.14 and 0.15 has a __getattr__ that answers None to any other name.
        if value is None and isinstance(owner, ModuleType) and name not in vars(owner):
            msg = f"module {module!r} has no attribute {name!r}"
            raise AttributeError(msg)
    return value


#: Class or function -> names that it takes by keyword, None when any; kept, because it is asked for on every call.
_keywords: dict[Any, frozenset[str] | None] = {}


@functools.cache
def _split(symbol: str) -> tuple[str, list[str]]:
    module, _, path = symbol.partition(":")
    return module, path.split(".")


def resolve_or_refuse(need: Need) -> Any:
    """The live object that ``need`` names.

    Raises:
        UnsupportedField: it is not there, which is known of some releases.
    """
    try:
        return resolve(need.symbol)
    except (ImportError, AttributeError):
        if need.life:
            refuse_symbol(need)
        raise


@dataclass(frozen=True)
class Need:
    """A symbol that an adapter calls or reads, and how.

    Args:
        symbol: ``"vllm.v1.request:Request"``.
        passes: Parameters that the adapter always passes. Each must exist, and no other may be required.
        options: Parameters that it passes only when the caller set them; the value is the first release known to
            have the parameter ("" when every release that this adapter serves has it), or "first-last" for one that
            is gone again.
        bound: The symbol is a method reached through an instance, so its first parameter is not ours to pass.
        reads: Attributes that the adapter reads of an instance: fields, properties, and what methods set on ``self``.
        read_only: The symbol is a class that is never called, only read.
        gives: How many values the function returns as a tuple; 0 where that is not looked at.
        life: The releases that have the symbol at all, written as in ``options``; "" when every release that the
            adapter serves has it. Where it is not there, whoever asks for it is refused.
        if_loaded: Look at the live symbol only when something has imported its module already. Of two model runners
            the one that is not in use may not be importable here.
    """

    symbol: str
    passes: tuple[str, ...] = ()
    options: Mapping[str, str] | None = None
    bound: bool = False
    reads: tuple[str, ...] = ()
    read_only: bool = False
    gives: int = 0
    life: str = ""
    if_loaded: bool = False

    def __post_init__(self) -> None:
        if self.read_only and (self.passes or self.options):
            msg = f"{self.symbol} is never called; what is read of it belongs in reads"
            raise ValueError(msg)

    @property
    def short(self) -> str:
        return self.symbol.partition(":")[2]

    def live(self) -> Signature:
        return signature_of(resolve(self.symbol), symbol=self.symbol, bound=self.bound)

    def misfit(self, live: Signature) -> str:
        """Why the live signature does not fit; "" when it does."""
        if self.read_only:
            return ""
        missing = [name for name in self.passes if not live.accepts(name)]
        # Options do not count: they are passed only when the caller set them.
        unmet = [name for name in live.required if name not in self.passes]
        parts = []
        if missing:
            parts.append(f"{self.short} takes no {', '.join(missing)}")
        if unmet:
            parts.append(f"{self.short} requires {', '.join(unmet)}")
        if self.gives and live.returns and live.returns != self.gives:
            parts.append(f"{self.short} returns {live.returns} values, not {self.gives}")
        return "; ".join(parts)

    def unreadable(self, lacking: Sequence[str]) -> str:
        """What to say of attributes that are not there; "" of none."""
        return f"{self.short} has no {', '.join(lacking)}" if lacking else ""

    def live_misfit(self) -> str:
        """Why the installed vLLM does not have what is called and read; "" when it does."""
        if self.if_loaded and self.symbol.partition(":")[0] not in sys.modules:
            return ""
        try:
            found = resolve(self.symbol)
            problems = (
                self.misfit(signature_of(found, symbol=self.symbol, bound=self.bound)),
                self.unreadable(attributes_lacking(found, self.reads) if self.reads else ()),
            )
        except (ImportError, AttributeError) as error:
            return "" if self.life else f"{self.symbol} is not there ({error})"
        except TypeError as error:
            return str(error)
        return "; ".join(filter(None, problems))


class Adapter:
    """One surface over one range of releases, from ``since`` until the next class of the same file takes over.

    A subclass states in ``needs`` every symbol it calls or reads; that is what the live signature is checked against
    before its first use, and what the contract tests check against every recorded release. ``left`` names, by
    ``Need.short``, the parameters that are deliberately never passed and the fields that are never read ("*": whatever
    else it has), so that one which nobody thought about is noticed.
    """

    surface: ClassVar[str]
    since: ClassVar[Release]
    needs: ClassVar[tuple[Need, ...]] = ()
    left: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    @classmethod
    def label(cls) -> str:
        return f"{cls.surface} since {'.'.join(map(str, cls.since))}"

    @staticmethod
    def construct(need: Need, options: Mapping[str, Any]) -> Any:
        """Call ``need`` with keywords only, leaving out what is UNSET.

        Raises:
            UnsupportedField: an option that the caller set does not exist in the installed release, or ``need`` itself
                does not, in a release outside its ``life``.
        """
        return Adapter.construct_class(need, resolve_or_refuse(need), options)

    @staticmethod
    def construct_class(need: Need, target: Callable[..., Any], options: Mapping[str, Any]) -> Any:
        """As ``construct``, for a callable that stands in for the one ``need`` names (a subclass, a bound method)."""
        given = {name: value for name, value in options.items() if value is not UNSET}
        if target not in _keywords:
            live = signature_of(target, symbol=need.symbol)
            keywords = None if live.accepts_var_keyword else live.keywords
            if isinstance(target, (type, FunctionType)):
                _keywords[target] = keywords
        else:
            keywords = _keywords[target]
        if keywords is not None and not given.keys() <= keywords:
            refuse(need, next(name for name in given if name not in keywords))
        return target(**given)


def refuse(need: Need, name: str) -> NoReturn:
    """Raise UnsupportedField for an option that the caller set and this release cannot express."""
    life = (need.options or {}).get(name, "")
    needed, upgrade = _needed(life)
    raise UnsupportedField(
        symbol=f"{need.short}.{name}",
        needed=needed or f"a vLLM whose {need.short} takes {name}",
        found=_here(),
        advice=f"leave {name} unset, or {'upgrade vLLM' if upgrade else 'use a release that has it'}",
    )


def refuse_symbol(need: Need, advice: str = "") -> NoReturn:
    """Raise UnsupportedField for something of vLLM's that this release does not have at all."""
    needed, upgrade = _needed(need.life)
    raise UnsupportedField(
        symbol=need.short,
        needed=needed or f"a vLLM that has {need.symbol}",
        found=_here(),
        advice=advice or ("upgrade vLLM" if upgrade else "use a release that has it"),
    )


def _needed(life: str) -> tuple[str, bool]:
    """(the releases of a ``life`` in words, whether upgrading gets there)."""
    first, _, last = life.partition("-")
    if last:
        return f"vLLM {first} to {last}", False
    if not first:
        return "", False
    here, known = installed(), parse_release(first)
    # A fork may lack what its release number promises; upgrading would not be the answer there.
    return f"vLLM {first} or newer", known is not None and (here.release is None or here.release < known)


def _here() -> str:
    here = installed()
    return f"vLLM {here.version} ({here.distribution or 'source tree'})"

"""Names that a module imports and the installed vLLM has no longer."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from vllm_compat.errors import UnsupportedName

__all__ = ["Lend"]


@dataclass(frozen=True)
class Lend:
    """Stand-ins for names that are gone, in their old places while one module is being imported, and no longer.

    They let the module be imported; whoever calls one is told what is gone. So the code that would call them has to be
    replaced as well. A name that is there is left alone.

    Attributes:
        importer: The module that imports them.
        names: ``"package.module:name"`` each; the module may be gone too.
    """

    importer: str
    names: tuple[str, ...]

    @property
    def module(self) -> str:
        """The importer's package, which is there before it."""
        return self.importer.partition(".")[0]

    @property
    def attribute(self) -> str:
        """Where they are lent, for messages."""
        return self.importer.partition(".")[2]

    def apply(self, module: ModuleType) -> Callable[[], object]:  # noqa: ARG002
        """Wait for the importer."""
        finder = _Finder(self)
        sys.meta_path.insert(0, finder)
        return lambda: sys.meta_path.remove(finder)


class _Finder:
    """Finds the importer as everybody else does, and gives it a loader that lends."""

    def __init__(self, lend: Lend) -> None:
        self._lend = lend

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._lend.importer:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _loader(spec.loader, self._lend.names)
                return spec
        return None


def _loader(loader: Any, names: tuple[str, ...]) -> Any:
    import wrapt

    class Lending(wrapt.ObjectProxy):  # type: ignore[type-arg]
        def exec_module(self, module: ModuleType) -> None:
            module.__loader__ = self.__wrapped__
            if module.__spec__ is not None:
                module.__spec__.loader = self.__wrapped__
            with _lent(names):
                self.__wrapped__.exec_module(module)

    return Lending(loader)


@contextmanager
def _lent(names: tuple[str, ...]) -> Iterator[None]:
    made: list[Callable[[], object]] = []
    try:
        for place in names:
            source, _, name = place.partition(":")
            module = _module(source, made)
            if not hasattr(module, name):
                setattr(module, name, _gone(place))
                made.append(lambda module=module, name=name: delattr(module, name))  # type: ignore[misc]
        yield
    finally:
        for take_back in reversed(made):
            take_back()


def _module(source: str, made: list[Callable[[], object]]) -> ModuleType:
    try:
        return importlib.import_module(source)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{source}.".startswith(f"{error.name}."):
            raise
    stand_in = sys.modules[source] = ModuleType(source)
    made.append(lambda: sys.modules.pop(source))
    return stand_in


def _gone(place: str) -> Callable[..., Any]:
    def gone(*args: Any, **kwargs: Any) -> Any:  # noqa: ARG001
        raise UnsupportedName(
            symbol=place,
            found="a vLLM that does not have it",
            advice="call what replaced it; this name is only here so that the module can be imported",
        )

    return gone

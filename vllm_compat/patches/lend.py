"""Names that a module imports and that are no longer where it looks for them."""

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

    They let the module be imported. By default whoever calls one is told what is gone, so that the code that would call
    them has to be replaced as well; or ``make`` gives what took their place. A name that is there is left alone.

    Attributes:
        importer: The module that imports them.
        names: ``"package.module:name"`` each; the module may be gone too.
        make: Gets such a place, returns what stands in for the name. Default: something that says, when it is called,
            that it is gone.
    """

    importer: str
    names: tuple[str, ...]
    make: Callable[[str], Any] | None = None

    @property
    def module(self) -> str:
        """What is changed at once: the list of Python's finders, with one more that waits for the importer."""
        return "sys"

    @property
    def attribute(self) -> str:
        """In words: where, and for whom."""
        return f"meta_path, for {self.importer}"

    def apply(self, module: ModuleType) -> Callable[[], object]:  # noqa: ARG002
        """Wait for the importer."""
        finder = _Finder(self)
        sys.meta_path.insert(0, finder)
        return lambda: sys.meta_path.remove(finder)


class _Finder:
    """Finds the importer as everybody else does, and gives it a loader that lends."""

    def __init__(self, lend: Lend) -> None:
        self._lend = lend
        self._searching = False  # wrapt's finder asks all finders again, this one too

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._lend.importer or self._searching:
            return None
        self._searching = True
        try:
            found = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
            spec = next(filter(None, found), None)
        finally:
            self._searching = False
        if spec is not None and spec.loader is not None:
            spec.loader = _loader(spec.loader, self._lend)
        return spec


def _loader(loader: Any, lend: Lend) -> Any:
    import wrapt

    class Lending(wrapt.ObjectProxy):  # type: ignore[type-arg]
        def exec_module(self, module: ModuleType) -> None:
            module.__loader__ = self.__wrapped__
            if module.__spec__ is not None:
                module.__spec__.loader = self.__wrapped__
            with _lent(lend):
                self.__wrapped__.exec_module(module)

    return Lending(loader)


@contextmanager
def _lent(lend: Lend) -> Iterator[None]:
    made: list[Callable[[], object]] = []
    try:
        for place in lend.names:
            source, _, name = place.partition(":")
            module = _module(source, made)
            if not hasattr(module, name):
                setattr(module, name, (lend.make or _gone)(place))
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
            found="an installation that does not have it any more",
            advice="call what replaced it; this name is only here so that the module can be imported",
        )

    return gone

"""A name of somebody else's module, bound to another object."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

__all__ = ["Replace"]


@dataclass(frozen=True)
class Replace:
    """Another object under a module's name: a class, a constant, a function that it took from elsewhere.

    It is the module's own name that changes. Where the object came from, and who else took it from there, keep it.

    Attributes:
        module, attribute: The module, and the name in it.
        make: Gets the object that is there, returns the one that takes its place.
    """

    module: str
    attribute: str
    make: Callable[[Any], Any]

    def apply(self, module: ModuleType) -> Callable[[], object]:
        """Bind the name anew; what comes back binds it as it was before."""
        before = getattr(module, self.attribute)
        setattr(module, self.attribute, self.make(before))
        return lambda: setattr(module, self.attribute, before)

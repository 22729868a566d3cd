"""The values that describe a patch: what it changes, and when, why and until when it does."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal, Protocol

from vllm_compat._versions import parse

__all__ = ["Change", "Patch", "Wrap"]


class Change(Protocol):
    """One change of one module of somebody else's, made when that module has been imported."""

    @property
    def module(self) -> str:
        """Name of the module."""

    @property
    def attribute(self) -> str:
        """What is changed in it: a name, or a dotted path."""

    def apply(self, module: ModuleType) -> Callable[[], object]:
        """Make the change; returns what takes it back, exactly.

        Raises:
            AttributeError: The module has no such attribute. Nothing is changed then.
        """


@dataclass(frozen=True)
class Wrap:
    """A wrapt wrapper around a function or method.

    Attributes:
        module, attribute: The target, as wrapt names it.
        wrapper: wrapt wrapper ``(wrapped, instance, args, kwargs)``.
    """

    module: str
    attribute: str
    wrapper: Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], Any]

    def apply(self, module: ModuleType) -> Callable[[], object]:
        """Wrap it.

        What comes back raises wrapt.WrapperNotFoundError or wrapt.WrapperNotOutermostError where somebody else
        replaced or covered it since.
        """
        import wrapt

        handle = wrapt.wrap_function_wrapper(module, self.attribute, self.wrapper)
        return lambda: wrapt.unwrap_object(module, self.attribute, handle)


@dataclass(frozen=True)
class Patch:
    """What to change in somebody else's code, together, and for which vLLM.

    Attributes:
        name: What ``enable`` takes; no comma in it.
        changes: What is changed. A change waits until its module is imported.
        since: First vLLM release that needs it.
        until: First release that no longer does; None while none is known.
        platform: "cpu", "cuda", …, or "" for all.
        phase: "worker": wherever a worker may run, which is any process (it shares that of the engine, or of the
            caller, when there is only one). "engine": in no process that is a worker and nothing else.
        why: What goes wrong without it.
        upstream: Where to read about it.
        remove_when: What has to happen for this patch to be deleted.
        library: Distribution whose code is changed, where its own version matters besides vLLM's.
        library_since, library_until: First version of it that this is for, and first one that it is not for.
    """

    name: str
    changes: tuple[Change, ...]
    since: tuple[int, ...]
    until: tuple[int, ...] | None
    platform: str
    phase: Literal["engine", "worker"]
    why: str
    upstream: str
    remove_when: str
    library: str = ""
    library_since: tuple[int, ...] = ()
    library_until: tuple[int, ...] | None = None

    def applies(self, release: tuple[int, ...] | None, platform: str) -> bool:
        """Whether a vLLM of ``release`` on ``platform`` needs it. An unknown release counts as the newest."""
        if self.platform and platform != self.platform:
            return False
        if release is None:
            return self.until is None
        return self.since <= release and (self.until is None or release < self.until)

    def fits_library(self) -> bool:
        """Whether the installed version of ``library`` is one that it is for. An unknown version is not."""
        if not self.library:
            return True
        try:
            version = parse(importlib.metadata.version(self.library))
        except importlib.metadata.PackageNotFoundError:
            return False
        if version is None:
            return False
        release = version.release
        return self.library_since <= release and (self.library_until is None or release < self.library_until)

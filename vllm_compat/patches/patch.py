"""The value that describes a patch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Patch:
    """A wrapper around one function or method of somebody else's code.

    Attributes:
        name: What ``enable`` takes.
        module, attribute: The target, as wrapt names it.
        wrapper: wrapt wrapper ``(wrapped, instance, args, kwargs)``.
        since: First vLLM release that needs it.
        until: First release that no longer does; None while none is known.
        platform: "cpu", "cuda", …, or "" for all.
        phase: The process it is for.
        why: What goes wrong without it.
        upstream: Where to read about it.
        remove_when: What has to happen for this patch to be deleted.
    """

    name: str
    module: str
    attribute: str
    wrapper: Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], Any]
    since: tuple[int, ...]
    until: tuple[int, ...] | None
    platform: str
    phase: Literal["engine", "worker"]
    why: str
    upstream: str
    remove_when: str

    def applies(self, release: tuple[int, ...] | None, platform: str) -> bool:
        """Whether a vLLM of ``release`` on ``platform`` needs it. An unknown release counts as the newest."""
        if self.platform and platform != self.platform:
            return False
        if release is None:
            return self.until is None
        return self.since <= release and (self.until is None or release < self.until)

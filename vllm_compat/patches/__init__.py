"""Patches of other people's code, as data: what, where, from which release to which, why, and until when.

``enable(name)`` applies one in this process, ``disable(name)`` takes it off again without a trace. Nothing is applied
unasked.
"""

from __future__ import annotations

import importlib
import threading
from typing import Any

import wrapt

from vllm_compat.errors import VllmCompatError
from vllm_compat.installed import installed
from vllm_compat.patches.catalogue import CATALOGUE
from vllm_compat.patches.patch import Patch

__all__ = ["CATALOGUE", "Patch", "disable", "enable", "enabled"]

_lock = threading.RLock()
_handles: dict[str, Any] = {}


def enable(name: str) -> bool:
    """Apply a catalogued patch in this process; idempotent.

    Returns:
        Whether it is applied now: False when this release or platform does not need it, or its target is not installed.

    Raises:
        VllmCompatError: there is no such patch.
    """
    patch = _find(name)
    here = installed()
    if not patch.applies(here.release, here.platform):
        return False
    with _lock:
        if name in _handles:
            return True
        try:
            importlib.import_module(patch.module)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.split(".")[0] != patch.module.split(".")[0]:
                raise
            return False
        _handles[name] = wrapt.wrap_function_wrapper(patch.module, patch.attribute, patch.wrapper)
    return True


def disable(name: str) -> None:
    """Undo ``enable``: the very objects from before are back. Does nothing when it was not applied.

    Raises:
        VllmCompatError: there is no such patch. wrapt.WrapperNotFoundError, wrapt.WrapperNotOutermostError: somebody
            else replaced or covered it since; it then still counts as applied.
    """
    patch = _find(name)
    with _lock:
        if name in _handles:
            wrapt.unwrap_object(patch.module, patch.attribute, _handles[name])
            del _handles[name]  # afterwards: where taking it off fails, it is still on


def enabled() -> tuple[str, ...]:
    """Names of the patches that are applied in this process."""
    return tuple(_handles)


def _find(name: str) -> Patch:
    for patch in CATALOGUE:
        if patch.name == name:
            return patch
    raise VllmCompatError(
        f"patch {name!r}",
        needed=f"one of {', '.join(patch.name for patch in CATALOGUE)}",
        found=repr(name),
        advice="see vllm_compat.patches.CATALOGUE",
    )

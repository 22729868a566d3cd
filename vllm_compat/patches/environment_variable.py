"""``VLLM_COMPAT_PATCHES``: names of the enabled patches, which processes that are started from here inherit."""

from __future__ import annotations

import os

__all__ = ["VARIABLE", "forget", "note", "noted"]

VARIABLE = "VLLM_COMPAT_PATCHES"


def noted() -> tuple[str, ...]:
    """The names, in order."""
    return tuple(filter(None, (name.strip() for name in os.environ.get(VARIABLE, "").split(","))))


def note(name: str) -> None:
    """Add a name; nothing changes where it is there."""
    if name not in noted():
        os.environ[VARIABLE] = ",".join((*noted(), name))


def forget(name: str) -> None:
    """Take a name out; the variable goes with the last one."""
    if name in noted():
        left = [other for other in noted() if other != name]
        if left:
            os.environ[VARIABLE] = ",".join(left)
        else:
            del os.environ[VARIABLE]

"""The names of the ways; without torch, which the calling process may not have loaded yet."""

from __future__ import annotations

#: In the order in which they are tried.
WAYS = ("aux", "hooks")

#: Never taken unasked: it needs a loop of its own.
NATIVE = "native"

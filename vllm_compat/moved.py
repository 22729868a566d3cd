"""Names that vLLM moved or renamed, importable from one place on every release.

    from vllm_compat.moved import cdiv, get_open_port, AttentionBackend

What comes back is vLLM's own object. ``docs/moved.md`` lists the names, where each release has them and what changed in
their calls. Importing this module imports no vLLM; a name does, when it is first asked for. One that this release does
not have raises UnsupportedName, which is an ImportError and says what to use instead.
"""

from __future__ import annotations

from typing import Any

__all__ = ["where"]  # and the names of the table, see __dir__


def where(name: str) -> str | None:
    """``"module:name"`` that a name comes from in the installed vLLM; None where it has none. Imports vLLM.

    Raises:
        KeyError: ``name`` is not in the table. VllmNotInstalled: there is no vLLM.
    """
    from vllm_compat.adapters import moves
    from vllm_compat.errors import UnsupportedName

    try:
        return moves.find(name)[0]
    except UnsupportedName:
        return None


def __getattr__(name: str) -> Any:
    """Find a name of the table in the installed vLLM."""
    from vllm_compat.adapters import moves

    move = moves.table().get(name)
    if move is None:
        msg = f"module {__name__!r} has no attribute {name!r}; docs/moved.md lists what it has"
        raise AttributeError(msg)
    if move.adapted:
        from vllm_compat.adapters import moved_functions

        value = getattr(moved_functions, move.adapted)
    else:
        value = moves.find(name)[1]
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    from vllm_compat.adapters import moves

    return sorted({*globals(), *moves.table()})

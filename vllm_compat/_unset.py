"""UNSET, the value of an option that the caller did not give.

``None`` is a value that vLLM itself understands (no sampling parameters, no LoRA), so it cannot also mean
"not given": an unset option is left out of the call, ``None`` is passed on.
"""

from __future__ import annotations

import enum
from typing import Final, NoReturn

__all__ = ["UNSET", "Unset"]


class Unset(enum.Enum):
    """Type of `UNSET`. An enum with one member, so that type checkers narrow on ``value is UNSET``.

    It pickles, copies and deep-copies to itself. It has no truth value: ``if option:`` and ``option or
    default`` would take unset for ``None``, ``0`` or ``""``, the very mistake it is here to prevent, so
    they raise TypeError.
    """

    UNSET = "UNSET"

    def __repr__(self) -> str:
        return "UNSET"

    __str__ = __repr__

    def __bool__(self) -> NoReturn:
        msg = "UNSET has no truth value; write `option is UNSET`"
        raise TypeError(msg)


UNSET: Final = Unset.UNSET
"""The one value of `Unset`."""

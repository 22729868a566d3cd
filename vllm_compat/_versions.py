"""Version strings, and the release numbers in them that say something about vLLM's API.

Only ``Version(...).release`` tuples are compared, never strings and never ``SpecifierSet``: whether
``>=0.33.0`` contains ``0.34.0rc1`` differs between releases of packaging, and no pair of half-open ranges
contains a nightly between them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packaging.version import Version

__all__ = ["Release", "is_dev", "parse", "parse_release"]

Release = tuple[int, ...]
"""At least three numbers, no trailing zero after the third: (0, 9, 0), (0, 9, 0, 1). Compare with ``>=``."""


def parse(version: object) -> Version | None:
    """Parse a PEP 440 version; None for anything else. Never raises."""
    from packaging.version import Version

    if not isinstance(version, str):
        return None
    try:
        return Version(version)
    except ValueError:  # InvalidVersion, or a number with more digits than int() takes
        return None


def parse_release(version: object) -> Release | None:
    """Return the release numbers that stand for the API of a vLLM version, or None when they say nothing.

    A candidate, nightly, post release or local build of X counts as X: what such a build really has, only its
    live signatures can tell. Never raises.

    >>> parse_release("0.34.0rc1.dev217+g1234567.cu129"), parse_release("0.12.0.post2")
    ((0, 34, 0), (0, 12, 0))

    None for "dev", for text that is no version, for a build from a clone without tags (which would compare
    as ancient: "0.1.dev8666+g1234567"), for "0.0.0" placeholders, and for versions with an epoch.
    """
    parsed = parse(version)
    if parsed is None or parsed.epoch or not any(parsed.release):
        return None
    numbers = list(parsed.release)
    while len(numbers) > 3 and numbers[-1] == 0:
        numbers.pop()
    numbers.extend([0] * (3 - len(numbers)))
    # setuptools-scm guesses 0.1.devN when it sees no tag; the real 0.1.x of 2023 is far below anything we
    # serve.
    if parsed.is_devrelease and tuple(numbers) < (0, 2):
        return None
    return tuple(numbers)


def is_dev(version: object) -> bool:
    """Say whether this is a development build; a string that is no version ("dev") is one."""
    parsed = parse(version)
    return parsed is None or parsed.is_devrelease

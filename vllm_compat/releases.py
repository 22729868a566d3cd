"""The table of vLLM releases, ``releases.toml``: supported, proved, known to be broken."""

from __future__ import annotations

import datetime
import functools
import sys
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal

from vllm_compat import _versions

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = [
    "KnownBad",
    "Release",
    "Status",
    "all_releases",
    "get",
    "known_bad",
    "nearest",
    "newest",
    "oldest",
    "unverified",
]

Status = Literal["live", "planned", "known_bad"]


@dataclass(frozen=True, kw_only=True)
class Release:
    """A row of the table; its columns are explained at the head of ``releases.toml``."""

    version: str
    date: datetime.date
    python: str
    torch: str
    cpu: str
    status: Status

    @property
    def numbers(self) -> _versions.Release:
        """Release numbers, as in `Installed.release`."""
        numbers = _versions.parse_release(self.version)
        assert numbers is not None, f"releases.toml: {self.version} is no release"
        return numbers


@dataclass(frozen=True, kw_only=True)
class KnownBad:
    """Something that does not work in some releases, whoever calls it.

    Attributes:
        releases: The versions that it was found in.
        what: What does not work.
        reason: Why.
        advice: What to do instead.
        platform: The one device it is about, or None for all.
    """

    releases: tuple[str, ...]
    what: str
    reason: str
    advice: str
    platform: str | None = None


@functools.cache
def _table() -> dict[str, Any]:
    text = resources.files("vllm_compat").joinpath("releases.toml").read_text(encoding="utf-8")
    table: dict[str, Any] = tomllib.loads(text)
    return table


@functools.cache
def all_releases() -> tuple[Release, ...]:
    """Every release of the table, oldest first."""
    return tuple(sorted((Release(**row) for row in _table()["releases"]), key=lambda release: release.numbers))


def newest() -> Release:
    """Return the newest release of the table."""
    return all_releases()[-1]


def oldest() -> Release:
    """Return the oldest release of the table, which is the oldest one served."""
    return all_releases()[0]


def get(release: str | _versions.Release | None) -> Release | None:
    """Return the row of a release; None when it has none.

    Args:
        release: A version string of any build of it, or its release numbers (`Installed.release`).
    """
    numbers = _versions.parse_release(release) if isinstance(release, str) else release
    return next((row for row in all_releases() if row.numbers == numbers), None)


def nearest(release: str | _versions.Release) -> Release:
    """Return the newest row that is not newer than `release`; the oldest row for anything before the table.

    This is the row whose API a build outside the table (a later patch release, a nightly) most likely has.

    Raises:
        ValueError: `release` is a string without release numbers.
    """
    numbers = _versions.parse_release(release) if isinstance(release, str) else release
    if numbers is None:
        msg = f"{release!r} has no release numbers"
        raise ValueError(msg)
    rows = all_releases()
    return next((row for row in reversed(rows) if row.numbers <= numbers), rows[0])


def unverified(release: _versions.Release | None, *, is_dev: bool) -> str:
    """Say why nothing has been proved of a build; "" when it is a release of the table.

    Args:
        release: Release numbers (`Installed.release`).
        is_dev: It is a development build (`Installed.is_dev`), which has the number of the release that it leads to.
    """
    if release is None:
        return "its release is unknown"
    rows = all_releases()
    below = [row.version for row in rows if row.numbers < release]
    if is_dev:
        above = [row.version for row in rows if row.numbers >= release]
        if not below:
            return f"a nightly from before {above[0]}"
        return f"a nightly from between {below[-1]} and {above[0]}" if above else f"a nightly from after {below[-1]}"
    if get(release) is not None:
        return ""
    if len(below) == len(rows):
        return f"newer than the newest release known, {below[-1]}"
    return f"not in the table of releases; the nearest is {nearest(release).version}"


def known_bad(release: str | _versions.Release | None, platform: str | None = None) -> tuple[KnownBad, ...]:
    """Return what is known not to work in a release.

    Args:
        release: As for `get`.
        platform: Leave out what is about another device; None leaves out nothing.
    """
    row = get(release)
    if row is None:
        return ()
    entries = (KnownBad(**{**entry, "releases": tuple(entry["releases"])}) for entry in _table()["known_bad"])
    return tuple(
        entry
        for entry in entries
        if row.version in entry.releases and (platform is None or entry.platform in (None, platform))
    )

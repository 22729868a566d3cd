"""The recordings, a file per release, and looking symbols up in them.

In a checkout they are ``matrix/api``; a wheel has a copy beside this file.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.version import Version

from vllm_compat import _versions
from vllm_compat.errors import VllmCompatError
from vllm_compat.recorded.calls import Call, parse

__all__ = ["FOLDER", "NIGHTLY", "Record", "RecordedApi", "all_recorded", "find", "load", "releases"]

_HERE = Path(__file__).resolve()
_COPY, _CHECKOUT = _HERE.parent / "api", _HERE.parents[2] / "matrix" / "api"

FOLDER = _COPY if _COPY.is_dir() else _CHECKOUT
NIGHTLY = FOLDER / "nightly"
Record = dict[str, Any]
_WITH_FIELDS = ("dataclass", "pydantic_dataclass", "pydantic_model", "msgspec_struct", "namedtuple")


@dataclass(frozen=True)
class RecordedApi:
    """One release.

    Attributes:
        release: ``"0.32.0"``; of a nightly ``"0.29.1.dev202609091054"``.
        wheel: The wheel that was read: distribution, version, file, sha256.
        surfaces: Surface -> symbol -> record; None where the release does not have the symbol.
        elsewhere: Name of ``moved.toml`` that is in none of its places -> other modules that define one.
    """

    release: str
    wheel: Record
    surfaces: dict[str, dict[str, Record | None]] = field(repr=False)
    elsewhere: dict[str, list[str]] = field(repr=False, default_factory=dict)

    @property
    def numbers(self) -> tuple[int, ...]:
        """The release numbers, as ``Installed.release`` has them: those of a nightly lie between two releases."""
        return tuple(map(int, self.release.partition(".dev")[0].split(".")))

    @functools.cached_property
    def _by_name(self) -> dict[str, Record]:
        """``module:name`` -> record, for every module from which the symbol can be imported."""
        found = {}
        for records in self.surfaces.values():
            for key, record in records.items():
                if record is not None:
                    for module in (record["module"], *record.get("also", ())):
                        found[f"{module}:{record.get('name', key)}"] = record
        return found

    def symbol(self, full_name: str) -> Record | None:
        """The record of ``module:Name``; None when it cannot be imported from there, or is not recorded."""
        return self._by_name.get(full_name)

    def call(self, full_name: str) -> Call | None:
        """What ``module:function``, ``module:Class`` or ``module:Class.method`` takes, without ``self`` and ``cls``.

        None when the release does not have it.
        """
        module, _, path = full_name.partition(":")
        name, _, method = path.partition(".")
        record = self.symbol(f"{module}:{name}")
        if record is None:
            return None
        text = self.method(record, method) if method else record.get("call")
        return parse(text) if text is not None else None

    def fields(self, full_name: str) -> set[str] | None:
        """Names of the fields of a dataclass, struct or named tuple; empty of a class that has none.

        None when the release does not have it.
        """
        record = self.symbol(full_name)
        if record is None:
            return None
        if record["kind"] not in _WITH_FIELDS:
            return set()
        return {parameter.name for parameter in parse(record["call"]).parameters} | set(record.get("not_init", ()))

    def attributes(self, full_name: str) -> set[str] | None:
        """What an instance of a recorded class has: fields, methods, properties, what its methods set; enum members.

        None when the release does not have it.
        """
        record = self.symbol(full_name)
        names = self.fields(full_name)
        if record is None or names is None:
            return None
        names |= {*record.get("attributes", ()), *record.get("methods", ()), *record.get("members", ())}
        for base in record.get("bases", ()):
            names |= self.attributes(base) or set()
        return names

    def method(self, record: Record, name: str) -> str | None:
        """A method of a recorded class, its own or inherited from another recorded one; None when it has none."""
        text: str | None = record.get("methods", {}).get(name)
        for base in record.get("bases", ()):
            above = self.symbol(base) if text is None else None
            if above is not None:
                text = self.method(above, name)
        return text


def load(release: str, folder: Path = FOLDER) -> RecordedApi:
    """Read a recorded release.

    Raises:
        FileNotFoundError: it was not recorded.
    """
    data = json.loads((folder / f"{release}.json").read_text(encoding="utf-8"))
    return RecordedApi(data["release"], data["wheel"], data["surfaces"], data["elsewhere"])


def releases(folder: Path = FOLDER) -> list[str]:
    """The recorded releases, oldest first."""
    return sorted((path.stem for path in folder.glob("*.json")), key=_order)


def all_recorded(folder: Path = FOLDER) -> Iterator[RecordedApi]:
    """Every recorded release, oldest first."""
    return (load(release, folder) for release in releases(folder))


def find(version: str) -> RecordedApi:
    """The recording of a release or nightly, by any spelling of its version ("v0.32", "0.12.0.post2").

    Raises:
        VllmCompatError: it was not recorded; names the neighbours that were.
    """
    for folder in (FOLDER, NIGHTLY):
        if version in releases(folder):
            return load(version, folder)
    parsed = _versions.parse(version)
    if parsed is not None and not parsed.is_prerelease:
        numbers = _versions.parse_release(version)
        for release in releases():
            if _versions.parse_release(release) == numbers:
                return load(release)
    raise _not_recorded(version)


def _not_recorded(version: str) -> VllmCompatError:
    asked, needed = f"the API of vLLM {version}", "a recorded release"
    parsed = _versions.parse(version)
    if parsed is None:
        found = f"{version!r}, which is no version"
        return VllmCompatError(asked, needed=needed, found=found, advice="see `vllm-compat releases`")
    known = sorted(Version(name) for name in [*releases(), *releases(NIGHTLY)])
    below, above = [name for name in known if name < parsed][-1:], [name for name in known if name > parsed][:1]
    beside = " and ".join(map(str, [*below, *above]))
    if not (below and above):
        beside += f", the {'newest' if below else 'oldest'}"
    advice = f"compare with {'one of them' if below and above else 'it'}"
    if parsed.is_devrelease:
        advice += f", or in a checkout run `python matrix/add_release.py record --nightly {version}`"
    elif not parsed.is_prerelease:
        advice += f", or in a checkout run `nox -s add_release -- {parsed.base_version}`"
    return VllmCompatError(asked, needed=needed, found=f"recorded next to it: {beside}", advice=advice)


def _order(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.replace("dev", "").split(".")))

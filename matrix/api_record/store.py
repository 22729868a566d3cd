"""The recorded API on disk, ``matrix/api/<release>.json``, and looking symbols up in it."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from api_record.calls import Call, parse

FOLDER = Path(__file__).parents[1] / "api"
NIGHTLY = FOLDER / "nightly"
Record = dict[str, Any]


def dump(value: Any, depth: int = 0) -> str:
    """JSON with sorted keys, one key a line and lists on one line: the same API gives the same bytes."""
    if not isinstance(value, dict) or not value:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    inner = ",\n".join(
        f"{' ' * min(depth + 1, 2)}{json.dumps(key)}: {dump(item, depth + 1)}" for key, item in sorted(value.items())
    )
    return f"{{\n{inner}\n{' ' * min(depth, 2)}}}"


def write(recorded: Record, folder: Path = FOLDER) -> Path:
    """Write a release's file, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{recorded['release']}.json"
    draft = path.with_name(f"{path.name}.tmp")
    draft.write_text(dump(recorded) + "\n", encoding="utf-8")
    os.replace(draft, path)  # noqa: PTH105 (Path.replace is the same, this one says that it is atomic)
    return path


@dataclass(frozen=True)
class RecordedApi:
    """One release.

    Attributes:
        release: ``"0.32.0"``; of a nightly ``"0.29.1.dev202609091054"``.
        wheel: The wheel that was read: distribution, version, file, sha256.
        surfaces: Surface -> symbol -> record; None where the release does not have the symbol.
    """

    release: str
    wheel: Record
    surfaces: dict[str, dict[str, Record | None]] = field(repr=False)

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
    return RecordedApi(data["release"], data["wheel"], data["surfaces"])


def releases(folder: Path = FOLDER) -> list[str]:
    """The recorded releases, oldest first."""
    names = [path.stem for path in folder.glob("*.json")]
    return sorted(names, key=lambda name: tuple(map(int, name.replace("dev", "").split("."))))


def all_recorded(folder: Path = FOLDER) -> Iterator[RecordedApi]:
    """Every recorded release, oldest first."""
    return (load(release, folder) for release in releases(folder))

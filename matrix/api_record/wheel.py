"""The Python files of a release's wheel, read out of the wheel on the package index without downloading all of it.

A wheel has hundreds of megabytes, its Python files ten. pip says where the wheel is, and pip's own reader for remote
archives fetches the parts, with whatever index, proxy and certificates pip is configured for. Nothing is installed and
nothing of the wheel is executed.
"""

from __future__ import annotations

import importlib
import json
import struct
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO, Any
from urllib.parse import unquote, urlsplit

#: Platforms that vLLM's wheels have been tagged with; the Python files are the same for all.
PLATFORMS = [
    *(f"manylinux_2_{minor}_{machine}" for machine in ("x86_64", "aarch64") for minor in range(40, 16, -1)),
    "manylinux1_x86_64",
    "linux_x86_64",
    "macosx_11_0_arm64",
]
#: Pythons that they have been tagged with: one file for all since abi3, a single one in some nightlies.
PYTHONS = ("3.12", "3.13", "3.11")
_GAP = 1 << 16  # bytes between two wanted files that are fetched rather than asked around
_LOCAL_HEADER = struct.Struct("<26xHH")


class NoSuchWheel(Exception):
    """The package index has no such wheel, or cannot be reached."""


@dataclass
class Wheel:
    """A wheel on the package index. `read` answers for its Python files.

    Attributes:
        distribution, version, file, sha256: What the index says of it.
        checksums: Path of each Python file -> its CRC-32.
    """

    distribution: str
    version: str
    file: str
    sha256: str
    _archive: IO[bytes]
    _entries: dict[str, zipfile.ZipInfo] = field(default_factory=dict)
    _texts: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        with zipfile.ZipFile(self._archive) as archive:
            entries = sorted(archive.infolist(), key=lambda entry: entry.header_offset)
        self._entries = {entry.filename: entry for entry in entries if entry.filename.endswith(".py")}

    @property
    def checksums(self) -> dict[str, int]:
        return {name: entry.CRC for name, entry in self._entries.items()}

    def read(self, path: str) -> str | None:
        """The text of a Python file; None when the wheel has no such file. Its whole folder comes with it."""
        if path not in self._entries:
            return None
        if path not in self._texts:
            folder = path.rpartition("/")[0]
            wanted = [entry for name, entry in self._entries.items() if name.rpartition("/")[0] == folder]
            for group in _runs(wanted):
                self._fetch(group)
        return self._texts[path]

    def read_all(self, paths: Iterable[str]) -> dict[str, str]:
        """Path -> text of Python files that the wheel has."""
        return {path: text for path in paths if (text := self.read(path)) is not None}

    def _fetch(self, entries: list[zipfile.ZipInfo]) -> None:
        start, end = entries[0].header_offset, _end(entries[-1])
        self._archive.seek(start)
        data = self._archive.read(end - start)
        for entry in entries:
            at = entry.header_offset - start
            name_length, extra_length = _LOCAL_HEADER.unpack_from(data, at)
            at += _LOCAL_HEADER.size + name_length + extra_length
            raw = data[at : at + entry.compress_size]
            content = zlib.decompress(raw, -15) if entry.compress_type == zipfile.ZIP_DEFLATED else raw
            if zlib.crc32(content) != entry.CRC:
                msg = f"{entry.filename} of {self.file} has another checksum than the wheel says"
                raise zipfile.BadZipFile(msg)
            self._texts[entry.filename] = content.decode("utf-8")


def _end(entry: zipfile.ZipInfo) -> int:
    # The local header repeats the name and has an extra field of its own, of which 512 bytes is far more than enough.
    return entry.header_offset + _LOCAL_HEADER.size + len(entry.filename) + 512 + entry.compress_size


def _runs(entries: list[zipfile.ZipInfo]) -> Iterator[list[zipfile.ZipInfo]]:
    """Entries grouped so that each group lies close together in the archive."""
    group: list[zipfile.ZipInfo] = []
    for entry in entries:
        if group and entry.header_offset - _end(group[-1]) > _GAP:
            yield group
            group = []
        group.append(entry)
    if group:
        yield group


@contextmanager
def open_wheel(distribution: str, version: str) -> Iterator[Wheel]:
    """The wheel of a release on the index that pip is configured for.

    Raises:
        NoSuchWheel: there is none, or pip cannot reach its index.
    """
    said = locate(distribution, version)
    try:
        commands: Any = importlib.import_module("pip._internal.commands")
        lazy_wheel: Any = importlib.import_module("pip._internal.network.lazy_wheel")
    except ImportError as error:
        msg = f"reading a part of a wheel needs pip in this Python ({sys.executable}): {error}"
        raise NoSuchWheel(msg) from error
    command = commands.create_command("download")
    options, _ = command.parse_args([])
    url = said["download_info"]["url"]
    with command.main_context():
        archive = lazy_wheel.LazyZipOverHTTP(url, command.get_default_session(options), chunk_size=1 << 18)
        with archive:
            yield Wheel(
                distribution,
                said["metadata"]["version"],
                unquote(urlsplit(url).path.rpartition("/")[2]),
                said["download_info"]["archive_info"]["hashes"]["sha256"],
                archive,
            )


def locate(distribution: str, version: str) -> dict[str, Any]:
    """What pip would install, from its own report; only metadata is fetched.

    Raises:
        NoSuchWheel: no wheel fits, or pip does not get that far.
    """
    requirement = f"{distribution}=={version}"
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-deps", "--quiet"]
    command += ["--only-binary", ":all:", "--implementation", "cp"]
    for platform in PLATFORMS:
        command += ["--platform", platform]
    # A target is required with foreign platforms; a dry run writes nothing there.
    command += ["--target", "unused", "--report", "-", requirement]
    for python in PYTHONS:
        done = subprocess.run(
            [*command, "--python-version", python], capture_output=True, text=True, check=False, timeout=300
        )
        if not done.returncode:
            found: dict[str, Any] = json.loads(done.stdout)["install"][0]
            return found
        reason = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        if "No matching distribution" not in reason:
            msg = f"pip cannot look for {requirement}: {reason}"
            raise NoSuchWheel(msg)
    msg = f"pip finds no wheel of {distribution} {version} for Python {' or '.join(PYTHONS)}"
    raise NoSuchWheel(msg)

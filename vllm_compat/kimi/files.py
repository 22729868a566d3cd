"""Writing files so that a crash leaves either the old file or the new one, never half of one."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

TEMPORARY_PREFIX = ".tmp-"


def temporary_path(path: Path) -> Path:
    """The name under which `path` is written before it is renamed; beside it, so that renaming is atomic."""
    return path.with_name(f"{TEMPORARY_PREFIX}{path.name}.{os.getpid()}")


def fsync_directory(path: Path) -> None:
    """Make renames and new names inside `path` durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def publish(temporary: Path, path: Path) -> None:
    """Fsync the finished `temporary`, rename it to `path`, fsync the directory."""
    fd = os.open(temporary, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    temporary.replace(path)
    fsync_directory(path.parent)


def write_atomic(path: Path, data: bytes | str) -> None:
    """Write beside, fsync, rename.

    On an error (a full disk) `path` is untouched and the temporary file is gone.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_path(path)
    try:
        temporary.write_bytes(data.encode() if isinstance(data, str) else data)
        publish(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """`write_atomic` of readable JSON.

    NaN and infinities are refused because no JSON reader need accept them.
    """
    write_atomic(path, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a file's bytes, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while piece := stream.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def sha256_json(value: Any) -> str:
    """Hex SHA-256 of a JSON-able value, independent of key order."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()

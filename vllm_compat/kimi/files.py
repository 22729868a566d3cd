"""Files that are whole or absent whatever happens, and locks that die with their process."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from vllm_compat.errors import StoreError

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


def lock(path: Path, what: str) -> int:
    """An open file descriptor that holds the lock file `path`, until it is closed or the process ends.

    StoreError names the process that holds it. `what` says what would be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.read(fd, 32).decode(errors="replace").strip()
        os.close(fd)
        raise StoreError(
            what,
            needed="to be the only process that writes there",
            found=f"process {holder or '(unknown)'} is writing ({error.strerror})",
            advice="wait for that process, or stop it; the lock goes with the process",
        ) from error
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd

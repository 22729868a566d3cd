"""vLLM's own output in a file, so that the console shows one line per stage.

Workers, C++ libraries and progress bars of other packages write to the process's file descriptors, past Python's
logging: the descriptors themselves are pointed elsewhere for as long as a stage runs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


@contextmanager
def console_stream() -> Iterator[TextIO]:
    """A stream to where standard output points now, also while ``redirected``."""
    try:
        descriptor = os.dup(sys.stdout.fileno())
    except OSError:  # a notebook or a test has put something else there, which no redirection touches
        yield sys.stdout
        return
    with os.fdopen(descriptor, "w", encoding="utf-8", errors="replace", buffering=1) as stream:
        yield stream


@contextmanager
def redirected(path: Path) -> Iterator[None]:
    """Append standard output and standard error of this process and its children to ``path``.

    An exception that leaves the block gets a note that names the file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = {number: os.dup(number) for number in (1, 2)}
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        for number in kept:
            os.dup2(log, number)
        yield
    except Exception as error:
        if hasattr(error, "add_note"):
            error.add_note(f"The engine's own output is in {path}")
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, descriptor in kept.items():
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.close(log)

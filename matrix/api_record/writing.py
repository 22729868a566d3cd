"""Writing a recording, ``matrix/api/<release>.json``, so that the same API gives the same bytes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from vllm_compat.recorded.store import Record

FOLDER = Path(__file__).parents[1] / "api"
NIGHTLY = FOLDER / "nightly"


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
    replace(path, dump(recorded) + "\n")
    return path


def replace(path: Path, text: str) -> bool:
    """Make ``text`` the content of a file, whole or not at all; whether that changed it."""
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return False
    draft = path.with_name(f"{path.name}.tmp")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, path)  # noqa: PTH105 (Path.replace is the same, this one says that it is atomic)
    return True

"""What each stage leaves behind: <run>/<stage>/manifest.json, written last, so that it means "complete"."""

from __future__ import annotations

import dataclasses
import platform
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from json import JSONDecodeError, loads
from pathlib import Path
from typing import Any

from vllm_compat import enabled, installed
from vllm_compat.errors import DataError, VllmNotInstalled

from .files import sha256_file, write_json

STAGES = ("prepare", "extract", "vocab", "train", "export", "evaluate")


@dataclass(frozen=True)
class Manifest:
    """A stage that has run to its end.

    started, finished: UTC, ISO 8601. config: the sections it read. inputs, outputs: name -> sha256 (of a
    file's bytes) or fingerprint. metrics: the numbers that the stage returned. versions: of the packages that
    made them, and the patches of vLLM that were on.
    """

    stage: str
    status: str
    started: str
    finished: str
    seconds: float
    config: dict[str, Any]
    inputs: dict[str, str]
    outputs: dict[str, str]
    metrics: dict[str, Any]
    versions: dict[str, str]


def manifest_path(run_dir: Path, stage: str) -> Path:
    """Where the stage's manifest is."""
    return run_dir / stage / "manifest.json"


def read_manifest(run_dir: Path, stage: str) -> Manifest | None:
    """The manifest of a complete stage, None when the stage has not run to its end."""
    path = manifest_path(run_dir, stage)
    try:
        value = loads(path.read_text(encoding="utf-8"))
        made = Manifest(**value)
    except FileNotFoundError:
        return None
    except (JSONDecodeError, TypeError) as error:
        raise DataError(
            f"the manifest {path}",
            needed="the fields that this version writes",
            found=str(error),
            advice=f"remove it to run the stage {stage} again",
        ) from error
    return made if made.status == "complete" else None


def write_manifest(run_dir: Path, manifest: Manifest) -> None:
    """Atomically; the stage is complete once this returns."""
    write_json(manifest_path(run_dir, manifest.stage), dataclasses.asdict(manifest))


def remove_manifest(run_dir: Path, stage: str) -> None:
    """The stage is about to run: until it ends there must be no manifest that says complete."""
    manifest_path(run_dir, stage).unlink(missing_ok=True)


def why_stale(run_dir: Path, stage: str, config: dict[str, Any], inputs: dict[str, str]) -> str | None:
    """Why a stage has to run, in a few words; None when it is up to date.

    Up to date: a complete manifest with the same configuration and inputs, and outputs that are still what
    was written.
    """
    manifest = read_manifest(run_dir, stage)
    if manifest is None:
        return "not complete"
    changed = [f"{section}.{key}" for section, key in _differences(manifest.config, config)]
    if changed:
        return "changed: " + ", ".join(changed)
    moved = [name for name in {**manifest.inputs, **inputs} if manifest.inputs.get(name) != inputs.get(name)]
    if moved:
        return "other input: " + ", ".join(moved)
    lost = [name for name, checksum in manifest.outputs.items() if _checksum(run_dir / name) != checksum]
    return "output missing or changed: " + ", ".join(lost) if lost else None


def checksums(run_dir: Path, names: tuple[str, ...]) -> dict[str, str]:
    """Map name to sha256 for those of the files (paths relative to the run) that are there."""
    found = {name: _checksum(run_dir / name) for name in names}
    return {name: checksum for name, checksum in found.items() if checksum is not None}


def versions() -> dict[str, str]:
    """Versions of what makes the numbers, and the patches that are on; nothing heavy is imported."""
    found = {"python": platform.python_version(), "machine": platform.machine()}
    names = (
        "vllm-compat",
        "torch",
        "transformers",
        "tokenizers",
        "safetensors",
        "datasets",
        "pyarrow",
        "numpy",
    )
    here_too = {str(item.metadata["Name"]).lower().replace("_", "-") for item in metadata.distributions()}
    found |= {name: metadata.version(name) for name in names if name in here_too}
    try:
        here = installed()
        found["vllm"] = f"{here.version} ({here.distribution or 'source tree'})"
    except VllmNotInstalled:
        pass
    if enabled():
        found["patches"] = ", ".join(enabled())
    return found


def now() -> str:
    """The time in UTC, ISO 8601, seconds."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _checksum(path: Path) -> str | None:
    return sha256_file(path) if path.is_file() else None


def _differences(old: Any, new: Any) -> list[tuple[str, str]]:
    """(section, key) of every value that differs between two configurations of sections."""
    found = []
    for section in sorted({*old, *new}):
        mine, theirs = old.get(section), new.get(section)
        if isinstance(mine, dict) and isinstance(theirs, dict):
            keys = sorted(key for key in {*mine, *theirs} if mine.get(key) != theirs.get(key))
            found += [(section, key) for key in keys]
        elif mine != theirs:
            found.append((section, ""))
    return found

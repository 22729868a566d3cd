"""What a run was made from: fingerprints of models and data, cheap enough to take before every stage."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

from vllm_compat.errors import ConfigError

from .files import sha256_file


def model_fingerprint(model: str) -> str:
    """Hex SHA-256 of what a model is: its config and its tensors' names, shapes and places.

    A local directory: config.json and each safetensors file's name, size and header. A hub id: its name and
    commit. The weights' own bytes are not read: terabytes for the real target. ConfigError when there is no
    such directory and the hub knows no such model.
    """
    path = Path(model)
    if not path.is_dir():
        return hashlib.sha256(f"{model}@{_hub_commit(model)}".encode()).hexdigest()
    config = path / "config.json"
    if not config.is_file():
        raise ConfigError(f"target.model = {model!r}", needed="a model's directory", found="no config.json in it")
    files = tuple(sorted(path.glob("*.safetensors")))
    return _digest(config, files, tuple((file.stat().st_size, file.stat().st_mtime_ns) for file in (config, *files)))


@lru_cache(maxsize=8)
def _digest(config: Path, files: tuple[Path, ...], _: tuple[tuple[int, int], ...]) -> str:
    """Kept while sizes and times are the same: stages ask for it several times, and the real target has 60 files."""
    digest = hashlib.sha256(config.read_bytes())
    for file in files:
        with file.open("rb") as stream:
            length = stream.read(8)
            header = stream.read(int.from_bytes(length, "little"))
        digest.update(f"{file.name} {file.stat().st_size}\n".encode() + length + header)
    return digest.hexdigest()


def data_fingerprint(source: str, split: str | None) -> str:
    """sha256 of a local file's bytes; for a hub data set over its name, split and commit."""
    path = Path(source)
    if path.is_file():
        return sha256_file(path)
    return hashlib.sha256(f"{source}@{_hub_commit(source, 'dataset')} {split}".encode()).hexdigest()


@lru_cache(maxsize=8)
def _hub_commit(name: str, kind: str = "model") -> str:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return str(HfApi().repo_info(name, repo_type=kind).sha)
    except (HfHubHTTPError, HFValidationError, OSError) as online:
        try:  # offline: the commit that the local cache holds
            folder = snapshot_download(name, repo_type=kind, local_files_only=True, allow_patterns="config.json")
            return Path(folder).name
        except (LocalEntryNotFoundError, HFValidationError, OSError) as error:
            raise ConfigError(
                f"the {kind} {name!r}",
                needed="a local path, or a name on the Hugging Face hub",
                found=f"no such path in {Path.cwd()}, and the hub gave: {str(online).splitlines()[0]}",
            ) from error

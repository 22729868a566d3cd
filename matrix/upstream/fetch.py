"""The tests of a release, out of its source distribution on the package index; kept outside the clone.

Only the folder ``tests`` is unpacked. Nothing of it becomes part of this project.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from api_record.index import pages


class NoSources(Exception):
    """The package index has no source distribution of a release, or a damaged one."""


def cache() -> Path:
    """Where fetched tests stay between runs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "vllm-compat", "upstream")


def tests(release: str) -> Path:
    """The folder whose ``tests`` are the release's.

    Raises:
        NoSources: the index has none. IndexUnreachable: pip cannot reach it.
    """
    home = cache() / release
    if not home.exists():
        home.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home.parent) as folder:
            archive = Path(folder, "sources.tar.gz")
            _download(f"vllm-{release}.tar.gz", archive)
            unpack(archive, Path(folder, "kept"))
            Path(folder, "kept").rename(home)
    return home


def unpack(archive: Path, target: Path) -> None:
    """The files below ``tests`` of a source distribution, whose paths begin with its own name."""
    with tarfile.open(archive, "r:gz") as sources:
        for member in sources:
            _, _, path = member.name.partition("/")
            if member.isfile() and path.startswith("tests/") and ".." not in Path(path).parts:
                content: Any = sources.extractfile(member)
                place = target / path
                place.parent.mkdir(parents=True, exist_ok=True)
                with place.open("wb") as file:
                    shutil.copyfileobj(content, file)
    if not (target / "tests").is_dir():
        raise NoSources(f"{archive.name} has no folder tests")


def _download(name: str, target: Path) -> None:
    with pages("vllm") as (session, found):
        links = [link for page, collector in found for link in collector.parse_links(page) if link.filename == name]
        if not links:
            raise NoSources(f"the package index has no {name}")
        answer = session.get(links[0].url_without_fragment, headers={"Accept-Encoding": "identity"}, stream=True)
        answer.raise_for_status()
        digest = hashlib.sha256()
        with target.open("wb") as file:
            for chunk in answer.iter_content(1 << 20):
                digest.update(chunk)
                file.write(chunk)
        if links[0].hash_name == "sha256" and links[0].hash != digest.hexdigest():
            raise NoSources(f"{name} has another checksum than the index says")

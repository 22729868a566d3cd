"""What the package index that pip is configured for has of a project: versions, when they came, what was withdrawn.

    python matrix/api_record/index.py vllm        prints the stable versions, oldest first

Nothing is cached: an answer is as new as the index.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, datetime
from typing import Any

from packaging.utils import parse_sdist_filename, parse_wheel_filename
from packaging.version import Version

#: Exit status where no index answers, to tell that from a mistake.
UNREACHABLE = 3


class IndexUnreachable(Exception):
    """No index that pip is configured for says anything of the project."""


@dataclass(frozen=True)
class File:
    """A file of a project on the index.

    Attributes:
        name: Its file name.
        version: The version it is of.
        published: The day it was uploaded; None where the index does not say.
        yanked: It was withdrawn: still there for whoever names the version.
    """

    name: str
    version: Version
    published: date | None
    yanked: bool


def files(project: str) -> list[File]:
    """All files of a project.

    Raises:
        IndexUnreachable: no index has the project, or none can be reached.
    """
    with pages(project) as (_, found):
        return [file for page, collector in found for file in _of_page(page, collector)]


@contextmanager
def pages(project: str) -> Iterator[tuple[Any, list[tuple[Any, Any]]]]:
    """Pip's own session, and what each of its indexes answers about a project, with pip's reader of it.

    Raises:
        IndexUnreachable: no index has the project, or none can be reached.
    """
    try:
        commands: Any = importlib.import_module("pip._internal.commands")
        collector: Any = importlib.import_module("pip._internal.index.collector")
        link: Any = importlib.import_module("pip._internal.models.link")
    except ImportError as error:
        raise IndexUnreachable(f"asking the package index needs pip in this Python: {error}") from error
    command = commands.create_command("download")
    options, _ = command.parse_args(["--no-cache-dir", "--retries", "1", "--timeout", "15"])
    with command.main_context():
        session = command.get_default_session(options)
        asked = collector.LinkCollector.create(session, options)
        urls = asked.search_scope.get_index_urls_locations(project)
        found = [(page, collector) for url in urls if (page := asked.fetch_response(link.Link(url))) is not None]
        if not found:
            raise IndexUnreachable(f"pip gets nothing about {project} from the package index that it is configured for")
        yield session, found


def _of_page(page: Any, collector: Any) -> Iterator[File]:
    uploaded: dict[str, str] = {}
    if "json" in page.content_type:
        uploaded = {entry["filename"]: entry.get("upload-time") or "" for entry in json.loads(page.content)["files"]}
    for link in collector.parse_links(page):
        version = _version(link.filename)
        if version is not None:
            when = uploaded.get(link.filename, "")
            # Until 3.11 Python does not read the Z.
            day = datetime.fromisoformat(when.replace("Z", "+00:00")).date() if when else None
            yield File(link.filename, version, day, bool(link.is_yanked))


def _version(filename: str) -> Version | None:
    try:
        if filename.endswith(".whl"):
            return parse_wheel_filename(filename)[1]
        return parse_sdist_filename(filename)[1]
    except ValueError:  # a name that no installer would take either
        return None


def stable(found: list[File]) -> list[Version]:
    """The versions that people get without asking for them by name, oldest first: no candidates, nothing withdrawn."""
    return sorted({file.version for file in found if not file.yanked and not file.version.is_prerelease})


if __name__ == "__main__":
    try:
        print(*stable(files(sys.argv[1])), sep="\n")
    except IndexUnreachable as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(UNREACHABLE)

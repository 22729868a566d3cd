"""What kind of build the installed vLLM is: the device it is for, and the model runner it takes by default.

Both are read from names, versions, file names and environment variables. vLLM itself asks the drivers, and
a plugin of the group ``vllm.platform_plugins`` may decide otherwise; `vllm_compat.doctor` lists those.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Literal

from vllm_compat._package import find_spec
from vllm_compat._versions import parse

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from vllm_compat._versions import Release

__all__ = ["Platform", "Runner", "default_runner", "find_platform", "runner_of"]

Platform = Literal["cuda", "cpu", "rocm", "tpu", "xpu", "unknown"]
Runner = Literal["v1", "v2", "unknown"]

_KNOWN: tuple[Platform, ...] = ("cuda", "cpu", "rocm", "tpu", "xpu")

# Compiled extensions that tell builds apart. CUDA and ROCm builds share names, so ROCm is asked first; a
# CPU build has `_C` without `_moe_C`.
_EXTENSIONS: tuple[tuple[Platform, tuple[str, ...]], ...] = (
    ("rocm", ("_rocm_C*.so",)),
    ("cuda", ("_moe_C*.so", "_C_stable_libtorch*.so", "cumem_allocator*.so")),
    ("cpu", ("_C_AVX*.so", "_C.*so")),
)


def find_platform(
    *, distribution: str | None, versions: Sequence[str], release: Release | None, location: Path
) -> tuple[Platform, str]:
    """Return the device that the build is for, and how we know.

    Args:
        distribution: Normalised name of the owning distribution.
        versions: Version strings seen, most trusted first; their local parts name a device ("+cu129").
        release: Release numbers, None when unknown.
        location: Folder of the package.
    """
    target = os.environ.get("VLLM_TARGET_DEVICE", "").strip().lower()
    # Since 0.28.0 this value alone forces the CPU platform at run time; any other only matters when building.
    if target == "cpu" and (release is None or release >= (0, 28, 0)):
        return "cpu", "VLLM_TARGET_DEVICE=cpu"
    for platform in _KNOWN:
        if distribution is not None and platform in distribution.split("-"):
            return platform, f"distribution {distribution}"
    for version in versions:
        named = _platform_of_local(version)
        if named is not None:
            return named, f"version {version}"
    for platform, patterns in _EXTENSIONS:
        for pattern in patterns:
            for file in location.glob(pattern):
                return platform, f"compiled extension {file.name}"
    for platform in _KNOWN:
        if target == platform:
            return platform, f"VLLM_TARGET_DEVICE={target}, and nothing else says"
    return "unknown", "nothing in the distribution's name, the version or the files says"


def _platform_of_local(version: str) -> Platform | None:
    """Read the device that vLLM's setup.py puts into the local part ("+cpu", "+gabc.cu129", "+rocm721")."""
    parsed = parse(version)
    for part in (parsed.local or "").split(".") if parsed else ():
        if re.fullmatch(r"cu(da)?\d*", part):
            return "cuda"
        for platform in _KNOWN:
            if re.fullmatch(rf"{platform}\d*", part):
                return platform
    return None


def default_runner(release: Release | None, platform: Platform) -> tuple[Runner, str]:
    """Return the model runner that an engine gets by default, and why.

    "unknown" also where it depends on the model. For a given config ``VllmConfig.use_v2_model_runner``
    (0.22.0 and newer) has the last word: features that V2 lacks send vLLM back to V1.
    """
    if release is not None and release < (0, 12, 0):
        return "v1", "releases before 0.12.0 have no V2 model runner"
    asked = os.environ.get("VLLM_USE_V2_MODEL_RUNNER")
    if asked is not None:
        try:
            chosen: Runner = "v2" if int(asked) else "v1"
        except ValueError:
            return "unknown", f"VLLM_USE_V2_MODEL_RUNNER={asked} is no number, and vLLM refuses it"
        return chosen, f"VLLM_USE_V2_MODEL_RUNNER={asked}"
    if platform in ("cpu", "cuda", "rocm") and not _has_triton(platform):
        return "v1", f"the V2 model runner needs Triton with a backend for {platform}, and there is none"
    return runner_of(release, platform)


def runner_of(release: Release | None, platform: Platform) -> tuple[Runner, str]:
    """Return the model runner that a release takes on a device that has everything for both, and why."""
    if release is None:
        return "unknown", "the release is unknown"
    if release < (0, 12, 0):
        return "v1", "releases before 0.12.0 have no V2 model runner"
    if release < (0, 22, 0):
        return "v1", "V2 is opt-in before 0.22.0"
    if release < (0, 29, 0):
        return "unknown", "from 0.22.0 to 0.28.0 the default depends on the model"
    if platform == "rocm" and release < (0, 32, 0):
        return "unknown", "from 0.29.0 to 0.31.0 the default on ROCm depends on the model"
    if platform in ("tpu", "xpu", "unknown"):
        return "unknown", f"platform {platform}: its worker decides"
    return "v2", "V2 is the default since 0.29.0"


def _has_triton(platform: Platform) -> bool:
    spec = find_spec("triton")
    if spec is None:
        return False
    if platform != "cpu":
        return True
    # The CUDA builds of Triton have no CPU backend, and a CPU build of vLLM switches Triton off without one.
    from pathlib import Path

    folders = spec.submodule_search_locations or ()
    return any((Path(folder) / "backends" / "cpu").is_dir() for folder in folders)

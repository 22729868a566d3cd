"""What is installed here, which adapter serves which surface and why, and what will surprise you.

``import vllm_compat`` loads this module, so everything it looks at is imported where it is looked at.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from vllm_compat.errors import VllmCompatError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm_compat.diagnosis import Finding, Report, Surface
    from vllm_compat.installed import Installed

__all__ = ["doctor"]


def doctor(*, import_vllm: bool = True) -> Report:
    """Look at this environment and report; print the result, or ask it for ``ok`` and ``findings``.

    Args:
        import_vllm: Import vLLM to compare the adapters with its live signatures, which takes seconds.
            Without it the report has no `Report.surfaces`.
    """
    from vllm_compat import __version__
    from vllm_compat.diagnosis import Finding, Report
    from vllm_compat.installed import installed

    findings: list[Finding] = []
    surfaces: tuple[Surface, ...] = ()
    here: Installed | None = None
    try:
        here = installed()
    except VllmCompatError as error:
        findings.append(Finding(level="problem", what=str(error)))
    else:
        if import_vllm:
            surfaces, problem = _surfaces()
            findings.extend(problem)
        findings.extend(Finding(level="hint", what=note) for note in here.notes)
        findings.extend(_known_bad(here))
        findings.extend(_platform_plugins(here))
        findings.extend(_speculators(here))
    return Report(
        vllm_compat=__version__,
        python=f"{sys.version.split()[0]} at {sys.executable}",
        installed=here,
        release=_release(here) if here else "",
        hash_seed=_hash_seed(here) if here else "",
        surfaces=surfaces,
        findings=tuple(findings),
    )


def _surfaces() -> tuple[tuple[Surface, ...], list[Finding]]:
    from vllm_compat.adapters.base import resolve
    from vllm_compat.adapters.select import SURFACES, Selection, explain
    from vllm_compat.diagnosis import Finding, Surface

    try:
        resolve("vllm:__version__")
    except Exception as error:  # noqa: BLE001 - whatever a broken vLLM raises is the finding
        what = f"vLLM is installed but cannot be imported: {type(error).__name__}: {error}."
        advice = "Run `python -c 'import vllm'` for the whole story."
        return (), [Finding(level="problem", what=what, advice=advice)]
    surfaces: list[Surface] = []
    problems: list[Finding] = []
    for name, answer in zip(SURFACES, explain(), strict=True):
        if isinstance(answer, Selection):
            surfaces.append(Surface(name=name, adapter=answer.adapter.label(), reason=answer.reason))
        else:
            surfaces.append(Surface(name=name, adapter=None, reason=answer.found))
            problems.append(Finding(level="problem", what=f"{answer}."))
    return tuple(surfaces), problems


def _release(here: Installed) -> str:
    from vllm_compat import releases

    if here.release is None:
        return "unknown; the adapters go by live signatures alone"
    row = releases.get(here.release)
    if row is not None:
        proof = {
            "live": "proved by the live suite",
            "planned": "not proved yet",
            "known_bad": "known to be bad",
        }
        needs = f"Python {row.python} or newer, torch {row.torch}"
        return f"{row.version} of {row.date}, {proof[row.status]}; it needs {needs}"
    name = ".".join(map(str, here.release))
    near = releases.nearest(here.release)
    if here.release > releases.newest().numbers:
        return f"{name} is newer than the newest one known ({near.version}); live signatures decide"
    return f"{name} is not in the table; the nearest one is {near.version}"


def _hash_seed(here: Installed) -> str:
    """Say what NONE_HASH, the parent of every first block's hash, depends on (vLLM: ``init_none_hash``)."""
    seed = os.environ.get("PYTHONHASHSEED")
    if seed is not None:
        return f"PYTHONHASHSEED={seed}: equal in all processes that have the same value and hash function"
    if here.release is None:
        return "PYTHONHASHSEED is not set; whether they are equal in other processes depends on the release"
    if here.release >= (0, 29, 0):
        return (
            "PYTHONHASHSEED is not set: sha256 and sha256_cbor start from a constant, so they are equal in "
            "all processes; xxhash kinds differ from process to process"
        )
    return (
        "PYTHONHASHSEED is not set: random, so they differ from process to process; set it where processes "
        "share or compare them (KV connectors, KV events, routers)"
    )


def _known_bad(here: Installed) -> Iterator[Finding]:
    from vllm_compat import releases
    from vllm_compat.diagnosis import Finding

    platform = None if here.platform == "unknown" else here.platform
    for entry in releases.known_bad(here.release, platform):
        what = f"Known not to work in vLLM {here.version}: {entry.what} ({entry.reason})."
        yield Finding(level="hint", what=what, advice=f"{entry.advice[0].upper()}{entry.advice[1:]}.")


def _platform_plugins(here: Installed) -> Iterator[Finding]:
    import importlib.metadata

    from vllm_compat.diagnosis import Finding

    for name in sorted({entry.name for entry in importlib.metadata.entry_points(group="vllm.platform_plugins")}):
        yield Finding(
            level="hint",
            what=f"The platform plugin {name} is installed; vLLM asks it before it takes {here.platform}.",
        )


def _speculators(here: Installed) -> Iterator[Finding]:
    """Compare the vLLM that speculators declares (in an extra, so no installer enforces it) with this one."""
    import importlib.metadata

    from packaging.requirements import Requirement

    from vllm_compat.diagnosis import Finding

    try:
        requires = [Requirement(text) for text in importlib.metadata.requires("speculators") or ()]
        version = importlib.metadata.version("speculators")
    except importlib.metadata.PackageNotFoundError:
        return
    pins = [requirement.specifier for requirement in requires if requirement.name == "vllm"]
    if here.release is None or not pins:
        return
    release = ".".join(map(str, here.release))
    # Somebody else's declaration, not a choice of ours: a specifier set is what it is. Candidates count as
    # releases.
    if not any(pin.contains(release, prereleases=True) for pin in pins):
        wanted = " or ".join(sorted({str(pin) for pin in pins}))
        yield Finding(
            level="hint",
            what=f"speculators {version} generates data with vllm{wanted} only; this is {here.version}.",
            advice="Capture hidden states with vllm_compat.capture_hidden_states instead.",
        )

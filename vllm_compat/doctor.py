"""What is installed here, which adapter serves which surface and why, and what will surprise you.

``import vllm_compat`` loads this module, so everything it looks at is imported where it is looked at.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from vllm_compat.errors import UnsupportedRelease, VllmCompatError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm_compat.diagnosis import Finding, Limit, Report, Surface
    from vllm_compat.installed import Installed

__all__ = ["doctor"]


def doctor(*, import_vllm: bool = True) -> Report:
    """Look at this environment and report; print the result, or ask it for ``ok`` and ``findings``.

    Starts one other process, to compare what it sees with this one.

    Args:
        import_vllm: Import vLLM to compare the adapters with its live signatures, which takes seconds.
            Without it the report has no `Report.surfaces`, and `Report.limits` is what the release number says.
    """
    from vllm_compat import __version__, environment
    from vllm_compat.diagnosis import Finding, Report
    from vllm_compat.installed import installed

    findings: list[Finding] = []
    surfaces: tuple[Surface, ...] = ()
    limits: tuple[Limit, ...] = ()
    here: Installed | None = None
    try:
        here = installed()
    except VllmCompatError as error:
        findings.append(Finding(level="problem", what=str(error)))
    else:
        if import_vllm:
            surfaces, problems = _surfaces()
            findings.extend(problems)
            findings.extend(environment.loaded(here))
        limits = tuple(_limits(here, live=any(surface.adapter for surface in surfaces)))
        findings.extend(environment.processes(here))
        findings.extend(Finding(level="hint", what=note) for note in here.notes)
        findings.extend(_known_bad(here))
        findings.extend(environment.plugins(here))
        findings.extend(environment.patches())
        findings.extend(environment.speculators(here))
    return Report(
        vllm_compat=__version__,
        python=f"{sys.version.split()[0]} at {sys.executable}",
        installed=here,
        release=_release(here) if here else "",
        hash_seed=_hash_seed(here) if here else "",
        surfaces=surfaces,
        limits=limits,
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
    try:
        answers = explain()
    except UnsupportedRelease as error:
        return (), [Finding(level="problem", what=f"{error}.")]
    for name, answer in zip(SURFACES, answers, strict=True):
        if isinstance(answer, Selection):
            surfaces.append(Surface(name=name, adapter=answer.adapter.label(), reason=answer.reason))
        else:
            surfaces.append(Surface(name=name, adapter=None, reason=answer.found))
            problems.append(Finding(level="problem", what=f"{answer}."))
    return tuple(surfaces), problems


def _limits(here: Installed, *, live: bool) -> Iterator[Limit]:
    """What a caller cannot set here, by the live signatures or else by the release number."""
    from vllm_compat.adapters import limits, select
    from vllm_compat.diagnosis import Limit

    if not live and here.release is None:
        return
    release = None if live else here.release
    for surface in select.SURFACES:
        adapter = select.serving(surface) if live else select.by_number(surface, release)
        if adapter is None:
            continue  # which the surfaces say
        found = limits.of_adapter(adapter, release)
        if surface == "vllm_config":
            found += limits.of_engine_args(release, limits.engine_args_of() if live else ())
        main = next((need.short for need in adapter.needs if need.options), "")
        of_main = {limit.option for limit in found if limit.symbol == main}
        for limit in found:
            call, own = _public_call(surface, limit.symbol)
            if not call or (not own and limit.symbol != main and limit.option in of_main):
                continue  # for our own use, or said already
            option = limit.option if own or limit.symbol == main else f"{limit.symbol}.{limit.option}"
            yield Limit(call=call, option=option, needs=limit.needs)


#: Surface -> the public name that takes the options of its symbols, where that is not ``make_<surface>``.
_CALLS = {"kv_cache": "make_kv_cache_spec", "input_processor": "EngineLoop.add_request"}


def _public_call(surface: str, symbol: str) -> tuple[str, bool]:
    """(the public name that takes the options of a symbol of vLLM, whether it is for that symbol alone)."""
    import re

    import vllm_compat

    name = symbol.rpartition(".")[2]
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
    for own in (f"make_{words}", words):
        if own in vllm_compat.__all__:
            return own, True
    call = _CALLS.get(surface, f"make_{surface}")
    if call.partition(".")[0] not in vllm_compat.__all__:
        return "", False
    return call, symbol == "EngineArgs"


def _release(here: Installed) -> str:
    from vllm_compat import releases

    if here.release is not None and here.release < releases.oldest().numbers:
        return f"older than the oldest one served, {releases.oldest().version}"
    why = releases.unverified(here.release, is_dev=here.is_dev)
    if why:
        return f"unverified: {why}; live signatures decide"
    row = releases.get(here.release)
    assert row is not None
    proof = {
        "live": "proved by the live suite",
        "planned": "checked against its recorded signatures, not live yet",
        "known_bad": "known to be bad",
    }
    needs = f"Python {row.python} or newer, torch {row.torch}"
    return f"{row.version} of {row.date}, {proof[row.status]}; it needs {needs}"


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

"""What in this environment, beside vLLM itself, decides which code runs: plugins, other processes, other packages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_compat.diagnosis import Finding

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from vllm_compat.installed import Installed

__all__ = ["loaded", "patches", "plugins", "processes", "speculators"]

_GROUPS = ("vllm.general_plugins", "vllm.platform_plugins")

# Run in a new process. Our package is loaded from its own folder, so that nothing has to be added to the path.
_ASK = """
import importlib.util, json, sys
given = json.loads(sys.argv[1])
if sys.path and not sys.path[0]:
    del sys.path[0]  # the current directory, which only `python -c` has
spec = importlib.util.spec_from_file_location("vllm_compat", given["package"])
package = sys.modules["vllm_compat"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)
answers = []
for path in (sys.path, given["path"]):
    sys.path[:] = path
    package.installed.cache_clear()
    try:
        here = package.installed()
        answers.append([here.version, str(here.location)])
    except package.VllmCompatError as error:
        answers.append([str(error), ""])
print(json.dumps(answers))
"""


def processes(here: Installed) -> Iterator[Finding]:
    """Compare the vLLM of this process with the one that a new process sees.

    vLLM starts its workers with multiprocessing, which hands the path of modules on; Ray, a server and a subprocess
    start from the environment alone.
    """
    answers = _new_process()
    if isinstance(answers, str):
        what = f"A new process could not say which vLLM it sees: {answers}."
        yield Finding(level="hint", what=what)
        return
    mine = [here.version, str(here.location)]
    fresh, worker = answers
    if worker != mine:
        yield Finding(
            level="problem",
            what=f"Worker processes see {_seen(worker)}, this process {_seen(mine)}.",
            advice="Restart this process; vLLM was installed, replaced or covered since it started.",
        )
    elif fresh != mine:
        yield Finding(
            level="hint",
            what=f"A process that is started from here on its own (a server, a Ray worker) sees {_seen(fresh)}, "
            f"this process {_seen(mine)}: its path of modules was changed.",
            advice="Set PYTHONPATH instead, or install that vLLM.",
        )


def _new_process() -> list[list[str]] | str:
    """[version, folder] in a new process, and with this one's path of modules; or why there is no answer."""
    import multiprocessing.spawn
    import multiprocessing.util

    executable = multiprocessing.spawn.get_executable()
    if not executable:
        return "this Python does not know its own executable"
    # What multiprocessing starts its processes with: the same options of the interpreter.
    flags: list[str] = multiprocessing.util._args_from_interpreter_flags()  # type: ignore[attr-defined]
    given = json.dumps({"package": str(Path(__file__).with_name("__init__.py")), "path": sys.path})
    command = [os.fsdecode(executable), *flags, "-c", _ASK, given]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]
    answers: list[list[str]] = json.loads(done.stdout)
    return answers


def _seen(answer: list[str]) -> str:
    version, location = answer
    return f"vLLM {version} in {location}" if location else f"none ({version})"


def loaded(here: Installed) -> Iterator[Finding]:
    """Whether the vLLM that was imported is the one that is installed."""
    from vllm_compat.installed import parse_release

    version = getattr(sys.modules.get("vllm"), "__version__", None)
    release = parse_release(version)
    if release is not None and here.release is not None and release != here.release and here.source != "override":
        yield Finding(
            level="problem",
            what=f"The vLLM that was imported calls itself {version}, the installed one is {here.version}.",
            advice="Restart this process if vLLM was replaced since; otherwise install one vLLM again.",
        )


def plugins(here: Installed) -> Iterator[Finding]:
    """Name platform plugins, and what VLLM_PLUGINS, vLLM's allow-list for all of its plugins, keeps out."""
    import importlib.metadata

    found = {group: list(importlib.metadata.entry_points(group=group)) for group in _GROUPS}
    allowed = os.environ["VLLM_PLUGINS"].split(",") if "VLLM_PLUGINS" in os.environ else None
    for name in sorted({entry.name for entry in found["vllm.platform_plugins"]}):
        if allowed is None or name in allowed:
            yield Finding(
                level="hint",
                what=f"The platform plugin {name} is installed; vLLM asks it before it takes {here.platform}.",
            )
    if allowed is None:
        return
    setting = f"VLLM_PLUGINS={','.join(allowed)}"
    every = {entry.name: entry for entries in found.values() for entry in entries}
    # vLLM's own do nothing unless they are configured, and ours has a note of its own.
    kept_out = [
        f"{name} ({_owner(entry) or entry.value})"
        for name, entry in sorted(every.items())
        if name not in allowed and entry.value.partition(":")[0].partition(".")[0] not in ("vllm", "vllm_compat")
    ]
    if kept_out:
        yield Finding(
            level="hint",
            what=f"{setting} keeps out of vLLM's processes: {', '.join(kept_out)}.",
            advice="Add what is wanted, without spaces, or unset it.",
        )
    unknown = [repr(name) for name in allowed if name and name not in every]
    if unknown:
        yield Finding(
            level="hint", what=f"{setting} names what no general or platform plugin is called: {', '.join(unknown)}."
        )


def patches() -> Iterator[Finding]:
    """Whether the patches that are enabled here reach vLLM's processes, through our plugin."""
    import importlib.metadata

    from vllm_compat.patches import VARIABLE, names, noted

    if not noted():
        return
    setting = f"{VARIABLE}={','.join(noted())}"
    unknown = sorted({*noted()} - {*names()})
    if unknown:
        yield Finding(
            level="problem",
            what=f"{setting} names what no patch is called: {', '.join(unknown)}. No engine will start.",
            advice="Correct it; the reference of vllm_compat lists the patches.",
        )
    entries = importlib.metadata.entry_points(group="vllm.general_plugins")
    ours = [entry.name for entry in entries if entry.value.partition(":")[0].partition(".")[0] == "vllm_compat"]
    if not ours:
        yield Finding(
            level="problem",
            what=f"{setting}, but the plugin that brings patches into vLLM's processes is not installed: this "
            "vllm_compat is a source tree on the path of modules, or was installed by a version that had none.",
            advice="Install it (pip install vllm-compat, or pip install -e .).",
        )
    allowed = os.environ["VLLM_PLUGINS"].split(",") if "VLLM_PLUGINS" in os.environ else None
    for name in ours:
        if allowed is not None and name not in allowed:
            yield Finding(
                level="problem",
                what=f"{setting}, but VLLM_PLUGINS={','.join(allowed)} keeps the plugin {name} out: the patches "
                "are on in processes that call enable, and not in the engine's and the workers'.",
                advice=f"Add {name} to VLLM_PLUGINS, or unset it.",
            )


def _owner(entry: EntryPoint) -> str:
    distribution: Any = getattr(entry, "dist", None)
    return str(distribution.name) if distribution is not None else ""


def _what_to_do(version: str) -> str:
    from vllm_compat.patches import CATALOGUE

    if any(patch.library == "speculators" and patch.fits_library() for patch in CATALOGUE):
        return (
            "Run its script as `vllm-compat run -- python data_generation_offline.py …`, or call "
            'vllm_compat.enable("speculators") before it is imported: its generator then works here.'
        )
    return (
        f"Nothing is known of data generation by speculators {version}: capture with vllm_compat.capture_hidden_states."
    )


def speculators(here: Installed) -> Iterator[Finding]:
    """Compare the vLLM that speculators declares (in an extra, so no installer enforces it) with this one."""
    import importlib.metadata

    from packaging.requirements import Requirement

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
            advice=_what_to_do(version),
        )

"""Patches of other people's code, as data: what, where, from which release to which, why, and until when.

``enable(name)`` switches one on, in this process and in those that vLLM starts from it (``vllm_compat.plugin``);
``disable(name)`` takes it off again without a trace. Nothing is applied unasked, and nothing is imported for it: a
change of a module that is not there yet is made when that module is imported.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import multiprocessing
import sys
import threading
from collections.abc import Callable
from types import ModuleType

from vllm_compat._package import find_spec
from vllm_compat.errors import VllmCompatError
from vllm_compat.installed import installed
from vllm_compat.patches.catalogue import CATALOGUE
from vllm_compat.patches.environment_variable import VARIABLE, forget, note, noted
from vllm_compat.patches.lend import Lend
from vllm_compat.patches.patch import Change, Patch, Wrap
from vllm_compat.patches.replace import Replace

__all__ = [
    "CATALOGUE",
    "GROUP",
    "VARIABLE",
    "Change",
    "Lend",
    "Patch",
    "Replace",
    "Wrap",
    "disable",
    "enable",
    "enable_noted",
    "enabled",
    "names",
    "noted",
]

#: Entry points of this group are patches of other packages: ``name = "package.module:PATCH"``, named as the patch is.
GROUP = "vllm_compat.patches"

_lock = threading.RLock()
_switched_on: dict[str, _SwitchedOn] = {}


class _SwitchedOn:
    """A patch that is on: its changes are made, or wait for their modules."""

    def __init__(self) -> None:
        self.undo: list[Callable[[], object]] = []
        self.off = False

    def await_module(self, change: Change) -> None:
        import wrapt

        def arrived(module: ModuleType) -> None:
            with _lock:
                if not self.off:  # wrapt keeps a hook until its module comes
                    self.undo.append(change.apply(module))

        wrapt.register_post_import_hook(arrived, change.module)

    def take_back(self) -> None:
        while self.undo:
            self.undo[-1]()
            self.undo.pop()  # afterwards: where taking it off fails, it is still on
        self.off = True


def enable(name: str) -> bool:
    """Switch a catalogued patch on, here and in the processes that vLLM starts from here; idempotent.

    It is applied at once where its target is imported already, else when it is. Its name goes into the environment
    variable ``VLLM_COMPAT_PATCHES``, by which the new processes know.

    Returns:
        Whether it is on in this process: False when this release or platform does not need it, its target is not
        installed or not in a version that it is for, or it is for another kind of process.

    Raises:
        VllmCompatError: there is no such patch. AttributeError: its target is imported and lacks what it changes.
    """
    patch = _find(name)
    here = installed()
    if not (
        patch.applies(here.release, here.platform)
        and patch.fits_library()
        and all(_is_there(change) for change in patch.changes)
    ):
        return False
    for change in patch.changes:
        if change.module in sys.modules:
            importlib.import_module(change.module)  # waits for another thread that is still importing it
    with _lock:
        if name not in _switched_on and _is_for_this_process(patch):
            on = _SwitchedOn()
            try:
                for change in patch.changes:
                    on.await_module(change)
            except BaseException:
                on.take_back()
                raise
            _switched_on[name] = on
        note(name)
        return name in _switched_on


def enable_noted() -> None:
    """Switch on, in this process, what ``VLLM_COMPAT_PATCHES`` names.

    Raises:
        VllmCompatError: it names a patch that there is not.
    """
    for name in noted():
        enable(name)


def disable(name: str) -> None:
    """Undo ``enable``: the very objects from before are back. Does nothing when it is not on.

    Processes that were started in between keep it.

    Raises:
        VllmCompatError: there is no such patch. wrapt.WrapperNotFoundError, wrapt.WrapperNotOutermostError: somebody
            else replaced or covered the target since; the patch then still counts as on.
    """
    _find(name)
    with _lock:
        if name in _switched_on:
            _switched_on[name].take_back()
            del _switched_on[name]
        forget(name)


def enabled() -> tuple[str, ...]:
    """Names of the patches that are on in this process."""
    return tuple(_switched_on)


def _is_there(change: Change) -> bool:
    package = change.module.partition(".")[0]
    return package in sys.modules or find_spec(package) is not None


def _is_for_this_process(patch: Patch) -> bool:
    # vllm/v1/executor/multiproc_executor.py names its processes VllmWorker-0, …, in every release.
    return patch.phase != "engine" or not multiprocessing.current_process().name.startswith("VllmWorker")


def names() -> tuple[str, ...]:
    """Names of all patches that there are: the catalogue's, then those that installed packages bring (``GROUP``)."""
    return (*(patch.name for patch in CATALOGUE), *sorted(entry.name for entry in _brought()))


def _brought() -> importlib.metadata.EntryPoints:
    return importlib.metadata.entry_points(group=GROUP)


def _find(name: str) -> Patch:
    for patch in CATALOGUE:
        if patch.name == name:
            return patch
    for entry in _brought():
        if entry.name == name:
            return _loaded(entry)
    raise VllmCompatError(
        f"patch {name!r}",
        needed=f"one of {', '.join(names())}",
        found=repr(name),
        advice=f"see vllm_compat.patches.CATALOGUE, and what {VARIABLE} is set to",
    )


def _loaded(entry: importlib.metadata.EntryPoint) -> Patch:
    patch = entry.load()
    if not isinstance(patch, Patch) or patch.name != entry.name:
        raise VllmCompatError(
            f"patch {entry.name!r}",
            needed=f"a vllm_compat.patches.Patch of this name at {entry.value}, where its entry point says",
            found=f"a Patch called {patch.name!r}" if isinstance(patch, Patch) else type(patch).__name__,
            advice=f"correct the entry point (group {GROUP}) of the package that brings it",
        )
    return patch

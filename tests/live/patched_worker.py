"""A worker extension that says which patches are on in the worker's process."""

from __future__ import annotations

import importlib
import multiprocessing
import os
from typing import Any

import wrapt


class PatchedWorker:
    """Named by ``worker_extension_cls``; vLLM mixes it into the worker's class."""

    def patches_here(self) -> dict[str, Any]:
        """The process, what is enabled in it, and which of the catalogue's targets that it can import are changed."""
        import vllm.envs

        import vllm_compat
        from vllm_compat.patches import CATALOGUE, VARIABLE

        changed = []
        for change in (change for patch in CATALOGUE for change in patch.changes):
            try:
                target = wrapt.resolve_path(importlib.import_module(change.module), change.attribute)[2]
            except (ImportError, AttributeError):
                continue  # a release that has no such thing
            if isinstance(target, wrapt.BaseObjectProxy) or type(target).__module__.startswith("vllm_compat."):
                changed.append(f"{change.module}:{change.attribute}")
        return {
            "pid": os.getpid(),
            "process": multiprocessing.current_process().name,
            "enabled": list(vllm_compat.enabled()),
            "changed": changed,
            "known_to_vllm": VARIABLE in vllm.envs.environment_variables,
        }

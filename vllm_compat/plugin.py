"""The entry point of the group ``vllm.general_plugins``: vLLM calls ``register`` in every process that it makes.

That is the process of ``vllm.LLM`` or of the server, the engine core's, each worker's, and the one that looks at a
model's class.
"""

from __future__ import annotations

import os
import sys

__all__ = ["register"]


def register() -> None:
    """Switch on, in this process, the patches that were enabled where it was started; a second call does nothing more.

    Raises:
        VllmCompatError: ``VLLM_COMPAT_PATCHES`` names a patch that there is not.
    """
    if not os.environ.get("VLLM_COMPAT_PATCHES"):
        return
    from vllm_compat.patches import VARIABLE, enable_noted

    # A variable that vLLM knows: it hands it to Ray's workers, and does not warn about it. What calls this function
    # imported vllm.envs before.
    known = getattr(sys.modules.get("vllm.envs"), "environment_variables", {})
    known.setdefault(VARIABLE, lambda: os.environ.get(VARIABLE))
    enable_noted()

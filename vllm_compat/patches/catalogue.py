"""All patches, in the order in which they were needed."""

from __future__ import annotations

from vllm_compat.patches import cpu_shutdown, llvmlite_proxy, speculators
from vllm_compat.patches.patch import Patch

CATALOGUE: tuple[Patch, ...] = (llvmlite_proxy.PATCH, cpu_shutdown.PATCH, speculators.PATCH)

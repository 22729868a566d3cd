"""All patches: of vLLM by the release that first needs them, of others' code at the end."""

from __future__ import annotations

from vllm_compat.patches import (
    cpu_aux_layers,
    cpu_dispatchers,
    cpu_expand,
    cpu_fp64_gumbel,
    cpu_moe_activation,
    cpu_rms_norm,
    cpu_shutdown,
    cpu_synthetic_mode,
    llvmlite_proxy,
    speculators,
)
from vllm_compat.patches.patch import Patch

CATALOGUE: tuple[Patch, ...] = (
    cpu_rms_norm.PATCH,
    cpu_moe_activation.PATCH,
    cpu_shutdown.PATCH,
    cpu_aux_layers.PATCH,
    cpu_synthetic_mode.PATCH,
    cpu_expand.PATCH,
    cpu_fp64_gumbel.PATCH,
    cpu_dispatchers.PATCH,
    llvmlite_proxy.PATCH,
    speculators.PATCH,
)

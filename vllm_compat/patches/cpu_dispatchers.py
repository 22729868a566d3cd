"""Dispatchers of speculative decoding launch Triton's placeholder on a CPU, not the CPU's kernel."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

from vllm_compat.patches.patch import Patch


class _CpuKernel:
    """What a dispatcher launches: ``kernel[grid](**arguments)``, named as the Triton kernel's.

    The CPU's functions take the same arguments in the same order, under names of their own.
    """

    def __init__(self, triton_kernel: Callable[..., Any], function: Callable[..., None]) -> None:
        self.arg_names = tuple(inspect.signature(triton_kernel).parameters)
        self._function = function

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self._launch

    def _launch(self, **arguments: Any) -> None:
        self._function(*(arguments[name] for name in self.arg_names))


@dataclass(frozen=True)
class _Kernel:
    """A dispatcher's kernel, exchanged for the CPU's."""

    module: str
    dispatcher: str
    function: str

    @property
    def attribute(self) -> str:
        return f"{self.dispatcher}.kernel"

    def apply(self, module: ModuleType) -> Callable[[], object]:
        from vllm.utils import cpu_triton_utils

        dispatcher = getattr(module, self.dispatcher)
        before = dispatcher.kernel
        if isinstance(before, FunctionType):  # Triton's own, where a CPU back end of Triton is installed, stays
            dispatcher.kernel = _CpuKernel(before, getattr(cpu_triton_utils, self.function))
        return lambda: setattr(dispatcher, "kernel", before)


_SAMPLER = "vllm.v1.sample.rejection_sampler"

PATCH = Patch(
    name="cpu-dispatchers",
    changes=(
        _Kernel(_SAMPLER, "_rejection_greedy_sample", "_rejection_greedy_sample_kernel_impl"),
        _Kernel(_SAMPLER, "_rejection_random_sample", "_rejection_random_sample_kernel_impl"),
        _Kernel(_SAMPLER, "_expand", "_expand_kernel_impl"),
        _Kernel(_SAMPLER, "_sample_recovered_tokens", "_sample_recovered_tokens_kernel_impl"),
        _Kernel(
            "vllm.v1.spec_decode.utils",
            "_eagle_step_slot_mapping_metadata",
            "_eagle_step_slot_mapping_metadata_kernel_impl",
        ),
    ),
    since=(0, 29, 1),  # nightlies on the way from 0.29.0 to 0.30.0 have it
    until=(0, 31, 0),
    platform="cpu",
    phase="worker",
    why=(
        "CPUModelRunner._postprocess_triton sets names in modules, but the kernels are launched through dispatchers, "
        "which took them when they were made: TypeError: Cannot inspect kernel parameters for function, with "
        "speculative decoding, where Triton has no CPU back end."
    ),
    upstream="https://github.com/vllm-project/vllm/issues/58214",
    remove_when="0.30 is no longer supported",
)

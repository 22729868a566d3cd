"""The wrappers of the patches of vLLM's bugs, by themselves; tests/live has them in the engine."""

from __future__ import annotations

import dataclasses
import sys
import types
from typing import Any

import pytest

from vllm_compat.patches.cpu_dispatchers import _CpuKernel
from vllm_compat.patches.cpu_expand import _expand
from vllm_compat.patches.cpu_fp64_gumbel import PATCH as FP64_GUMBEL
from vllm_compat.patches.cpu_rms_norm import PATCH as RMS_NORM
from vllm_compat.patches.cpu_synthetic_mode import PATCH as SYNTHETIC_MODE
from vllm_compat.patches.patch import Wrap


class Kernel:
    """A kernel object of vllm.utils.cpu_triton_utils: ``kernel[grid]`` is its function."""

    def __init__(self, func: Any) -> None:
        self.func = func

    def __getitem__(self, grid: Any) -> Any:
        return self.func


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    made = types.ModuleType("fake_kernels")
    monkeypatch.setitem(sys.modules, "fake_kernels", made)
    return made


def applied(change: Any, module: types.ModuleType) -> Any:
    assert isinstance(change, Wrap)
    return dataclasses.replace(change, module=module.__name__).apply(module)


def greedy(out: Any, cu: Any, draft: Any, argmax: Any, bonus: Any, is_greedy: Any, max_len: Any) -> None:
    out.append(("greedy", cu, draft, argmax, bonus, is_greedy, max_len))


def random(
    out: Any,
    cu: Any,
    draft: Any,
    draft_probs: Any,
    probs: Any,
    bonus: Any,
    recovered: Any,
    uniform: Any,
    is_greedy: Any,
    max_len: Any,
    vocab: Any,
    NO_DRAFT_PROBS: Any = False,  # noqa: N803
) -> None:
    out.append(("random", uniform, is_greedy, max_len, vocab, NO_DRAFT_PROBS))


def test_synthetic_acceptance_is_left_out_of_the_call(module: types.ModuleType) -> None:
    """Called as vLLM 0.20.2's rejection sampler does, each kernel gets its own arguments; asked for, it is refused."""
    module.rejection_greedy_sample_kernel = Kernel(greedy)  # type: ignore[attr-defined]
    module.rejection_random_sample_kernel = Kernel(random)  # type: ignore[attr-defined]
    undo = [applied(change, module) for change in SYNTHETIC_MODE.changes]
    out: list[Any] = []

    module.rejection_greedy_sample_kernel[(1,)](out, 1, 2, 3, 4, None, 6, "uniform", "rates", SYNTHETIC_MODE=False)
    module.rejection_random_sample_kernel[(1,)](
        out, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, "rates", NO_DRAFT_PROBS=True, SYNTHETIC_MODE=False
    )

    assert [("greedy", 1, 2, 3, 4, None, 6), ("random", 7, 8, 9, 10, True)] == out
    with pytest.raises(AssertionError, match="Synthetic acceptance"):
        module.rejection_greedy_sample_kernel[(1,)](out, 1, 2, 3, 4, None, 6, 7, 8, SYNTHETIC_MODE=True)
    for take_back in undo:
        take_back()
    assert greedy is module.rejection_greedy_sample_kernel.func
    assert random is module.rejection_random_sample_kernel.func


class Numbers:
    """A tensor, as far as it is looked at."""

    def float(self) -> str:
        return "float32"

    def contiguous(self) -> str:
        return "contiguous"


def test_recovered_tokens_get_their_noise_in_float32(module: types.ModuleType) -> None:
    """Called as vLLM 0.24.0's rejection sampler does."""
    calls: list[Any] = []

    def recovered(*args: Any, NO_DRAFT_PROBS: bool = False) -> None:  # noqa: N803
        calls.append((args, NO_DRAFT_PROBS))

    module.sample_recovered_tokens_kernel = Kernel(recovered)  # type: ignore[attr-defined]
    (change,) = FP64_GUMBEL.changes
    applied(change, module)

    kernel = module.sample_recovered_tokens_kernel[(1, 2)]
    kernel(0, 1, 2, 3, 4, Numbers(), 6, 8192, NO_DRAFT_PROBS=True, USE_FP64_GUMBEL=True)

    assert [((0, 1, 2, 3, 4, "float32", 6, 8192), True)] == calls


def test_rms_norm_gets_contiguous_input(module: types.ModuleType) -> None:
    """Its input only; the output is written where it is."""
    calls: list[Any] = []
    module.rms_norm = lambda *args: calls.append(args)  # type: ignore[attr-defined]
    (change,) = RMS_NORM.changes
    applied(change, module)
    out = Numbers()
    module.rms_norm(out, Numbers(), "weight", 1e-6)
    assert [(out, "contiguous", "weight", 1e-6)] == calls


def test_a_cpu_kernel_is_launched_like_the_triton_one() -> None:
    """By the Triton kernel's names, in its order, whatever order they come in; one that is missing is an error."""

    def triton_kernel(output_ptr: Any, input_ptr: Any, MAX_NUM_TOKENS: Any) -> None:  # noqa: N803
        raise AssertionError

    calls: list[Any] = []
    kernel = _CpuKernel(
        triton_kernel, lambda output, input_val, maximum=None: calls.append((output, input_val, maximum))
    )

    assert ("output_ptr", "input_ptr", "MAX_NUM_TOKENS") == kernel.arg_names
    kernel[(4,)](MAX_NUM_TOKENS=8, output_ptr="out", input_ptr=None)
    assert [("out", None, 8)] == calls
    with pytest.raises(KeyError, match="MAX_NUM_TOKENS"):
        kernel[(4,)](output_ptr="out", input_ptr=None)


def test_values_of_requests_become_values_of_tokens() -> None:
    """As vLLM's docstring has it: each value as often as its request has tokens, one value replaced; dtypes stay."""
    torch = pytest.importorskip("torch", reason="tensors")
    cu_num_tokens = torch.tensor([2, 5, 5, 6], dtype=torch.int32)
    temperature = torch.tensor([0.7, 0.0, 9.0, 1.5])
    expanded = _expand(None, None, (temperature, cu_num_tokens, 6), {"replace_from": 0, "replace_to": 1})  # type: ignore[arg-type]
    assert torch.equal(torch.tensor([0.7, 0.7, 1.0, 1.0, 1.0, 1.5]), expanded)
    top_k = torch.tensor([3, 4, 5, 6], dtype=torch.int32)
    expanded = _expand(None, None, (top_k, cu_num_tokens, 6), {})  # type: ignore[arg-type]
    assert torch.equal(torch.tensor([3, 3, 4, 4, 4, 6], dtype=torch.int32), expanded)

"""States in 8 bits: float8 e4m3, one float32 scale per 128 neighbouring values of a state.

A state's values differ by orders of magnitude between channels, so one scale for all of them would lose the small ones.
128 is the group of DeepSeek's own fp8 weights and activations.
"""

from __future__ import annotations

import torch

GROUP = 128
#: The largest number of e4m3 ("fn": no infinities).
MAX = 448.0


def groups(width: int) -> int:
    """Scales per state of ``width`` values; the last group may be shorter than 128."""
    return -(-width // GROUP)


def quantise(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., H] of any floating dtype -> float8_e4m3fn [..., H] and float32 scales [..., ceil(H / 128)]."""
    width = states.shape[-1]
    padded = torch.nn.functional.pad(states.float(), (0, groups(width) * GROUP - width))
    grouped = padded.unflatten(-1, (groups(width), GROUP))
    # A group of zeros keeps its zeros under any scale.
    scales = (grouped.abs().amax(-1) / MAX).clamp(min=torch.finfo(torch.float32).tiny)
    values = (grouped / scales[..., None]).to(torch.float8_e4m3fn)
    return values.flatten(-2)[..., :width].contiguous(), scales


def dequantise(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The inverse: [..., H] in ``dtype``."""
    spread = scales.repeat_interleave(GROUP, dim=-1)[..., : values.shape[-1]]
    return (values.float() * spread).to(dtype)

"""States in 8 bits: float8 e4m3, one float32 scale per 128 neighbouring values of a state.

A state's values differ by orders of magnitude between channels, so one scale for all of them would lose the small ones.
128 is the group of DeepSeek's own fp8 weights and activations.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

GROUP = 128
#: The largest number of e4m3 ("fn": no infinities).
MAX = 448.0
_BLOCK = 1 << 18  # values worked on at once


def groups(width: int) -> int:
    """Scales per state of ``width`` values; the last group may be shorter than 128."""
    return -(-width // GROUP)


@dataclass(frozen=True)
class Quantised:
    """values: float8_e4m3fn [T, L, H]. scales: float32 [T, L, ceil(H / 128)].

    error, power: float64 [L], sums of squares over tokens and channels of what rounding did, and of the states.
    """

    values: torch.Tensor
    scales: torch.Tensor
    error: torch.Tensor
    power: torch.Tensor


def quantise(states: torch.Tensor) -> Quantised:
    """States [T, L, H] of any floating dtype; on their device."""
    tokens, layers, width = states.shape
    values = torch.empty(states.shape, dtype=torch.float8_e4m3fn, device=states.device)
    scales = torch.empty(tokens, layers, groups(width), device=states.device)
    error = torch.zeros(layers, dtype=torch.float64, device=states.device)
    power = torch.zeros_like(error)
    rows = max(1, _BLOCK // (layers * width))
    for at in range(0, tokens, rows):  # temporaries that stay in the cache: several times as fast
        block = states[at : at + rows]
        padded = torch.nn.functional.pad(block, (0, groups(width) * GROUP - width))
        grouped = padded.unflatten(-1, (groups(width), GROUP))
        # A group of zeros keeps its zeros under any scale.
        scale = (grouped.abs().amax(-1).float() / MAX).clamp(min=torch.finfo(torch.float32).tiny)
        exact = grouped.float()
        rounded = (exact / scale[..., None]).to(torch.float8_e4m3fn)
        values[at : at + rows] = rounded.flatten(-2)[..., :width]
        scales[at : at + rows] = scale
        error += (rounded.float() * scale[..., None] - exact).square().sum((0, 2, 3))
        power += exact.square().sum((0, 2, 3))
    return Quantised(values, scales, error, power)


def dequantise(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The inverse: [T, L, H] in ``dtype``."""
    width = values.shape[-1]
    made = torch.empty(values.shape, dtype=dtype, device=values.device)
    rows = max(1, _BLOCK // (values.shape[1] * width))
    for at in range(0, len(values), rows):
        padded = torch.nn.functional.pad(values[at : at + rows].float(), (0, groups(width) * GROUP - width))
        block = padded.unflatten(-1, (groups(width), GROUP)) * scales[at : at + rows, :, :, None]
        made[at : at + rows] = block.flatten(-2)[..., :width]
    return made

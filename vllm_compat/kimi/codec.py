"""From a sample to the tensors that a shard holds of it, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from . import fp8
from .shards import DTYPES, FP8, Provenance, Sample, final_positions

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Encoded:
    """What a shard stores of one sample. error, power: float64 per aux boundary, in fp8 only."""

    sample_id: str
    tensors: Tensors
    error: torch.Tensor | None = None
    power: torch.Tensor | None = None

    @property
    def counts(self) -> tuple[str, int, int]:
        """Id, tokens, final states: what `placed` takes."""
        finals = self.tensors.get("final_states", self.tensors["token_ids"])
        return self.sample_id, len(self.tensors["token_ids"]), len(finals)


def layout(provenance: Provenance) -> dict[str, tuple[torch.dtype, tuple[int, ...], bool]]:
    """Tensor name -> dtype, shape of one row, and whether its rows are final states (else tokens).

    In the order of the file: wider types first, so that each tensor starts at a multiple of its item size.
    """
    layers, hidden = len(provenance.layers), provenance.hidden_size
    made: dict[str, tuple[torch.dtype, tuple[int, ...], bool]] = {"token_ids": (torch.int32, (), False)}
    if not provenance.splits_finals:
        made["hidden_states"] = (DTYPES[provenance.dtype], (layers, hidden), False)
    else:
        in_8_bits = provenance.dtype == FP8
        if in_8_bits:
            made["hidden_states_scale"] = (torch.float32, (layers - 1, fp8.groups(hidden)), False)
        made["final_positions"] = (torch.int32, (), True)
        made["final_states"] = (DTYPES[provenance.dtype], (hidden,), True)
        stored = torch.float8_e4m3fn if in_8_bits else DTYPES[provenance.dtype]
        made["hidden_states"] = (stored, (layers - 1, hidden), False)
    made["loss_mask"] = (torch.uint8, (), False)
    return dict(sorted(made.items(), key=lambda item: -item[1][0].itemsize))


def encode(sample: Sample, provenance: Provenance) -> Encoded:
    """Without a copy unless the final states are a tensor of their own."""
    tensors = {"token_ids": sample.token_ids, "loss_mask": sample.loss_mask}
    if not provenance.splits_finals:
        return Encoded(sample.sample_id, {**tensors, "hidden_states": sample.hidden_states})
    aux = sample.hidden_states[:, :-1]
    positions = final_positions(sample.loss_mask, provenance.finals)
    tensors |= {"final_positions": positions, "final_states": sample.hidden_states[positions.long(), -1]}
    if provenance.dtype != FP8:
        return Encoded(sample.sample_id, {**tensors, "hidden_states": aux.contiguous()})
    made = fp8.quantise(aux)
    tensors |= {"hidden_states": made.values, "hidden_states_scale": made.scales}
    return Encoded(sample.sample_id, tensors, made.error, made.power)


def decode(sample_id: str, tensors: Mapping[str, torch.Tensor], provenance: Provenance) -> Sample:
    """A sample that owns its memory; its final state is NaN where none is stored."""
    ids, mask, states = tensors["token_ids"], tensors["loss_mask"], tensors["hidden_states"]
    if not provenance.splits_finals:
        return Sample(sample_id, ids.clone(), mask.clone(), states.clone())
    made = torch.empty(len(ids), len(provenance.layers), provenance.hidden_size, dtype=DTYPES[provenance.dtype])
    if provenance.dtype == FP8:
        states = fp8.dequantise(states, tensors["hidden_states_scale"], made.dtype)
    made[:, :-1] = states
    if len(tensors["final_states"]) < len(ids):
        made[:, -1] = torch.nan
    made[tensors["final_positions"].long(), -1] = tensors["final_states"]
    return Sample(sample_id, ids.clone(), mask.clone(), made)

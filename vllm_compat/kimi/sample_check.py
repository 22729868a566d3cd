"""What a store does not take: samples of another shape, and states that are not finite."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from vllm_compat.errors import StoreError

from .files import write_atomic
from .shards import DTYPES, Provenance, Sample

REFUSED = "refused.jsonl"


def fitting(sample: Sample, provenance: Provenance, where: Path, *, is_there: bool = False) -> Sample:
    """The sample, on the CPU, in memory that holds nothing else.

    StoreError: its shape or dtype is not what the provenance says, or `is_there`.
    """
    states = sample.hidden_states
    shape = (len(sample.token_ids), len(provenance.layers), provenance.hidden_size)
    dtype = DTYPES[provenance.dtype]
    problems = {
        "its id is in the store already": is_there,
        "it has no tokens": shape[0] == 0,
        f"hidden_states is {tuple(states.shape)}, not {shape}": tuple(states.shape) != shape,
        f"hidden_states is {states.dtype}, not {dtype}": states.dtype != dtype,
        f"token_ids is {sample.token_ids.dtype}, not int32": sample.token_ids.dtype != torch.int32,
        f"loss_mask is {sample.loss_mask.dtype}, not uint8": sample.loss_mask.dtype != torch.uint8,
        f"loss_mask has {len(sample.loss_mask)} entries": len(sample.loss_mask) != shape[0],
    }
    wrong = [text for text, is_so in problems.items() if is_so]
    if wrong:
        raise StoreError(f"adding sample {sample.sample_id!r} to {where}", found="; ".join(wrong))
    return Sample(sample.sample_id, *(_own(t) for t in (sample.token_ids, sample.loss_mask, states)))


def not_finite(sample: Sample, provenance: Provenance) -> str | None:
    """Where the first NaN or infinite state is; None when there is none."""
    states = sample.hidden_states
    # Not isfinite() of all: that makes three temporaries of this size, at a fiftieth of the speed.
    if all(torch.isfinite(end) for end in torch.aminmax(states)):
        return None
    token, layer = (~torch.isfinite(states)).any(-1).nonzero()[0].tolist()
    return f"a state is NaN or infinite, first at token {token}, boundary {provenance.layers[layer]}"


class Refusals:
    """The samples that are left out of a store, with the reason, in `refused.jsonl`; at most `most` of them."""

    def __init__(self, path: Path, most: int) -> None:
        self._path, self._most = path, most
        self.reasons = read_refused(path)

    def add(self, sample_id: str, reason: str) -> None:
        """One more. StoreError: that is one too many."""
        if len(self.reasons) >= self._most:
            raise StoreError(
                f"adding sample {sample_id!r} to {self._path}",
                needed="finite states" + (f", but for {self._most} samples" if self._most else ""),
                found=reason,
                advice="look at the row and the model's dtype; extract.max_bad_rows leaves out that many such rows",
            )
        self.reasons[sample_id] = reason
        lines = [json.dumps({"id": name, "reason": why}) + "\n" for name, why in self.reasons.items()]
        write_atomic(self._path / REFUSED, "".join(lines))


def read_refused(path: Path) -> dict[str, str]:
    """Samples that were left out of the store, with the reason."""
    if not (path / REFUSED).exists():
        return {}
    lines = [json.loads(line) for line in (path / REFUSED).read_text(encoding="utf-8").splitlines()]
    return {line["id"]: line["reason"] for line in lines}


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """On the CPU, contiguous, and not keeping anything bigger alive; the tensor itself where it is all that already."""
    tensor = tensor.detach().to("cpu").contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()

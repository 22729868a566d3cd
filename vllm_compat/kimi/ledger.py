"""A store whose shards several workers write: one process has its lock, hands out claims and writes the index."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from vllm_compat.errors import StoreError

from .claims import Claim, Claims
from .files import TEMPORARY_PREFIX, fsync_directory, lock
from .rows import count_rows, read_rows
from .sample_check import Refusals
from .shards import DTYPES, Provenance, Shard, check_size, shard_name
from .store_writer import LOCK, index_with, next_number, resume


class Ledger:
    """Opens a store for several workers, or resumes one.

    Only this process makes files called ``shard-…``. A worker writes its shard under ``draft_name`` and hands it over
    with `publish`: a worker that was thought dead and is not can neither replace a shard nor add one twice.

    StoreError: another writer has the store, its provenance differs, or an indexed shard is missing or cut.
    """

    def __init__(
        self, path: str | Path, provenance: Provenance, rows_path: str | Path, shard_bytes: int, max_bad: int = 0
    ) -> None:
        self.path, self.provenance = Path(path), provenance
        self.recovered: list[str] = []
        self._lock = lock(self.path / LOCK, f"writing to the store {self.path}")
        try:
            self.shards = resume(self.path, provenance, self.recovered)
            self._refusals = Refusals(self.path, max_bad)
        except BaseException:
            os.close(self._lock)
            raise
        done = {place.id for shard in self.shards for place in shard.samples} | self._refusals.reasons.keys()
        self.rows = count_rows(Path(rows_path))
        self.rows_done = len(done)
        self.tokens = 0
        self._claims = Claims(
            (row for row in read_rows(Path(rows_path)) if row.row_id not in done),
            shard_bytes,
            len(provenance.layers) * provenance.hidden_size * DTYPES[provenance.dtype].itemsize,
            next_number(self.path, self.shards),
        )

    def take(self, worker: str) -> Claim | None:
        """The next claim for a worker; None when there is none left that nobody has."""
        return self._claims.take(worker)

    def publish(self, worker: str, number: int, draft: Shard | None, refused: Mapping[str, str]) -> None:
        """Take a worker's shard into the store; None when all its samples are `refused` (id -> reason).

        The shard of a worker that has lost its claim is left to be removed. StoreError: more are refused than may be.
        """
        if not self._claims.is_held(worker, number):
            return
        for sample_id, reason in refused.items():
            self._refusals.add(sample_id, reason)
        if draft is not None:
            self._take_over(number, draft)
        self._claims.finish(number)
        self.rows_done += len(refused) + (len(draft.samples) if draft is not None else 0)

    def _take_over(self, number: int, draft: Shard) -> None:
        check_size(self.path, draft.file, draft.bytes)
        shard = draft._replace(file=shard_name(number))
        (self.path / draft.file).rename(self.path / shard.file)
        fsync_directory(self.path)
        self.shards = index_with(self.path, self.provenance, self.shards, shard)
        self.tokens += shard.tokens

    def give_back(self, worker: str) -> list[int]:
        """A worker died: its claims are others' to take. Their numbers; StoreError when they kill every worker."""
        return self._claims.give_back(worker)

    def progress(self) -> tuple[int, int, int]:
        """(rows that are stored, tokens that were stored since the ledger was opened, rows in all)."""
        return self.rows_done, self.tokens, self.rows

    @property
    def refused(self) -> dict[str, str]:
        """Samples that were left out, with the reason."""
        return self._refusals.reasons

    def close(self) -> tuple[list[str], int]:
        """Let go of the store, once no worker is left: sentences on what a crash had left, and how many were refused.

        StoreError: rows are missing.
        """
        for leftover in self.path.glob(f"{TEMPORARY_PREFIX}*"):
            leftover.unlink()
        os.close(self._lock)
        if self.rows_done != self.rows:
            raise StoreError(
                f"the store {self.path}",
                needed=f"{self.rows} rows",
                found=f"{self.rows_done}, and no worker left",
                advice="the same command goes on with the rest",
            )
        return self.recovered, len(self.refused)


def draft_name(worker: str, number: int) -> str:
    """What a worker calls the shard of a claim: a temporary name, which the next run removes."""
    return f"{TEMPORARY_PREFIX}{worker}-{shard_name(number)}"

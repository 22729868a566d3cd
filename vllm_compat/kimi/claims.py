"""Who makes which shard, when several make them: rows cut into the shards that a single writer would make of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from vllm_compat.errors import StoreError

from .rows import Row

#: How often a claim may come back before something in it is thought to be what its workers die of.
ATTEMPTS = 3


@dataclass(frozen=True)
class Claim:
    """The rows of one shard; `number` is that of its file."""

    number: int
    rows: tuple[Row, ...]


@dataclass
class Claims:
    """Hands out claims, in the order of the rows, and again those whose worker died.

    rows: What is to be done, in order; taken as needed. shard_bytes, token_bytes: A shard is full with so many bytes of
    hidden states, of which a token has `token_bytes`. first: Number of the first shard.
    """

    rows: Iterable[Row]
    shard_bytes: int
    token_bytes: int
    first: int = 0
    _held: dict[int, tuple[str, Claim]] = field(default_factory=dict)
    _returned: list[Claim] = field(default_factory=list)
    _lost: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._next = self._cut(iter(self.rows))

    def _cut(self, rows: Iterator[Row]) -> Iterator[Claim]:
        number, taken, size = self.first, [], 0
        for row in rows:
            taken.append(row)
            size += len(row.input_ids) * self.token_bytes
            if size >= self.shard_bytes:
                yield Claim(number, tuple(taken))
                number, taken, size = number + 1, [], 0
        if taken:
            yield Claim(number, tuple(taken))

    def take(self, worker: str) -> Claim | None:
        """The next claim for a worker; None when there is none left that nobody has."""
        claim = self._returned.pop(0) if self._returned else next(self._next, None)
        if claim is not None:
            self._held[claim.number] = (worker, claim)
        return claim

    def is_held(self, worker: str, number: int) -> bool:
        """Whether this worker still has the claim: one that was thought dead has lost it."""
        return self._held.get(number, ("", None))[0] == worker

    def finish(self, number: int) -> None:
        """A claim is done."""
        del self._held[number]

    def give_back(self, worker: str) -> list[int]:
        """A worker died: its claims are others' to take. Their numbers.

        StoreError: a claim's worker died for the third time.
        """
        lost = sorted(number for number, (holder, _) in self._held.items() if holder == worker)
        for number in lost:
            _, claim = self._held.pop(number)
            self._lost[number] += 1
            if self._lost[number] >= ATTEMPTS:
                ids = [row.row_id for row in claim.rows]
                raise StoreError(
                    f"shard {number}, rows {ids[0]} to {ids[-1]}",
                    needed="a worker that lives through it",
                    found=f"{ATTEMPTS} workers that died while they had it",
                    advice="see the workers' logs (ray logs); what is stored stays, and the same command goes on",
                )
            self._returned.append(claim)
        self._returned.sort(key=lambda claim: claim.number)
        return lost

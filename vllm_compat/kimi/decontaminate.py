"""Training rows that the held-out set is not independent of: the same prompt, or (nearly) the same answer.

Two well-known rules, over token ids:

- A training row whose prompt is a held-out row's prompt is left out: at temperature 0 its answer is the same, too.
- A training row most of whose answer stands in held-out answers, as n-grams of 13 tokens, is left out. The length is
  GPT-3's (arXiv 2005.14165, appendix C); that the covered share of the tokens decides, and 0.8 of it, is Llama 2's
  (arXiv 2307.09288, appendix A.6). Prompts are not compared so: system prompts and tools are shared by right.

The held-out set stays as it is, so that what is measured does not depend on what is trained on.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence

from .rows import Row

SHARE = 0.8


class HeldOut:
    """What of the held-out rows must not be learned. `ngram`: tokens per n-gram, 0 compares prompts only."""

    def __init__(self, rows: Iterable[Row], ngram: int) -> None:
        self._ngram = ngram
        self._prompts: set[bytes] = set()
        self._grams: set[bytes] = set()
        for row in rows:
            self._prompts.add(digest(row.input_ids[: row.prompt_length]))
            self._grams.update(self._of(row.input_ids[row.prompt_length :]))

    def reason(self, row: Row) -> str | None:
        """Why a training row has to go; None when it may stay."""
        if digest(row.input_ids[: row.prompt_length]) in self._prompts:
            return "the prompt of a held-out row"
        answer = row.input_ids[row.prompt_length :]
        if self._grams and self.covered(answer) >= SHARE:
            return f"{SHARE:.0%} of the answer stand in held-out answers ({self._ngram}-grams)"
        return None

    def covered(self, answer: Sequence[int]) -> float:
        """Share of the tokens that are in an n-gram of a held-out answer."""
        found = bytearray(len(answer))
        for at, gram in enumerate(self._of(answer)):
            if gram in self._grams:
                found[at : at + self._ngram] = b"\1" * self._ngram
        return sum(found) / len(answer) if answer else 0.0

    def _of(self, ids: Sequence[int]) -> list[bytes]:
        n = self._ngram
        return [digest(ids[at : at + n]) for at in range(len(ids) - n + 1)] if n else []


class Seen:
    """Rows by content: one that is there already, under whatever id, is trained on twice for nothing."""

    def __init__(self) -> None:
        self._rows: set[bytes] = set()

    def again(self, input_ids: Sequence[int], loss_mask: Sequence[int]) -> bool:
        """Whether the same tokens with the same mask came before; they have now."""
        key = digest([*input_ids, -1, *loss_mask])
        if key in self._rows:
            return True
        self._rows.add(key)
        return False


def digest(ids: Sequence[int]) -> bytes:
    """16 bytes that stand for token ids."""
    return hashlib.blake2b(array("q", ids).tobytes(), digest_size=16).digest()


def removed(row: Row, heldout: HeldOut, dropped: Counter[str]) -> bool:
    """Whether a training row has to go; counted by reason."""
    reason = heldout.reason(row)
    if reason is not None:
        dropped[reason] += 1
    return reason is not None

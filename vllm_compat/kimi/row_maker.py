"""From a history and an answer's ids to a written row, or to a counted reason why there is none."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .conversations import Conversation
from .decontaminate import HeldOut, Seen, removed
from .prompts import find_markers, generation_prefix, loss_mask, render_prompt
from .rows import SPLITS, Row, RowWriter

if TYPE_CHECKING:
    from .config import Config


class RowMaker:
    """Renders prompts and writes rows.

    `dropped`: rows not written, by reason; `numbers`: token counts and the like.

    DataError when the tokenizer or its chat template is not Kimi's.
    """

    def __init__(self, cfg: Config, tokenizer: Any, writer: RowWriter) -> None:
        self.cfg, self.tokenizer, self.writer = cfg, tokenizer, writer
        self.markers = find_markers(tokenizer)
        self.prefixes = {thinking: generation_prefix(tokenizer, self.markers, thinking) for thinking in (False, True)}
        self.dropped: Counter[str] = Counter()
        self.numbers: Counter[str] = Counter()
        self._seen = {split: Seen() for split in SPLITS}

    @property
    def room(self) -> int | None:
        """Rows that may still be written, None for any number."""
        most = self.cfg.prepare.max_rows
        return None if most is None else most - sum(self.writer.counts.values())

    def prompt(
        self, history: Sequence[dict[str, Any]], tools: Sequence[Any] | None, thinking: bool
    ) -> list[int] | None:
        """The prompt's ids, or None when they leave no room for an answer.

        DataError when the template refuses.
        """
        prepare = self.cfg.prepare
        prompt = render_prompt(self.tokenizer, history, tools, thinking)
        if len(prompt) + prepare.min_loss_tokens > prepare.max_length:
            self.dropped[f"the prompt leaves no room in {prepare.max_length} tokens (its conversation ends)"] += 1
            return None
        return prompt

    def row(
        self,
        conversation: Conversation,
        turn: int,
        prompt: list[int],
        answer: Sequence[int],
        thinking: bool,
        source: str,
    ) -> None:
        """Write one row.

        An answer that does not fit into max_length is cut, its mask ending where the ids end.
        """
        prepare, markers = self.cfg.prepare, self.markers
        answer = list(answer)
        if markers.end in answer:
            answer = answer[: answer.index(markers.end) + 1]
        if markers.turns.intersection(answer):
            self.dropped["the answer contains a turn marker"] += 1
            return
        ids = (prompt + answer)[: prepare.max_length]
        mask = loss_mask(ids, len(prompt), markers, self.prefixes[thinking])
        if sum(mask) < prepare.min_loss_tokens:
            self.dropped[f"fewer than {prepare.min_loss_tokens} loss tokens"] += 1
            return
        identity = conversation.conversation_id
        heldout = heldout_share(identity, self.cfg.seed) < prepare.heldout_fraction
        split = "heldout" if heldout else "train"
        if self._seen[split].again(ids, mask):
            self.dropped["the same tokens as another row"] += 1
            return
        self.writer.add(split, Row(f"{identity}/{turn}", identity, turn, ids, len(prompt), mask, source))
        self.numbers["tokens"] += len(ids)
        self.numbers["loss_tokens"] += sum(mask)
        self.numbers["truncated"] += len(ids) < len(prompt) + len(answer)

    def decontaminate(self) -> None:
        """Leave out the training rows that the held-out ones are not independent of. The last thing to do."""
        heldout = HeldOut(self.writer.written("heldout"), self.cfg.prepare.decontaminate_ngram)

        def chosen(row: Row) -> bool:
            if not removed(row, heldout, self.dropped):
                return True
            self.numbers["contaminated"] += 1
            self.numbers["tokens"] -= len(row.input_ids)
            self.numbers["loss_tokens"] -= sum(row.loss_mask)
            return False

        self.writer.keep("train", chosen)


def heldout_share(conversation_id: str, seed: int) -> float:
    """A number in [0, 1) of the id and the seed alone: a conversation keeps its side when data is added."""
    digest = hashlib.sha256(f"{seed}:{conversation_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64

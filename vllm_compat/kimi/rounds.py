"""Regeneration: the target answers each conversation turn by turn, all conversations side by side."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm_compat.errors import DataError

from .answers import decode_answer
from .conversations import Conversation
from .degeneracy import distinct_bigrams
from .journal import AnswerJournal, Generate, Generated
from .row_maker import RowMaker

if TYPE_CHECKING:
    from .progress import Progress


@dataclass
class Thread:
    """A conversation on its way: `at` is the next original message to read, `turn` counts assistant turns."""

    conversation: Conversation
    history: list[dict[str, Any]] = field(default_factory=list)
    at: int = 0
    turn: int = 0
    calls: list[dict[str, Any]] = field(default_factory=list)  # of the target's last answer, still without result

    def advance(self) -> bool:
        """Read on to the next turn that the target has to answer; False when there is none.

        A conversation that ends with a user's message is answered too; an assistant's message that follows no
        user's or tool's is history.
        """
        messages = self.conversation.messages
        while self.at < len(messages):
            message = messages[self.at]
            if message["role"] == "assistant":
                if self._waiting():
                    return True
                self.turn += 1
            elif message["role"] == "tool" and self.calls:
                message = {**message, "tool_call_id": self.calls.pop(0)["id"]}
            self.history.append(message)
            self.at += 1
        return self._waiting()

    def accept(self, message: dict[str, Any] | None) -> str | None:
        """Take the target's answer into the history.

        The reason when the conversation cannot go on after it.
        """
        messages = self.conversation.messages
        original = messages[self.at] if self.at < len(messages) else None
        self.at += 1
        self.turn += 1
        if original is None:
            return "its end"
        if message is None:
            return "the target's answer has special tokens inside its text"
        if _calls(message) != _calls(original):
            return "the target called other tools than the original did"
        self.history.append(message)
        self.calls = list(message.get("tool_calls") or ())
        return None

    def _waiting(self) -> bool:
        return bool(self.history) and self.history[-1]["role"] in ("user", "tool")


@dataclass
class Regeneration:
    """Rounds of generation.

    `ended`: conversations that stopped, by reason; bigram_ratios: distinct/all per answer.
    """

    maker: RowMaker
    journal: AnswerJournal
    generate: Generate
    refuse: Callable[[str, str], None]
    ended: Counter[str] = field(default_factory=Counter)
    bigram_ratios: list[float] = field(default_factory=list)

    def run(self, conversations: Sequence[Conversation], progress: Progress) -> None:
        """Answer turn after turn until every conversation has ended or `max_rows` rows are written."""
        maker, thinking = self.maker, self.maker.cfg.prepare.thinking
        active, number = [Thread(conversation) for conversation in conversations], 0
        while active and maker.room != 0:
            number += 1
            asked = [(t, prompt) for t in active if t.advance() and (prompt := self._prompt(t)) is not None]
            asked = asked[: maker.room]
            active = []
            with progress.task(f"the target answers, round {number}", total=len(asked)) as bar:
                answers = self.journal.generate([prompt for _, prompt in asked], self.generate)
                for (thread, prompt), answer in zip(asked, answers, strict=True):
                    ids = answer.token_ids
                    maker.row(thread.conversation, thread.turn, prompt, ids, thinking, "regenerated")
                    self._count(answer)
                    prefix = maker.prefixes[thinking]
                    reason = thread.accept(decode_answer(maker.tokenizer, ids, maker.markers, prefix))
                    if reason is None:
                        active.append(thread)
                    elif reason != "its end":
                        self.ended[reason] += 1
                    bar.advance(1)

    def _prompt(self, thread: Thread) -> list[int] | None:
        try:
            tools = thread.conversation.tools
            return self.maker.prompt(thread.history, tools, self.maker.cfg.prepare.thinking)
        except DataError as error:
            self.refuse(thread.conversation.place, str(error))
            return None

    def _count(self, answer: Generated) -> None:
        self.maker.numbers["generated_tokens"] += len(answer.token_ids)
        self.maker.numbers["cut_by_length"] += answer.finish_reason == "length"
        ratio = distinct_bigrams(answer.token_ids)
        if ratio is not None and len(answer.token_ids) > 8:  # fewer bigrams say nothing about looping
            self.bigram_ratios.append(ratio)


def _calls(message: dict[str, Any]) -> list[Any]:
    """Functions and arguments that a message calls, comparable.

    Equal ones make the original's tool results fit.
    """
    made = []
    for call in message.get("tool_calls") or ():
        try:
            arguments = json.loads(call["function"]["arguments"])
        except ValueError:
            arguments = call["function"]["arguments"]
        made.append([call["function"]["name"], arguments])
    return made

"""Answers that the target has generated, kept until prepare is done.

A crash hours into a regeneration loses one chunk.
"""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

_CHUNK = 4096  # prompts per call of the engine: enough to keep it full, few enough to lose


@dataclass(frozen=True)
class Generated:
    """What the target wrote after a prompt: its raw ids (`<|im_end|>` included when it stopped by itself)."""

    token_ids: list[int]
    finish_reason: Literal["stop", "length"]


Generate = Callable[[Sequence[list[int]]], Sequence[Generated]]


class AnswerJournal:
    """A JSONL file of [key, token ids, finish reason].

    The key is a hash of the prompt and of `settings`, which stands for all else that answers depend on: those
    of another model or temperature are never taken.
    """

    def __init__(self, path: Path, settings: str) -> None:
        self._path, self._settings = path, settings
        self._places: dict[str, int] = {}  # key -> where its line starts; the answers stay on disk
        self.reused = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+") as stream:
            stream.seek(0)
            at = 0
            for line in stream:
                if not line.endswith(b"\n"):  # the process died while it was written
                    stream.truncate(at)
                    break
                self._places[json.loads(line)[0]] = at
                at += len(line)

    def generate(self, prompts: Sequence[list[int]], generate: Generate) -> Iterator[Generated]:
        """Answers in the order of `prompts`; only those not in the journal are generated."""
        keys = [self._key(prompt) for prompt in prompts]
        missing = [i for i, key in enumerate(keys) if key not in self._places]
        self.reused += len(prompts) - len(missing)
        for at in range(0, len(missing), _CHUNK):
            chunk = missing[at : at + _CHUNK]
            answers = generate([prompts[i] for i in chunk])
            self._append([(keys[i], answer) for i, answer in zip(chunk, answers, strict=True)])
        with self._path.open("rb") as stream:
            for key in keys:
                stream.seek(self._places[key])
                _, ids, reason = json.loads(stream.readline())
                yield Generated(ids, reason)

    def remove(self) -> None:
        """The rows are published: the journal has done its work."""
        self._path.unlink(missing_ok=True)

    def _append(self, pairs: list[tuple[str, Generated]]) -> None:
        with self._path.open("ab") as stream:
            for key, answer in pairs:
                at = stream.tell()
                stream.write(json.dumps([key, list(answer.token_ids), answer.finish_reason]).encode() + b"\n")
                self._places[key] = at
            stream.flush()
            os.fsync(stream.fileno())

    def _key(self, prompt: list[int]) -> str:
        return hashlib.sha256(self._settings.encode() + array("q", prompt).tobytes()).hexdigest()

"""prepare: conversations -> rows (rendered prompt + the target's own ids), split into train and held-out.

With `regenerate` the target answers every turn itself, in rounds: round r renders the r-th turn of each
conversation from the history so far (the target's own answers in it), generates once for all, and goes on.
Rows keep the raw ids; the history gets the decoded text, as it would in serving.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_compat.errors import DataError

from .answers import encode_answer
from .conversations import Conversation, Reading, read_conversations
from .degeneracy import mean_ratio
from .files import sha256_json, write_atomic
from .fingerprints import model_fingerprint
from .journal import AnswerJournal, Generate, Generated
from .prompts import Markers, load_tokenizer, marker_in
from .rounds import Regeneration
from .row_maker import RowMaker
from .rows import RowWriter

if TYPE_CHECKING:
    from .config import Config
    from .progress import Progress

__all__ = ["Generated", "prepare", "prepare_stage"]


def prepare_stage(cfg: Config, progress: Progress) -> dict[str, Any]:
    """The stage as the pipeline calls it.

    With the engine when answers are regenerated, without vLLM otherwise.
    """
    tokenizer = load_tokenizer(cfg.target)
    if not cfg.prepare.regenerate:
        return prepare(cfg, tokenizer, None, progress)
    from .generate import open_generator

    with open_generator(cfg, progress) as generate:
        return prepare(cfg, tokenizer, generate, progress)


def prepare(cfg: Config, tokenizer: Any, generate: Generate | None, progress: Progress) -> dict[str, Any]:
    """Write <run>/prepare/{train,heldout}.parquet and malformed.jsonl; return the metrics.

    generate: needed when `prepare.regenerate` is on. DataError: the tokenizer is not Kimi's, more than half
    of the input is malformed, no token at all carries loss, or a split that was asked for came out empty.
    """
    started = time.monotonic()
    directory = cfg.run_dir / "prepare"
    reading = Reading()
    regeneration = None
    try:
        with RowWriter(directory) as writer:
            maker = RowMaker(cfg, tokenizer, writer)
            conversations = _usable(cfg, reading, maker.markers, progress)
            _check_input(cfg, reading)
            if cfg.prepare.regenerate:
                if generate is None:
                    raise DataError(
                        "prepare.regenerate = true",
                        needed="an engine that generates the answers",
                        advice="run the stage where vLLM is installed, or set prepare.regenerate=false",
                    )
                journal = AnswerJournal(directory / "answers.jsonl", _settings_hash(cfg))
                regeneration = Regeneration(maker, journal, generate, reading.refuse)
                regeneration.run(conversations, progress)
            else:
                _originals(conversations, maker, reading, progress)
            maker.decontaminate()
            _check_rows(cfg, reading, maker)
    finally:
        lines = [json.dumps(item, ensure_ascii=False) + "\n" for item in reading.malformed]
        write_atomic(directory / "malformed.jsonl", "".join(lines))
    if regeneration is not None:
        regeneration.journal.remove()
    return _metrics(reading, maker, regeneration, len(conversations), time.monotonic() - started)


def _usable(cfg: Config, reading: Reading, markers: Markers, progress: Progress) -> list[Conversation]:
    made = []
    with progress.task("reading conversations") as bar:
        for conversation in read_conversations(cfg.prepare, reading):
            bar.advance(1)
            marker = marker_in(_rendered_texts(conversation, cfg.prepare.regenerate), markers)
            if marker is None:
                made.append(conversation)
            else:
                reading.refuse(conversation.place, f"the text contains the special token {marker!r}")
    return made


def _rendered_texts(conversation: Conversation, regenerate: bool) -> Iterator[str]:
    """What will be rendered: not the answers that the target is going to replace."""
    if not regenerate:
        return conversation.texts()
    kept = [message for message in conversation.messages if message["role"] != "assistant"]
    return dataclasses.replace(conversation, messages=kept).texts()


def _originals(conversations: Sequence[Conversation], maker: RowMaker, reading: Reading, progress: Progress) -> None:
    """Rows with the answers as they are in the data. An answer with reasoning gets the thinking prompt."""
    with progress.task("building rows", total=len(conversations)) as bar:
        for conversation in conversations:
            bar.advance(1)
            turn = 0
            for at, message in enumerate(conversation.messages):
                if message["role"] != "assistant":
                    continue
                if at and conversation.messages[at - 1]["role"] in ("user", "tool"):
                    if maker.room == 0:
                        return
                    thinking = bool(message.get("reasoning_content"))
                    try:
                        prompt = maker.prompt(conversation.messages[:at], conversation.tools, thinking)
                        if prompt is None:
                            break  # later prompts are longer
                        answer = encode_answer(maker.tokenizer, message, maker.markers, maker.prefixes[thinking])
                    except DataError as error:
                        reading.refuse(conversation.place, str(error))
                        break
                    maker.row(conversation, turn, prompt, answer, thinking, "original")
                turn += 1


def _check_input(cfg: Config, reading: Reading) -> None:
    bad, read = len(reading.malformed), reading.read
    if bad * 2 > read:
        reasons = "; ".join(f"{item['place']}: {item['reason']}" for item in reading.malformed[:3])
        raise DataError(
            f"the conversations of {cfg.prepare.conversations}",
            needed="at least half of them to be usable",
            found=f"{bad} of {read} malformed ({reasons})",
            advice=f"all reasons are in {cfg.run_dir / 'prepare' / 'malformed.jsonl'}",
        )


def _check_rows(cfg: Config, reading: Reading, maker: RowMaker) -> None:
    _check_input(cfg, reading)  # again: the template may have refused some
    counts = maker.writer.counts
    if not maker.numbers["loss_tokens"]:
        raise DataError(
            f"rows of {cfg.prepare.conversations}",
            needed="at least one token that carries loss",
            found=f"{reading.read} conversations read, {len(reading.malformed)} malformed;"
            f" rows dropped: {dict(maker.dropped)}",
            advice="see prepare.max_length and prepare.min_loss_tokens",
        )
    if not counts["train"] or (cfg.prepare.heldout_fraction > 0 and not counts["heldout"]):
        raise DataError(
            f"train and held-out rows of {cfg.prepare.conversations}",
            needed="at least one conversation on each side",
            found=f"{counts} rows with heldout_fraction {cfg.prepare.heldout_fraction}",
            advice="give more conversations, or another prepare.heldout_fraction",
        )


def _metrics(
    reading: Reading, maker: RowMaker, regeneration: Regeneration | None, conversations: int, seconds: float
) -> dict[str, Any]:
    return {
        "conversations": conversations,
        "rows": sum(maker.writer.counts.values()),
        "train_rows": maker.writer.counts["train"],
        "heldout_rows": maker.writer.counts["heldout"],
        "tokens": maker.numbers["tokens"],
        "loss_tokens": maker.numbers["loss_tokens"],
        "malformed": len(reading.malformed),
        "malformed_examples": reading.malformed[:5],
        "duplicates": reading.duplicates,
        "dropped": dict(maker.dropped),
        "contaminated": maker.numbers["contaminated"],
        "truncated": maker.numbers["truncated"],
        "ended_early": dict(regeneration.ended) if regeneration else {},
        "generated_tokens": maker.numbers["generated_tokens"],
        "answers_reused": regeneration.journal.reused if regeneration else 0,
        "cut_by_length": maker.numbers["cut_by_length"],
        "distinct_bigram_ratio": mean_ratio(regeneration.bigram_ratios) if regeneration else None,
        "seconds": round(seconds, 2),
    }


def _settings_hash(cfg: Config) -> str:
    settings = {name: getattr(cfg.prepare, name) for name in ("temperature", "max_new_tokens")}
    target = dataclasses.asdict(cfg.target)
    if Path(cfg.target.model).is_dir():
        target["model"] = model_fingerprint(cfg.target.model)
    return sha256_json({"target": target, "prepare": settings, "seed": cfg.seed})

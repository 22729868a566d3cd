"""Reading conversations.

JSONL, JSON, parquet or a hub data set -> one shape, with a reason for every row refused.

Two shapes are read: `messages` ([{role, content, tool_calls, reasoning_content, name, tool_call_id}]) and
ShareGPT's `conversations` ([{from, value}]); both may carry `tools` and an id (`id` or `conversation_id`;
without one the id is made of the content).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_compat.errors import ConfigError, DataError

from .answers import call_id

if TYPE_CHECKING:
    from .settings import PrepareConfig

_ROLES = ("system", "user", "assistant", "tool")
_SHAREGPT = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard"), "assistant"),
    **dict.fromkeys(("tool", "observation"), "tool"),
    "system": "system",
}


class Malformed(Exception):
    """Why a row of the input cannot be used; its text goes into the report."""


@dataclass(frozen=True)
class Conversation:
    """One conversation.

    Its id, where it stood in the input ("line 7"), its messages in one shape, its tools.
    """

    conversation_id: str
    place: str
    messages: list[dict[str, Any]]
    tools: list[Any] | None = None

    def texts(self) -> Iterator[str]:
        """Every text that ends up in a prompt."""
        for message in self.messages:
            yield from (str(message[key]) for key in ("content", "reasoning_content", "name") if message.get(key))
            for call in message.get("tool_calls") or ():
                yield from (call["id"], call["function"]["arguments"])
        if self.tools:
            yield json.dumps(self.tools, ensure_ascii=False)


@dataclass
class Reading:
    """What came of the input besides the conversations.

    How many, what was refused and why, what was there twice.
    """

    read: int = 0
    duplicates: int = 0
    malformed: list[dict[str, str]] = field(default_factory=list)

    def refuse(self, place: str, reason: str) -> None:
        """Count one input row as unusable."""
        self.malformed.append({"place": place, "reason": reason})


def read_conversations(cfg: PrepareConfig, reading: Reading) -> Iterator[Conversation]:
    """Yield the usable conversations in input order, each content once; fill `reading` on the way.

    ConfigError when the input cannot be opened at all.
    """
    contents: set[str] = set()
    ids: set[str] = set()
    given = 0
    for place, raw in _raw_rows(cfg):
        if cfg.max_conversations is not None and given >= cfg.max_conversations:
            return
        reading.read += 1
        try:
            messages, tools = _messages(raw), _tools(raw)
        except Malformed as error:
            reading.refuse(place, str(error))
            continue
        except (ValueError, TypeError, KeyError, AttributeError) as error:  # a field of another type
            reading.refuse(place, f"{type(error).__name__}: {error}")
            continue
        content = hashlib.sha256(json.dumps([messages, tools], sort_keys=True).encode()).hexdigest()
        if content in contents:
            reading.duplicates += 1
            continue
        contents.add(content)
        name = raw.get("id") or raw.get("conversation_id") or content[:16]
        # Two conversations of one id would overwrite each other's rows downstream.
        identity = str(name) if str(name) not in ids else f"{name}-{content[:8]}"
        ids.add(identity)
        given += 1
        yield Conversation(identity, place, messages, tools)


def _raw_rows(cfg: PrepareConfig) -> Iterator[tuple[str, Any]]:
    """(place, raw dict) pairs; an unreadable line comes as (place, Malformed)."""
    path = Path(cfg.conversations)
    if path.suffix == ".jsonl" and path.is_file():
        with path.open("rb") as stream:
            for number, line in enumerate(stream, 1):
                if line.strip():
                    yield f"line {number}", _parse(line)
        return
    number = 0
    try:
        for number, raw in enumerate(_dataset(cfg, path), 1):
            yield f"row {number}", raw
    except (OSError, ValueError, RuntimeError) as error:  # what pyarrow and datasets raise for a broken file
        raise DataError(
            f"reading {cfg.conversations}",
            needed="a file that can be read to its end",
            found=f"after row {number}: {type(error).__name__}: {error}",
        ) from error


def _parse(line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8-sig"))
    except ValueError as error:  # also UnicodeDecodeError
        return Malformed(f"not JSON in UTF-8: {error}")


def _dataset(cfg: PrepareConfig, path: Path) -> Any:
    """Rows through `datasets`: a local parquet or JSON file, else a data set of the hub."""
    kinds = {".parquet": "parquet", ".json": "json"}
    if path.suffix in (*kinds, ".jsonl") and not path.is_file():
        raise ConfigError(
            f"prepare.conversations = {cfg.conversations!r}",
            needed="that file",
            found=f"no such file in {Path.cwd()}",
        )
    if path.exists() and path.suffix not in kinds:
        raise ConfigError(
            f"prepare.conversations = {cfg.conversations!r}",
            needed="a file that ends in .jsonl, .json or .parquet, or the name of a hub data set",
            found="a directory" if path.is_dir() else f"a file that ends in {path.suffix!r}",
        )
    from datasets import load_dataset
    from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError

    try:
        if path.suffix in kinds:
            return load_dataset(kinds[path.suffix], data_files=str(path), split="train", streaming=True)
        return load_dataset(cfg.conversations, split=cfg.split or "train", streaming=True)
    except (DatasetNotFoundError, DatasetGenerationError, OSError, ValueError) as error:
        raise ConfigError(
            f"prepare.conversations = {cfg.conversations!r}",
            needed=f"a data set that can be read, split {cfg.split or 'train'!r}",
            found=f"{type(error).__name__}: {error}",
            advice="check the name, prepare.split, and that the hub can be reached",
        ) from error


def _messages(raw: Any) -> list[dict[str, Any]]:
    if isinstance(raw, Malformed):
        raise raw
    if not isinstance(raw, dict):
        raise Malformed(f"a {type(raw).__name__}, not an object")
    messages, sharegpt = _decoded(raw.get("messages")), _decoded(raw.get("conversations"))
    if isinstance(messages, list):
        made = [_message(_decoded(item), number) for number, item in enumerate(messages)]
    elif isinstance(sharegpt, list):
        made = [_message(_from_sharegpt(_decoded(item)), number) for number, item in enumerate(sharegpt)]
    else:
        raise Malformed("neither a list 'messages' nor a list 'conversations'")
    if not made:
        raise Malformed("no messages")
    if not any(message["role"] in ("user", "tool") for message in made):
        raise Malformed("no user message: nothing to answer")
    return made


def _decoded(value: Any) -> Any:
    """`datasets` 5 gives objects of mixed shape as JSON text when it streams.

    Parquet sets keep such text themselves.
    """
    return json.loads(value) if isinstance(value, str) and value.lstrip()[:1] in ("{", "[") else value


def _from_sharegpt(item: Any) -> dict[str, Any]:
    speaker = item.get("from")
    if speaker not in _SHAREGPT:
        raise Malformed(f"unknown speaker {speaker!r} (known: {', '.join(_SHAREGPT)})")
    return {**item, "role": _SHAREGPT[speaker], "content": item.get("value")}


def _message(item: Any, number: int) -> dict[str, Any]:
    role = item.get("role")
    if role not in _ROLES:
        raise Malformed(f"message {number} has role {role!r} (known: {', '.join(_ROLES)})")
    made: dict[str, Any] = {"role": role, "content": _content(item.get("content"), number)}
    reasoning = item.get("reasoning_content") or item.get("reasoning")
    if role == "assistant" and isinstance(made["content"], str) and not reasoning:
        reasoning, made["content"] = _split_think(made["content"])
    if role == "assistant" and reasoning:
        made["reasoning_content"] = str(reasoning)
    if role == "assistant" and item.get("tool_calls"):
        made["tool_calls"] = [_call(_decoded(c), i) for i, c in enumerate(_decoded(item["tool_calls"]))]
    for key in ("name", "tool_call_id"):
        if item.get(key):
            made[key] = str(item[key])
    if made["content"] == "" and not made.get("tool_calls") and role != "tool":
        raise Malformed(f"message {number} ({role}) is empty")
    return made


def _content(content: Any, number: int) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type", "text") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise Malformed(f"message {number} has a part of type {kind!r}: only text is supported")
        texts.append(part["text"])
    return "".join(texts)


def _split_think(content: str) -> tuple[str | None, str]:
    """`<think>reasoning</think>answer`, as many data sets write it inside the content."""
    if content.startswith("<think>") and "</think>" in content:
        reasoning, _, answer = content.removeprefix("<think>").partition("</think>")
        return reasoning or None, answer
    return None, content


def _call(call: dict[str, Any], number: int) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments or {}, ensure_ascii=False)
    made = {
        "id": call.get("id"),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }
    return {**made, "id": call_id(made, number)}


def _tools(raw: dict[str, Any]) -> list[Any] | None:
    tools = _decoded(raw.get("tools")) or None
    if tools is not None and not isinstance(tools, list):
        raise Malformed(f"tools is a {type(tools).__name__}, not a list")
    return [_decoded(tool) for tool in tools] if tools else None

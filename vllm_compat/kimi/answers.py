"""An assistant message as the target emits it (token ids), and the message that emitted ids stand for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from vllm_compat.errors import DataError

from .prompts import Markers, Message

_CALL_ID = re.compile(r"(?:functions\.)?(?P<name>.+?)(?::\d+)?$", re.DOTALL)


def encode_answer(tokenizer: Any, message: Message, markers: Markers, prefix: Sequence[int]) -> list[int]:
    """Ids of an answer after the generation prompt: reasoning, `</think>`, content, tool calls, `<|im_end|>`.

    prefix: what the generation prompt ends in (`generation_prefix`). With a prefilled `<think>` the answer
    begins inside the reasoning; without any prefill the target writes `<think>` itself. DataError when the
    tokenizer lacks a token that the message needs, or when a tool call cannot be read.
    """
    pieces: list[str | int] = []
    reasoning, content = message.get("reasoning_content"), message.get("content")
    if prefix and prefix[-1] == markers.think:
        pieces += [reasoning or "", _needed(markers.end_think, "</think>", "reasoning")]
    elif reasoning:
        pieces += [_needed(markers.think, "<think>", "reasoning"), reasoning]
        pieces += [_needed(markers.end_think, "</think>", "reasoning")]
    pieces.append(content or "")
    if message.get("tool_calls"):
        pieces.append(_needed(markers.calls, "<|tool_calls_section_begin|>", "tool calls"))
        for number, call in enumerate(message["tool_calls"]):
            pieces += [_needed(markers.call, "<|tool_call_begin|>", "tool calls"), call_id(call, number)]
            pieces += [_needed(markers.arguments, "<|tool_call_argument_begin|>", "tool calls")]
            pieces += [
                call["function"]["arguments"],
                _needed(markers.end_call, "<|tool_call_end|>", "tool calls"),
            ]
        pieces.append(_needed(markers.end_calls, "<|tool_calls_section_end|>", "tool calls"))
    pieces.append(markers.end)
    ids: list[int] = []
    for piece in pieces:
        ids += [piece] if isinstance(piece, int) else tokenizer.encode(piece, add_special_tokens=False)
    return ids


def decode_answer(tokenizer: Any, ids: Sequence[int], markers: Markers, prefix: Sequence[int]) -> dict[str, Any] | None:
    """The assistant message that an answer's `ids` stand for, with or without `<|im_end|>`: for the history.

    None when there is no such message: a special token stands where text should be, or a tool call is broken.
    A template could not write that back, so the conversation has to end there.
    """
    rest = [i for i in ids if i != markers.end]
    message: dict[str, Any] = {"role": "assistant"}
    inside = bool(prefix) and prefix[-1] == markers.think
    if not inside and markers.think is not None and rest[:1] == [markers.think]:
        inside, rest = True, rest[1:]
    if inside:
        cut = rest.index(markers.end_think) if markers.end_think in rest else len(rest)
        reasoning, rest = rest[:cut], rest[cut + 1 :]
        if markers.special.intersection(reasoning):
            return None
        message["reasoning_content"] = _text(tokenizer, reasoning)
    if markers.calls is not None and markers.calls in rest:
        cut = rest.index(markers.calls)
        calls, rest = _decode_calls(tokenizer, rest[cut:], markers), rest[:cut]
        if calls is None:
            return None
        message["tool_calls"] = calls
    if markers.special.intersection(rest):
        return None
    return {**message, "content": _text(tokenizer, rest)}


def call_id(call: dict[str, Any], number: int) -> str:
    """The id of a tool call: the given one, or Kimi's own form `functions.NAME:NUMBER`."""
    return str(call.get("id") or f"functions.{call['function']['name']}:{number}")


def _decode_calls(tokenizer: Any, ids: Sequence[int], markers: Markers) -> list[dict[str, Any]] | None:
    """`ids` from section begin to section end, strictly: begin (call id arguments json end)+ end."""
    if len(ids) < 2 or ids[-1] != markers.end_calls:
        return None
    calls, at, last = [], 1, len(ids) - 1
    while at < last:
        try:
            middle = ids.index(markers.arguments, at)
            stop = ids.index(markers.end_call, middle)
        except ValueError:
            return None
        name_ids, argument_ids = ids[at + 1 : middle], ids[middle + 1 : stop]
        if ids[at] != markers.call or markers.special.intersection([*name_ids, *argument_ids]):
            return None
        identity = _text(tokenizer, name_ids)
        match = _CALL_ID.match(identity)
        if match is None:
            return None
        function = {"name": match["name"], "arguments": _text(tokenizer, argument_ids)}
        calls.append({"id": identity, "type": "function", "function": function})
        at = stop + 1
    return calls or None


def _text(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _needed(marker: int | None, text: str, what: str) -> int:
    if marker is None:
        raise DataError(f"an answer with {what}", needed=f"a tokenizer with {text}", found="none in this tokenizer")
    return marker

"""Token ids as callers give them (lists, tuples, NumPy arrays, torch tensors) -> a list of plain integers."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from typing import Annotated, Any

from vllm_compat.errors import VllmCompatError

__all__ = ["plain_token_ids"]


def plain_token_ids(request_id: str | None, token_ids: Iterable[Any]) -> list[int]:
    """Return the ids as Python integers, in a list of their own.

    NumPy and torch integers would otherwise travel into msgpack, hashes and comparisons.

    Args:
        request_id: For the message; None when the request has no id yet.
        token_ids: One dimension of integers from 0 on.

    Raises:
        VllmCompatError: It is no sequence, or one of the ids is no integer (bool is one by accident) or negative.
    """
    plain = _all_plain(token_ids) if isinstance(token_ids, (list, tuple)) else None
    if plain is not None:
        return plain
    asked = "a prompt" if request_id is None else f"prompt of request {request_id!r}"
    needed, advice = "token ids: integers from 0 on", "tokenise the prompt first"
    if isinstance(token_ids, (str, bytes)) or not hasattr(token_ids, "__iter__"):
        raise VllmCompatError(asked, needed=needed, found=repr(token_ids), advice=advice)
    ids: list[int] = []
    for token in token_ids:
        try:
            value = None if isinstance(token, bool) else token.__index__()
        except (AttributeError, TypeError):  # a row of a matrix has __index__ and refuses
            value = None
        if value is None or value < 0:
            raise VllmCompatError(asked, needed=needed, found=repr(token), advice=advice)
        ids.append(value)
    return ids


def _all_plain(token_ids: list[Any] | tuple[Any, ...]) -> list[int] | None:
    """A copy, when all are plain integers already, as from a tokenizer; None when they have to be looked at singly.

    In C, by the msgspec that vLLM brings: a loop over a long prompt costs as much as hashing its blocks.
    """
    if "msgspec" not in sys.modules:
        return None
    import msgspec

    try:
        converted: list[int] = msgspec.convert((token_ids,), _plain_prompt()).ids
    except msgspec.ValidationError:
        return None
    return converted


@functools.cache
def _plain_prompt() -> Any:
    # A struct, because msgspec keeps what it makes of a struct's types; a bare list type it would read on every call.
    import msgspec

    fields = [("ids", list[Annotated[int, msgspec.Meta(ge=0)]])]
    return msgspec.defstruct("PlainPrompt", fields, array_like=True)

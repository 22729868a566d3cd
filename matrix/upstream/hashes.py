"""Requests, and how their blocks are hashed."""

from __future__ import annotations

import os
from typing import Any

from upstream.ledger import Left

_SEED = os.environ.get("PYTHONHASHSEED")


def request(_: Any, stated: dict[str, Any]) -> dict[str, Any]:
    """Without a hasher of its own a test's request has none. The request for structured output is the factory's."""
    options = {"block_hasher": None, **stated}
    options.pop("structured_output_request", None)
    return options


def hasher(_: Any, stated: dict[str, Any]) -> dict[str, Any]:
    """Block size and the name of the function."""
    if stated.get("num_hash_lookahead_tokens"):
        raise Left("hash-lookahead")
    size = stated.get("hash_block_size", stated.get("block_size"))
    return {"block_size": size, "hash_algo": _name(stated["caching_hash_fn"])}


def none_hash(_: Any, stated: dict[str, Any]) -> dict[str, Any]:
    """The name of the function. The factory takes the seed that the process began with."""
    if os.environ.get("PYTHONHASHSEED") != _SEED:
        raise Left("another-seed")
    return {"hash_algo": _name(stated["hash_fn"])}


def _name(function: Any) -> str:
    """What CacheConfig calls a hash function of vLLM: its own name."""
    module, name = getattr(function, "__module__", ""), getattr(function, "__name__", "")
    if module not in {"vllm.utils", "vllm.utils.hashing"}:
        raise Left("hash-function")
    return str(name)

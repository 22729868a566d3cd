"""Block hashers, and the one-time initialisation of NONE_HASH that every hasher depends on.

vLLM initialises ``NONE_HASH``, the parent of every first block, only inside EngineCore. A request made by hand
therefore meets ``NameError: NONE_HASH``, and a request without a hasher meets an AssertionError, an IndexError or,
from 0.33, a cache that silently never hits. Here the order is kept: NONE_HASH first, once, then hashers.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

from vllm_compat._unset import UNSET
from vllm_compat.adapters.select import adapter
from vllm_compat.errors import HashFunctionMismatch

__all__ = ["BlockHasher", "ensure_none_hash", "make_block_hasher"]

#: Request -> hashes of its full blocks that are not hashed yet.
BlockHasher = Callable[[Any], list[bytes]]

_lock = threading.Lock()
#: Name of the function, and the NONE_HASH that it gave; vLLM may put another one in its place later.
_initialised: tuple[str, bytes] | None = None


def ensure_none_hash(hash_algo: str = "sha256") -> None:
    """Initialise vLLM's NONE_HASH for ``hash_algo``, once per process. Thread-safe.

    A second call with the same function does nothing; so does a call after vLLM's own EngineCore did it with the same
    function in this process. Before vLLM 0.29 NONE_HASH is random unless PYTHONHASHSEED is set, and bears no trace of
    the function: then one that vLLM made is accepted for any.

    Args:
        hash_algo: A name that ``CacheConfig.prefix_caching_hash_algo`` accepts: "sha256", "sha256_cbor", "xxhash", …

    Raises:
        HashFunctionMismatch: NONE_HASH already belongs to another function; hashes made with it would not match.
        ValueError: vLLM does not know the function.
    """
    global _initialised
    hashing = adapter("block_hashing")
    with _lock:
        standing = hashing.none_hash()
        if standing is not None and _initialised == (hash_algo, standing):
            return
        function = hashing.hash_function(hash_algo)
        if standing is None:
            hashing.init_none_hash(function)
            _initialised = hash_algo, hashing.none_hash()
            return
        by = "another function, by vLLM itself"
        if _initialised is not None and _initialised[1] == standing:
            # Ours, so we know more than the bytes may tell: another function than the one asked for.
            by = _initialised[0]
        elif hashing.made_by(function):
            return
        raise HashFunctionMismatch(
            f"block hashes with {hash_algo}",
            needed=f"a process whose NONE_HASH was initialised with {hash_algo}",
            found=f"NONE_HASH was initialised with {by}",
            advice="use one prefix_caching_hash_algo per process, or start a new process",
        )


def make_block_hasher(
    vllm_config: Any = None,
    kv_cache_config: Any = None,
    *,
    block_size: Any = UNSET,
    hash_algo: Any = UNSET,
) -> BlockHasher:
    """A function that hashes a request's full blocks, as vLLM's EngineCore makes it, with NONE_HASH initialised.

    Args:
        vllm_config: Where block size and hash function come from. Without it, the config that is current in
            ``set_current_vllm_config``, else the defaults of vLLM's CacheConfig.
        kv_cache_config: The scheduler's KVCacheConfig; models with several groups of different block sizes hash at
            their common granularity, which only it can tell.
        block_size: Tokens per hash, instead of the config's.
        hash_algo: Name of the hash function, instead of the config's.

    Returns:
        A callable for ``Request(block_hasher=…)``. ``len(request.block_hashes) == num_tokens // block_size``, or
        ``(num_tokens - n) // block_size`` where a config with an EAGLE-like draft makes each hash cover the n tokens
        after its block too (vLLM 0.33).

    Raises:
        HashFunctionMismatch: see ``ensure_none_hash``. ValueError: unknown function or block size below 1.
    """
    hashing = adapter("block_hashing")
    config = vllm_config
    if block_size is UNSET or hash_algo is UNSET:
        config = vllm_config if vllm_config is not None else hashing.current_config()
        if hash_algo is UNSET:
            hash_algo = hashing.cache_config(config).prefix_caching_hash_algo
        if block_size is UNSET:
            block_size = hashing.block_sizes(config, kv_cache_config)[1]
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1 token, not {block_size}")
    ensure_none_hash(hash_algo)
    hasher: BlockHasher = hashing.make_hasher(block_size, hashing.hash_function(hash_algo), hashing.lookahead(config))
    return hasher


#: Scheduler -> name of the hash function, and the hasher.
_hashers: weakref.WeakKeyDictionary[Any, tuple[str, BlockHasher]] = weakref.WeakKeyDictionary()


def hasher_of_scheduler(scheduler: Any) -> BlockHasher:
    """``make_block_hasher`` of a scheduler's configs, made once: its block sizes are settled when it is made."""
    try:
        kept = _hashers.get(scheduler)
    except TypeError:  # an object that stands in for one, without a hash or weak references
        return make_block_hasher(scheduler.vllm_config, scheduler.kv_cache_config)
    if kept is None:
        config = scheduler.vllm_config
        hasher = make_block_hasher(config, scheduler.kv_cache_config)
        _hashers[scheduler] = adapter("block_hashing").cache_config(config).prefix_caching_hash_algo, hasher
        return hasher
    ensure_none_hash(kept[0])
    return kept[1]

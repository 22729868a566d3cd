"""Block hashing: where the hash functions live, who initialises NONE_HASH, which block size a hasher takes."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from vllm_compat.adapters.base import Adapter, Need, resolve

BlockHasher = Callable[[Any], list[bytes]]

_UTILS = "vllm.v1.core.kv_cache_utils"


class BlockHashing_0_29(Adapter):
    """NONE_HASH comes from a seed that the module keeps; without PYTHONHASHSEED it is a constant for SHA-256.

    0.29.0 replaced the random seed of every process by ``DEFAULT_NONE_HASH_SEED`` (except for xxhash, which stays
    random), and 0.24.0 named the hasher's first parameter ``hash_block_size``.
    """

    surface = "block_hashing"
    since = (0, 29, 0)
    hasher = Need(f"{_UTILS}:get_request_block_hasher", passes=("hash_block_size", "caching_hash_fn"))
    init = Need(f"{_UTILS}:init_none_hash", passes=("hash_fn",))
    seed = Need(f"{_UTILS}:get_none_hash_seed")
    by_name = Need("vllm.utils.hashing:get_hash_fn_by_name", passes=("hash_fn_name",))
    sizes = Need(f"{_UTILS}:resolve_kv_cache_block_sizes", passes=("kv_cache_config", "vllm_config"))
    current = Need("vllm.config:get_current_vllm_config_or_none")
    needs = (hasher, init, seed, by_name, sizes, current)

    def hash_function(self, name: str) -> Callable[[Any], bytes]:
        """The function that ``CacheConfig.prefix_caching_hash_algo`` names. ValueError when unknown."""
        return self.construct(self.by_name, {"hash_fn_name": name})  # type: ignore[no-any-return]

    def none_hash(self) -> bytes | None:
        """NONE_HASH as it stands in this process; None while nobody has initialised it."""
        # Read through the module: init_none_hash rebinds the global, so an imported name would go stale.
        return getattr(importlib.import_module(_UTILS), "NONE_HASH", None)

    def made_by(self, hash_fn: Callable[[Any], bytes]) -> bool:
        """Whether the NONE_HASH that stands here is the one ``hash_fn`` gives."""
        return self.none_hash() == hash_fn(resolve(self.seed.symbol)())

    def init_none_hash(self, hash_fn: Callable[[Any], bytes]) -> None:
        self.construct(self.init, {"hash_fn": hash_fn})

    def make_hasher(self, block_size: int, hash_fn: Callable[[Any], bytes]) -> BlockHasher:
        return self.construct(  # type: ignore[no-any-return]
            self.hasher, {"hash_block_size": block_size, "caching_hash_fn": hash_fn}
        )

    def current_config(self) -> Any | None:
        """The config of the enclosing ``set_current_vllm_config``, or None."""
        return resolve(self.current.symbol)()

    def cache_config(self, vllm_config: Any | None) -> Any:
        """The CacheConfig of ``vllm_config``; without one, vLLM's defaults."""
        return vllm_config.cache_config if vllm_config is not None else resolve("vllm.config:CacheConfig")()

    def block_sizes(self, vllm_config: Any | None, kv_cache_config: Any | None = None) -> tuple[int, int]:
        """(scheduler block size, hash block size) in tokens, as EngineCore resolves them."""
        if vllm_config is None:
            size = self.cache_config(None).block_size
            return size, size
        if kv_cache_config is not None:
            sizes: tuple[int, int] = self.construct(
                self.sizes, {"kv_cache_config": kv_cache_config, "vllm_config": vllm_config}
            )
            return sizes
        parallel = vllm_config.parallel_config
        size = vllm_config.cache_config.block_size * parallel.decode_context_parallel_size
        return size, size


ADAPTERS = (BlockHashing_0_29,)

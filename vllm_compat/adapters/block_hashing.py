"""Block hashing: where the hash functions live, who initialises NONE_HASH, which block size a hasher takes."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any, ClassVar

from vllm_compat.adapters.base import Adapter, Need, resolve

BlockHasher = Callable[[Any], list[bytes]]

_UTILS = "vllm.v1.core.kv_cache_utils"
_HASHER = f"{_UTILS}:get_request_block_hasher"
_INIT = Need(f"{_UTILS}:init_none_hash", passes=("hash_fn",))
_SEED = Need(f"{_UTILS}:get_none_hash_seed")
_BY_NAME = Need("vllm.utils.hashing:get_hash_fn_by_name", passes=("hash_fn_name",))
_SIZES = Need(f"{_UTILS}:resolve_kv_cache_block_sizes", passes=("kv_cache_config", "vllm_config"))
_CURRENT = Need("vllm.config:get_current_vllm_config_or_none")


class BlockHashing_0_33(Adapter):
    """A hash may also cover the tokens after its block (0.33.0), which the cache of an EAGLE-like draft depends on."""

    surface = "block_hashing"
    since = (0, 33, 0)
    hasher = Need(_HASHER, passes=("hash_block_size", "caching_hash_fn", "num_hash_lookahead_tokens"))
    init, seed, by_name, sizes, current = _INIT, _SEED, _BY_NAME, _SIZES, _CURRENT
    needs: ClassVar[tuple[Need, ...]] = (hasher, init, seed, by_name, sizes, current)

    def hash_function(self, name: str) -> Callable[[Any], bytes]:
        """The function that ``CacheConfig.prefix_caching_hash_algo`` names. ValueError when unknown."""
        return self.construct(self.by_name, {"hash_fn_name": name})  # type: ignore[no-any-return]

    def none_hash(self) -> bytes | None:
        """NONE_HASH as it stands in this process; None while nobody has initialised it."""
        # Read through the module: init_none_hash rebinds the global, so an imported name would go stale.
        return getattr(importlib.import_module(_UTILS), "NONE_HASH", None)

    def made_by(self, hash_fn: Callable[[Any], bytes]) -> bool:
        """Whether the NONE_HASH that stands here can be the one that ``hash_fn`` gives."""
        return self.none_hash() == hash_fn(resolve(self.seed.symbol)())

    def init_none_hash(self, hash_fn: Callable[[Any], bytes]) -> None:
        self.construct(self.init, {"hash_fn": hash_fn})

    def lookahead(self, vllm_config: Any | None) -> int:
        """Tokens after its block that each hash covers too."""
        return vllm_config.num_hash_lookahead_tokens if vllm_config is not None else 0

    def make_hasher(self, block_size: int, hash_fn: Callable[[Any], bytes], lookahead: int = 0) -> BlockHasher:
        return self.construct(  # type: ignore[no-any-return]
            self.hasher,
            {"hash_block_size": block_size, "caching_hash_fn": hash_fn, "num_hash_lookahead_tokens": lookahead},
        )

    def current_config(self) -> Any | None:
        """The config of the enclosing ``set_current_vllm_config``, or None."""
        return resolve(self.current.symbol)()

    def cache_config(self, vllm_config: Any | None) -> Any:
        """The CacheConfig of ``vllm_config``; without one, vLLM's defaults."""
        return vllm_config.cache_config if vllm_config is not None else resolve("vllm.config:CacheConfig")()

    def default_block_size(self) -> int:
        """Tokens per block where no config says it: what CacheConfig starts from."""
        size = self.cache_config(None).block_size
        # None until 0.18: the platform filled it in while VllmConfig was made, with 16 unless a kernel wants more.
        return size if size is not None else 16

    def context_parallel_size(self, vllm_config: Any) -> int:
        """Ranks that share the tokens of a block; their block counts as one."""
        return vllm_config.parallel_config.decode_context_parallel_size  # type: ignore[no-any-return]

    def block_sizes(self, vllm_config: Any | None, kv_cache_config: Any | None = None) -> tuple[int, int]:
        """(scheduler block size, hash block size) in tokens, as EngineCore resolves them."""
        if vllm_config is None:
            size = self.default_block_size()
            return size, size
        if kv_cache_config is not None:
            sizes: tuple[int, int] = self.construct(
                self.sizes, {"kv_cache_config": kv_cache_config, "vllm_config": vllm_config}
            )
            return sizes
        size = vllm_config.cache_config.block_size * self.context_parallel_size(vllm_config)
        return size, size


class BlockHashing_0_29(BlockHashing_0_33):
    """NONE_HASH comes from a seed that the module keeps; without PYTHONHASHSEED it is a constant for SHA-256.

    0.29.0 replaced the random seed of every process by ``DEFAULT_NONE_HASH_SEED`` (except for xxhash, which stays
    random).
    """

    since = (0, 29, 0)
    hasher = Need(_HASHER, passes=("hash_block_size", "caching_hash_fn"))
    needs: ClassVar[tuple[Need, ...]] = (hasher, _INIT, _SEED, _BY_NAME, _SIZES, _CURRENT)

    def lookahead(self, vllm_config: Any | None) -> int:
        del vllm_config
        return 0

    def make_hasher(self, block_size: int, hash_fn: Callable[[Any], bytes], lookahead: int = 0) -> BlockHasher:
        del lookahead  # always 0
        return self.construct(  # type: ignore[no-any-return]
            self.hasher, {"hash_block_size": block_size, "caching_hash_fn": hash_fn}
        )


class BlockHashing_0_26(BlockHashing_0_29):
    """NONE_HASH is 32 random bytes in every process, unless PYTHONHASHSEED is set (up to 0.28.0).

    Random bytes bear no trace of the function, nor does it matter: the same bytes would do for any of them. So an
    initialisation by vLLM itself is accepted as it is.
    """

    since = (0, 26, 0)
    needs: ClassVar[tuple[Need, ...]] = (BlockHashing_0_29.hasher, _INIT, _BY_NAME, _SIZES, _CURRENT)

    def made_by(self, hash_fn: Callable[[Any], bytes]) -> bool:
        seed = os.environ.get("PYTHONHASHSEED")
        return seed is None or self.none_hash() == hash_fn(seed)


class BlockHashing_0_24(BlockHashing_0_26):
    """The hasher's first parameter is called ``hash_block_size`` (0.24.0).

    Prefill context parallelism multiplies the block size; it went out of the formula in 0.26.0.
    """

    since = (0, 24, 0)

    def context_parallel_size(self, vllm_config: Any) -> int:
        parallel = vllm_config.parallel_config
        return parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size  # type: ignore[no-any-return]


class BlockHashing_0_20(BlockHashing_0_24):
    """Scheduler and hashes have block sizes of their own, which ``resolve_kv_cache_block_sizes`` derives (0.20.0)."""

    since = (0, 20, 0)
    hasher = Need(_HASHER, passes=("block_size", "caching_hash_fn"))
    needs: ClassVar[tuple[Need, ...]] = (hasher, _INIT, _BY_NAME, _SIZES, _CURRENT)

    def make_hasher(self, block_size: int, hash_fn: Callable[[Any], bytes], lookahead: int = 0) -> BlockHasher:
        del lookahead
        return self.construct(self.hasher, {"block_size": block_size, "caching_hash_fn": hash_fn})  # type: ignore[no-any-return]


class BlockHashing_0_14(BlockHashing_0_20):
    """One block size for scheduler and hashes: the cache's, times both context parallel sizes (0.12.0-0.19.1)."""

    since = (0, 14, 0)
    needs: ClassVar[tuple[Need, ...]] = (BlockHashing_0_20.hasher, _INIT, _BY_NAME, _CURRENT)

    def block_sizes(self, vllm_config: Any | None, kv_cache_config: Any | None = None) -> tuple[int, int]:
        del kv_cache_config  # all groups share one size
        return super().block_sizes(vllm_config)


class BlockHashing_0_12(BlockHashing_0_14):
    """``get_current_vllm_config`` alone is there (up to 0.13.0), which makes a config of defaults where none is set."""

    since = (0, 12, 0)
    current = Need("vllm.config:get_current_vllm_config")
    needs: ClassVar[tuple[Need, ...]] = (BlockHashing_0_20.hasher, _INIT, _BY_NAME, current)

    def current_config(self) -> Any | None:
        # Its global, rather than a call: a config of defaults looks for a device and a model.
        return resolve(self.current.symbol).__globals__["_current_vllm_config"]


class BlockHashing_0_11_1(BlockHashing_0_12):
    """The hash functions live in ``vllm.utils.hashing`` (0.11.1); prefill context parallelism came in 0.12.0."""

    since = (0, 11, 1)

    def context_parallel_size(self, vllm_config: Any) -> int:
        return vllm_config.parallel_config.decode_context_parallel_size  # type: ignore[no-any-return]


class BlockHashing_0_10(BlockHashing_0_11_1):
    """The hash functions live in ``vllm.utils`` (up to 0.11.0), and hashes keep the cache's own block size.

    The Scheduler multiplies by the context parallel size by itself; EngineCore hashes without it.
    """

    since = (0, 10, 2)
    by_name = Need("vllm.utils:get_hash_fn_by_name", passes=("hash_fn_name",))
    needs: ClassVar[tuple[Need, ...]] = (BlockHashing_0_20.hasher, _INIT, by_name, BlockHashing_0_12.current)

    def block_sizes(self, vllm_config: Any | None, kv_cache_config: Any | None = None) -> tuple[int, int]:
        scheduler_size, _ = super().block_sizes(vllm_config, kv_cache_config)
        hash_size = vllm_config.cache_config.block_size if vllm_config is not None else scheduler_size
        return scheduler_size, hash_size


ADAPTERS = (
    BlockHashing_0_33,
    BlockHashing_0_29,
    BlockHashing_0_26,
    BlockHashing_0_24,
    BlockHashing_0_20,
    BlockHashing_0_14,
    BlockHashing_0_12,
    BlockHashing_0_11_1,
    BlockHashing_0_10,
)
#: Earlier releases have all that these need as well; see ``select.in_order``.
UNSEEN = (BlockHashing_0_26, BlockHashing_0_12)

"""Properties of block hashes made through make_block_hasher, on vLLM's own hashing."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from typing import Any

import pytest
from here import RELEASE, by_release, hash_functions
from hypothesis import given
from hypothesis import strategies as st

import vllm_compat as vc
from vllm_compat.adapters.select import adapter

TOKENS = st.lists(st.integers(0, 163_839), max_size=300)
SIZES = st.integers(1, 128)


@pytest.fixture(scope="module")
def params() -> Any:
    return vc.make_sampling_params(max_tokens=1)


def _hashes(ids: list[int], size: int, params: Any) -> list[bytes]:
    hasher = vc.make_block_hasher(block_size=size, hash_algo="sha256")
    return list(vc.make_request("r", ids, params, block_hasher=hasher).block_hashes)


@given(ids=TOKENS, size=SIZES)
def test_equal_ids_give_equal_hashes(params: Any, ids: list[int], size: int) -> None:
    """One hash per full block, the same for the same ids, and different for every block of one prompt."""
    hashes = _hashes(ids, size, params)
    assert len(ids) // size == len(hashes)
    assert _hashes(list(ids), size, params) == hashes
    assert len(set(hashes)) == len(hashes)


@given(ids=TOKENS.filter(bool), size=SIZES, data=st.data())
def test_a_changed_token_changes_its_block_and_all_later_ones(
    params: Any, ids: list[int], size: int, data: st.DataObject
) -> None:
    """And leaves the blocks before it alone."""
    at = data.draw(st.integers(0, len(ids) - 1))
    changed = [*ids[:at], ids[at] + 1, *ids[at + 1 :]]
    before, after = _hashes(ids, size, params), _hashes(changed, size, params)
    block = at // size
    assert before[:block] == after[:block]
    assert all(a != b for a, b in zip(before[block:], after[block:], strict=True))


@given(ids=TOKENS, more=TOKENS, size=SIZES)
def test_hashes_of_a_prefix_are_a_prefix_of_the_hashes(params: Any, ids: list[int], more: list[int], size: int) -> None:
    """Also when the tokens come later: a request that grows hashes its new full blocks, and no block twice."""
    hasher = vc.make_block_hasher(block_size=size, hash_algo="sha256")
    request = vc.make_request("r", ids, params, block_hasher=hasher)
    assert list(request.block_hashes) == _hashes([*ids, *more], size, params)[: len(ids) // size]
    request.append_output_token_ids(more)
    assert list(request.block_hashes) == _hashes([*ids, *more], size, params)


@pytest.mark.parametrize("size", [1, 16, 128])
@pytest.mark.parametrize("blocks", [0, 1, 3])
def test_exact_multiples_and_empty_prompts(params: Any, size: int, blocks: int) -> None:
    """The last token of a full block completes it; an empty prompt has no block."""
    assert blocks == len(_hashes([5] * (blocks * size), size, params))
    assert blocks == len(_hashes([5] * (blocks * size + size - 1), size, params))


def test_block_size_below_one_is_refused() -> None:
    """Rather than an endless loop inside vLLM's hasher."""
    with pytest.raises(ValueError, match="at least 1"):
        vc.make_block_hasher(block_size=0, hash_algo="sha256")


#: Without PYTHONHASHSEED, NONE_HASH is 32 random bytes in every process; from 0.29.0 a constant for SHA-256.
RANDOM = RELEASE < (0, 29, 0)
SEEDED = {"PYTHONHASHSEED": "7"}


def test_hashes_equal_those_of_vllms_engine_core() -> None:
    """The hasher is vLLM's own with the NONE_HASH that EngineCore would make."""
    said = _in_process(
        """
        import vllm_compat as vc
        from vllm.v1.core import kv_cache_utils
        vc.ensure_none_hash("sha256")
        ours = kv_cache_utils.NONE_HASH
        kv_cache_utils.init_none_hash(hashing.sha256)
        print(ours == kv_cache_utils.NONE_HASH)
        """,
        **(SEEDED if RANDOM else {}),
    )
    assert said == "True"


def _in_process(code: str, **environment: str) -> str:
    head = f"import {hash_functions().__name__} as hashing\n"
    done = subprocess.run(
        [sys.executable, "-c", head + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={**os.environ, **environment},
    )
    return done.stdout.strip().splitlines()[-1]


def test_another_function_in_one_process_is_an_error() -> None:
    """The same function again is fine, from many threads too; another one would silently never match."""
    said = _in_process(
        """
        import threading
        import vllm_compat as vc
        from vllm.v1.core import kv_cache_utils
        seen = []
        def run():
            vc.ensure_none_hash("sha256_cbor")
            seen.append(kv_cache_utils.NONE_HASH)
        threads = [threading.Thread(target=run) for _ in range(16)]
        [t.start() for t in threads]; [t.join() for t in threads]
        assert len(seen) == 16 and len(set(seen)) == 1
        try:
            vc.ensure_none_hash("sha256")
        except vc.HashFunctionMismatch as error:
            print(type(error).__name__, error.found)
        """
    )
    assert said == "HashFunctionMismatch NONE_HASH was initialised with sha256_cbor"


def test_vllms_own_initialisation_is_accepted_or_named() -> None:
    """After EngineCore initialised NONE_HASH, the same function is a no-op and another one an error."""
    said = _in_process(
        """
        import vllm_compat as vc
        from vllm.v1.core import kv_cache_utils
        kv_cache_utils.init_none_hash(hashing.sha256)
        value = kv_cache_utils.NONE_HASH
        try:
            vc.ensure_none_hash("sha256_cbor")
        except vc.HashFunctionMismatch as error:
            found = error.found
        vc.ensure_none_hash("sha256")
        assert kv_cache_utils.NONE_HASH == value
        print(found)
        """,
        **(SEEDED if RANDOM else {}),
    )
    assert "by vLLM itself" in said


def test_a_later_initialisation_by_vllm_is_not_called_ours() -> None:
    """An engine that replaces NONE_HASH with another function's is named as what it is."""
    said = _in_process(
        """
        import vllm_compat as vc
        from vllm.v1.core import kv_cache_utils
        vc.ensure_none_hash("sha256")
        kv_cache_utils.init_none_hash(hashing.sha256_cbor)
        try:
            vc.ensure_none_hash("sha256")
        except vc.HashFunctionMismatch as error:
            print(error.found)
        """,
        **(SEEDED if RANDOM else {}),
    )
    assert "by vLLM itself" in said


def test_random_bytes_of_vllm_are_accepted_for_any_function() -> None:
    """Where NONE_HASH is random it bears no trace of the function; then what vLLM made is kept as it is."""
    said = _in_process(
        """
        import os
        os.environ.pop("PYTHONHASHSEED", None)
        import vllm_compat as vc
        from vllm.v1.core import kv_cache_utils
        kv_cache_utils.init_none_hash(hashing.sha256)
        value = kv_cache_utils.NONE_HASH
        try:
            vc.ensure_none_hash("sha256_cbor")
            print("accepted", kv_cache_utils.NONE_HASH == value)
        except vc.HashFunctionMismatch:
            print("refused")
        """
    )
    assert said == ("accepted True" if RANDOM else "refused")


def test_random_seeds_are_recognised() -> None:
    """Random bytes (any function up to 0.28, xxhash later): a second call is a no-op all the same."""
    algorithm = by_release(("0", "sha256"), ("0.29.0", "xxhash"))
    said = _in_process(
        f"""
        import os
        os.environ.pop("PYTHONHASHSEED", None)
        import vllm_compat as vc
        from vllm.v1.core import kv_cache_utils
        vc.ensure_none_hash("{algorithm}")
        value = kv_cache_utils.NONE_HASH
        vc.ensure_none_hash("{algorithm}")
        assert kv_cache_utils.NONE_HASH == value
        print("same")
        """
    )
    assert said == "same"


def test_unknown_function_is_vllms_own_error() -> None:
    """vLLM's ValueError names what it knows."""
    with pytest.raises(ValueError, match="md5"):
        vc.ensure_none_hash("md5")


@pytest.mark.parametrize("seed", [None, "7"])
def test_processes_agree(seed: str | None) -> None:
    """sha256 hashes are the same in two processes with PYTHONHASHSEED, and from 0.29 on without it too."""
    code = """
        import os
        import vllm_compat as vc
        h = vc.make_block_hasher(block_size=4, hash_algo="sha256")
        r = vc.make_request("r", list(range(8)), vc.make_sampling_params(max_tokens=1), block_hasher=h)
        print(r.block_hashes[-1].hex())
    """
    environment = {} if seed is None else {"PYTHONHASHSEED": seed}
    agree = _in_process(code, **environment) == _in_process(code, **environment)
    assert agree is (seed is not None or not RANDOM)


def test_concurrent_first_use_of_a_surface() -> None:
    """Many threads choosing an adapter at once all get one."""
    made: list[Any] = []
    threads = [
        threading.Thread(target=lambda: made.append(vc.make_block_hasher(block_size=16, hash_algo="sha256")))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 8


def test_the_current_config_gives_the_block_size(scheduler_config: Any, params: Any) -> None:
    """Inside ``set_current_vllm_config`` its block size holds, outside of it the default of vLLM's CacheConfig."""
    from vllm.config import set_current_vllm_config

    size = scheduler_config.cache_config.block_size
    scheduler_config.cache_config.block_size = 3 * size
    try:
        with set_current_vllm_config(scheduler_config):
            inside = vc.make_request("r", list(range(6 * size)), params)
    finally:
        scheduler_config.cache_config.block_size = size
    outside = vc.make_request("r", list(range(6 * size)), params)
    assert len(inside.block_hashes) == 2
    assert len(outside.block_hashes) == 6 * size // 16


def test_hashes_that_look_ahead(scheduler_config: Any, params: Any) -> None:
    """From 0.33.0 a hash can cover tokens after its block, so it waits for them; before, nothing looks ahead."""
    vc.ensure_none_hash("sha256")
    hashing = adapter("block_hashing")
    hasher = hashing.make_hasher(16, hashing.hash_function("sha256"), 3)
    request = vc.make_request("r", list(range(48)), params, block_hasher=hasher)
    assert len(request.block_hashes) == by_release(("0", 3), ("0.33.0", 2))
    assert hashing.lookahead(scheduler_config) == 0  # it has no draft

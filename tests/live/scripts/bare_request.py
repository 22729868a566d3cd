"""One request through a scheduler with prefix caching, made in one of three ways; prints the error's name as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from here import BLOCK_SIZE, EAGER, by_release, hash_functions


def main(case: str, model: str) -> None:
    import vllm_compat as vc

    config = vc.make_vllm_config(
        model=model,
        dtype="float32",
        **EAGER,
        max_model_len=256,
        block_size=BLOCK_SIZE,
        enable_prefix_caching=True,
    )
    scheduler = vc.make_scheduler(config, vc.make_kv_cache_config(config, num_blocks=32))
    params = vc.make_sampling_params(temperature=0.0, max_tokens=2)
    prompt = list(range(3, 3 + 4 * scheduler.block_size))
    error, cached = "", 0
    try:
        if case == "make_request":
            request = vc.make_request("r", prompt, params, scheduler=scheduler)
        else:
            from vllm.v1.core.kv_cache_utils import get_request_block_hasher
            from vllm.v1.request import Request

            sha256 = hash_functions().sha256
            hasher = get_request_block_hasher(scheduler.block_size, sha256) if case == "no_none_hash" else None
            eos = by_release(("0", {"eos_token_id": None}), ("0.17.0", {}))  # then a field of the sampling params
            request = Request("r", prompt, params, None, block_hasher=hasher, **eos)
        scheduler.add_request(request)
        output = scheduler.schedule()
        scheduler.update_from_output(output, vc.make_model_runner_output({"r": [5]}))
        cached = sum(block.block_hash is not None for block in scheduler.kv_cache_manager.get_blocks("r").blocks[0])
    except Exception as caught:
        error = type(caught).__name__
    print(json.dumps({"error": error, "cached_blocks": cached}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])

"""vLLM's own front end, without an engine: token ids, text and dictionaries become the same native Request."""

from __future__ import annotations

from typing import Any

import pytest

import vllm_compat as vc
from vllm_compat.adapters.select import adapter

EOS = 2030  # of the tiny Llama


@pytest.fixture(scope="module")
def processor(scheduler_config: Any) -> Any:
    return adapter("input_processor").build(scheduler_config)


def _request(config: Any, processor: Any, prompt: Any, **options: Any) -> Any:
    params = options.pop("params", None) or vc.make_sampling_params(temperature=0.0, max_tokens=5)
    given = {"request_id": "r", "params": params, "arrival_time": 1.5, "lora_request": vc.UNSET, **options}
    return adapter("input_processor").request(processor, prompt, given, vc.make_block_hasher(config))


def test_token_ids(scheduler_config: Any, processor: Any) -> None:
    """As they are, under the caller's id, hashed, with the model's end-of-sequence id; the caller's params stay."""
    ids = list(range(3, 80))
    params = vc.make_sampling_params(temperature=0.0, max_tokens=None, min_tokens=2)
    read = vc.read_request(request := _request(scheduler_config, processor, ids, params=params, priority=3))
    assert ("r", ids, 1.5, 3) == tuple(read[n] for n in ("request_id", "prompt_token_ids", "arrival_time", "priority"))
    assert read["eos_token_id"] == EOS
    assert EOS in read["sampling_params"].all_stop_token_ids
    assert read["sampling_params"].max_tokens == 256 - len(ids)  # what max_model_len leaves
    assert (None, False) == (params.max_tokens, EOS in params.all_stop_token_ids)
    made = vc.make_request("r", ids, read["sampling_params"], vllm_config=scheduler_config)
    assert made.block_hashes == request.block_hashes
    assert len(made.block_hashes) == len(ids) // scheduler_config.cache_config.block_size


@pytest.mark.parametrize("form", ["ids", "text", "dictionary"])
def test_a_salt_is_kept_whatever_the_prompt(scheduler_config: Any, processor: Any, tokenizer: Any, form: str) -> None:
    """Two tenants never share a block, in whichever form they ask."""
    text = "The quick brown fox jumps over the lazy dog. " * 5
    ids = tokenizer.encode(text)
    prompt = {"ids": ids, "text": text, "dictionary": {"prompt": text}}[form]
    plain, salted = (_request(scheduler_config, processor, prompt, cache_salt=salt) for salt in (None, "tenant"))
    assert ids == list(plain.prompt_token_ids) == list(salted.prompt_token_ids)
    assert (None, "tenant") == (plain.cache_salt, salted.cache_salt)
    assert len(plain.block_hashes) > 0
    assert not set(plain.block_hashes) & set(salted.block_hashes)


def test_vllms_own_validation_speaks(scheduler_config: Any, processor: Any) -> None:
    """A prompt longer than the model takes is vLLM's own error."""
    # Its class is no ValueError in every release.
    with pytest.raises(Exception, match=r"max_model_len|maximum model length"):
        _request(scheduler_config, processor, list(range(3, 403)))

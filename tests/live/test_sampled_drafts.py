"""Speculative decoding of requests that are sampled, on a CPU."""

from __future__ import annotations

import pytest
from here import NO_SPECULATION, SPECULATES
from states import open_loop

import vllm_compat as vc


@pytest.mark.filterwarnings("ignore:(.|\n)*reflected list")  # numba about vLLM's n-gram proposer
@pytest.mark.skipif(not SPECULATES, reason=NO_SPECULATION)
def test_the_likeliest_token_alone_is_what_greedy_decoding_takes(tiny_llama: str, prompts: list[list[int]]) -> None:
    """With a temperature and top_k=1 there is nothing to choose, so drafts are accepted or not as without one.

    Beside a request that is greedy and one that draws from all tokens: each has its own temperature, top_k and top_p.
    """
    options = {"max_tokens": 24, "ignore_eos": True}
    greedy = vc.make_sampling_params(temperature=0.0, **options)
    # top_k by itself fails in a step without drafts from 0.32.0 on (releases.toml).
    likeliest = vc.make_sampling_params(temperature=0.7, top_k=1, top_p=0.9, seed=1, **options)
    free = vc.make_sampling_params(temperature=2.0, seed=2, **options)
    speculative = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    with open_loop(tiny_llama, speculative_config=speculative) as loop:
        expected = list(loop.generate(prompts[:3], greedy))
        mixed = list(loop.generate([*prompts[:3], prompts[0]], [likeliest, greedy, likeliest, free]))
    assert any(step.accepted for done in mixed[:3] for step in done.draft_steps)
    assert [done.token_ids for done in expected] == [done.token_ids for done in mixed[:3]]
    assert expected[0].token_ids != mixed[3].token_ids

"""Hidden states of prompts with images, on a tiny ``KimiK25ForConditionalGeneration`` with its vision tower."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import FIXTURE
from here import KIMI_K25, NO_KIMI_K25
from kimi_k25 import build
from states import captured_states, open_loop, relative_error

import vllm_compat as vc

pytestmark = pytest.mark.skipif(not KIMI_K25, reason=NO_KIMI_K25)


def picture(seed: int, height: int, width: int) -> dict[str, Any]:
    """One item of Kimi-K2.5's modality."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return {"type": "image", "image": Image.fromarray(pixels), "uuid": None}


def see_images(model: torch.nn.Module) -> None:
    """Let the vision tower tell images apart: with vLLM's dummy weights its norms hide them behind its biases."""
    for name, parameter in model.named_parameters():
        if not name.startswith("language_model.") and parameter.ndim == 1:
            parameter.data.fill_(float(name.endswith("weight")))


def prompt(ids: list[int], media_pad: int, *pictures: dict[str, Any]) -> Any:
    """Token ids with a placeholder per picture in their middle; without pictures the ids."""
    if not pictures:
        return ids
    middle = len(ids) // 2
    with_media = [*ids[:middle], *([media_pad] * len(pictures)), *ids[middle:]]
    return {"prompt_token_ids": with_media, "multi_modal_data": {"vision_chunk": list(pictures)}}


def test_images_are_positions_like_any_other(tmp_path: Path, tokenizer: Any, prompts: list[list[int]]) -> None:
    """Rows of an image's placeholders are captured under the ids that the engine fed.

    In a mixed batch as one by one, by either way; another image changes its own rows and nothing before them.
    """
    vc.enable("llvmlite-proxy")
    media_pad = tokenizer.convert_tokens_to_ids("<|media_pad|>")
    small, large, other = picture(0, 28, 28), picture(1, 56, 84), picture(2, 28, 28)
    sent = [
        prompt(prompts[0], media_pad, small),
        prompt(prompts[1], media_pad),
        prompt(prompts[2], media_pad, large, small),
        prompt(prompts[0], media_pad, other),
    ]
    params = vc.make_sampling_params(temperature=0.0, max_tokens=3, ignore_eos=True)
    model = str(build(FIXTURE, tmp_path / "k25"))
    # The checkpoint has no vision tower, and vLLM fills a whole model or none.
    with open_loop(model, load_format="dummy", mm_processor_cache_gb=0) as loop:
        see_images(loop.executor.driver_worker.worker.model_runner.get_model())
        aux = captured_states(loop, (2, 5, 8), sent, params, "aux")
        hooks = captured_states(loop, (2, 5, 8), sent, params, "hooks")
        alone = [captured_states(loop, (2, 5, 8), [one], params)[0] for one in sent]

    for a, b, c in zip(aux, hooks, alone, strict=True):
        assert torch.equal(a.hidden_states, b.hidden_states)
        assert a.token_ids == c.token_ids
        assert relative_error(a.hidden_states, c.hidden_states).max() < 1e-5
    # Patches of 14 pixels, merged two by two.
    fed = [states.token_ids.count(media_pad) for states in aux]
    assert [1, 0, 2 * 3 + 1, 1] == fed
    middle = len(prompts[0]) // 2
    first, last = aux[0].hidden_states, aux[3].hidden_states
    assert media_pad == aux[0].token_ids[middle]
    assert relative_error(first[:middle], last[:middle]).max() < 1e-5
    assert relative_error(first[middle : middle + 1], last[middle : middle + 1]).min() > 1e-3

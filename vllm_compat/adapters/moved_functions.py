"""Functions of vLLM whose signature changed with their place, with one signature for every release."""

from __future__ import annotations

from typing import Any

from vllm_compat.adapters.moves import find
from vllm_compat.adapters.signature import signature_of
from vllm_compat.errors import UnsupportedField
from vllm_compat.installed import installed

__all__ = ["init_tokenizer_from_configs", "tokens_input"]


def init_tokenizer_from_configs(model_config: Any) -> Any:
    """The tokenizer that ``model_config`` names, as vLLM's engines load it; None with ``skip_tokenizer_init``.

    vLLM 0.10.2 took the configs of scheduler and LoRA too and returned a TokenizerGroup; 0.11.0 to 0.11.2 take the
    model's alone; from 0.12.0 on the function is gone, and ``cached_tokenizer_from_config`` is what is left.
    Prompts are truncated on the left where the model generates, on the right where it pools.
    """
    if model_config.skip_tokenizer_init:
        return None
    _, cached_tokenizer_from_config = find("cached_tokenizer_from_config")
    side = "right" if model_config.runner_type == "pooling" else "left"
    return cached_tokenizer_from_config(model_config, truncation_side=side)


def tokens_input(prompt_token_ids: list[int], *, prompt: str | None = None, cache_salt: str | None = None) -> Any:
    """Rendered inputs of one prompt, a TypedDict: what the engine takes without tokenizing anything again.

    Called ``token_inputs`` up to 0.18.1. There the second positional parameter was the prompt's text, then the salt.

    Raises:
        UnsupportedField: ``prompt`` is set, and this release (0.11.1 to 0.16.0) cannot carry it.
    """
    symbol, function = find("tokens_input")
    given = {"prompt": prompt, "cache_salt": cache_salt}
    given = {name: value for name, value in given.items() if value is not None}
    live = signature_of(function, symbol=symbol)
    for name in given:
        if not live.accepts(name):
            raise UnsupportedField(
                symbol=f"tokens_input.{name}",
                needed=f"a vLLM whose {symbol} takes {name}",
                found=str(installed()),
                advice=f"leave {name} unset",
            )
    return function(prompt_token_ids, **given)

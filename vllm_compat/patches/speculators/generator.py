"""``VllmHiddenStatesGenerator`` with another inside: EngineLoop runs the prompts, capture cuts the rows into requests.

The class, its attributes and what ``generate`` returns are speculators'; of its own scheduler, KV cache, executor and
worker extension nothing is left, and with them go the releases that they broke in.
"""

from __future__ import annotations

import inspect
import os
import weakref
from collections.abc import Callable
from typing import Any

from vllm_compat.errors import CaptureError, UnsupportedField
from vllm_compat.installed import installed
from vllm_compat.patches.patch import Wrap
from vllm_compat.patches.speculators import record

MODULE = "speculators.data_generation.vllm_hidden_states_generator"

#: What 0.3.0 and 0.4.0 hard-code: sequences a batch, the least token budget of a step, tokens generated.
MAX_NUM_SEQS = 32
MIN_MAX_BATCHED_TOKENS = 8192
MAX_DECODE_TOKENS = 1

_PARAMETERS = {
    "model_path",
    "layer_ids",
    "max_model_len",
    "gpu_memory_utilization",
    "tensor_parallel_size",
    "max_num_batched_tokens",  # 0.4.0
}


def _init(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    from transformers import AutoTokenizer

    from vllm_compat.capture import capture_hidden_states
    from vllm_compat.engine import EngineLoop

    given = _arguments(wrapped, args, kwargs)
    instance.model_path = given["model_path"]
    instance.tensor_parallel_size = given["tensor_parallel_size"]
    instance._request_counter = 0
    instance.tokenizer = AutoTokenizer.from_pretrained(given["model_path"], trust_remote_code=True)
    asked = {name: value for name, value in given.items() if name != "layer_ids"}
    instance.vllm_config = instance._create_vllm_config(**asked)
    num_layers = instance.vllm_config.model_config.hf_text_config.num_hidden_layers
    instance.layer_ids = _layer_ids(given["layer_ids"], num_layers)
    boundaries = record.boundaries(instance.layer_ids)
    record.begin(instance, num_layers)
    _spawn_workers()

    loop = EngineLoop(instance.vllm_config)
    # At interpreter exit as well, before modules are cleared; speculators' own __del__ comes too late for that.
    instance._vllm_compat_close = weakref.finalize(instance, loop.shutdown)
    instance._vllm_compat = loop, capture_hidden_states(loop, boundaries)
    instance.executor, instance.scheduler = loop.executor, loop.scheduler


def _spawn_workers() -> None:
    """Workers of a GPU are started anew, as vLLM's own command line does, unless the user said otherwise.

    What is imported before (speculators, transformers) may have asked torch for its devices, after which CUDA does not
    start in a forked process; vLLM looks only at whether it has been initialised here.
    """
    if installed().platform != "cpu":
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")


def _arguments(wrapped: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    bound = inspect.signature(wrapped).bind(*args, **kwargs)
    bound.apply_defaults()
    unknown = sorted(bound.arguments.keys() - _PARAMETERS)
    if unknown:
        raise UnsupportedField(
            symbol=f"VllmHiddenStatesGenerator.{unknown[0]}",
            needed="the parameters of speculators 0.3.0 or 0.4.0",
            found=f"a generator with {', '.join(unknown)}",
            advice="disable the patch 'speculators', and use the vLLM that this version of it was written for",
        )
    return dict(bound.arguments)


def _create_vllm_config(
    wrapped: Callable[..., Any],
    instance: Any,  # noqa: ARG001
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    from vllm_compat.factories.config import make_vllm_config

    given = _arguments(wrapped, args, kwargs)
    budget = given.get("max_num_batched_tokens") or max(MIN_MAX_BATCHED_TOKENS, given["max_model_len"])
    return make_vllm_config(
        model=given["model_path"],
        tokenizer=given["model_path"],
        trust_remote_code=True,
        dtype="auto",
        max_model_len=given["max_model_len"],
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=budget,
        gpu_memory_utilization=given["gpu_memory_utilization"],
        tensor_parallel_size=given["tensor_parallel_size"],
        distributed_executor_backend="mp",
        enable_prefix_caching=False,  # nothing is ever read from it
        enforce_eager=True,
    )


def _layer_ids(asked: list[int] | None, num_layers: int) -> list[int]:
    if asked is None:
        return [2, num_layers // 2, num_layers - 3, num_layers - 1]
    for layer_id in asked:
        if not 0 <= layer_id < num_layers:
            # speculators' own words, since callers may match them.
            msg = f"Layer index {layer_id} out of bounds [0, {num_layers - 1}]"
            raise ValueError(msg)
    return asked


def _generate(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[dict[str, Any]]:
    import torch

    from vllm_compat.factories.params import make_sampling_params

    (token_ids,) = inspect.signature(wrapped).bind(*args, **kwargs).arguments.values()
    if len(token_ids) == 0:
        msg = "token_ids cannot be empty"
        raise ValueError(msg)
    # vLLM wants room for the token that it generates.
    limit = instance.vllm_config.model_config.max_model_len - MAX_DECODE_TOKENS
    prompts = [(ids.tolist() if isinstance(ids, torch.Tensor) else list(ids))[:limit] for ids in token_ids]
    _refuse_empty(prompts)
    instance._request_counter += 1

    loop, capture = instance._vllm_compat
    places = [capture.layers.index(boundary) for boundary in record.boundaries(instance.layer_ids)]
    results = []
    params = make_sampling_params(max_tokens=MAX_DECODE_TOKENS, temperature=0.0)
    for prompt, done in zip(prompts, loop.generate(prompts, params), strict=True):
        captured = capture.pop(done.request_id)
        _check(prompt, captured)
        # Each a copy of its own: torch.save writes the whole storage under a view.
        layers = [captured.hidden_states[:, at].clone(memory_format=torch.contiguous_format) for at in places]
        results.append(
            {"input_ids": torch.tensor(prompt, dtype=torch.long), "hidden_states": layers, "loss_mask": None}
        )
    return results


def _refuse_empty(prompts: list[list[int]]) -> None:
    empty = [place for place, prompt in enumerate(prompts) if not prompt]
    if empty:
        # Before anything is queued: vLLM's scheduler would fail on it, in this call and in every later one.
        raise CaptureError(
            f"hidden states of prompt {empty[0]} of {len(prompts)}",
            needed="at least one token",
            found="an empty prompt",
            advice="leave empty rows out of the batch, with their loss masks",
        )


def _check(prompt: list[int], captured: Any) -> None:
    if list(captured.token_ids) != prompt:
        raise CaptureError(
            f"hidden states of a prompt of {len(prompt)} tokens",
            needed="one row for each of its tokens",
            found=f"rows of {len(captured.token_ids)} tokens that are not these",
            advice="report this",
        )


def _del(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # noqa: ARG001
    close = vars(instance).get("_vllm_compat_close")
    if close is not None:
        close()


CHANGES = (
    Wrap(MODULE, "VllmHiddenStatesGenerator.__init__", _init),
    Wrap(MODULE, "VllmHiddenStatesGenerator._create_vllm_config", _create_vllm_config),
    Wrap(MODULE, "VllmHiddenStatesGenerator.generate", _generate),
    Wrap(MODULE, "VllmHiddenStatesGenerator.__del__", _del),
)

"""Which way a model's hidden states are captured: what the release and the model can do decides, and it is said."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from vllm_compat.capture import aux_outputs
from vllm_compat.capture.aux_outputs import AuxOutputs
from vllm_compat.capture.hooks import LayerHooks
from vllm_compat.capture.layers import Decoder
from vllm_compat.capture.names import WAYS
from vllm_compat.errors import CaptureError


@dataclass(frozen=True)
class Way:
    """A way that was chosen, and why not the one before it."""

    name: str
    reason: str


def choose(runner: Any, decoder: Decoder, layers: tuple[int, ...], asked: str | None) -> Way:
    """The first way that works here, or the one asked for.

    Raises:
        CaptureError: none does, or the one asked for does not; with the reason of each.
    """
    why_not = {"aux": _prepared_otherwise(runner, layers) or aux_outputs.why_not(runner, decoder, layers)}
    why_not["hooks"] = _why_no_hooks(runner)
    if not why_not["aux"] and not runner.model_config.enforce_eager and AuxOutputs.of(runner) is None:
        why_not["aux"] = "the model is compiled already, without these outputs"
    wanted = WAYS if asked is None else (asked,)
    name = next((way for way in wanted if not why_not[way]), None)
    if name is None:
        advice = "make_vllm_config(…, enforce_eager=True)"
        if runner.model_config.enforce_eager:
            advice = f"leave way unset; here it would be {next((w for w in WAYS if not why_not[w]), 'none')}"
        elif not aux_outputs.why_not(runner, decoder, layers):
            advice = f"EngineLoop(config, capture_layers={layers}), or {advice}"
        raise CaptureError(
            f"hidden states at boundaries {list(layers)}" + (f" by way={asked!r}" if asked else ""),
            needed="auxiliary outputs of the model, switched on before its first forward pass; or enforce_eager=True "
            "for hooks on its decoder layers, since compiled code does not call hooks",
            found="; ".join(f"{way}: {why_not[way]}" for way in wanted),
            advice=advice,
        )
    reason = "the model returns them itself" if name == "aux" else why_not["aux"] or "asked for"
    return Way(name, reason)


def refuse_wrong_layers(runner: Any, decoder: Decoder, layers: tuple[int, ...]) -> None:
    """What no way can give.

    Raises:
        CaptureError: ids out of range, or float16 DeepSeek weights.
    """
    num_layers = len(decoder.layers)
    wrong = [layer for layer in layers if not 0 <= layer <= num_layers]
    if wrong or not layers:
        raise CaptureError(
            f"boundaries {list(layers)}",
            needed=f"ids between 0 (embeddings) and {num_layers} (final state before the last norm)",
            found=f"{wrong} out of range" if wrong else "no id at all",
            advice="count decoder layers done: the output of 0-based layer i is boundary i+1",
        )
    # By the layer's class: Kimi-K2.5 has DeepSeek layers inside a wrapper of another name.
    if runner.dtype == torch.float16 and "deepseek" in type(decoder.here).__name__.lower():
        # deepseek_v2.py divides the residual by routed_scaling_factor in float16, against overflow.
        raise CaptureError(
            "hidden states of a DeepSeek model in float16",
            needed="a dtype in which vLLM does not rescale the residual stream",
            found="float16",
            advice="use bfloat16 or float32",
        )


def source_of(
    way: Way, runner: Any, decoder: Decoder, layers: tuple[int, ...], boundaries: tuple[int, ...]
) -> AuxOutputs | LayerHooks:
    """What takes the states out of each step, switched on; `boundaries` are those of `layers` in this stage."""
    if way.name == "aux":
        return AuxOutputs.of(runner) or AuxOutputs(runner, layers)
    return LayerHooks(decoder, boundaries)


def prepare(runner: Any, decoder: Decoder, layers: tuple[int, ...]) -> None:
    """Switch auxiliary outputs on before the first forward pass, for all of the loop's life.

    In eager mode a model that has none is left to hooks.

    Raises:
        CaptureError: the model is going to be compiled and has no auxiliary outputs at these boundaries; or what
            ``refuse_wrong_layers`` raises.
    """
    refuse_wrong_layers(runner, decoder, layers)
    reason = aux_outputs.why_not(runner, decoder, layers)
    if not reason:
        AuxOutputs(runner, layers, stays=True)
    elif not runner.model_config.enforce_eager:
        raise CaptureError(
            f"hidden states at boundaries {list(layers)} of a compiled model",
            needed="a model that returns them itself, since compiled code does not call hooks",
            found=reason,
            advice="make_vllm_config(…, enforce_eager=True)",
        )


def _prepared_otherwise(runner: Any, layers: tuple[int, ...]) -> str:
    prepared = AuxOutputs.of(runner)
    if prepared is None or set(layers) <= set(prepared.layers):
        return ""
    return f"the loop was opened with capture_layers={prepared.layers}"


def _why_no_hooks(runner: Any) -> str:
    if not runner.model_config.enforce_eager:
        return "enforce_eager=False"
    if getattr(runner.vllm_config.parallel_config, "use_sequence_parallel_moe", False):
        return "with sequence-parallel experts a layer has a shard of the tokens"
    return ""

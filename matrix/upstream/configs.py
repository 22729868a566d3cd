"""VllmConfig and what is made of it.

A test makes a VllmConfig of parts (ModelConfig, CacheConfig, …), a factory of EngineArgs. So what each part was made
with is remembered, and translated.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from upstream.ledger import Left
from vllm_compat.adapters.select import adapter


@dataclass(frozen=True)
class Part:
    """How a part of VllmConfig is said in EngineArgs.

    Attributes:
        field: Its name in VllmConfig.
        renamed: Parameter -> option of EngineArgs, where they differ; "" where EngineArgs derives it.
        always: Options whose default is another one in EngineArgs: what the part has is stated.
        whole: One option takes the part as it is, or as a dictionary of its parameters.
    """

    field: str
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    always: tuple[str, ...] = ()
    whole: bool = False


PARTS: Mapping[str, Part] = {
    "ModelConfig": Part("model_config", {"task": "runner"}),
    "CacheConfig": Part(
        "cache_config",
        {"cache_dtype": "kv_cache_dtype", "is_attention_free": "", "sliding_window": ""},
        always=("block_size", "enable_prefix_caching"),
    ),
    "SchedulerConfig": Part(
        "scheduler_config",
        {"policy": "scheduling_policy", "is_encoder_decoder": "", "is_multimodal_model": "", "runner_type": ""},
        always=("max_num_batched_tokens", "max_num_seqs", "enable_chunked_prefill", "async_scheduling"),
    ),
    "ParallelConfig": Part("parallel_config"),
    "ObservabilityConfig": Part("observability_config"),
    "SpeculativeConfig": Part("speculative_config", whole=True),
}
#: Parts that EngineArgs takes as they are.
_AS_THEY_ARE = (
    "kv_transfer_config",
    "kv_events_config",
    "ec_transfer_config",
    "structured_outputs_config",
    "attention_config",
    "compilation_config",
    "diffusion_config",
    "additional_config",
    "kernel_config",
    "mamba_config",
)


@dataclass(frozen=True)
class _Made:
    """What is remembered of a part."""

    stated: dict[str, Any]
    looked: dict[str, str]


#: id of a part -> what is remembered of it, as long as it lives.
_remembered: dict[int, _Made] = {}


def is_part(name: str) -> bool:
    """Whether a class, as module:name, is a part of VllmConfig."""
    module, _, qualified = name.partition(":")
    return qualified in PARTS and module.split(".")[:2] == ["vllm", "config"]


def part(native: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Make a part with vLLM's class, and remember with what."""
    made = native(*args, **kwargs)
    stated = dict(inspect.signature(native).bind(*args, **kwargs).arguments)
    stated.update(stated.pop("kwargs", {}))
    _remembered[id(made)] = _Made(stated, _looks(made))
    weakref.finalize(made, _remembered.pop, id(made), None)
    return made


def options(native: Any, stated: dict[str, Any]) -> dict[str, Any]:
    """EngineArgs by name, from the parts of a VllmConfig."""
    if "model_config" not in stated:
        raise Left("no-model")
    parts = {made.field: made for made in PARTS.values()}
    for name, given in stated.items():
        if name in parts and given is not None:
            if id(given) not in _remembered:
                raise Left("half-built")
            if _looks(given) != _remembered[id(given)].looked:
                raise Left("changed-by-hand")
    # What the test asks for: parts that it does not name have the defaults of their classes.
    asked = native(**stated)
    found: dict[str, Any] = {}
    for name, how in parts.items():
        given = stated.get(name)
        if how.whole:
            if given is not None:
                found[name] = _remembered[id(given)].stated
            continue
        if given is not None:
            for parameter, value in _remembered[id(given)].stated.items():
                option = how.renamed.get(parameter, parameter)
                if option:
                    found.setdefault(option, value)
        for parameter in how.always:
            value = getattr(getattr(asked, name), parameter)
            # Where the class leaves prefix caching open it is off; EngineArgs would turn it on.
            found.setdefault(parameter, bool(value) if parameter == "enable_prefix_caching" else value)
    for name, given in stated.items():
        if name not in parts and given is not None:
            if name not in _AS_THEY_ARE:
                raise Left("not-in-engine-args")
            found[name] = given
    length = _max_model_len(asked, stated)
    if length is not None:
        found["max_model_len"] = length
    if not found.keys() <= _engine_args():
        raise Left("not-in-engine-args")
    return found


def _max_model_len(asked: Any, stated: Mapping[str, Any]) -> int | None:
    """One length, where a test may give the model one and the scheduler another; None when it gives the scheduler none.

    The longer one holds every request of the test, but without chunked prefill a batch has to hold all of a prompt.
    """
    given = stated.get("scheduler_config")
    scheduler: int | None = _remembered[id(given)].stated.get("max_model_len") if given is not None else None
    if scheduler is None or not asked.scheduler_config.enable_chunked_prefill:
        return scheduler
    model: int = asked.model_config.max_model_len
    return max(scheduler, model)


def _looks(part: Any) -> dict[str, str]:
    return {name: repr(value) for name, value in vars(part).items()}


def share_parts(_: Any, stated: dict[str, Any], made: Any) -> Any:
    """Let what the test holds of the parts be the parts of our config, so that what it changes later, changes there."""
    for name in {how.field for how in PARTS.values()}:
        given, there = stated.get(name), getattr(made, name)
        if given is not None and there is not None:
            object.__setattr__(given, "__dict__", there.__dict__)
    return made


def manager(_: Any, stated: dict[str, Any]) -> dict[str, Any]:
    """A manager is of a whole config."""
    _whole(stated["vllm_config"])
    return stated


def scheduler(native: Any, stated: dict[str, Any]) -> dict[str, Any]:
    """Block sizes are the factory's to find."""
    given = dict(stated)
    _whole(given["vllm_config"])
    sizes = adapter("block_hashing").block_sizes(given["vllm_config"], given["kv_cache_config"])
    for name, size in zip(("block_size", "hash_block_size"), sizes, strict=True):
        if given.pop(name, None) not in (None, size):
            raise Left("other-block-size")
    return {"scheduler_cls": native, **given}


def _whole(config: Any) -> None:
    if not dataclasses.is_dataclass(config) or type(config).__name__ != "VllmConfig":
        raise Left("half-built")


@functools.cache
def _engine_args() -> frozenset[str]:
    engine_args = importlib.import_module("vllm.engine.arg_utils").EngineArgs
    return frozenset(field.name for field in dataclasses.fields(engine_args) if field.init)

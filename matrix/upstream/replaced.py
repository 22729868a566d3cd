"""Which of vLLM's constructors are replaced by which factory, and how one is called for the other."""

from __future__ import annotations

import functools
import inspect
import os
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import vllm_compat
from upstream import caches, configs, hashes, steps
from upstream.ledger import Ledger, Left, reasons
from vllm_compat import VllmCompatError

Options = dict[str, Any]

_KV = "vllm.v1.kv_cache_interface"
_OUTPUTS = "vllm.v1.outputs"
_SCHED = "vllm.v1.core.sched"


def _same(_: Any, stated: Options) -> Options:
    return stated


def _as_made(_: Any, __: Options, made: Any) -> Any:
    return made


@dataclass(frozen=True)
class Row:
    """What replaces a constructor.

    Attributes:
        factory: Its name.
        translate: (the constructor, its arguments by name) -> arguments of the factory by name.
        finish: (the constructor, its arguments by name, what the factory made) -> what the test gets.
    """

    factory: str
    translate: Callable[[Any, Options], Options] = _same
    finish: Callable[[Any, Options, Any], Any] = _as_made


_CONFIG = Row("make_vllm_config", configs.options, configs.share_parts)
_SCHEDULER = f"{_SCHED}.scheduler:Scheduler"

#: "module:name" of the constructor -> what replaces it.
TABLE: Mapping[str, Row] = {
    "vllm.v1.request:Request": Row("make_request", hashes.request),
    "vllm.sampling_params:SamplingParams": Row("make_sampling_params"),
    "vllm.pooling_params:PoolingParams": Row("make_pooling_params"),
    "vllm.lora.request:LoRARequest": Row("make_lora_request"),
    "vllm.v1.core.kv_cache_utils:get_request_block_hasher": Row("make_block_hasher", hashes.hasher),
    "vllm.v1.core.kv_cache_utils:init_none_hash": Row("ensure_none_hash", hashes.none_hash),
    "vllm.config.vllm:VllmConfig": _CONFIG,
    "vllm.config:VllmConfig": _CONFIG,
    **{f"{_KV}:{name}": Row("make_kv_cache_spec", caches.spec) for name in caches.KINDS},
    f"{_KV}:KVCacheConfig": Row("make_kv_cache_config", caches.plan, caches.as_stated),
    "vllm.v1.structured_output:StructuredOutputManager": Row("make_structured_output_manager", configs.manager),
    _SCHEDULER: Row("make_scheduler", configs.scheduler),
    f"{_SCHED}.output:SchedulerOutput": Row("make_scheduler_output", steps.scheduler_output),
    f"{_SCHED}.output:NewRequestData": Row("make_new_request_data", steps.new_request),
    f"{_SCHED}.output:CachedRequestData": Row("make_cached_request_data", steps.cached_requests),
    f"{_OUTPUTS}:ModelRunnerOutput": Row("make_model_runner_output", steps.runner_output),
    f"{_OUTPUTS}:DraftTokenIds": Row("make_draft_token_ids", steps.drafts),
    f"{_OUTPUTS}:KVConnectorOutput": Row("make_kv_connector_output"),
    f"{_OUTPUTS}:ECConnectorOutput": Row("make_ec_connector_output"),
}

LEDGER = Ledger()


def ours(called: Any) -> Any:
    """What a test calls, or what makes the same with a factory."""
    if not isinstance(called, (type, FunctionType)):
        return called
    name = f"{called.__module__}:{called.__qualname__}"
    if configs.is_part(name):
        return functools.partial(configs.part, called)
    row = TABLE.get(name) or _of_scheduler(called)
    return called if row is None else functools.partial(_call, called, row)


def _of_scheduler(called: Any) -> Row | None:
    """Any scheduler is made by the same factory."""
    bases = (f"{base.__module__}:{base.__qualname__}" for base in getattr(called, "__mro__", ()))
    return TABLE[_SCHEDULER] if _SCHEDULER in bases else None


def _call(native: Any, row: Row, /, *args: Any, **kwargs: Any) -> Any:
    try:
        _spare(row.factory)
        stated = _stated(native, args, kwargs)
        made = _refusable(row.factory, row.translate(native, stated))
        made = row.finish(native, stated, made)
    except Left as left:
        LEDGER.left[row.factory][left.key] += 1
        return native(*args, **kwargs)
    LEDGER.calls[row.factory] += 1
    return made


def _spare(factory: str) -> None:
    """Leave what ``left.toml`` says of the test that runs."""
    running = os.environ.get("PYTEST_CURRENT_TEST", "").partition("::")[2].partition("[")[0].partition(" ")[0]
    for key, entry in reasons().items():
        if entry.get("factory") == factory and running in entry.get("tests", ()):
            raise Left(key)


def _stated(native: Any, args: tuple[Any, ...], kwargs: Options) -> Options:
    """The arguments by the names of the constructor's parameters."""
    try:
        bound = inspect.signature(native).bind(*args, **kwargs)
    except TypeError:  # the test wants to see that refused
        raise Left("no-such-call") from None
    stated: Options = {}
    for name, value in bound.arguments.items():
        if bound.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            stated.update(value)
        elif bound.signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL:
            raise Left("no-such-call")
        else:
            stated[name] = value
    return stated


def _refusable(factory: str, options: Options) -> Any:
    """Call a factory; a refusal that ``left.toml`` has is ``Left``, any other error is the test's."""
    try:
        return getattr(vllm_compat, factory)(**options)
    except VllmCompatError as error:
        for key, entry in reasons().items():
            if entry.get("factory") == factory and entry.get("says", "?") in str(error):
                raise Left(key) from error
        raise
    except Exception as error:
        if factory == "make_kv_cache_config" and _innermost(error).startswith("vllm."):
            raise Left("no-plan") from error
        raise


def _innermost(error: BaseException) -> str:
    """The module whose code raised an error."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__", ""))

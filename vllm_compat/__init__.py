"""Stable factories for vLLM's internals: native objects, right for whichever vLLM is installed.

Importing this package imports neither vllm nor torch; every name below loads what it needs when it is first
used.

Attributes:
    __version__: Version of this library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# `installed` and `doctor` are functions and modules of the same name. They are bound here, before anybody
# can import the modules alone, so that the names in this package are always the functions.
from vllm_compat import errors
from vllm_compat._unset import UNSET
from vllm_compat.doctor import doctor
from vllm_compat.errors import (
    CaptureError,
    ConfigError,
    DataError,
    ExportError,
    HashFunctionMismatch,
    SelfCheckFailed,
    SignatureMismatch,
    StoreError,
    UnsupportedField,
    UnsupportedName,
    UnsupportedRelease,
    UnverifiedRelease,
    VllmCompatError,
    VllmNotInstalled,
)
from vllm_compat.installed import Installed, installed
from vllm_compat.values import (
    BlockPoolState,
    CachedPrefix,
    DraftStep,
    FinishedRequest,
    RequestUpdate,
    RunnerOutput,
    ScheduledBatch,
    ScheduledRequest,
)

if TYPE_CHECKING:
    from vllm_compat.capture import CapturedStates, HiddenStatesCapture, capture_hidden_states, native_capture_args
    from vllm_compat.engine import EngineLoop, LoopObserver
    from vllm_compat.factories.config import make_vllm_config
    from vllm_compat.factories.engine_core_output import make_engine_core_output, make_engine_core_outputs
    from vllm_compat.factories.engine_core_request import make_engine_core_request, request_from_engine_core_request
    from vllm_compat.factories.executor import initialize_kv_cache, make_executor
    from vllm_compat.factories.kv_cache import make_kv_cache_config, make_kv_cache_spec, make_kv_cache_specs
    from vllm_compat.factories.lora import make_lora_request
    from vllm_compat.factories.model_runner_output import (
        make_draft_token_ids,
        make_ec_connector_output,
        make_kv_connector_output,
        make_logprobs_lists,
        make_logprobs_tensors,
        make_model_runner_output,
    )
    from vllm_compat.factories.params import make_pooling_params, make_sampling_params
    from vllm_compat.factories.request import make_request
    from vllm_compat.factories.scheduler import make_scheduler, make_structured_output_manager
    from vllm_compat.factories.scheduler_output import (
        make_cached_request_data,
        make_grammar_output,
        make_new_request_data,
        make_scheduler_output,
    )
    from vllm_compat.hashing import ensure_none_hash, make_block_hasher
    from vllm_compat.kv_connector import KVConnectorBase, make_kv_transfer_config
    from vllm_compat.kv_readers import (
        plain_block_ids,
        read_block_ids,
        read_block_pool,
        read_cached_prefix,
        reset_prefix_cache,
    )
    from vllm_compat.patches import disable, enable, enabled
    from vllm_compat.readers import (
        read_engine_core_output,
        read_engine_core_request,
        read_model_runner_output,
        read_request,
        read_scheduler_output,
    )

__version__ = "0.1.0"

__all__ = [
    "UNSET",
    "BlockPoolState",
    "CachedPrefix",
    "CaptureError",
    "CapturedStates",
    "ConfigError",
    "DataError",
    "DraftStep",
    "EngineLoop",
    "ExportError",
    "FinishedRequest",
    "HashFunctionMismatch",
    "HiddenStatesCapture",
    "Installed",
    "KVConnectorBase",
    "LoopObserver",
    "RequestUpdate",
    "RunnerOutput",
    "ScheduledBatch",
    "ScheduledRequest",
    "SelfCheckFailed",
    "SignatureMismatch",
    "StoreError",
    "UnsupportedField",
    "UnsupportedName",
    "UnsupportedRelease",
    "UnverifiedRelease",
    "VllmCompatError",
    "VllmNotInstalled",
    "capture_hidden_states",
    "disable",
    "doctor",
    "enable",
    "enabled",
    "ensure_none_hash",
    "errors",
    "initialize_kv_cache",
    "installed",
    "make_block_hasher",
    "make_cached_request_data",
    "make_draft_token_ids",
    "make_ec_connector_output",
    "make_engine_core_output",
    "make_engine_core_outputs",
    "make_engine_core_request",
    "make_executor",
    "make_grammar_output",
    "make_kv_cache_config",
    "make_kv_cache_spec",
    "make_kv_cache_specs",
    "make_kv_connector_output",
    "make_kv_transfer_config",
    "make_logprobs_lists",
    "make_logprobs_tensors",
    "make_lora_request",
    "make_model_runner_output",
    "make_new_request_data",
    "make_pooling_params",
    "make_request",
    "make_sampling_params",
    "make_scheduler",
    "make_scheduler_output",
    "make_structured_output_manager",
    "make_vllm_config",
    "native_capture_args",
    "plain_block_ids",
    "read_block_ids",
    "read_block_pool",
    "read_cached_prefix",
    "read_engine_core_output",
    "read_engine_core_request",
    "read_model_runner_output",
    "read_request",
    "read_scheduler_output",
    "request_from_engine_core_request",
    "reset_prefix_cache",
]

_MODULES = {
    "capture": ("CapturedStates", "HiddenStatesCapture", "capture_hidden_states", "native_capture_args"),
    "engine": ("EngineLoop", "LoopObserver"),
    "factories.config": ("make_vllm_config",),
    "factories.engine_core_output": ("make_engine_core_output", "make_engine_core_outputs"),
    "factories.engine_core_request": ("make_engine_core_request", "request_from_engine_core_request"),
    "factories.executor": ("initialize_kv_cache", "make_executor"),
    "factories.kv_cache": ("make_kv_cache_config", "make_kv_cache_spec", "make_kv_cache_specs"),
    "factories.lora": ("make_lora_request",),
    "factories.model_runner_output": (
        "make_draft_token_ids",
        "make_ec_connector_output",
        "make_kv_connector_output",
        "make_logprobs_lists",
        "make_logprobs_tensors",
        "make_model_runner_output",
    ),
    "factories.params": ("make_pooling_params", "make_sampling_params"),
    "factories.request": ("make_request",),
    "factories.scheduler": ("make_scheduler", "make_structured_output_manager"),
    "factories.scheduler_output": (
        "make_cached_request_data",
        "make_grammar_output",
        "make_new_request_data",
        "make_scheduler_output",
    ),
    "patches": ("disable", "enable", "enabled"),
    "hashing": ("ensure_none_hash", "make_block_hasher"),
    "kv_connector": ("KVConnectorBase", "make_kv_transfer_config"),
    "kv_readers": (
        "plain_block_ids",
        "read_block_ids",
        "read_block_pool",
        "read_cached_prefix",
        "reset_prefix_cache",
    ),
    "readers": (
        "read_engine_core_output",
        "read_engine_core_request",
        "read_model_runner_output",
        "read_request",
        "read_scheduler_output",
    ),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used."""
    home = _HOME.get(name)
    if home is None:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

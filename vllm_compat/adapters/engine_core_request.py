"""EngineCoreRequest: a request on its way from the front end to the engine core, a msgspec array on the wire."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, ClassVar

from vllm_compat._unset import UNSET
from vllm_compat.adapters.base import Adapter, Need
from vllm_compat.adapters.eos import EOS_OF_PARAMS, STOP_IDS_OF_PARAMS, with_eos

_REQUEST = "vllm.v1.engine:EngineCoreRequest"
#: What every release requires, ``eos_token_id`` up to 0.16 apart.
_ALWAYS = (
    "request_id",
    "prompt_token_ids",
    "mm_features",
    "sampling_params",
    "pooling_params",
    "arrival_time",
    "lora_request",
    "cache_salt",
    "data_parallel_rank",
)
_OPTIONS = {
    "prompt_embeds": "0.11.0",
    "prompt_is_token_ids": "0.21.0",
    "client_index": "",
    "current_wave": "",
    "priority": "",
    "trace_headers": "",
    "resumable": "0.15.0",
    "external_req_id": "0.14.0",
    "reasoning_ended": "0.16.0",
    "reasoning_parser_kwargs": "0.20.1",
    "abort_immediately": "0.21.0",
    "session_id": "0.28.0",
    "kv_hints": "0.31.0",
}
#: Required here, None in a plain request.
_NONE = ("prompt_token_ids", "mm_features", "lora_request", "cache_salt", "data_parallel_rank")


class EngineCoreRequest_0_17(Adapter):
    """The end-of-sequence id moved into the sampling params (0.17.0); later changes add fields in between.

    The struct is sent as an array, so a field in between changes the wire: front end and core must be of one release.
    """

    surface = "engine_core_request"
    since = (0, 17, 0)
    request = Need(_REQUEST, passes=_ALWAYS, options=_OPTIONS, reads=_ALWAYS)
    from_core = Need("vllm.v1.request:Request.from_engine_core_request", passes=("request", "block_hasher"))
    needs: ClassVar[tuple[Need, ...]] = (request, from_core, EOS_OF_PARAMS)
    left: ClassVar[Mapping[str, tuple[str, ...]]] = {"SamplingParams": ("*",)}

    def build(self, options: Mapping[str, Any], eos_token_id: Any) -> Any:
        """A native EngineCoreRequest; UNSET options are left out, or None where vLLM requires them."""
        given = dict(options)
        for name in _NONE:
            if given[name] is UNSET:
                given[name] = None
        if given["arrival_time"] is UNSET:
            given["arrival_time"] = time.time()  # as vLLM's front end does
        if given["sampling_params"] is not None and eos_token_id is not UNSET and eos_token_id is not None:
            given["sampling_params"] = with_eos(given["sampling_params"], eos_token_id)
        return self.construct(self.request, given)

    def read(self, request: Any) -> dict[str, Any]:
        """The options that ``build`` takes, read back; those that the release has."""
        live = self.request.live()
        names = (*_ALWAYS, *_OPTIONS)
        values = {name: getattr(request, name) for name in names if live.accepts(name)}
        return {**values, "eos_token_id": self.eos_of(request)}

    def eos_of(self, request: Any) -> int | None:
        """The id at which the request ends; None where there is none (``ignore_eos``, pooling)."""
        params = request.sampling_params
        return params.eos_token_id if params is not None else None

    def to_request(self, core_request: Any, block_hasher: Any) -> Any:
        """The Request that the engine core makes of it."""
        return self.construct(self.from_core, {"request": core_request, "block_hasher": block_hasher})


class EngineCoreRequest_0_10(EngineCoreRequest_0_17):
    """``eos_token_id`` is a required field (up to 0.16.0)."""

    since = (0, 10, 2)
    request = Need(_REQUEST, passes=(*_ALWAYS, "eos_token_id"), options=_OPTIONS, reads=(*_ALWAYS, "eos_token_id"))
    needs: ClassVar[tuple[Need, ...]] = (request, EngineCoreRequest_0_17.from_core, STOP_IDS_OF_PARAMS)

    def build(self, options: Mapping[str, Any], eos_token_id: Any) -> Any:
        eos = None if eos_token_id is UNSET else eos_token_id
        return super().build({**options, "eos_token_id": eos}, eos)

    def eos_of(self, request: Any) -> int | None:
        eos: int | None = request.eos_token_id
        return eos


ADAPTERS = (EngineCoreRequest_0_17, EngineCoreRequest_0_10)

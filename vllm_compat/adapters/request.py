"""vllm.v1.request.Request."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any, ClassVar

from vllm_compat._unset import UNSET
from vllm_compat.adapters.base import Adapter, Need
from vllm_compat.adapters.eos import EOS_OF_PARAMS, STOP_IDS_OF_PARAMS, with_eos

_REQUEST = "vllm.v1.request:Request"
#: What every release requires, ``eos_token_id`` up to 0.16 apart.
_ALWAYS = ("request_id", "prompt_token_ids", "sampling_params", "pooling_params")
_OPTIONS = {
    "client_index": "",
    "arrival_time": "",
    "prompt_embeds": "0.11.0",
    "prompt_is_token_ids": "0.21.0",
    "mm_features": "",
    "lora_request": "",
    "cache_salt": "",
    "priority": "",
    "trace_headers": "",
    "resumable": "0.15.0",
    "session_id": "0.28.0",
    "reasoning_ended": "0.16.0",
    "reasoning_parser_kwargs": "0.20.1",
    "abort_immediately": "0.21.0",
    "kv_hints": "0.31.0",
}
#: Options that came later than the oldest release served, and are attributes by the same name.
_SAME_NAME = ("prompt_embeds", "prompt_is_token_ids", "resumable", "session_id", "abort_immediately", "kv_hints")
#: What ``read`` finds on a Request of every release, block hasher and end-of-sequence id apart.
_READS = (
    "request_id",
    "prompt_token_ids",
    "sampling_params",
    "pooling_params",
    "client_index",
    "arrival_time",
    "mm_features",
    "lora_request",
    "cache_salt",
    "priority",
    "trace_headers",
    "structured_output_request",
)


class Request_0_17(Adapter):
    """The end-of-sequence id moved from Request into SamplingParams (0.17.0); every later change adds optional fields.

    ``SamplingParams.eos_token_id`` is private and is set only by ``update_from_generation_config``, which also adds it
    to the ids that ``min_tokens`` suppresses.
    """

    surface = "request"
    since = (0, 17, 0)
    request = Need(_REQUEST, passes=(*_ALWAYS, "block_hasher"), options=_OPTIONS, reads=(*_READS, "_block_hasher"))
    needs: ClassVar[tuple[Need, ...]] = (request, EOS_OF_PARAMS)
    left: ClassVar[Mapping[str, tuple[str, ...]]] = {"SamplingParams": ("*",)}

    def build(self, options: Mapping[str, Any], eos_token_id: Any) -> Any:
        """A native Request.

        Args:
            options: Parameters of Request by name; UNSET ones are left out.
            eos_token_id: Stop at this id, or UNSET/None for what the sampling params say themselves.
        """
        given = dict(options)
        if given["sampling_params"] is not None and eos_token_id is not UNSET and eos_token_id is not None:
            given["sampling_params"] = with_eos(given["sampling_params"], eos_token_id)
        return self.construct(self.request, self.completed(given))

    def completed(self, options: dict[str, Any]) -> dict[str, Any]:
        """The options with what the caller of this release's Request makes of them."""
        return options

    def eos_of(self, request: Any) -> int | None:
        """The id at which the request ends; None where there is none (``ignore_eos``, pooling)."""
        params = request.sampling_params
        return params.eos_token_id if params is not None else None

    def hasher_of(self, request: Any) -> Any:
        return request._block_hasher

    def keep_from_prefix_cache(self, request: Any) -> None:
        """Let all of the request's prompt be computed, also where the prefix cache has it."""
        # The attribute, not the sampling param: the request's params may be shared with the caller.
        request.skip_reading_prefix_cache = True

    def read(self, request: Any) -> dict[str, Any]:
        """The options that ``build`` takes, read back from a native Request; those that the release has."""
        values = {
            "request_id": request.request_id,
            "prompt_token_ids": request.prompt_token_ids,
            "sampling_params": request.sampling_params,
            "pooling_params": request.pooling_params,
            "block_hasher": self.hasher_of(request),
            "eos_token_id": self.eos_of(request),
            "client_index": request.client_index,
            "arrival_time": request.arrival_time,
            "mm_features": request.mm_features,
            "lora_request": request.lora_request,
            "cache_salt": request.cache_salt,
            "priority": request.priority,
            "trace_headers": request.trace_headers,
        }
        for name in _SAME_NAME:
            if hasattr(request, name):
                values[name] = getattr(request, name)
        structured = request.structured_output_request
        live = self.request.live()
        # Kept by the structured output request alone, so gone where there is none.
        for name in ("reasoning_ended", "reasoning_parser_kwargs"):
            if live.accepts(name) and (structured is not None or name == "reasoning_ended"):
                values[name] = getattr(structured, name, None)
        return values


class Request_0_16(Request_0_17):
    """``eos_token_id`` is a required parameter of Request (until 0.16.0).

    A Request keeps its hasher (0.16.0), and ``reasoning_ended`` came in the same release.
    """

    since = (0, 16, 0)
    request = Need(
        _REQUEST,
        passes=(*_ALWAYS, "eos_token_id", "block_hasher"),
        options=_OPTIONS,
        reads=(*_READS, "eos_token_id", "_block_hasher"),
    )
    needs: ClassVar[tuple[Need, ...]] = (request, STOP_IDS_OF_PARAMS)

    def build(self, options: Mapping[str, Any], eos_token_id: Any) -> Any:
        eos = None if eos_token_id is UNSET else eos_token_id
        return super().build({**options, "eos_token_id": eos}, eos)

    def eos_of(self, request: Any) -> int | None:
        eos: int | None = request.eos_token_id
        return eos


class Request_0_11_1(Request_0_16):
    """A Request keeps its hasher bound to itself, as ``get_hash_new_full_blocks`` (until 0.15.1).

    Structured output is read from the params: 0.11.1 took ``structured_output_request`` out of the constructor.
    ``resumable`` came in 0.15.0.
    """

    since = (0, 11, 1)
    request = Need(
        _REQUEST,
        passes=(*_ALWAYS, "eos_token_id", "block_hasher"),
        options=_OPTIONS,
        reads=(*_READS, "eos_token_id", "get_hash_new_full_blocks"),
    )
    needs: ClassVar[tuple[Need, ...]] = (request, STOP_IDS_OF_PARAMS)

    def hasher_of(self, request: Any) -> Any:
        bound = request.get_hash_new_full_blocks  # a partial over the request
        return bound.func if bound is not None else None


class Request_0_10(Request_0_11_1):
    """The caller brings the ``StructuredOutputRequest`` (0.10.2-0.11.0), as ``from_engine_core_request`` did.

    ``prompt_embeds`` came in 0.11.0. 0.10.2 put one optional ``mm_features`` in the place of three lists; with the
    same release ``trace_headers`` came.
    """

    since = (0, 10, 2)
    request = Need(
        _REQUEST,
        passes=(*_ALWAYS, "eos_token_id", "block_hasher", "structured_output_request"),
        options=_OPTIONS,
        reads=Request_0_11_1.request.reads,
    )
    structured = Need("vllm.v1.structured_output.request:StructuredOutputRequest", passes=("sampling_params",))
    needs: ClassVar[tuple[Need, ...]] = (request, structured, STOP_IDS_OF_PARAMS)
    left: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **Request_0_11_1.left,
        "StructuredOutputRequest": ("_grammar", "reasoning_ended"),  # what vLLM fills in
    }

    def completed(self, options: dict[str, Any]) -> dict[str, Any]:
        params = options["sampling_params"]
        made = self.construct(self.structured, {"sampling_params": params}) if params is not None else None
        return {**options, "structured_output_request": made}

    def keep_from_prefix_cache(self, request: Any) -> None:
        """Give it a salt of its own, by which it still finds its own blocks after a preemption.

        ``skip_reading_prefix_cache`` came in 0.11.1.
        """
        request.cache_salt = f"{request.cache_salt or ''} kept from the prefix cache {uuid.uuid4()}"
        if request.get_hash_new_full_blocks is not None:
            request.block_hashes.clear()  # the new ones are those of the tokens after the hashed ones
            request.block_hashes.extend(request.get_hash_new_full_blocks())


ADAPTERS = (Request_0_17, Request_0_16, Request_0_11_1, Request_0_10)
#: Earlier releases have all that these need as well; see ``select.in_order``.
UNSEEN = (Request_0_11_1,)

"""Hidden states out of a running model: per request, by position, checked for completeness.

A layer id is a *boundary*: id ``k`` is the residual stream after ``k`` decoder layers. 0 are the embeddings, N (the
number of layers) is the final state before the last norm. That is the numbering of vLLM's
``aux_hidden_state_layers``.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from vllm_compat.adapters.select import adapter
from vllm_compat.capture.refusal import Refusal
from vllm_compat.errors import CaptureError
from vllm_compat.installed import installed
from vllm_compat.values import FinishedRequest

if TYPE_CHECKING:
    from vllm_compat.engine import EngineLoop

__all__ = ["CapturedStates", "HiddenStatesCapture", "capture_hidden_states"]


@dataclass(frozen=True)
class CapturedStates:
    """The hidden states of one request.

    Attributes:
        request_id: The request's id.
        token_ids: The T tokens that the model was fed: the prompt and all generated tokens but the last.
        hidden_states: torch tensor [T, L, H] on the CPU in the model's dtype; row t is the state at token t.
        layers: The L boundary ids, ascending.
    """

    request_id: str
    token_ids: tuple[int, ...]
    hidden_states: Any
    layers: tuple[int, ...]


def capture_hidden_states(loop: EngineLoop, layers: Iterable[int]) -> HiddenStatesCapture:
    """Capture boundaries of every request that is added to ``loop`` from now on.

    ::

        with capture_hidden_states(loop, layers=(2, 30, 58, 61)) as capture:
            for output in loop.generate(prompts, params):
                states = capture.pop(output.request_id)

    Requests captured do not *read* the prefix cache, nor a KV connector (their blocks are still written to both):
    states of cached tokens would not be computed. They are recomputed instead, never short. Up to 0.30.0 vLLM cannot
    hold a KV connector back, so that a loop with one that may load is refused.

    Args:
        loop: A running EngineLoop whose workers carry our worker extension (EngineLoop sees to it).
        layers: Boundary ids between 0 and N; duplicates are merged.

    Raises:
        CaptureError: an id out of range, a model whose decoder layers cannot be found, compiled mode, pipeline
            parallelism, float16 DeepSeek weights (their residual is rescaled inside), a KV connector that cannot be
            held back, a worker extension that is not ours, or a capture already running.
    """
    return HiddenStatesCapture(loop, tuple(sorted(set(layers))))


class HiddenStatesCapture:
    """A running capture; see ``capture_hidden_states``. Close it, or use it as a context manager."""

    def __init__(self, loop: EngineLoop, layers: tuple[int, ...]) -> None:
        self._loop = loop
        self._tracked: set[str] = set()
        self._ready: dict[str, CapturedStates] = {}
        self._incomplete: dict[str, CaptureError] = {}
        self.layers = layers
        _refuse_unsupported(loop.vllm_config)
        _refuse_loading_connector(loop)
        answers = _call(loop, "vllm_compat_capture_start", layers)
        #: Facts of the model: number of layers, hidden size, dtype, runner kind.
        self.model_info: dict[str, Any] = next(answer for answer in answers if answer is not None)
        loop.observe(self)

    def on_add(self, request: Any) -> None:
        if request.prompt_token_ids is None:
            raise CaptureError(
                f"hidden states of request {request.request_id!r}",
                needed="a prompt of token ids, to which states can be matched",
                found="a prompt of embeddings only",
                advice="run it outside of the capture",
            )
        adapter("request").keep_from_prefix_cache(request)
        self._tracked.add(request.request_id)

    def on_finish(self, finished: FinishedRequest) -> None:
        if finished.request_id not in self._tracked:
            _call(self._loop, "vllm_compat_capture_drop", [finished.request_id])
            return
        self._tracked.discard(finished.request_id)
        tokens = finished.prompt_token_ids + finished.token_ids
        if finished.finish_reason == "abort":
            # Whatever was computed before; there is nothing to be complete against.
            _call(self._loop, "vllm_compat_capture_drop", [finished.request_id])
            return
        # The last generated token is never fed back to the model.
        fed = tokens[:-1] if finished.token_ids else tokens
        try:
            answers = _call(self._loop, "vllm_compat_capture_take", finished.request_id, len(fed))
        except CaptureError as error:
            # Told to whoever asks for these states; the step that ended the request was a good one.
            self._incomplete[finished.request_id] = error
            return
        states = next(answer for answer in answers if answer is not None)
        self._ready[finished.request_id] = CapturedStates(finished.request_id, fed, states, self.layers)

    def pop(self, request_id: str) -> CapturedStates:
        """The states of a finished request; hands them over.

        Raises:
            CaptureError: the request is not finished, was aborted, was added before the capture began, its states are
                incomplete (it was finished before its prompt was computed), or they were popped already.
        """
        if request_id in self._incomplete:
            raise self._incomplete.pop(request_id)
        try:
            return self._ready.pop(request_id)
        except KeyError:
            raise CaptureError(
                f"hidden states of request {request_id!r}",
                needed="a request that was added during the capture and has finished (not aborted)",
                found="still running" if request_id in self._tracked else "no states under this id",
                advice="pop each request once, after the loop yields it",
            ) from None

    def close(self) -> None:
        """Remove the hooks from the model; states already finished can still be popped.

        Does nothing the second time, or when the loop was shut down before.
        """
        self._tracked.clear()
        if self in self._loop._observers:
            self._loop.unobserve(self)
            if self._loop.executor is not None:
                _call(self._loop, "vllm_compat_capture_stop")

    def __enter__(self) -> HiddenStatesCapture:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _call(loop: EngineLoop, method: str, *args: Any) -> list[Any]:
    answers = loop.call_workers(method, *args)
    for answer in answers:
        if isinstance(answer, Refusal):
            raise answer.error
    return answers


def _refuse_unsupported(vllm_config: Any) -> None:
    parallel = vllm_config.parallel_config
    module, _, name = parallel.worker_extension_cls.rpartition(".")
    if not hasattr(getattr(importlib.import_module(module), name), "vllm_compat_capture_start"):
        raise CaptureError(
            "hidden states of this loop",
            needed="workers with vllm_compat.capture.worker.HiddenStatesWorkerExtension",
            found=f"worker_extension_cls={parallel.worker_extension_cls!r}",
            advice="derive that class from ours",
        )
    if parallel.pipeline_parallel_size > 1:
        raise CaptureError(
            "hidden states of a model split over pipeline stages",
            needed="pipeline_parallel_size 1",
            found=str(parallel.pipeline_parallel_size),
            advice="use tensor parallelism",
        )
    if not vllm_config.model_config.enforce_eager:
        raise CaptureError(
            "hidden states by hooks on decoder layers",
            needed="enforce_eager=True, since compiled code does not call hooks",
            found="enforce_eager=False",
            advice="make_vllm_config(…, enforce_eager=True)",
        )


def _refuse_loading_connector(loop: EngineLoop) -> None:
    transfer = loop.vllm_config.kv_transfer_config
    if transfer is None or not transfer.is_kv_consumer or adapter("scheduler").holds_connector_back(loop.scheduler):
        return
    raise CaptureError(
        f"hidden states of a loop with the KV connector {transfer.kv_connector}",
        needed="vLLM 0.31.0 or newer, where a request can be kept from loading; or a connector that only saves",
        found=f"vLLM {installed().version} and kv_role={transfer.kv_role!r}",
        advice="capture in a loop without it, or with kv_role='kv_producer' if it loads nothing then",
    )

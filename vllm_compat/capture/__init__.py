"""Hidden states out of a running model: per request, by position, checked for completeness.

A layer id is a *boundary*: id ``k`` is the residual stream after ``k`` decoder layers. 0 are the embeddings, N (the
number of layers) is the final state before the last norm. That is the numbering of vLLM's
``aux_hidden_state_layers``.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from vllm_compat.adapters.select import adapter
from vllm_compat.capture.names import NATIVE, WAYS
from vllm_compat.capture.native import FileStates, NativeFiles, native_capture_args
from vllm_compat.capture.states import CapturedStates, Joined
from vllm_compat.errors import CaptureError
from vllm_compat.installed import installed
from vllm_compat.values import FinishedRequest

if TYPE_CHECKING:
    from vllm_compat.capture.chunks import RequestStates
    from vllm_compat.engine import EngineLoop

_log = logging.getLogger(__name__)

__all__ = ["CapturedStates", "HiddenStatesCapture", "capture_hidden_states", "native_capture_args"]


def capture_hidden_states(
    loop: EngineLoop,
    layers: Iterable[int],
    *,
    way: str | None = None,
    dtype: Any = None,
    max_unpopped_bytes: int | None = None,
) -> HiddenStatesCapture:
    """Capture boundaries of every request that is added to ``loop`` from now on.

    ::

        with capture_hidden_states(loop, layers=(2, 30, 58, 61)) as capture:
            for output in loop.generate(prompts, params):
                states = capture.pop(output.request_id)

    Requests captured do not *read* the prefix cache, nor a KV connector (their blocks are still written to both):
    states of cached tokens would not be computed. They are recomputed instead, never short. Up to 0.30.0 vLLM cannot
    hold a KV connector back, so that a loop with one that may load is refused.

    Ways, which agree bit for bit in eager mode; the one taken is in ``way`` of what is returned:

    - "aux": the model's own auxiliary outputs, vLLM 0.18.0 or newer (DeepSeek's final state: 0.25.0). Works with
      torch.compile and CUDA graphs, if the loop was opened with ``capture_layers``. Not for boundary 0, nor with
      pipeline parallelism.
    - "hooks": Python hooks on the decoder layers. Every release, every boundary, pipeline stages too; eager mode only.

    - "native", only when asked for: vLLM's own extraction into files, 0.24.0 or newer, in a loop that has
      ``native_capture_args`` among its engine arguments. On a GPU only: vLLM's connector pins memory.

    Args:
        loop: A running EngineLoop whose workers carry our worker extension (EngineLoop sees to it).
        layers: Boundary ids between 0 and N; duplicates are merged.
        way: "aux", "hooks" or "native"; None takes the first of the former two that works here.
        dtype: A torch dtype to which states are converted on their way to the CPU; None leaves them in the model's.
        max_unpopped_bytes: What finished requests may hold until they are popped; default: a quarter of this machine's
            memory. The states of a request beyond it are dropped, and ``pop`` says so.

    Raises:
        CaptureError: an id out of range, a model whose decoder layers cannot be found, no way that works here or not
            the one asked for, float16 DeepSeek weights (their residual is rescaled inside), a KV connector that cannot
            be held back, a worker extension that is not ours, or a capture already running.
    """
    return HiddenStatesCapture(loop, tuple(sorted(set(layers))), way, dtype, max_unpopped_bytes)


class HiddenStatesCapture:
    """A running capture; see ``capture_hidden_states``. Close it, or use it as a context manager.

    Attributes:
        layers: The boundary ids, ascending.
        way: "aux", "hooks" or "native".
        model_info: Facts of the model: number of layers, hidden size, dtype, runner; the way and why it was taken.
    """

    def __init__(
        self,
        loop: EngineLoop,
        layers: tuple[int, ...],
        way: str | None = None,
        dtype: Any = None,
        max_unpopped_bytes: int | None = None,
    ) -> None:
        self._loop = loop
        self._dtype = dtype
        self._tracked: set[str] = set()
        self._ready: dict[str, CapturedStates] = {}
        self._ready_bytes = 0
        self._max_bytes = _quarter_of_memory() if max_unpopped_bytes is None else max_unpopped_bytes
        self._incomplete: dict[str, CaptureError] = {}
        self.layers = layers
        _refuse_unknown_way(way)
        _refuse_foreign_extension(loop.vllm_config)
        _refuse_loading_connector(loop)
        self._native = NativeFiles(loop, layers, dtype) if way == NATIVE else None
        if self._native is not None and any(isinstance(observer, HiddenStatesCapture) for observer in loop._observers):
            raise CaptureError(
                "a second capture on one model",
                needed="one at a time",
                found="a running one",
                advice="close the first one before",
            )
        self.model_info: dict[str, Any] = self._start(way) if self._native is None else self._native.info
        self.way: str = self.model_info["way"]
        _log.info("hidden states at boundaries %s by way of %s (%s)", layers, self.way, self.model_info["why"])
        loop.observe(self)

    def _start(self, way: str | None) -> dict[str, Any]:
        name = None if self._dtype is None else str(self._dtype).removeprefix("torch.")
        try:
            answers = self._loop.call_workers("vllm_compat_capture_start", self.layers, way, name)
        except CaptureError:
            if not any(isinstance(observer, HiddenStatesCapture) for observer in self._loop._observers):
                self._loop.call_workers("vllm_compat_capture_stop")  # of several ranks some may have begun
            raise
        return next(answer for answer in answers if answer is not None)

    def on_add(self, request: Any) -> None:
        if request.prompt_token_ids is None:
            raise CaptureError(
                f"hidden states of request {request.request_id!r}",
                needed="a prompt of token ids, to which states can be matched",
                found="a prompt of embeddings only",
                advice="run it outside of the capture",
            )
        adapter("request").keep_from_prefix_cache(request)
        self._forget(request.request_id)
        if self._native is not None:
            self._native.add(request)
        self._tracked.add(request.request_id)

    def _forget(self, request_id: str) -> None:
        """What nobody popped of a request that had this id before."""
        self._incomplete.pop(request_id, None)
        states = self._ready.pop(request_id, None)
        if states is not None:
            self._ready_bytes -= states.nbytes
            self._drop(request_id)

    def on_finish(self, finished: FinishedRequest) -> None:
        if finished.request_id not in self._tracked:
            self._drop(finished.request_id)
            return
        self._tracked.discard(finished.request_id)
        tokens = finished.prompt_token_ids + finished.token_ids
        if finished.finish_reason == "abort":
            # Whatever was computed before; there is nothing to be complete against.
            self._drop(finished.request_id)
            return
        # The last generated token is never fed back to the model.
        fed = tokens[:-1] if finished.token_ids else tokens
        try:
            parts = self._take(finished.request_id, fed)
        except CaptureError as error:
            # Told to whoever asks for these states; the step that ended the request was a good one.
            self._incomplete[finished.request_id] = error
            return
        nbytes = sum(part.nbytes for part in parts)
        if self._ready_bytes + nbytes > self._max_bytes:
            self._incomplete[finished.request_id] = self._too_many(finished.request_id, nbytes)
            self._drop(finished.request_id)
            return
        self._ready_bytes += nbytes
        self._ready[finished.request_id] = CapturedStates(finished.request_id, fed, self.layers, nbytes, Joined(parts))

    def _take(self, request_id: str, fed: tuple[int, ...]) -> tuple[RequestStates | FileStates, ...]:
        if self._native is not None:
            return (self._native.take(request_id, fed),)
        sends = not self._loop._owns_process
        answers = self._loop.call_workers("vllm_compat_capture_take", request_id, len(fed), sends)
        return tuple(sorted((answer for answer in answers if answer is not None), key=lambda part: part.layers))

    def _drop(self, request_id: str) -> None:
        if self._native is None:
            self._loop.call_workers("vllm_compat_capture_drop", [request_id])
        else:
            self._native.drop(request_id)

    def _too_many(self, request_id: str, nbytes: int) -> CaptureError:
        return CaptureError(
            f"hidden states of request {request_id!r}",
            needed=f"room for {nbytes} bytes among the {self._max_bytes} of finished requests that were not popped",
            found=f"{self._ready_bytes} bytes of {len(self._ready)} requests that nobody popped",
            advice="pop each request when the loop yields it, or raise max_unpopped_bytes",
        )

    def pop(self, request_id: str) -> CapturedStates:
        """The states of a finished request; hands them over.

        Raises:
            CaptureError: the request is not finished, was aborted, was added before the capture began, its states are
                incomplete (it was finished before its prompt was computed), or they were popped already.
        """
        if request_id in self._incomplete:
            raise self._incomplete.pop(request_id)
        try:
            states = self._ready.pop(request_id)
        except KeyError:
            raise CaptureError(
                f"hidden states of request {request_id!r}",
                needed="a request that was added during the capture and has finished (not aborted)",
                found="still running" if request_id in self._tracked else "no states under this id",
                advice="pop each request once, after the loop yields it",
            ) from None
        self._ready_bytes -= states.nbytes
        for part in states._joined.parts:
            if self._native is not None and isinstance(part, FileStates):
                self._native.see_to(part)
        return states

    def close(self) -> None:
        """Remove the hooks from the model; states already finished can still be popped.

        Does nothing the second time, or when the loop was shut down before.
        """
        self._tracked.clear()
        if self in self._loop._observers:
            self._loop.unobserve(self)
            if self._loop.executor is None:
                return
            if self._native is None:
                self._loop.call_workers("vllm_compat_capture_stop")
            elif self._loop._failed is None:
                self._native.clear()

    def __enter__(self) -> HiddenStatesCapture:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _quarter_of_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4


def _refuse_unknown_way(way: str | None) -> None:
    if way not in (None, NATIVE, *WAYS):
        names = ", ".join((*WAYS, NATIVE))
        raise CaptureError(f"way={way!r}", needed=f"one of {names}, or None for the first that works here")


def _refuse_foreign_extension(vllm_config: Any) -> None:
    parallel = vllm_config.parallel_config
    module, _, name = parallel.worker_extension_cls.rpartition(".")
    if not hasattr(getattr(importlib.import_module(module), name), "vllm_compat_capture_start"):
        raise CaptureError(
            "hidden states of this loop",
            needed="workers with vllm_compat.capture.worker.HiddenStatesWorkerExtension",
            found=f"worker_extension_cls={parallel.worker_extension_cls!r}",
            advice="derive that class from ours",
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

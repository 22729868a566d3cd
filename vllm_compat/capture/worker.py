"""The worker's side: a mixin that vLLM injects into its worker class (``worker_extension_cls``).

Every name carries our prefix, since vLLM refuses an extension whose names clash with the worker's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from vllm_compat.capture.recorder import Recorder
from vllm_compat.capture.refusal import Refusal
from vllm_compat.errors import CaptureError

_SLOT = "_vllm_compat_recorder"


Method = TypeVar("Method", bound=Callable[..., Any])


def _refuses(method: Method) -> Method:
    """Return a Refusal where ``method`` raises a CaptureError."""

    @functools.wraps(method)
    def answer(*args: Any) -> Any:
        try:
            return method(*args)
        except CaptureError as error:
            return Refusal(error)

    return answer  # type: ignore[return-value]


class HiddenStatesWorkerExtension:
    """RPC methods of hidden-state capture. Rank 0 hooks, keeps and answers; the others check and answer None."""

    @_refuses
    def vllm_compat_capture_start(self, layers: Sequence[int]) -> dict[str, Any] | None:
        if getattr(self, _SLOT, None) is not None:
            raise CaptureError(
                "a second capture on one model",
                needed="one at a time",
                found="a running one",
                advice="close the first one before",
            )
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        recorder = Recorder(runner, tuple(layers), keeps=self.rank == 0)  # type: ignore[attr-defined]
        setattr(self, _SLOT, recorder)
        return recorder.info if recorder.keeps else None

    @_refuses
    def vllm_compat_capture_take(self, request_id: str, num_tokens: int) -> Any:
        recorder: Recorder = getattr(self, _SLOT)
        return recorder.take(request_id, num_tokens) if recorder.keeps else None

    def vllm_compat_capture_drop(self, request_ids: Sequence[str]) -> None:
        recorder: Recorder = getattr(self, _SLOT)
        recorder.drop(request_ids)

    def vllm_compat_capture_stop(self) -> None:
        recorder: Recorder = getattr(self, _SLOT)
        setattr(self, _SLOT, None)
        recorder.close()

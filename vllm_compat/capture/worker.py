"""The worker's side: a mixin that vLLM injects into its worker class (``worker_extension_cls``).

Every name carries our prefix, since vLLM refuses an extension whose names clash with the worker's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from vllm_compat.capture.chunks import RequestStates
from vllm_compat.capture.layers import decoder_of
from vllm_compat.capture.recorder import Recorder
from vllm_compat.capture.ways import prepare
from vllm_compat.errors import CaptureError, Refusal

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
    """RPC methods of hidden-state capture.

    The first tensor-parallel rank of each pipeline stage keeps the boundaries of its stage and answers; the others
    check, switch on what all ranks must, and answer None.
    """

    @_refuses
    def vllm_compat_capture_prepare(self, layers: Sequence[int]) -> None:
        """Switch the model's auxiliary outputs on, before its first forward pass."""
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        prepare(runner, decoder_of(runner.get_model()), tuple(layers))

    @_refuses
    def vllm_compat_capture_start(
        self, layers: Sequence[int], way: str | None, dtype: str | None
    ) -> dict[str, Any] | None:
        if getattr(self, _SLOT, None) is not None:
            raise CaptureError(
                "a second capture on one model",
                needed="one at a time",
                found="a running one",
                advice="close the first one before",
            )
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        speaks = self.rank % self.parallel_config.tensor_parallel_size == 0  # type: ignore[attr-defined]
        recorder = Recorder(runner, tuple(layers), way, speaks, dtype)
        setattr(self, _SLOT, recorder)
        return recorder.info if speaks else None

    def vllm_compat_capture_runner(self) -> str:
        return type(self.model_runner).__module__  # type: ignore[attr-defined]

    @_refuses
    def vllm_compat_capture_take(self, request_id: str, num_tokens: int, sends: bool) -> RequestStates | None:
        """States of a finished request. ``sends``: to another process, so that they have to be there.

        Then they are waited for here: vLLM may pickle the answer in a thread of its own, where an error would be
        lost.
        """
        recorder: Recorder = getattr(self, _SLOT)
        if not recorder.keeps:
            return None
        states = recorder.take(request_id, num_tokens)
        return states.arrived() if sends else states

    def vllm_compat_capture_drop(self, request_ids: Sequence[str]) -> None:
        recorder: Recorder = getattr(self, _SLOT)
        recorder.drop(request_ids)

    def vllm_compat_capture_stop(self) -> None:
        recorder: Recorder | None = getattr(self, _SLOT, None)
        setattr(self, _SLOT, None)
        if recorder is not None:
            recorder.close()

"""The hidden states of a request, as they are handed out."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_compat.capture.chunks import RequestStates
    from vllm_compat.capture.native import FileStates


@dataclass(frozen=True, eq=False)
class CapturedStates:
    """The hidden states of one request.

    Attributes:
        request_id: The request's id.
        token_ids: The T tokens that the model was fed: the prompt and all generated tokens but the last.
        layers: The L boundary ids, ascending.
        nbytes: Bytes of ``hidden_states``.
    """

    request_id: str
    token_ids: tuple[int, ...]
    layers: tuple[int, ...]
    nbytes: int
    _joined: Joined = field(repr=False)

    @property
    def hidden_states(self) -> Any:
        """Torch tensor [T, L, H] on the CPU in the model's dtype, or the one asked for; row t is the state at token t.

        Waits for the copy from the GPU, which runs beside the next step. Where the loop should go on meanwhile, let
        another thread (a writer's) be the first to ask.
        """
        return self._joined.tensor()


class Joined:
    """Parts of pipeline stages, put together once, by whichever thread asks first; pickled as what they make.

    functools.cached_property would have the threads of all requests wait for one another up to Python 3.11, and do the
    work twice from 3.12 on.
    """

    def __init__(self, parts: Sequence[RequestStates | FileStates]) -> None:
        #: What is to be put together; empty when it was.
        self.parts = tuple(parts)
        self._tensor: Any = None
        self._lock = threading.Lock()

    def tensor(self) -> Any:
        """[T, L, H]."""
        with self._lock:
            if self.parts:
                tensors = [part.tensor() for part in self.parts]
                self._tensor = tensors[0] if len(tensors) == 1 else _cat(tensors)
                self.parts = ()
            return self._tensor

    def __reduce__(self) -> tuple[Any, ...]:
        return _made, (self.tensor(),)


def _cat(tensors: list[Any]) -> Any:
    import torch

    return torch.cat(tensors, dim=1)  # stage after stage, so boundaries ascend


def _made(tensor: Any) -> Joined:
    joined = Joined(())
    joined._tensor = tensor
    return joined

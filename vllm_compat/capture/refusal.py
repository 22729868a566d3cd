"""How a worker says no."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_compat.errors import CaptureError


@dataclass(frozen=True)
class Refusal:
    """A CaptureError on its way from a worker.

    Wrapped, since vLLM makes a RuntimeError of what a worker process raises, and of any exception that it returns
    (v1/executor/multiproc_executor.py, ``WorkerProc.enqueue_output``).
    """

    error: CaptureError

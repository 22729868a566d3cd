"""Which rows of a step's flattened batch belong to which request: the runner's own order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from vllm_compat.adapters.base import Adapter, Need
from vllm_compat.values import ScheduledBatch

Rows = list[tuple[str, int]]


def _read(symbol: str, *names: str) -> Need:
    return Need(f"vllm.v1.worker.{symbol}", reads=names, read_only=True, if_loaded=True)


_V1 = (_read("gpu_model_runner:GPUModelRunner", "input_batch"), _read("gpu_input_batch:InputBatch", "req_ids"))
_V2 = (
    _read("gpu.model_runner:GPUModelRunner", "execute_model_state"),
    _read("gpu.input_batch:InputBatch", "req_ids", "num_scheduled_tokens", "idx_mapping"),
)


class BatchRows_0_18(Adapter):
    """The V1 runner keeps one persistent ``input_batch``.

    The V2 runner hands the batch of the step from ``execute_model`` to ``sample_tokens`` in ``execute_model_state``,
    a named tuple with ``input_batch`` (0.18.0).
    """

    surface = "batch_rows"
    since = (0, 18, 0)
    needs: ClassVar[tuple[Need, ...]] = (*_V1, *_V2, _read("gpu.model_runner:ExecuteModelState", "input_batch"))
    left: ClassVar[Mapping[str, tuple[str, ...]]] = {"InputBatch": ("*",), "ExecuteModelState": ("*",)}

    def read(self, runner: Any, batch: ScheduledBatch) -> Rows:
        """(request id, number of rows) in row order. Call between ``execute_model`` and ``sample_tokens``."""
        step_batch = self.of_step(runner)
        if step_batch is not None:
            # Both are as long as the batch has requests; the runner may pad them for a captured graph.
            counts = zip(step_batch.req_ids, step_batch.num_scheduled_tokens, strict=False)
            return [(request_id, int(count)) for request_id, count in counts]
        scheduled = {request.request_id: request.num_scheduled_tokens for request in batch.requests}
        # A persistent batch may hold requests that this step leaves out.
        held = runner.input_batch.req_ids
        return [(request_id, scheduled[request_id]) for request_id in held if request_id in scheduled]

    def of_step(self, runner: Any, /) -> Any:
        """The V2 runner's batch of this step; None of a V1 runner."""
        return getattr(getattr(runner, "execute_model_state", None), "input_batch", None)


class BatchRows_0_12(BatchRows_0_18):
    """The state that the V2 runner hands on is a plain tuple, with the batch in a place that moved (until 0.17.1)."""

    since = (0, 12, 0)
    needs: ClassVar[tuple[Need, ...]] = (*_V1, *_V2)

    def of_step(self, runner: Any, /) -> Any:
        state = getattr(runner, "execute_model_state", None)
        if not isinstance(state, tuple):
            return None
        # The V1 runner's state is a tuple too; nothing in it has request ids.
        return next((item for item in state if hasattr(item, "req_ids") and hasattr(item, "idx_mapping")), None)


class BatchRows_0_10(BatchRows_0_12):
    """There is only the V1 runner (until 0.11.2). Up to 0.11.0 the batch stands until the next step begins."""

    since = (0, 10, 2)
    needs: ClassVar[tuple[Need, ...]] = _V1

    def of_step(self, _: Any, /) -> Any:
        return None


ADAPTERS = (BatchRows_0_18, BatchRows_0_12, BatchRows_0_10)

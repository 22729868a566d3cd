"""Which rows of a step's flattened batch belong to which request: the runner's own order."""

from __future__ import annotations

from typing import Any

from vllm_compat.adapters.base import Adapter
from vllm_compat.values import ScheduledBatch


class BatchRows_0_12(Adapter):
    """The V1 runner keeps one persistent ``input_batch``.

    The V2 runner hands the batch of the step from ``execute_model`` to ``sample_tokens`` in ``execute_model_state``: by
    name from 0.18.0 on, in an untyped tuple before, which is not read here.
    """

    surface = "batch_rows"
    since = (0, 12, 0)

    def read(self, runner: Any, batch: ScheduledBatch) -> list[tuple[str, int]]:
        """(request id, number of rows) in row order. Call between ``execute_model`` and ``sample_tokens``."""
        counts = {request.request_id: request.num_scheduled_tokens for request in batch.requests}
        state = getattr(runner, "execute_model_state", None)
        step_batch = getattr(state, "input_batch", None)
        if step_batch is not None:
            return [
                (request_id, int(count))
                for request_id, count in zip(step_batch.req_ids, step_batch.num_scheduled_tokens, strict=False)
            ]
        return [(request_id, counts[request_id]) for request_id in runner.input_batch.req_ids if request_id in counts]


ADAPTERS = (BatchRows_0_12,)

"""Takes hidden states out of every step of a model runner, and gives them back per request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import wrapt

from vllm_compat.adapters.select import adapter
from vllm_compat.capture.chunks import Chunk, Chunks, RequestStates
from vllm_compat.capture.layers import Decoder, decoder_of
from vllm_compat.capture.staging import Staging
from vllm_compat.capture.ways import choose, refuse_wrong_layers, source_of
from vllm_compat.errors import CaptureError


class Recorder:
    """A source of hidden states, and a wrapper around ``execute_model`` that cuts its rows into requests.

    Rows are mapped to requests by the runner's own batch, read after its state update: the scheduler's dictionaries
    are in another order. A row count that does not add up stops the run.

    Args:
        runner: vLLM's model runner with its model loaded.
        layers: Boundary ids, ascending.
        way: "aux", "hooks", or None for the first that works.
        speaks: Whether this rank records; of the ranks of one pipeline stage one does.
        dtype: Name of a torch dtype to which states are converted; None leaves them in the model's.

    Raises:
        CaptureError: see ``capture_hidden_states``; nothing is hooked then.
    """

    def __init__(
        self, runner: Any, layers: tuple[int, ...], way: str | None, speaks: bool, dtype: str | None = None
    ) -> None:
        self._runner = runner
        self._batches = adapter("scheduler_output")
        self._rows = adapter("batch_rows")
        self._chunks = Chunks()
        decoder = decoder_of(runner.get_model())
        refuse_wrong_layers(runner, decoder, layers)
        chosen = choose(runner, decoder, layers, way)
        #: Boundaries of this pipeline stage.
        self.boundaries = decoder.boundaries(layers)
        self.keeps = speaks and bool(self.boundaries)
        self.info = _facts(runner, decoder) | {"way": chosen.name, "why": chosen.reason}
        self._source: Any = None
        self._handle: Any = None
        # Auxiliary outputs are switched on in every rank: they may gather from all of them.
        if self.keeps or chosen.name == "aux":
            self._source = source_of(chosen, runner, decoder, layers, self.boundaries)
        if self.keeps:
            self._staging = Staging(torch.device(runner.device), None if dtype is None else getattr(torch, dtype))
            self._handle = wrapt.wrap_function_wrapper(runner, "execute_model", self._execute_model)

    # -- while the model runs ---------------------------------------------------------------------------------------

    def _execute_model(self, wrapped: Any, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        scheduler_output = kwargs.get("scheduler_output", args[0] if args else None)
        self._source.begin()
        try:
            result = wrapped(*args, **kwargs)
        finally:
            seen = self._source.end()
            # The GPU is busy with this step from here on: time to copy the one before.
            self._staging.launch()
        if seen:
            self._cut(seen, self._batches.read(scheduler_output))
        return result

    def _cut(self, seen: dict[int, torch.Tensor], batch: Any) -> None:
        """Cut the step's rows into requests."""
        rows = self._rows.read(self._runner, batch)
        total = sum(count for _, count in rows)
        starts = {request.request_id: request.num_computed_tokens for request in batch.requests}
        missing = [boundary for boundary in self.boundaries if boundary not in seen]
        short = {boundary: len(t) for boundary, t in seen.items() if len(t) < total}
        if missing or short or total != batch.total_num_scheduled_tokens:
            raise CaptureError(
                f"the rows of a step with {batch.total_num_scheduled_tokens} tokens",
                needed=f"{total} rows at each of the boundaries {list(self.boundaries)}",
                found=f"{total} rows in the runner's batch; boundaries missing: {missing}, short: {short}",
                advice="a layer ran on a shard of the tokens or not at all: report model and parallel settings",
            )
        self._chunks.tidy()
        fetched = self._staging.fetch([seen[boundary] for boundary in self.boundaries], [count for _, count in rows])
        for (request_id, _), part in zip(rows, fetched, strict=True):
            self._chunks.add(request_id, Chunk(starts[request_id], part))

    # -- per request ------------------------------------------------------------------------------------------------

    def take(self, request_id: str, num_tokens: int) -> RequestStates:
        """The states of a finished request; nothing is waited for.

        Raises:
            CaptureError: some position was never computed while the capture ran.
        """
        chunks = [chunk for chunk in self._chunks.pop(request_id) if chunk.start < num_tokens and chunk.count]
        gaps = _gaps(chunks, num_tokens)
        if gaps:
            raise CaptureError(
                f"hidden states of request {request_id!r}",
                needed=f"states of all {num_tokens} tokens that the model was fed",
                found=f"{len(gaps)} positions were never computed here (first: {gaps[:1]})",
                advice="capture from the request's first step on, and let it end by itself",
            )
        return RequestStates(self.boundaries, num_tokens, tuple(chunks))

    def take_all(self) -> dict[str, torch.Tensor]:
        """Request id -> [T, L, H] of every request, as far as it was computed. CaptureError as in ``take``."""
        return {name: self.take(name, end).tensor() for name, end in self._chunks.ends().items()}

    def drop(self, request_ids: Sequence[str]) -> None:
        """Forget requests that nobody will take."""
        for request_id in request_ids:
            self._chunks.pop(request_id)

    def close(self) -> None:
        """Leave the runner as it was; auxiliary outputs that it was opened with stay on."""
        if self._source is not None:
            self._source.close()
        if self._handle is not None:
            wrapt.unwrap_object(self._runner, "execute_model", self._handle)
        self._chunks.clear()


def _gaps(chunks: Sequence[Chunk], num_tokens: int) -> list[int]:
    """Positions that no chunk has; chunks ascend, unless a position was computed twice."""
    at = 0
    for chunk in chunks:
        if chunk.start > at:
            break
        at = max(at, chunk.end)
    if at >= num_tokens:
        return []
    have = set[int]().union(*(range(chunk.start, chunk.end) for chunk in chunks))
    return [position for position in range(num_tokens) if position not in have]


def _facts(runner: Any, decoder: Decoder) -> dict[str, Any]:
    return {
        "num_hidden_layers": len(decoder.layers),
        "hidden_size": runner.model_config.get_hidden_size(),
        "dtype": str(runner.dtype).removeprefix("torch."),
        "runner": type(runner).__module__,
    }

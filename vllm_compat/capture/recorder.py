"""Records the residual stream at chosen boundaries of a model runner, and gives it back per request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import wrapt

from vllm_compat.adapters.select import adapter
from vllm_compat.capture.layers import LayerArguments, decoder_layers
from vllm_compat.errors import CaptureError


@dataclass(frozen=True)
class _Chunk:
    start: int
    states: torch.Tensor  # [n, L, H]


class Recorder:
    """Hooks on the decoder layers, and a wrapper around ``execute_model`` that cuts their rows into requests.

    Rows are mapped to requests by the runner's own batch, read after its state update: the scheduler's dictionaries
    are in another order. A row count that does not add up stops the run.

    Args:
        runner: vLLM's model runner with its model loaded.
        layers: Boundary ids, ascending.
        keeps: Whether this rank records; the others only check that it could.

    Raises:
        CaptureError: see ``capture_hidden_states``; nothing is hooked then.
    """

    def __init__(self, runner: Any, layers: tuple[int, ...], keeps: bool) -> None:
        self.keeps = keeps
        self.layers = layers
        self._runner = runner
        self._batches = adapter("scheduler_output")
        self._rows = adapter("batch_rows")
        self._chunks: dict[str, list[_Chunk]] = {}
        self._seen: dict[int, torch.Tensor] = {}
        self._recording = False
        self._hooks: list[Any] = []
        modules = decoder_layers(runner.get_model())
        self.info = {
            "num_hidden_layers": len(modules),
            "hidden_size": runner.model_config.get_hidden_size(),
            "dtype": str(runner.dtype).removeprefix("torch."),
            "runner": type(runner).__module__,
        }
        self._check(modules)
        arguments = {boundary: LayerArguments(modules[boundary]) for boundary in layers if boundary < len(modules)}
        if not keeps:
            return
        for boundary in layers:
            if boundary < len(modules):
                hook = self._before(boundary, arguments[boundary])
                self._hooks.append(modules[boundary].register_forward_pre_hook(hook, with_kwargs=True))
            else:
                self._hooks.append(modules[-1].register_forward_hook(self._after(boundary)))
        self._handle = wrapt.wrap_function_wrapper(runner, "execute_model", self._execute_model)

    def _check(self, modules: Sequence[torch.nn.Module]) -> None:
        num_layers = len(modules)
        wrong = [layer for layer in self.layers if not 0 <= layer <= num_layers]
        if wrong or not self.layers:
            raise CaptureError(
                f"boundaries {list(self.layers)}",
                needed=f"ids between 0 (embeddings) and {num_layers} (final state before the last norm)",
                found=f"{wrong} out of range" if wrong else "no id at all",
                advice="count decoder layers done: the output of 0-based layer i is boundary i+1",
            )
        # By the layer's class: Kimi-K2.5 has DeepSeek layers inside a wrapper of another name.
        if self._runner.dtype == torch.float16 and "deepseek" in type(modules[0]).__name__.lower():
            # deepseek_v2.py divides the residual by routed_scaling_factor in float16, against overflow.
            raise CaptureError(
                "hidden states of a DeepSeek model in float16",
                needed="a dtype in which vLLM does not rescale the residual stream",
                found="float16",
                advice="use bfloat16 or float32",
            )

    # -- while the model runs ---------------------------------------------------------------------------------------

    def _before(self, boundary: int, arguments: LayerArguments) -> Any:
        def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._recording:
                hidden, residual = arguments.stream(args, kwargs)
                self._seen[boundary] = _stream(hidden, residual)

        return hook

    def _after(self, boundary: int) -> Any:
        def hook(_: Any, __: tuple[Any, ...], output: Any) -> None:
            if self._recording:
                hidden, residual = output if isinstance(output, tuple) else (output, None)
                self._seen[boundary] = _stream(hidden, residual)

        return hook

    def _execute_model(self, wrapped: Any, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        scheduler_output = kwargs.get("scheduler_output", args[0] if args else None)
        self._seen.clear()
        self._recording = True
        try:
            result = wrapped(*args, **kwargs)
        finally:
            self._recording = False
        if self._seen:
            self._cut(self._batches.read(scheduler_output))
        return result

    def _cut(self, batch: Any) -> None:
        """Cut the step's rows into requests."""
        rows = self._rows.read(self._runner, batch)
        total = sum(count for _, count in rows)
        starts = {request.request_id: request.num_computed_tokens for request in batch.requests}
        missing = [boundary for boundary in self.layers if boundary not in self._seen]
        short = {boundary: len(t) for boundary, t in self._seen.items() if len(t) < total}
        if missing or short or total != batch.total_num_scheduled_tokens:
            raise CaptureError(
                f"the rows of a step with {batch.total_num_scheduled_tokens} tokens",
                needed=f"{total} rows at each of the boundaries {list(self.layers)}",
                found=f"{total} rows in the runner's batch; boundaries missing: {missing}, short: {short}",
                advice="a layer ran on a shard of the tokens or not at all: report model and parallel settings",
            )
        # Padding rows follow the last request. One transfer a step: [rows, L, H].
        stacked = torch.stack([self._seen[boundary][:total] for boundary in self.layers], dim=1).cpu()
        self._seen.clear()
        at = 0
        for request_id, count in rows:
            self._chunks.setdefault(request_id, []).append(_Chunk(starts[request_id], stacked[at : at + count]))
            at += count

    # -- per request ------------------------------------------------------------------------------------------------

    def take(self, request_id: str, num_tokens: int) -> torch.Tensor:
        """[num_tokens, L, H] of a finished request.

        Raises:
            CaptureError: some position was never computed while the capture ran.
        """
        chunks = self._chunks.pop(request_id, [])
        if len(chunks) == 1 and chunks[0].start == 0 and len(chunks[0].states) == num_tokens:
            # A copy of its own: a view would keep the whole step's batch alive, and take it along to other processes.
            return chunks[0].states.clone()
        have = torch.zeros(num_tokens, dtype=torch.bool)
        states: torch.Tensor | None = None
        for chunk in chunks:
            end = min(chunk.start + len(chunk.states), num_tokens)
            if end <= chunk.start:
                continue
            if states is None:
                states = chunk.states.new_empty((num_tokens, *chunk.states.shape[1:]))
            # Later chunks win: after a preemption, or a rejected draft, a position is computed again.
            states[chunk.start : end] = chunk.states[: end - chunk.start]
            have[chunk.start : end] = True
        if states is None or not bool(have.all()):
            gaps = (~have).nonzero().flatten().tolist()
            raise CaptureError(
                f"hidden states of request {request_id!r}",
                needed=f"states of all {num_tokens} tokens that the model was fed",
                found=f"{len(gaps)} positions were never computed here (first: {gaps[:1]})",
                advice="capture from the request's first step on, and let it end by itself",
            )
        return states

    def take_all(self) -> dict[str, torch.Tensor]:
        """Request id -> [T, L, H] of every request, as far as it was computed. CaptureError as in ``take``."""
        ends = {name: max(c.start + len(c.states) for c in chunks) for name, chunks in self._chunks.items()}
        return {name: self.take(name, end) for name, end in ends.items()}

    def drop(self, request_ids: Sequence[str]) -> None:
        """Forget requests that nobody will take."""
        for request_id in request_ids:
            self._chunks.pop(request_id, None)

    def close(self) -> None:
        """Take every hook and wrapper off again."""
        for hook in self._hooks:
            hook.remove()
        if self.keeps:
            wrapt.unwrap_object(self._runner, "execute_model", self._handle)
        self._chunks.clear()


def _stream(hidden: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    # A sum or a copy, never the tensor itself: later layers add into these buffers in place.
    return hidden.clone() if residual is None else hidden + residual

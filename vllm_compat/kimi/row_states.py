"""Rows through an engine that captures: each is prefilled, unless its answer left its states already."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from vllm_compat import CapturedStates, DataError, EngineLoop, HiddenStatesCapture, make_sampling_params

from .shards import Sample

if TYPE_CHECKING:
    from .one_pass import AnswerStates
    from .rows import Row

#: [T, L, H], or what will be that once it has arrived from the GPU.
States: TypeAlias = "torch.Tensor | CapturedStates"


def prefill_params() -> Any:
    """One token has to be generated for vLLM to run a prompt."""
    return make_sampling_params(temperature=0.0, max_tokens=1, detokenize=False)


def states_of_rows(
    loop: EngineLoop,
    capture: HiddenStatesCapture,
    answers: AnswerStates,
    rows: Iterable[Row],
    put: Callable[[tuple[Row, States], int], None],
) -> tuple[int, int]:
    """Run rows, which are taken as the engine has room.

    Args:
        loop, capture: An engine and what captures on it.
        answers: States that are there already.
        rows: What to run.
        put: Is given (row, states) and the bytes of the states, as they come: prefilled rows in their order.

    Returns:
        Tokens that were prefilled, and rows whose states were there already.

    Raises:
        DataError: the states are of other tokens than the row's.
    """
    waiting: deque[Row] = deque()
    tokens = answered = 0

    def prompts() -> Iterator[list[int]]:
        nonlocal answered
        for row in rows:
            states = answers.of(row)
            if states is None:
                waiting.append(row)
                yield row.input_ids
            else:
                put((row, states), states.nbytes)
                answered += 1

    # generate yields in the order given, so the oldest waiting row is the one that finished.
    for done in loop.generate(prompts(), prefill_params()):
        row = waiting.popleft()
        states = capture.pop(done.request_id)
        if states.token_ids != tuple(row.input_ids):
            raise DataError(
                f"row {row.row_id}",
                needed="the tokens that were sent",
                found="states of other tokens",
                advice="report it with `vllm-compat doctor`: nothing of this row was stored",
            )
        put((row, states), states.nbytes)
        tokens += len(row.input_ids)
    return tokens, answered


def sample_of(row: Row, found: States, dtype: torch.dtype) -> Sample:
    """What a store takes; waits for states that are on their way."""
    states = found.hidden_states if isinstance(found, CapturedStates) else found
    ids = torch.tensor(row.input_ids, dtype=torch.int32)
    mask = torch.tensor(row.loss_mask, dtype=torch.uint8)
    return Sample(row.row_id, ids, mask, states.to(dtype))

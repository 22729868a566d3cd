"""One step of the engine: run what the scheduler planned, sample, and bring back a ModelRunnerOutput."""

from __future__ import annotations

from typing import Any

from vllm_compat.adapters.base import Adapter, Need

_EXECUTOR = "vllm.v1.executor.abstract:Executor"
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"


class Step_0_11_1(Adapter):
    """Executing and sampling are two calls (0.11.1, PR #26866): the grammar bitmask is made while the model runs.

    A runner that has nothing to sample (no tokens scheduled, pooling) answers already in the first call.
    """

    surface = "step"
    since = (0, 11, 1)
    needs = (
        Need(f"{_EXECUTOR}.execute_model", passes=("scheduler_output", "non_block"), bound=True),
        Need(f"{_EXECUTOR}.sample_tokens", passes=("grammar_output",), options={"non_block": ""}, bound=True),
        Need(f"{_EXECUTOR}.take_draft_token_ids", bound=True),
        Need(f"{_SCHEDULER}.schedule", options={"throttle_prefills": "0.24.0"}, bound=True),
        Need(f"{_SCHEDULER}.get_grammar_bitmask", passes=("scheduler_output",), bound=True),
        Need(f"{_SCHEDULER}.update_draft_token_ids", passes=("draft_token_ids",), bound=True),
    )

    def run(self, executor: Any, scheduler: Any, scheduler_output: Any) -> Any:
        """Execute and sample; returns the native ModelRunnerOutput."""
        future = executor.execute_model(scheduler_output, non_block=True)
        grammar = scheduler.get_grammar_bitmask(scheduler_output)
        output = future.result()
        if output is None:
            output = executor.sample_tokens(grammar)
        # A blocking call of the in-process executor handed back the unresolved asynchronous output up to 0.23.0.
        return output.get_output() if hasattr(output, "get_output") else output

    def update_drafts(self, executor: Any, scheduler: Any) -> None:
        """Hand the draft tokens of the step to the scheduler; a loop that skips this silently never speculates."""
        drafts = executor.take_draft_token_ids()
        if drafts is not None:
            scheduler.update_draft_token_ids(drafts)


ADAPTERS = (Step_0_11_1,)

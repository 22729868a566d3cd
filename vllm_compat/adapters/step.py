"""One step of the engine: run what the scheduler planned, sample, and bring back a ModelRunnerOutput."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, ClassVar

from vllm_compat.adapters.base import Adapter, Need

_EXECUTOR = "vllm.v1.executor.abstract:Executor"
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_DRAFTS = (
    Need(f"{_EXECUTOR}.take_draft_token_ids", bound=True),
    Need(f"{_SCHEDULER}.update_draft_token_ids", passes=("draft_token_ids",), bound=True),
)


class Step_0_11_1(Adapter):
    """Executing and sampling are two calls (0.11.1, PR #26866): the grammar bitmask is made while the model runs.

    A runner that has nothing to sample (no tokens scheduled, pooling) answers already in the first call.
    """

    surface = "step"
    since = (0, 11, 1)
    needs: ClassVar[tuple[Need, ...]] = (
        Need(f"{_EXECUTOR}.execute_model", passes=("scheduler_output", "non_block"), bound=True),
        Need(f"{_EXECUTOR}.sample_tokens", passes=("grammar_output",), options={"non_block": ""}, bound=True),
        Need(f"{_SCHEDULER}.schedule", options={"throttle_prefills": "0.24.0"}, bound=True),
        Need(f"{_SCHEDULER}.get_grammar_bitmask", passes=("scheduler_output",), bound=True),
        *_DRAFTS,
    )

    def run(self, executor: Any, scheduler: Any, scheduler_output: Any, /) -> Any:
        """Execute and sample; returns the native ModelRunnerOutput."""
        future = executor.execute_model(scheduler_output, non_block=True)
        grammar = scheduler.get_grammar_bitmask(scheduler_output)
        output = future.result()
        if output is None:
            output = executor.sample_tokens(grammar)
        return resolved(output)

    def update_drafts(self, executor: Any, scheduler: Any) -> None:
        """Hand the draft tokens of the step to the scheduler; a loop that skips this silently never speculates."""
        drafts = executor.take_draft_token_ids()
        if drafts is not None:
            scheduler.update_draft_token_ids(drafts)


class Step_0_10(Step_0_11_1):
    """One call executes and samples (until 0.11.0).

    The grammar bitmask is made by ``schedule`` and travels inside the SchedulerOutput. The executor of several
    processes answers with a Future by itself when more than one batch may be in flight (until 0.10.2).
    """

    since = (0, 10, 2)
    needs: ClassVar[tuple[Need, ...]] = (
        Need(f"{_EXECUTOR}.execute_model", passes=("scheduler_output",), bound=True),
        Need(f"{_SCHEDULER}.schedule", bound=True),
        Need(
            "vllm.v1.core.sched.output:SchedulerOutput",
            reads=("structured_output_request_ids", "grammar_bitmask"),
            read_only=True,
        ),
        *_DRAFTS,
    )
    left: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "Executor.execute_model": ("non_block",),  # 0.11.0 takes it and does not need it
        "SchedulerOutput": ("*",),
    }

    def run(self, executor: Any, _: Any, scheduler_output: Any, /) -> Any:
        return resolved(executor.execute_model(scheduler_output))


def resolved(output: Any) -> Any:
    """The ModelRunnerOutput in what an executor answered.

    That may be a Future of it, and up to 0.23.0 a blocking call of the in-process executor hands back the
    asynchronous output (AsyncModelRunnerOutput) as the runner made it.
    """
    if isinstance(output, Future):
        output = output.result()
    return output.get_output() if hasattr(output, "get_output") else output


ADAPTERS = (Step_0_11_1, Step_0_10)

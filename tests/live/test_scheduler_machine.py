"""A state machine over vLLM's real scheduler, fed by our factories: no block leaked, no token lost."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from here import BLOCK_SIZE, RELEASE, by_release
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import vllm_compat as vc
from vllm_compat.adapters.select import adapter

#: The fewest blocks in which vLLM lets one request of 256 tokens run; one of them is the null block.
FEWEST = 256 // BLOCK_SIZE + 1


class SchedulerMachine(RuleBasedStateMachine):
    """add, step, abort, finish in any order; a model of what every request must have got."""

    config: ClassVar[Any] = None

    def __init__(self) -> None:
        super().__init__()
        self.expected: dict[str, list[int]] = {}  # what the "model" emitted and the scheduler must have taken
        self.got: dict[str, list[int]] = {}
        self.lengths: dict[str, int] = {}
        self.prompts: dict[str, int] = {}
        self.ended: dict[str, str] = {}
        self.count = 0

    @initialize(num_blocks=st.integers(FEWEST, FEWEST + 15), kind=st.sampled_from(["sync", "async"]))
    def make(self, num_blocks: int, kind: str) -> None:
        self.scheduler = vc.make_scheduler(
            self.config, vc.make_kv_cache_config(self.config, num_blocks=num_blocks), scheduler_cls=kind
        )
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.free = self.pool.get_num_free_blocks()

    @rule(length=st.integers(1, 150), shared=st.integers(0, 100), max_tokens=st.integers(1, 40))
    def add(self, length: int, shared: int, max_tokens: int) -> None:
        request_id = f"r{self.count}"
        self.count += 1
        prompt = [*range(min(shared, length)), *(1000 + self.count + i for i in range(length - min(shared, length)))]
        params = vc.make_sampling_params(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self.scheduler.add_request(vc.make_request(request_id, prompt, params, scheduler=self.scheduler))
        self.expected[request_id], self.got[request_id] = [], []
        self.lengths[request_id], self.prompts[request_id] = max_tokens, length

    @precondition(lambda self: self.scheduler.has_requests())
    @rule(token=st.integers(0, 2047))
    def step(self, token: int) -> None:
        scheduled = self.scheduler.schedule()
        batch = vc.read_scheduler_output(scheduled)
        assert batch.total_num_scheduled_tokens == sum(r.num_scheduled_tokens for r in batch.requests)
        assert batch.total_num_scheduled_tokens <= 64
        sampled: dict[str, list[int]] = {}
        for request in batch.requests:
            known = self.prompts[request.request_id] + len(self.expected[request.request_id])
            done = request.num_computed_tokens + request.num_scheduled_tokens
            assert request.num_scheduled_tokens > 0
            assert done <= known
            sampled[request.request_id] = [token] if done == known else []
            self.expected[request.request_id] += sampled[request.request_id]
        output = vc.make_model_runner_output(sampled)
        assert vc.read_model_runner_output(output).token_ids == {k: tuple(v) for k, v in sampled.items()}
        for native in adapter("scheduler").outputs(self.scheduler, scheduled, output):
            update = vc.read_engine_core_output(native)
            self.got[update.request_id] += update.new_token_ids
            if update.finish_reason:
                self.ended[update.request_id] = update.finish_reason

    def running(self) -> list[str]:
        return [request_id for request_id in self.expected if request_id not in self.ended]

    @precondition(lambda self: self.running())
    @rule(data=st.data(), status=st.sampled_from(["FINISHED_ABORTED", "FINISHED_STOPPED"]))
    def end(self, data: st.DataObject, status: str) -> None:
        request_id = data.draw(st.sampled_from(self.running()))
        adapter("scheduler").finish_requests(self.scheduler, [request_id, "nobody"], status)
        self.ended[request_id] = status

    @invariant()
    def no_token_is_lost(self) -> None:
        assert self.expected == self.got
        for request_id, reason in self.ended.items():
            if reason == "length":
                assert self.lengths[request_id] == len(self.got[request_id])

    def teardown(self) -> None:
        """Run everything to the end: every request is answered and every block is free again."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(3000):
            if not self.scheduler.has_requests():
                break
            self.step(5)
        assert not self.running()
        assert not self.scheduler.requests
        assert self.free == self.pool.get_num_free_blocks()


def test_no_block_leaked_and_no_token_lost(scheduler_config: Any) -> None:
    """Whatever the order of add, step, abort and finish, small caches and preemption included."""
    SchedulerMachine.config = scheduler_config
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(
        SchedulerMachine, settings=settings(max_examples=60, stateful_step_count=40, deadline=None)
    )


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_what_a_step_says_of_its_requests(scheduler_config: Any, runner: str) -> None:
    """New, continued, preempted, resumed and finished requests, and the blocks that each gets, in a cache too small.

    For the V2 model runner the scheduler puts resumed requests among the new ones; what is read is the same.
    """
    if runner == "v2" and RELEASE < (0, 12, 0):
        pytest.skip("there is no V2 model runner")
    kv = vc.make_kv_cache_config(scheduler_config, num_blocks=FEWEST)  # half of them for each prompt
    scheduler = vc.make_scheduler(scheduler_config, kv)
    scheduler.use_v2_model_runner = runner == "v2"
    params = vc.make_sampling_params(temperature=0.0, max_tokens=20, ignore_eos=True)
    known, blocks, batches = {}, {}, []
    for name in ("a", "b"):
        prompt = [len(name) + ord(name) * 10 + i for i in range(120)]
        scheduler.add_request(vc.make_request(name, prompt, params, scheduler=scheduler))
        known[name] = 120
    while scheduler.has_requests():
        scheduled = scheduler.schedule()
        batch = vc.read_scheduler_output(scheduled)
        batches.append(batch)
        sampled: dict[str, list[int]] = {}
        for request in batch.requests:
            at = request.num_computed_tokens + request.num_scheduled_tokens
            sampled[request.request_id] = [7] if at == known[request.request_id] else []
            known[request.request_id] += len(sampled[request.request_id])
            fresh = request.is_new or request.resumed
            held = [] if fresh else blocks[request.request_id]
            blocks[request.request_id] = held + [block for group in request.new_block_ids for block in group]
            # Rows of the step need a place each.
            assert len(blocks[request.request_id]) >= -(-at // BLOCK_SIZE)
            assert len(set(blocks[request.request_id])) == len(blocks[request.request_id])
        scheduler.update_from_output(scheduled, vc.make_model_runner_output(sampled))

    seen = [(request.request_id, request) for batch in batches for request in batch.requests]
    for name in ("a", "b"):
        assert [True] + [False] * (len([r for n, r in seen if n == name]) - 1) == [
            request.is_new for n, request in seen if n == name
        ]
    # Before 0.12.0 a SchedulerOutput does not say whom it preempted.
    preempted = by_release(("0", []), ("0.12.0", [{"b"}]))
    assert preempted == [set(batch.preempted_request_ids) for batch in batches if batch.preempted_request_ids]
    assert ["b"] == [n for n, request in seen if request.resumed]
    assert [{"a"}, {"b"}] == [set(batch.finished_request_ids) for batch in batches if batch.finished_request_ids]


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_scheduler_class_by_name(scheduler_config: Any, kind: str) -> None:
    """ "sync" and "async" are vLLM's own classes; a subclass is taken as it is."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    class Mine(Scheduler):  # type: ignore[misc]
        pass

    kv = vc.make_kv_cache_config(scheduler_config, num_blocks=FEWEST)
    expected = {"sync": Scheduler, "async": AsyncScheduler}[kind]
    assert type(vc.make_scheduler(scheduler_config, kv, scheduler_cls=kind)) is expected
    assert type(vc.make_scheduler(scheduler_config, kv, scheduler_cls=Mine)) is Mine


def test_scheduler_class_of_the_config(scheduler_config: Any) -> None:
    """Without a name the config decides, also one whose field (up to 0.11.0) still names the V0 scheduler."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    kv = vc.make_kv_cache_config(scheduler_config, num_blocks=FEWEST)
    config = scheduler_config.scheduler_config
    before = config.scheduler_cls, config.async_scheduling
    names = [None, f"{Scheduler.__module__}.Scheduler"]
    names = by_release(("0", ["vllm.core.scheduler.Scheduler", names[1]]), ("0.11.1", names))
    try:
        for name, is_async, expected in (
            (names[0], False, Scheduler),
            (names[0], True, AsyncScheduler),
            (names[1], False, Scheduler),
            (AsyncScheduler, True, AsyncScheduler),
        ):
            config.scheduler_cls, config.async_scheduling = name, is_async
            assert type(vc.make_scheduler(scheduler_config, kv)) is expected
    finally:
        config.scheduler_cls, config.async_scheduling = before

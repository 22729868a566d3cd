"""Scheduler and AsyncScheduler: construction, and the calls whose shape changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_compat.adapters.base import Adapter, Need, resolve
from vllm_compat.errors import VllmCompatError

_SYNC = "vllm.v1.core.sched.scheduler:Scheduler"
_ASYNC = "vllm.v1.core.sched.async_scheduler:AsyncScheduler"


class Scheduler_0_20(Adapter):
    """Takes the block size that requests are hashed at beside its own (0.20.0)."""

    surface = "scheduler"
    since = (0, 20, 0)
    scheduler = Need(
        _SYNC,
        passes=("vllm_config", "kv_cache_config", "structured_output_manager", "block_size", "hash_block_size"),
        options={"mm_registry": "", "include_finished_set": "", "log_stats": ""},
    )
    finish = Need(f"{_SYNC}.finish_requests", passes=("request_ids", "finished_status"), bound=True)
    update = Need(f"{_SYNC}.update_from_output", passes=("scheduler_output", "model_runner_output"), bound=True)
    get_class = Need("vllm.config:SchedulerConfig.get_scheduler_cls", bound=True)
    needs = (scheduler, finish, update, get_class, Need(_ASYNC, passes=scheduler.passes))

    def scheduler_class(self, vllm_config: Any, which: str | type | None) -> type:
        """The class for ``which``: "sync", "async", a class, or None for what the config asks for."""
        if isinstance(which, type):
            return which
        if which is None:
            return vllm_config.scheduler_config.get_scheduler_cls()  # type: ignore[no-any-return]
        named = {"sync": _SYNC, "async": _ASYNC}
        if which not in named:
            raise VllmCompatError(
                f"scheduler_cls={which!r}",
                needed='"sync", "async", a subclass of vLLM\'s Scheduler, or None',
                found=repr(which),
                advice="pass the class itself for a scheduler of your own",
            )
        return resolve(named[which])  # type: ignore[no-any-return]

    def is_async(self, cls: type) -> bool:
        """Whether a scheduler class is vLLM's asynchronous one, or derived from it."""
        return issubclass(cls, resolve(_ASYNC))

    def build(self, cls: type, options: Mapping[str, Any]) -> Any:
        name = f"{cls.__module__}:{cls.__qualname__}"
        need = Need(name, passes=self.scheduler.passes, options=self.scheduler.options)
        return self.construct_class(need, cls, options)

    def finish_requests(self, scheduler: Any, request_ids: Sequence[str], status: str) -> None:
        """Finish requests from outside; ``status`` is a name of RequestStatus (its integers move between releases)."""
        scheduler.finish_requests(list(request_ids), getattr(resolve("vllm.v1.request:RequestStatus"), status))

    def outputs(self, scheduler: Any, scheduler_output: Any, runner_output: Any) -> list[Any]:
        """``update_from_output``, flattened over clients: the step's EngineCoreOutput objects."""
        per_client = scheduler.update_from_output(scheduler_output, runner_output)
        return [output for outputs in per_client.values() for output in outputs.outputs]


ADAPTERS = (Scheduler_0_20,)

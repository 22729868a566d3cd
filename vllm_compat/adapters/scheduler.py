"""Scheduler and AsyncScheduler: construction, and the calls whose shape changed."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from vllm_compat.adapters.base import Adapter, Need, resolve
from vllm_compat.errors import VllmCompatError

_SYNC = "vllm.v1.core.sched.scheduler:Scheduler"
_ASYNC = "vllm.v1.core.sched.async_scheduler:AsyncScheduler"
_ALWAYS = ("vllm_config", "kv_cache_config", "structured_output_manager")
_OPTIONS = {"mm_registry": "", "include_finished_set": "", "log_stats": ""}
_FINISH = Need(f"{_SYNC}.finish_requests", passes=("request_ids", "finished_status"), bound=True)
_UPDATE = Need(f"{_SYNC}.update_from_output", passes=("scheduler_output", "model_runner_output"), bound=True)
_GET_CLASS = Need("vllm.config:SchedulerConfig.get_scheduler_cls", bound=True)


@functools.lru_cache(maxsize=16)
def _need_of(cls: type, passes: tuple[str, ...]) -> Need:
    """A scheduler class takes what vLLM's does, under its own name in messages."""
    return Need(f"{cls.__module__}:{cls.__qualname__}", passes=passes, options=_OPTIONS)


class Scheduler_0_20(Adapter):
    """Takes the block size that requests are hashed at beside its own (0.20.0).

    ``finish_requests`` returns the finished requests' ids and clients from 0.17.0 and the requests from 0.26.0; here it
    returns nothing in any release.
    """

    surface = "scheduler"
    since = (0, 20, 0)
    scheduler = Need(_SYNC, passes=(*_ALWAYS, "block_size", "hash_block_size"), options=_OPTIONS)
    needs: ClassVar[tuple[Need, ...]] = (
        scheduler,
        _FINISH,
        _UPDATE,
        _GET_CLASS,
        Need(_ASYNC, passes=scheduler.passes, options=_OPTIONS),
    )

    def scheduler_class(self, vllm_config: Any, which: str | type | None) -> type:
        """The class for ``which``: "sync", "async", a class, or None for what the config asks for."""
        if isinstance(which, type):
            return which
        if which is None:
            return self.configured_class(vllm_config.scheduler_config)
        named = {"sync": _SYNC, "async": _ASYNC}
        if which not in named:
            raise VllmCompatError(
                f"scheduler_cls={which!r}",
                needed='"sync", "async", a subclass of vLLM\'s Scheduler, or None',
                found=repr(which),
                advice="pass the class itself for a scheduler of your own",
            )
        return resolve(named[which])  # type: ignore[no-any-return]

    def configured_class(self, scheduler_config: Any) -> type:
        """The class that a SchedulerConfig asks for."""
        return scheduler_config.get_scheduler_cls()  # type: ignore[no-any-return]

    def is_async(self, cls: type) -> bool:
        """Whether a scheduler class is vLLM's asynchronous one, or derived from it."""
        return issubclass(cls, resolve(_ASYNC))

    def build(self, cls: type, options: Mapping[str, Any]) -> Any:
        """A scheduler of class ``cls``. ``options`` have both block sizes, of which older releases take one or none."""
        need = _need_of(cls, self.scheduler.passes)
        if self.untaken:
            options = {name: value for name, value in options.items() if name not in self.untaken}
        return self.construct_class(need, cls, options)

    @functools.cached_property
    def untaken(self) -> frozenset[str]:
        """Block sizes that this release's schedulers do not take."""
        return frozenset({"block_size", "hash_block_size"} - {*self.scheduler.passes})

    def finish_requests(self, scheduler: Any, request_ids: Sequence[str], status: str) -> None:
        """Finish requests from outside; ``status`` is a name of RequestStatus (its integers move between releases)."""
        scheduler.finish_requests(list(request_ids), getattr(resolve("vllm.v1.request:RequestStatus"), status))

    def holds_connector_back(self, scheduler: Any) -> bool:
        """Whether a request with ``skip_reading_prefix_cache`` gets nothing from a KV connector either (0.31.0).

        Nothing in a signature tells, so the live method is asked whether it looks at that attribute.
        """
        written = (vars(cls).get("schedule") for cls in type(scheduler).__mro__)
        codes = [code for method in written if (code := getattr(method, "__code__", None)) is not None]
        return any("skip_reading_prefix_cache" in code.co_names for code in codes)

    def outputs(self, scheduler: Any, scheduler_output: Any, runner_output: Any) -> list[Any]:
        """``update_from_output``, flattened over clients: the step's EngineCoreOutput objects."""
        per_client = scheduler.update_from_output(scheduler_output, runner_output)
        return [output for outputs in per_client.values() for output in outputs.outputs]


class Scheduler_0_11_1(Scheduler_0_20):
    """Requires one block size, the requests' too (0.11.1); the config knows the class (``get_scheduler_cls``)."""

    since = (0, 11, 1)
    scheduler = Need(_SYNC, passes=(*_ALWAYS, "block_size"), options=_OPTIONS)
    needs: ClassVar[tuple[Need, ...]] = (
        scheduler,
        _FINISH,
        _UPDATE,
        _GET_CLASS,
        Need(_ASYNC, passes=scheduler.passes, options=_OPTIONS),
    )


class Scheduler_0_10(Scheduler_0_11_1):
    """Reads the block size from the config; the class is ``SchedulerConfig.scheduler_cls``, a dotted name (to 0.11.0).

    Its default names the V0 scheduler, which is of no use to V1 and in 0.11.0 does not exist; EngineArgs replaces it,
    a config made by hand still has it.
    """

    since = (0, 10, 2)
    scheduler = Need(_SYNC, passes=_ALWAYS, options=_OPTIONS)
    config = Need("vllm.config:SchedulerConfig", reads=("scheduler_cls", "async_scheduling"), read_only=True)
    needs: ClassVar[tuple[Need, ...]] = (
        scheduler,
        _FINISH,
        _UPDATE,
        config,
        Need(_ASYNC, passes=_ALWAYS, options=_OPTIONS),
    )
    left: ClassVar[Mapping[str, tuple[str, ...]]] = {"SchedulerConfig": ("*",)}

    def configured_class(self, scheduler_config: Any) -> type:
        cls = scheduler_config.scheduler_cls
        if not isinstance(cls, str):
            return cls  # type: ignore[no-any-return]
        if cls == "vllm.core.scheduler.Scheduler":
            return resolve(_ASYNC if scheduler_config.async_scheduling else _SYNC)  # type: ignore[no-any-return]
        module, _, name = cls.rpartition(".")
        return resolve(f"{module}:{name}")  # type: ignore[no-any-return]


ADAPTERS = (Scheduler_0_20, Scheduler_0_11_1, Scheduler_0_10)

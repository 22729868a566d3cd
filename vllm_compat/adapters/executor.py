"""Executors: the class that a config asks for, and bringing its workers to the point where they can run a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_compat.adapters.base import Adapter, Need, resolve
from vllm_compat.errors import VllmCompatError

_EXECUTOR = "vllm.v1.executor.abstract:Executor"


class Executor_0_29(Adapter):
    """The KV cache layout is agreed on before memory is measured (0.29.0); warm-up is a call of its own (0.27.0)."""

    surface = "executor"
    since = (0, 29, 0)
    layout = Need(
        "vllm.v1.attention.backends.utils:resolve_kv_cache_layout",
        passes=("vllm_config", "supported_layouts", "kv_cache_specs"),
    )
    in_process = Need("vllm.v1.executor.uniproc_executor:UniProcExecutor", passes=("vllm_config",))
    cleanup = Need("vllm.distributed:cleanup_dist_env_and_memory", options={"shutdown_ray": ""})
    preference = Need("vllm.v1.attention.backends.utils:get_supported_kv_cache_layouts", passes=("backends",))
    needs = (
        layout,
        preference,
        cleanup,
        in_process,
        Need(f"{_EXECUTOR}.get_class", passes=("vllm_config",)),
        Need(_EXECUTOR, passes=("vllm_config",)),
        Need(f"{_EXECUTOR}.get_kv_cache_specs", bound=True),
        Need(f"{_EXECUTOR}.get_supported_kv_cache_layouts", bound=True),
        Need(f"{_EXECUTOR}.set_kv_cache_layout", passes=("layout_name",), bound=True),
        Need(f"{_EXECUTOR}.determine_available_memory", bound=True),
        Need(f"{_EXECUTOR}.initialize_from_config", passes=("kv_cache_configs",), bound=True),
        Need(f"{_EXECUTOR}.compile_or_warm_up_model", bound=True),
        Need(f"{_EXECUTOR}.init_kv_output_aggregator", passes=("connector",), bound=True),
        Need(f"{_EXECUTOR}.init_ec_output_aggregator", bound=True),
        Need(f"{_EXECUTOR}.get_kv_connector_handshake_metadata", bound=True),
        Need(
            f"{_EXECUTOR}.collective_rpc",
            passes=("method",),
            options={"timeout": "", "args": "", "kwargs": "", "non_block": ""},
            bound=True,
        ),
    )

    def executor_class(self, vllm_config: Any) -> type:
        return resolve(_EXECUTOR).get_class(vllm_config)  # type: ignore[no-any-return]

    def runs_in_process(self, cls: type | None, vllm_config: Any) -> bool:
        """Whether the executor's worker lives in the calling process."""
        return issubclass(cls or self.executor_class(vllm_config), resolve(self.in_process.symbol))

    def build(self, cls: type, vllm_config: Any) -> Any:
        """The executor with its model loaded; it cannot run before ``initialize``."""
        return cls(vllm_config)

    def kv_cache_specs(self, executor: Any) -> list[dict[str, Any]]:
        """Layer name -> KVCacheSpec, for every worker."""
        return executor.get_kv_cache_specs()  # type: ignore[no-any-return]

    def prepare_memory(self, executor: Any, vllm_config: Any, specs: Sequence[Mapping[str, Any]]) -> None:
        """What must happen before memory is measured: agree on the KV cache layout."""
        supported = executor.get_supported_kv_cache_layouts()
        layout = self.resolve_layout(vllm_config, supported, specs)
        if any(layout not in names for names in supported):
            # vLLM takes a layout that stands in the config unchecked, and the kernels then read the cache wrongly.
            raise VllmCompatError(
                f"KV cache layout {layout} of this vllm_config",
                needed="one that every worker supports",
                found=f"workers that support {supported}",
                advice="make a fresh config for the executor, or set VLLM_KV_CACHE_LAYOUT to one of these",
            )
        executor.set_kv_cache_layout(layout)

    def default_layouts(self) -> list[str]:
        """Layout names in vLLM's order of preference where no attention backend declares any."""
        return [layout.name for layout in self.construct(self.preference, {"backends": []})]

    def resolve_layout(
        self, vllm_config: Any, supported: Sequence[Sequence[str]], specs: Sequence[Mapping[str, Any]]
    ) -> str:
        """Fix the layout in ``vllm_config.cache_config`` and return its name."""
        layout = self.construct(
            self.layout,
            {
                "vllm_config": vllm_config,
                "supported_layouts": [list(names) for names in supported],
                "kv_cache_specs": [spec for worker in specs for spec in worker.values()],
            },
        )
        return layout.name  # type: ignore[no-any-return]

    def available_memory(self, executor: Any) -> list[int]:
        """Bytes for the KV cache, per worker; runs a profiling forward."""
        return executor.determine_available_memory()  # type: ignore[no-any-return]

    def initialize(self, executor: Any, kv_cache_configs: Sequence[Any]) -> None:
        executor.initialize_from_config(list(kv_cache_configs))
        executor.compile_or_warm_up_model()

    def connect(self, executor: Any, scheduler: Any) -> None:
        """Make the scheduler's KV and encoder-cache connectors known to the workers, and theirs to it.

        As EngineCore.__init__ does after it made the scheduler; without connectors nothing happens.
        """
        connector = getattr(scheduler, "connector", None)
        if connector is not None:
            executor.init_kv_output_aggregator(connector)
        if getattr(scheduler, "ec_connector", None) is not None:
            executor.init_ec_output_aggregator()
        if connector is not None and (workers := executor.get_kv_connector_handshake_metadata()):
            # (pp rank, tp rank) -> what a peer needs to reach that worker.
            connector.set_xfer_handshake_metadata_pp_aware(
                {rank: metadata for worker in workers for rank, metadata in (worker or {}).items()}
            )

    def release(self) -> None:
        """Tear down the process groups that an in-process executor leaves behind, as EngineCore.shutdown does."""
        self.construct(self.cleanup, {})

    def call_workers(self, executor: Any, method: str, *args: Any) -> list[Any]:
        """Call a method by name on every worker; one result per worker, in rank order."""
        return executor.collective_rpc(method, args=args)  # type: ignore[no-any-return]


ADAPTERS = (Executor_0_29,)

"""Executors: the class that a config asks for, and bringing its workers to the point where they can run a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from vllm_compat.adapters.base import Adapter, Need, resolve
from vllm_compat.adapters.select import adapter
from vllm_compat.errors import VllmCompatError

_EXECUTOR = "vllm.v1.executor.abstract:Executor"
_LAYOUT = Need(
    "vllm.v1.attention.backends.utils:resolve_kv_cache_layout",
    passes=("vllm_config", "supported_layouts", "kv_cache_specs"),
)
_PREFERENCE = Need("vllm.v1.attention.backends.utils:get_supported_kv_cache_layouts", passes=("backends",))
_CLEANUP = Need("vllm.distributed:cleanup_dist_env_and_memory", options={"shutdown_ray": ""})
_WIDTHS = Need(
    "vllm.distributed.ec_transfer.ec_connector.encoder_output_width:measure_encoder_output_widths",
    passes=("vllm_config", "collective_rpc"),
)
_RPC = {"timeout": "", "args": "", "kwargs": ""}
_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1"
_HANDSHAKE = f"{_CONNECTOR}.set_xfer_handshake_metadata"


def _of_executor(name: str, *passes: str) -> Need:
    return Need(f"vllm.v1.executor.abstract:Executor.{name}", passes=passes, bound=True)


def _of_worker(name: str, *passes: str, life: str = "") -> Need:
    """A method that workers are told to run by its name; they may be in other processes."""
    return Need(f"vllm.v1.worker.gpu_worker:Worker.{name}", passes=passes, bound=True, life=life, if_loaded=True)


#: What every release has.
_BASIC = (
    _of_worker("update_max_model_len", "max_model_len", life="0.14.0"),
    _CLEANUP,
    Need(f"{_EXECUTOR}.get_class", passes=("vllm_config",)),
    Need(_EXECUTOR, passes=("vllm_config",)),
    _of_executor("get_kv_cache_specs"),
    _of_executor("determine_available_memory"),
    _of_executor("initialize_from_config", "kv_cache_configs"),
)
#: ``UniProcExecutor`` has its own module, and two-phase steps their aggregator of KV connector output (0.11.1).
_SINCE_0_11_1 = (
    *_BASIC,
    Need("vllm.v1.executor.uniproc_executor:UniProcExecutor", passes=("vllm_config",)),
    Need(f"{_EXECUTOR}.collective_rpc", passes=("method",), options={**_RPC, "non_block": ""}, bound=True),
    _of_executor("init_kv_output_aggregator", "connector"),
    _of_executor("get_kv_connector_handshake_metadata"),
)
_SINCE_0_23 = (*_SINCE_0_11_1, Need(f"{_HANDSHAKE}_pp_aware", passes=("metadata",), bound=True))
_SINCE_0_27 = (*_SINCE_0_23, _of_executor("compile_or_warm_up_model"))
_SINCE_0_28 = (*_SINCE_0_27, _of_executor("init_ec_output_aggregator"))
_SINCE_0_29 = (*_SINCE_0_28, _LAYOUT, _PREFERENCE, _of_executor("get_supported_kv_cache_layouts"))


class Executor_0_33(Adapter):
    """Workers are told, with the layout, how decode context parallelism interleaves tokens (0.33.0).

    The interleave follows from the KV cache groups of the whole model, so those are made before memory is measured.
    The CPU blocks of SimpleCPUOffloadConnector are agreed on after the cache is allocated.
    """

    surface = "executor"
    since = (0, 33, 0)
    in_process = "vllm.v1.executor.uniproc_executor:UniProcExecutor"
    layout = _LAYOUT
    preference = _PREFERENCE
    widths = _WIDTHS
    needs: ClassVar[tuple[Need, ...]] = (
        *_SINCE_0_29,
        _WIDTHS,
        _of_executor("set_kv_cache_layout", "layout_name", "cp_kv_cache_interleave_size"),
        _of_executor("get_simple_cpu_offload_num_blocks"),
    )

    def executor_class(self, vllm_config: Any) -> type:
        return resolve(_EXECUTOR).get_class(vllm_config)  # type: ignore[no-any-return]

    def runs_in_process(self, cls: type | None, vllm_config: Any) -> bool:
        """Whether the executor's worker lives in the calling process."""
        return issubclass(cls or self.executor_class(vllm_config), resolve(self.in_process))

    def build(self, cls: type, vllm_config: Any) -> Any:
        """The executor with its model loaded; it cannot run before ``initialize``."""
        return cls(vllm_config)

    def kv_cache_specs(self, executor: Any) -> list[dict[str, Any]]:
        """Layer name -> KVCacheSpec, for every worker."""
        return executor.get_kv_cache_specs()  # type: ignore[no-any-return]

    # -- memory -----------------------------------------------------------------------------------------------------

    def prepare_memory(self, executor: Any, vllm_config: Any, specs: Sequence[Mapping[str, Any]]) -> None:
        """What must happen before memory is measured."""
        # Of the producer of an encoder cache only. Once the KV cache is there, no room is left for a dummy encode.
        self.construct(self.widths, {"vllm_config": vllm_config, "collective_rpc": executor.collective_rpc})
        self.agree_on_layout(executor, vllm_config, specs)

    def agree_on_layout(self, executor: Any, vllm_config: Any, specs: Sequence[Mapping[str, Any]]) -> None:
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
        self.tell_layout(executor, layout, vllm_config, specs)

    def tell_layout(self, executor: Any, layout: str, vllm_config: Any, specs: Sequence[Mapping[str, Any]], /) -> None:
        adapter("kv_cache").groups(vllm_config, specs)  # settles the interleave
        executor.set_kv_cache_layout(layout, vllm_config.parallel_config.cp_kv_cache_interleave_size)

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

    # -- start ------------------------------------------------------------------------------------------------------

    def initialize(self, executor: Any, kv_cache_configs: Sequence[Any]) -> None:
        """Allocate the KV cache in every worker, and warm up."""
        executor.initialize_from_config(list(kv_cache_configs))
        self.count_offloaded_blocks(executor)
        executor.compile_or_warm_up_model()

    def count_offloaded_blocks(self, executor: Any) -> None:
        cache, transfer = executor.vllm_config.cache_config, executor.vllm_config.kv_transfer_config
        if transfer is None or not transfer.has_connector("SimpleCPUOffloadConnector"):
            return
        if cache.enable_prefix_caching:
            cache.simple_cpu_offload_num_blocks = executor.get_simple_cpu_offload_num_blocks()

    def connect(self, executor: Any, scheduler: Any) -> None:
        """Make the scheduler's KV and encoder-cache connectors known to the workers, and theirs to it.

        As EngineCore.__init__ does after it made the scheduler; without connectors nothing happens.
        """
        connector = getattr(scheduler, "connector", None)
        if connector is not None:
            self.aggregate(executor, connector)
        self.aggregate_encoder(executor, scheduler)
        if connector is not None:
            self.shake_hands(executor, connector)

    def aggregate(self, executor: Any, connector: Any) -> None:
        """One output of the KV connectors of all workers."""
        executor.init_kv_output_aggregator(connector)

    def aggregate_encoder(self, executor: Any, scheduler: Any) -> None:
        """The same of the encoder cache's."""
        if getattr(scheduler, "ec_connector", None) is not None:
            executor.init_ec_output_aggregator()

    def shake_hands(self, executor: Any, connector: Any) -> None:
        # (pp rank, tp rank) -> what a peer needs to reach that worker.
        if metadata := self.handshake_metadata(executor):
            connector.set_xfer_handshake_metadata_pp_aware(metadata)

    def handshake_metadata(self, executor: Any) -> dict[Any, Any]:
        workers = executor.get_kv_connector_handshake_metadata() or ()
        return {rank: metadata for worker in workers for rank, metadata in (worker or {}).items()}

    # -- later ------------------------------------------------------------------------------------------------------

    def release(self) -> None:
        """Tear down the process groups that an in-process executor leaves behind, as EngineCore.shutdown does."""
        self.construct(_CLEANUP, {})

    def call_workers(self, executor: Any, method: str, *args: Any) -> list[Any]:
        """Call a method by name on every worker; one result per worker, in rank order."""
        return executor.collective_rpc(method, args=args)  # type: ignore[no-any-return]


class Executor_0_32(Executor_0_33):
    """The producer of an encoder cache measures its output widths before the KV cache takes the memory (0.32.0)."""

    since = (0, 32, 0)
    needs: ClassVar[tuple[Need, ...]] = (*_SINCE_0_29, _WIDTHS, _of_executor("set_kv_cache_layout", "layout_name"))

    def tell_layout(self, executor: Any, layout: str, _: Any, __: Sequence[Mapping[str, Any]], /) -> None:
        executor.set_kv_cache_layout(layout)

    def count_offloaded_blocks(self, executor: Any) -> None:
        """Nothing: the scheduler counts them itself."""


class Executor_0_29(Executor_0_32):
    """The layout of the KV cache is agreed on before memory is measured (0.29.0)."""

    since = (0, 29, 0)
    needs: ClassVar[tuple[Need, ...]] = (*_SINCE_0_29, _of_executor("set_kv_cache_layout", "layout_name"))

    def prepare_memory(self, executor: Any, vllm_config: Any, specs: Sequence[Mapping[str, Any]]) -> None:
        self.agree_on_layout(executor, vllm_config, specs)


class Executor_0_28(Executor_0_29):
    """Workers' outputs of an encoder-cache connector are aggregated too (0.28.0). There are no layouts."""

    since = (0, 28, 0)
    needs: ClassVar[tuple[Need, ...]] = _SINCE_0_28

    def prepare_memory(self, executor: Any, vllm_config: Any, specs: Sequence[Mapping[str, Any]]) -> None:
        """Nothing to agree on."""


class Executor_0_27(Executor_0_28):
    """Warm-up and graph capture are a call of their own after the cache is allocated (0.27.0)."""

    since = (0, 27, 0)
    needs: ClassVar[tuple[Need, ...]] = _SINCE_0_27

    def aggregate_encoder(self, executor: Any, scheduler: Any) -> None:
        """Nothing: outputs of the encoder cache are not aggregated."""


class Executor_0_23(Executor_0_27):
    """``initialize_from_config`` warms up as well.

    The handshake between KV connectors is keyed by (pipeline rank, tensor rank) (0.23.0).
    """

    since = (0, 23, 0)
    needs: ClassVar[tuple[Need, ...]] = _SINCE_0_23

    def initialize(self, executor: Any, kv_cache_configs: Sequence[Any]) -> None:
        executor.initialize_from_config(list(kv_cache_configs))


class Executor_0_18(Executor_0_23):
    """The handshake is keyed by tensor rank alone, so workers of other pipeline stages are not told apart."""

    since = (0, 18, 0)
    needs: ClassVar[tuple[Need, ...]] = (*_SINCE_0_11_1, Need(_HANDSHAKE, passes=("metadata",), bound=True))

    def shake_hands(self, executor: Any, connector: Any) -> None:
        if metadata := self.handshake_metadata(executor):
            connector.set_xfer_handshake_metadata(metadata)


class Executor_0_11_1(Executor_0_18):
    """Workers are told the number of blocks by a call of its own (``initialize_cache``, until 0.17.1).

    ``vllm.executor`` is gone, and ``UniProcExecutor`` has a module of its own (0.11.1).
    """

    since = (0, 11, 1)
    number_of_blocks = _of_worker("initialize_cache", "num_gpu_blocks", "num_cpu_blocks")
    needs: ClassVar[tuple[Need, ...]] = (*Executor_0_18.needs, number_of_blocks)

    def initialize(self, executor: Any, kv_cache_configs: Sequence[Any]) -> None:
        super().initialize(executor, kv_cache_configs)
        # (blocks on the device, blocks in CPU memory), as EngineCore.__init__ does.
        self.call_workers(executor, "initialize_cache", kv_cache_configs[0].num_blocks, 0)


class Executor_0_11(Executor_0_11_1):
    """``UniProcExecutor`` lies beside ``Executor``; its base class is that of V0, in ``vllm.executor`` (until 0.11.0).

    The aggregator of KV connector output takes the number of workers to wait for; no handshake is passed on.
    """

    since = (0, 11, 0)
    in_process = "vllm.v1.executor.abstract:UniProcExecutor"
    needs: ClassVar[tuple[Need, ...]] = (
        *_BASIC,
        Executor_0_11_1.number_of_blocks,
        Need("vllm.v1.executor.abstract:UniProcExecutor", passes=("vllm_config",)),
        Need(f"{_EXECUTOR}.collective_rpc", passes=("method",), options={**_RPC, "non_block": ""}, bound=True),
        _of_executor("init_kv_output_aggregator", "finished_count"),
        Need(f"{_CONNECTOR}.get_finished_count", bound=True),
    )

    def aggregate(self, executor: Any, connector: Any) -> None:
        executor.init_kv_output_aggregator(connector.get_finished_count())

    def shake_hands(self, executor: Any, connector: Any) -> None:
        """Nothing: connectors find each other."""


class Executor_0_10(Executor_0_11):
    """An executor makes its aggregator of KV connector output itself (until 0.10.2)."""

    since = (0, 10, 2)
    needs: ClassVar[tuple[Need, ...]] = (
        *_BASIC,
        Executor_0_11_1.number_of_blocks,
        Need("vllm.v1.executor.abstract:UniProcExecutor", passes=("vllm_config",)),
        Need(f"{_EXECUTOR}.collective_rpc", passes=("method",), options=_RPC, bound=True),
    )

    def aggregate(self, executor: Any, connector: Any) -> None:
        """Nothing: done by the executor."""


ADAPTERS = (
    Executor_0_33,
    Executor_0_32,
    Executor_0_29,
    Executor_0_28,
    Executor_0_27,
    Executor_0_23,
    Executor_0_18,
    Executor_0_11_1,
    Executor_0_11,
    Executor_0_10,
)
#: Earlier releases have all that these need as well; see ``select.in_order``.
UNSEEN = (Executor_0_18,)

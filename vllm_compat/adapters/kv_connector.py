"""KV connectors: vLLM's base class, what it calls of it, and how a connector is named in the config."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from vllm_compat.adapters.base import Adapter, Need, resolve
from vllm_compat.adapters.kv_connector_class import ConnectorBase, ConnectorType, tolerant
from vllm_compat.adapters.kv_connector_steps import AROUND, Step, save_in_an_empty_step, with_metadata
from vllm_compat.errors import VllmCompatError

_MODULE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
_BASE = f"{_MODULE}:KVConnectorBase_V1"
_FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory"

#: The methods that every connector has to write. The same in every release.
ABSTRACT = (
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
)

#: Every method and property of vLLM's base class: the releases that have it ("" for all, "first-last" when it is gone
#: again), and what it takes. All are called by position. They are no needs: one with a further parameter still fits.
HOOKS: dict[str, tuple[str, tuple[str, ...]]] = {
    "start_load_kv": ("", ("forward_context",)),
    "wait_for_layer_load": ("", ("layer_name",)),
    "save_kv_layer": ("", ("layer_name", "kv_layer", "attn_metadata")),
    "wait_for_save": ("", ()),
    "get_num_new_matched_tokens": ("", ("request", "num_computed_tokens")),
    "update_state_after_alloc": ("", ("request", "blocks", "num_external_tokens")),
    "build_connector_meta": ("", ("scheduler_output",)),
    "role": ("", ()),
    "bind_connector_metadata": ("", ("connector_metadata",)),
    "clear_connector_metadata": ("", ()),
    "_get_connector_metadata": ("", ()),
    "has_connector_metadata": ("0.11.1", ()),
    "register_kv_caches": ("", ("kv_caches",)),
    "unregister_kv_caches": ("0.33.0", ()),
    "restore_kv_caches": ("0.33.0", ()),
    "register_cross_layers_kv_cache": ("0.12.0-0.28.0", ("kv_cache", "attn_backend")),
    "prefer_cross_layer_blocks": ("0.14.0-0.28.0", ()),
    "set_host_xfer_buffer_ops": ("", ("copy_operation",)),
    "get_mem_pool_context": ("0.31.0", ()),
    "finish_forward": ("0.30.0", ()),
    "reset_capture_state": ("0.30.0", ()),
    "handle_preemptions": ("0.14.0", ("kv_connector_metadata",)),
    "get_finished": ("", ("finished_req_ids",)),
    "get_transfer_results": ("0.30.0", ("finished_req_ids",)),
    "get_block_ids_with_load_errors": ("0.11.1", ()),
    "build_connector_worker_meta": ("0.18.0", ()),
    "shutdown": ("", ()),
    "get_kv_connector_stats": ("0.11.0", ()),
    "get_kv_connector_kv_cache_events": ("0.13.0", ()),
    "get_handshake_metadata": ("0.11.1", ()),
    "set_xfer_handshake_metadata": ("0.11.1", ("metadata",)),
    "set_xfer_handshake_metadata_pp_aware": ("0.23.0", ("metadata",)),
    "bind_kv_cache_manager": ("0.30.0", ("kv_cache_manager",)),
    "bind_gpu_block_pool": ("0.22.0", ("gpu_block_pool",)),
    "get_loaded_kv_cache_group_ids": ("0.32.0", ("request",)),
    "get_external_cache_hit_sources": ("0.32.0", ("request", "num_external_tokens")),
    "supports_divergent_local_hybrid_hits": ("0.28.0", ()),
    "requires_kv_delivery": ("0.27.0", ()),
    "on_new_request": ("0.22.0", ("request",)),
    "update_connector_output": ("", ("connector_output",)),
    "request_finished": ("", ("request", "block_ids")),
    "register_finished_partial_tail": ("0.30.0", ("request", "block_ids", "partial_tail_offloads")),
    "take_events": ("", ()),
    "has_pending_block_frees": ("0.30.0", ()),
    "has_pending_push_work": ("0.24.0", ()),
    "get_required_kvcache_layout": ("", ("vllm_config",)),
    "requires_piecewise_for_cudagraph": ("0.17.0", ("extra_config",)),
    "supports_sleep_mode": ("0.33.0", ("kv_transfer_config",)),
    "get_finished_count": ("0.11.0", ()),
    "build_kv_connector_stats": ("0.11.0", ("data",)),
    "build_prom_metrics": (
        "0.11.1",
        ("vllm_config", "metric_types", "labelnames", "per_engine_labelvalues"),
    ),
    "reset_cache": ("0.13.0", ()),
}

_GET_CLASS = Need(f"{_FACTORY}.get_connector_class", passes=("kv_transfer_config",))
_CONFIG = Need(
    "vllm.config.kv_transfer:KVTransferConfig",
    passes=("kv_connector", "kv_connector_module_path", "kv_role", "kv_connector_extra_config"),
    options={
        "engine_id": "",
        "kv_buffer_device": "",
        "kv_port": "",
        "enable_permute_local_kv": "0.11.1",
        "kv_load_failure_policy": "0.13.0",
        "kv_buffer_size": "0.10.2-0.31.0",
        "kv_rank": "0.10.2-0.31.0",
        "kv_parallel_size": "0.10.2-0.31.0",
        "kv_ip": "0.10.2-0.31.0",
    },
)
_THREE = Need(_BASE, passes=("vllm_config", "role", "kv_cache_config"))
_CREATE = Need(f"{_FACTORY}.create_connector", passes=("config", "role", "kv_cache_config"))
_ALL_GROUPS = Need(f"{_MODULE}:SupportsHMA.request_finished_all_groups", passes=("request", "block_ids"), bound=True)
_READ = (
    Need("vllm.v1.kv_cache_interface:KVCacheConfig", reads=("num_blocks", "kv_cache_groups"), read_only=True),
    Need("vllm.v1.kv_cache_interface:KVCacheGroupSpec", reads=("layer_names",), read_only=True),
)
_LEFT = {"KVCacheConfig": ("*",), "KVCacheGroupSpec": ("*",)}
_PREEMPTIONS = Need(f"{_BASE}.handle_preemptions", passes=("kv_connector_metadata",), bound=True)


class KVConnector_0_31(Adapter):
    """``wait_for_save`` is called in every step, also in those without a forward pass (0.31.0).

    ``kv_cache_config`` is required from 0.21.0 on, and passed in any case.
    """

    surface = "kv_connector"
    since = (0, 31, 0)
    base = _THREE
    #: What tells the release by its shape; nothing of it is called.
    marks: ClassVar[tuple[Need, ...]] = (_PREEMPTIONS, Need(f"{_BASE}.get_mem_pool_context", bound=True))
    needs: ClassVar[tuple[Need, ...]] = (base, _CREATE, _ALL_GROUPS, _GET_CLASS, _CONFIG, *_READ, *marks)
    left: ClassVar[Mapping[str, tuple[str, ...]]] = _LEFT
    #: Called where a connector has it, though vLLM's base class has not.
    called_if_there: ClassVar[tuple[str, ...]] = ()

    def base_class(self) -> type:
        """The class to subclass; the same one each time."""
        made = _MADE.get(self.label())
        if made is None:
            made = _MADE[self.label()] = _joined(self)
        return made

    def fitted(self, name: str, written: Any) -> Any:
        """An attribute of a connector's class body, as vLLM can call it."""
        native = inspect.getattr_static(resolve(_BASE), name, None)
        if inspect.isfunction(written) and inspect.isfunction(native):
            return tolerant(written, native)
        if isinstance(written, classmethod) and isinstance(native, classmethod):
            function = tolerant(written.__func__, native.__func__)
            return written if function is written.__func__ else classmethod(function)
        return written

    def bound(self, connector: Any, metadata: Any) -> None:
        """A step's metadata was bound in a worker."""

    def unbound(self, connector: Any) -> None:
        """A step's metadata is about to be cleared in a worker."""

    def declare_hma(self, cls: type) -> None:
        """Tell vLLM that ``cls`` supports several KV cache groups."""
        resolve(f"{_MODULE}:SupportsHMA").register(cls)

    def uncalled(self, cls: type) -> tuple[str, ...]:
        """Hooks of other releases that ``cls`` overrides in vain."""
        base = self.base_class()
        there = {"handle_preemptions", *self.called_if_there}
        return tuple(name for name in HOOKS if name not in there and hasattr(cls, name) and not hasattr(base, name))

    def worker_metadata(self) -> type:
        """The base class of what workers tell the scheduler's side."""
        try:
            return resolve(f"{_MODULE}:KVConnectorWorkerMetadata")  # type: ignore[no-any-return]
        except AttributeError:
            return WorkerMetadata

    def transfer_config(self, cls: type, options: Mapping[str, Any]) -> Any:
        """The KVTransferConfig that makes vLLM load ``cls``."""
        self.refuse_unnamed(cls)
        made = self.construct(
            _CONFIG, {"kv_connector": cls.__name__, "kv_connector_module_path": cls.__module__, **options}
        )
        try:
            found = resolve(_GET_CLASS.symbol)(made)
            said = f"{found.__module__}.{found.__qualname__}"
        except ImportError as error:
            found, said = None, f"{type(error).__name__}: {error}"
        if found is not cls:
            # Up to 0.19.1 a name that vLLM has registered itself wins over the module path.
            raise VllmCompatError(
                f"the KV connector {cls.__module__}.{cls.__qualname__}",
                needed="a class that vLLM finds by its module and name",
                found=f"{said}, under that name",
                advice="give the class a name that no connector of vLLM has, in a module that can be imported",
            )
        return made

    def refuse_unnamed(self, cls: type) -> None:
        """Refuse a class that a worker process could not import."""
        if cls.__module__ != "__main__" and cls.__qualname__ == cls.__name__:
            return
        raise VllmCompatError(
            f"the KV connector {cls.__qualname__}",
            needed="a class at the top of a module that worker processes can import",
            found=f"{cls.__module__}.{cls.__qualname__}",
            advice="put it into a module of its own, and import it from there",
        )


class KVConnector_0_19(KVConnector_0_31):
    """Workers see the step's metadata before blocks are overwritten (``handle_preemptions``, 0.19.0).

    A step without a forward pass does not call ``wait_for_save`` (to 0.30.0). What is saved when a request has finished
    would wait for the next request, so it is called here, before ``get_finished`` asks what was saved.
    """

    since = (0, 19, 0)
    needs: ClassVar[tuple[Need, ...]] = (_THREE, _CREATE, _ALL_GROUPS, _GET_CLASS, _CONFIG, *_READ, _PREEMPTIONS)
    called_if_there: ClassVar[tuple[str, ...]] = ("bind_gpu_block_pool",)  # 0.19.0 to 0.21.0

    def fitted(self, name: str, written: Any) -> Any:
        fitted = super().fitted(name, written)
        return AROUND[name](fitted) if name in AROUND and inspect.isfunction(fitted) else fitted

    def bound(self, connector: Any, metadata: Any) -> None:  # noqa: ARG002 - older releases look at it
        connector._compat_step = Step()

    def unbound(self, connector: Any) -> None:
        save_in_an_empty_step(connector)


class KVConnector_0_11_1(KVConnector_0_19):
    """``kv_cache_config`` comes third, and connectors may support several groups (``SupportsHMA``, 0.11.1).

    ``handle_preemptions`` is there from 0.14.0 on and is given request ids, only when there are any (to 0.18.1).
    """

    since = (0, 11, 1)
    needs: ClassVar[tuple[Need, ...]] = (_THREE, _CREATE, _ALL_GROUPS, _GET_CLASS, _CONFIG, *_READ)
    called_if_there: ClassVar[tuple[str, ...]] = ()

    def fitted(self, name: str, written: Any) -> Any:
        fitted = super().fitted(name, written)
        return with_metadata(fitted) if name == "handle_preemptions" and inspect.isfunction(fitted) else fitted

    def bound(self, connector: Any, metadata: Any) -> None:
        super().bound(connector, metadata)
        if hasattr(connector, "handle_preemptions"):
            connector.handle_preemptions(metadata)


class KVConnector_0_10(KVConnector_0_11_1):
    """Two arguments, no KVCacheConfig, and one KV cache group only (until 0.11.0)."""

    since = (0, 10, 2)
    base = Need(_BASE, passes=("vllm_config", "role"))
    needs: ClassVar[tuple[Need, ...]] = (
        base,
        Need(_CREATE.symbol, passes=("config", "role")),
        _GET_CLASS,
        _CONFIG,
    )
    left: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    def declare_hma(self, cls: type) -> None:
        """Nothing: there is always one group, whose blocks ``request_finished`` is given."""


_MADE: dict[str, type] = {}


def _joined(adapter: KVConnector_0_31) -> type:
    native = resolve(_BASE)
    namespace = {
        # Where it is imported from: pickle looks a class up by name.
        "__module__": "vllm_compat.kv_connector",
        "__doc__": ConnectorBase.__doc__,
        "_compat": adapter,
    }
    return ConnectorType("KVConnectorBase", (ConnectorBase, native), namespace)


class WorkerMetadata(ABC):
    """Stands for ``KVConnectorWorkerMetadata`` where vLLM has none (until 0.17.1), for subclasses to be written."""

    @abstractmethod
    def aggregate(self, other: Any) -> Any:
        """Join what two workers say."""


ADAPTERS = (KVConnector_0_31, KVConnector_0_19, KVConnector_0_11_1, KVConnector_0_10)

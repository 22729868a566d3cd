"""KV connectors that are written once: the base class, and how to name one in vLLM's config.

``KVConnectorBase``, ``KVConnectorMetadata``, ``KVConnectorWorkerMetadata`` and ``KVConnectorRole`` are made of, or
are, vLLM's own; vLLM is imported when one of them is first used. docs/kv-connector.md has a whole connector.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm_compat.adapters.base import resolve
from vllm_compat.adapters.select import adapter

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorMetadata,
        KVConnectorRole,
        KVConnectorWorkerMetadata,
    )

    from vllm_compat.adapters.kv_connector_class import ConnectorBase

    class KVConnectorBase(ConnectorBase, KVConnectorBase_V1):
        """What ``__getattr__`` gives."""


__all__ = [
    "KVConnectorBase",
    "KVConnectorMetadata",
    "KVConnectorRole",
    "KVConnectorWorkerMetadata",
    "make_kv_transfer_config",
]

_MODULE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
_lock = threading.RLock()


def make_kv_transfer_config(
    connector_class: type,
    role: str = "kv_both",
    extra: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """A native ``KVTransferConfig`` that makes vLLM load ``connector_class``, in worker processes too.

    ::

        transfer = make_kv_transfer_config(MyConnector, extra={"path": "/kv"})
        config = make_vllm_config(model=…, kv_transfer_config=transfer)

    Args:
        connector_class: A KV connector at the top of an importable module; vLLM loads it by module and name.
        role: "kv_both", "kv_producer" or "kv_consumer".
        extra: ``kv_connector_extra_config``: what the connector reads with ``get_from_extra_config``.
        options: Further fields of KVTransferConfig (``engine_id``, ``kv_load_failure_policy``, …). The default of the
            latter is vLLM's: "recompute" up to 0.16.0, "fail" from 0.17.0 on.

    Raises:
        UnsupportedField: this release's KVTransferConfig has no such field.
        VllmCompatError: the class is local or in ``__main__``, so that a worker could not import it; or vLLM finds
            another one under its name. Whatever vLLM raises for bad values.
    """
    named = {"kv_role": role, "kv_connector_extra_config": dict(extra or {}), **options}
    return adapter("kv_connector").transfer_config(connector_class, named)


def __getattr__(name: str) -> Any:
    """Make or fetch a class when it is first used."""
    if name not in __all__:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    with _lock:
        if name == "KVConnectorBase":
            value = adapter("kv_connector").base_class()
        elif name == "KVConnectorWorkerMetadata":
            value = adapter("kv_connector").worker_metadata()
        else:
            value = resolve(f"{_MODULE}:{name}")
        globals()[name] = value
    return value

"""A worker's step in releases before 0.31.0, made the same as in later ones: what is called, and with what."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass
class Step:
    """What a worker's connector has been called for since the metadata was bound."""

    forward: bool = True
    saved: bool = False


def save_in_an_empty_step(connector: Any) -> None:
    """Call ``wait_for_save`` where vLLM did not, there being no forward pass."""
    step = connector._compat_step
    if not (step.forward or step.saved):
        connector.wait_for_save()


def _around_loading(load: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load)
    def start_load_kv(connector: Any, forward_context: Any, **kwargs: Any) -> Any:
        # The V2 runner may have none in a step with a forward pass either, but it saves before it asks.
        connector._compat_step.forward = getattr(forward_context, "attn_metadata", None) is not None
        return load(connector, forward_context, **kwargs)

    return start_load_kv


def _around_saving(save: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(save)
    def wait_for_save(connector: Any) -> Any:
        connector._compat_step.saved = True
        return save(connector)

    return wait_for_save


def _around_results(results: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(results)
    def get(connector: Any, finished_req_ids: set[str]) -> Any:
        save_in_an_empty_step(connector)
        return results(connector, finished_req_ids)

    return get


def with_metadata(handle: Callable[..., Any]) -> Callable[..., Any]:
    """``handle_preemptions`` that hears of a step's metadata, and of nothing else."""

    @functools.wraps(handle)
    def handle_preemptions(connector: Any, metadata: Any) -> Any:
        # vLLM's own call, with ids; ours comes with the metadata, still before the forward pass.
        return None if isinstance(metadata, set) else handle(connector, metadata)

    return handle_preemptions


#: What is put around a connector's own methods, by name.
AROUND: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "start_load_kv": _around_loading,
    "wait_for_save": _around_saving,
    "get_finished": _around_results,
    "get_transfer_results": _around_results,
}

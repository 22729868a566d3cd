"""vLLM's base class of KV connectors over the releases, and what the common one makes of it."""

from __future__ import annotations

import enum
from types import SimpleNamespace
from typing import Any

import pytest
import windows

from vllm_compat.adapters.kv_connector import ABSTRACT, HOOKS, KVConnector_0_11_1, KVConnector_0_19
from vllm_compat.adapters.kv_connector_class import arranged, tolerant
from vllm_compat.adapters.kv_connector_steps import AROUND, with_metadata
from vllm_compat.recorded.calls import Call, parse
from vllm_compat.recorded.store import RecordedApi

MODULE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory"
RELEASES = [pytest.param(api, id=api.release) for api in windows.recorded()]
ALL = [*RELEASES, *(pytest.param(api, id=api.release) for api in windows.nightlies())]


def methods(api: RecordedApi) -> dict[str, Call]:
    """Those of vLLM's base class."""
    record = api.symbol(f"{MODULE}:KVConnectorBase_V1")
    assert record is not None
    return {name: parse(text) for name, text in record["methods"].items()}


def names(call: Call | None) -> tuple[str, ...]:
    assert call is not None
    return tuple(parameter.name for parameter in call.parameters)


@pytest.mark.parametrize("api", ALL)
def test_connectors_are_made_from_three_arguments_in_one_order(api: RecordedApi) -> None:
    """Base class and factory agree on the order; up to 0.11.0 both do without the last."""
    count = 3 if api.numbers >= (0, 11, 1) else 2
    assert ("vllm_config", "role", "kv_cache_config")[:count] == names(api.call(f"{MODULE}:KVConnectorBase_V1"))
    assert ("config", "role", "kv_cache_config")[:count] == names(api.call(f"{FACTORY}.create_connector"))


@pytest.mark.parametrize("api", ALL)
def test_what_has_to_be_written_is_the_same_everywhere(api: RecordedApi) -> None:
    """A connector with these seven methods can be made in every release."""
    assert set(ABSTRACT) == {name for name, call in methods(api).items() if "abstract" in call.words}


@pytest.mark.parametrize("api", RELEASES)
def test_every_hook_is_known_with_its_releases(api: RecordedApi) -> None:
    """The table has each method that vLLM's base class has, for exactly the releases that have it."""
    assert {name for name, (life, _) in HOOKS.items() if windows.promised(api.release, life)} == set(methods(api))


@pytest.mark.parametrize("api", ALL)
def test_every_hook_takes_what_it_takes_elsewhere(api: RecordedApi) -> None:
    """No method has other parameters in another release, ``handle_preemptions`` before 0.19.0 excepted."""
    wrong = {}
    for name, call in methods(api).items():
        expected = HOOKS[name][1]
        if name == "handle_preemptions" and api.numbers < (0, 19, 0):
            expected = ("preempted_req_ids",)
        if expected != names(call):
            wrong[name] = names(call)
    assert not wrong


@pytest.mark.parametrize("api", ALL)
def test_several_groups_are_supported_by_one_method(api: RecordedApi) -> None:
    """``SupportsHMA`` is there from 0.11.1 on and asks for nothing but ``request_finished_all_groups``."""
    record = api.symbol(f"{MODULE}:SupportsHMA")
    assert (record is not None) is (api.numbers >= (0, 11, 1))
    assert record is None or {"request_finished_all_groups"} == set(record["methods"])


def test_worker_metadata_is_stood_in_for_where_it_is_missing() -> None:
    """``aggregate(other)`` is all that vLLM's own asks for, from 0.18.0 on."""
    found = {api.release: api.symbol(f"{MODULE}:KVConnectorWorkerMetadata") for api in windows.recorded()}
    assert {release for release, record in found.items() if record is None} == {
        api.release for api in windows.recorded() if api.numbers < (0, 18, 0)
    }
    assert {"abstract (other) -> KVConnectorWorkerMetadata"} == {
        text for record in found.values() if record is not None for text in record["methods"].values()
    }


class Role(enum.Enum):
    WORKER = 1


def test_arguments_are_told_apart_by_what_they_are() -> None:
    """In any order; a missing KVCacheConfig is None."""
    config, kv = SimpleNamespace(kv_transfer_config=1), SimpleNamespace(kv_cache_groups=[])
    for given in ((config, Role.WORKER, kv), (Role.WORKER, config, kv), (kv, config, Role.WORKER)):
        assert (config, Role.WORKER, kv) == arranged(*given)
    assert (config, Role.WORKER, None) == arranged(config, Role.WORKER, None)


class Native:
    """A base class as vLLM may have it."""

    def added(self, request: Any, blocks: Any, later: Any) -> None: ...
    def loads(self, context: Any, **kwargs: Any) -> None: ...
    def named(self, context: Any, *, flag: bool) -> None: ...


class Written:
    """Overrides from before."""

    def added(self, request: Any, blocks: Any) -> Any:
        return request, blocks

    def other(self, request: Any, num_tokens: int) -> Any:
        return request, num_tokens

    def loads(self, context: Any, attn_metadata: Any = None) -> Any:
        return context, attn_metadata

    def named(self, context: Any) -> Any:
        return context

    def takes_all(self, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs


def test_what_vllm_adds_does_not_reach_an_older_override() -> None:
    """Further positions and keywords are dropped, those that it has a name for are passed."""
    assert (1, 2) == tolerant(Written.added, Native.added)(None, 1, 2, 3)
    assert (1, 2) == tolerant(Written.added, Native.added)(None, 1, 2)
    assert (1, 5) == tolerant(Written.loads, Native.loads)(None, 1, attn_metadata=5, request_ids=[])
    assert tolerant(Written.named, Native.named)(None, 1, flag=True) == 1
    assert ((1, 2, 3), {"x": 4}) == tolerant(Written.takes_all, Native.added)(None, 1, 2, 3, x=4)


def test_an_override_that_fits_is_left_as_it_is() -> None:
    """And so is one with other parameters: dropping some would give it the wrong ones, without an error."""
    assert Written.takes_all is tolerant(Written.takes_all, Native.loads)
    assert Native.added is tolerant(Native.added, Native.added)
    assert Written.other is tolerant(Written.other, Native.added)


class Steps:
    """A connector as one is made for a release before 0.31.0; notes what it is called for."""

    def __init__(self) -> None:
        self.called: list[Any] = []

    def handle_preemptions(self, metadata: Any) -> None:
        self.called.append(metadata)

    def start_load_kv(self, forward_context: Any) -> None:
        self.called.append("load")

    def wait_for_save(self) -> None:
        self.called.append("save")

    def get_finished(self, finished_req_ids: set[str]) -> Any:
        self.called.append("finished")
        return finished_req_ids, None


Steps.handle_preemptions = with_metadata(Steps.handle_preemptions)  # type: ignore[method-assign]
for hook in ("start_load_kv", "wait_for_save", "get_finished"):
    setattr(Steps, hook, AROUND[hook](getattr(Steps, hook)))
FORWARD, EMPTY = SimpleNamespace(attn_metadata={}), SimpleNamespace(attn_metadata=None)


@pytest.mark.parametrize(
    ("context", "calls", "expected"),
    [
        (EMPTY, ["get_finished"], ["load", "save", "finished"]),  # up to 0.30.0
        (EMPTY, ["wait_for_save", "get_finished"], ["load", "save", "finished"]),  # from 0.31.0 on
        (EMPTY, [], ["load", "save"]),
        (FORWARD, ["wait_for_save", "get_finished"], ["load", "save", "finished"]),
        (FORWARD, ["get_finished", "wait_for_save"], ["load", "finished", "save"]),  # with a draft model
        (FORWARD, [], ["load"]),
    ],
)
def test_a_step_saves_once(context: Any, calls: list[str], expected: list[str]) -> None:
    """Before ``get_finished`` asks in a step without a forward pass, else when vLLM says so; in each step anew."""
    compat, connector = KVConnector_0_19(), Steps()
    for _ in range(2):
        compat.bound(connector, "metadata")
        connector.start_load_kv(context)
        for name in calls:
            getattr(connector, name)(*({"a"},) * (name == "get_finished"))
        compat.unbound(connector)
    assert expected * 2 == connector.called


def test_preemptions_are_told_with_the_metadata_before_0_19() -> None:
    """vLLM's own call with a set of ids is held back, ours with the bound metadata gets through."""
    connector = Steps()
    connector.handle_preemptions({"a"})
    KVConnector_0_11_1().bound(connector, "metadata")
    assert ["metadata"] == connector.called
    KVConnector_0_11_1().bound(SimpleNamespace(), "metadata")  # no hook, nothing to call
    KVConnector_0_19().bound(connector, "more")
    assert ["metadata"] == connector.called

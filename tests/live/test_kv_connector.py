"""The base class of KV connectors on the installed vLLM: made by its factory, found by name, fitted to its calls."""

from __future__ import annotations

import inspect
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from here import BLOCK_SIZE, EAGER, HOLDS_CONNECTORS_BACK, RELEASE
from saving_connector import SavingConnector, Work
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import base as native

import vllm_compat as vc
from vllm_compat import kv_connector
from vllm_compat.adapters.select import adapter
from vllm_compat.capture import HiddenStatesCapture

ROOT = Path(__file__).parents[2]
ROLES = list(native.KVConnectorRole)


class TwoArguments(SavingConnector):
    """A constructor as of 0.11.0."""

    def __init__(self, vllm_config: Any, role: Any) -> None:
        super().__init__(vllm_config, role)


class AllGroups(SavingConnector):
    """Says that it supports the hybrid KV cache manager, by overriding this."""

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        return True, {"of": request, "blocks": block_ids}


class Mixed:
    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        return True, None

    def start_load_kv(self, forward_context: Any) -> Any:
        return forward_context


class MixedIn(Mixed, SavingConnector):
    """Gets what it overrides from elsewhere."""


class SaysWhatIsNotCalled(SavingConnector):
    def restore_kv_caches(self) -> None:
        """New in 0.33.0."""

    def register_cross_layers_kv_cache(self, kv_cache: Any, attn_backend: Any) -> None:
        """Gone in 0.29.0."""

    def take_events(self) -> Any:
        """Always there."""
        return ()


class Away:
    class Inside(SavingConnector):
        """Not at the top of its module."""


class NixlConnector(SavingConnector):
    """A name that vLLM has itself."""


def config(**options: Any) -> Any:
    """What a connector and the factory read of a VllmConfig."""
    return SimpleNamespace(
        kv_transfer_config=options.get("transfer"),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=not options.get("hma", False)),
        cache_config=SimpleNamespace(block_size=16, num_gpu_blocks=7),
    )


def made_by_vllm(cls: type, role: Any = ROLES[0], **options: Any) -> Any:
    """A connector from vLLM's own factory, which loads the class by module and name."""
    given = {
        "config": config(transfer=vc.make_kv_transfer_config(cls, extra={"folder": "f"}), **options),
        "role": role,
        "kv_cache_config": SimpleNamespace(
            kv_cache_groups=[SimpleNamespace(layer_names=["a"]), SimpleNamespace(layer_names=["b", "c"])], num_blocks=7
        ),
    }
    taken = inspect.signature(KVConnectorFactory.create_connector).parameters
    return KVConnectorFactory.create_connector(**{name: given[name] for name in taken})


def test_the_base_is_vllms_own_class() -> None:
    """A subclass of it, under one name everywhere, and found by that name when it is unpickled."""
    base = vc.KVConnectorBase
    assert base is kv_connector.KVConnectorBase is adapter("kv_connector").base_class()
    assert issubclass(base, native.KVConnectorBase_V1)
    assert native.KVConnectorMetadata is kv_connector.KVConnectorMetadata
    assert native.KVConnectorRole is kv_connector.KVConnectorRole
    assert [base, SavingConnector] == pickle.loads(pickle.dumps([base, SavingConnector]))
    with pytest.raises(TypeError, match="abstract"):
        base(config(transfer=vc.make_kv_transfer_config(SavingConnector)), ROLES[0])


@pytest.mark.parametrize("cls", [SavingConnector, TwoArguments, AllGroups, MixedIn])
@pytest.mark.parametrize("role", ROLES)
def test_vllms_factory_makes_it(cls: type, role: Any) -> None:
    """Whatever its own constructor takes, its attributes are there as vLLM was told them."""
    made = made_by_vllm(cls, role)
    assert cls is type(made)
    assert role is made.role
    assert made.kv_transfer_config is made.vllm_config.kv_transfer_config
    assert made.kv_transfer_config.get_from_extra_config("folder", None) == "f"
    assert (made.kv_cache_config is not None) is (RELEASE >= (0, 11, 1))


def test_arguments_may_come_in_another_order() -> None:
    """Each is known by what it is."""
    settings = config(transfer=vc.make_kv_transfer_config(SavingConnector))
    cache = SimpleNamespace(kv_cache_groups=[], num_blocks=7)
    made = SavingConnector(cache, settings, ROLES[1])
    assert (settings, ROLES[1], cache) == (made.vllm_config, made.role, made.kv_cache_config)


@pytest.mark.skipif(RELEASE < (0, 11, 1), reason="SupportsHMA came with 0.11.1")
def test_who_takes_all_groups_is_declared_to_vllm() -> None:
    """Who overrides the method is made with the hybrid KV cache manager on, who does not is refused by vLLM."""
    supports = {cls: native.supports_hma(cls) for cls in (SavingConnector, AllGroups, MixedIn)}
    assert {SavingConnector: False, AllGroups: True, MixedIn: True} == supports
    assert isinstance(made_by_vllm(AllGroups, hma=True), native.SupportsHMA)
    with pytest.raises(ValueError, match="does not support HMA"):
        made_by_vllm(SavingConnector, hma=True)


def test_one_group_ends_in_the_same_method() -> None:
    """Up to 0.11.0 vLLM calls ``request_finished``, of whose overrides an older one does not come first."""
    assert (True, {"of": "r", "blocks": ([3, 4],)}) == made_by_vllm(AllGroups).request_finished("r", [3, 4])


@pytest.mark.parametrize("cls", [SavingConnector, MixedIn])
def test_keywords_of_newer_runners_do_not_reach_an_override_without_them(cls: type) -> None:
    """The V2 runner passes its batch to ``start_load_kv`` (0.30.0), which is written without here."""
    made = made_by_vllm(cls)
    made.bind_connector_metadata(made.build_connector_meta(None))
    made.start_load_kv(None, scheduler_output=None, request_ids=[])


@pytest.mark.parametrize("shape", [(2, 7, 3), (7, 2, 3), (7, 3), (5, 1, 7, 2)])
def test_blocks_come_first(shape: tuple[int, ...]) -> None:
    """Of any layout a view, through which blocks are written."""
    import torch

    made = made_by_vllm(SavingConnector)
    layer = torch.zeros(shape)
    made.by_block(layer)[[1, 4]] = 1.0
    assert made.by_block(layer).shape[0] == 7
    assert layer.sum() == layer.numel() / 7 * 2
    assert made.by_block(layer)[4].all()
    assert [0, 1] == [made.group_of(layer) for layer in "ac"] or RELEASE < (0, 11, 1)
    with pytest.raises(vc.VllmCompatError, match="a dimension of 7"):
        made.by_block(torch.zeros(8, 3))


def test_what_is_never_called_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """By name, and only what this release has not."""
    expected = []
    if RELEASE < (0, 33, 0):
        expected.append("restore_kv_caches")
    if not (0, 12, 0) <= RELEASE < (0, 29, 0):
        expected.append("register_cross_layers_kv_cache")
    # Modules of vLLM that another test imports set the root logger to ERROR (0.16.0).
    caplog.set_level("WARNING", logger="vllm_compat")
    for _ in range(2):
        made_by_vllm(SaysWhatIsNotCalled)
    assert tuple(expected) == SaysWhatIsNotCalled.uncalled_hooks()
    said = [record.getMessage() for record in caplog.records if "never calls" in record.getMessage()]
    assert [f"SaysWhatIsNotCalled overrides {', '.join(expected)}, which this vLLM never calls"] == said


def test_who_could_not_be_imported_is_refused() -> None:
    """A worker process has nothing but module and name."""

    class Local(SavingConnector):
        pass

    for cls in (Local, Away.Inside):
        with pytest.raises(vc.VllmCompatError, match="at the top of a module"):
            vc.make_kv_transfer_config(cls)


def test_a_name_that_vllm_has_itself() -> None:
    """It names our class where a module path comes first, and is refused where it would name vLLM's (to 0.19.1)."""
    if RELEASE < (0, 20, 0):
        with pytest.raises(vc.VllmCompatError, match="give the class a name"):
            vc.make_kv_transfer_config(NixlConnector)
    else:
        assert NixlConnector is KVConnectorFactory.get_connector_class(vc.make_kv_transfer_config(NixlConnector))


def test_options_of_the_config() -> None:
    """Those that this release has are set, others are refused."""
    made = vc.make_kv_transfer_config(SavingConnector, "kv_producer", {"a": 1}, engine_id="e")
    assert ("kv_producer", {"a": 1}, "e") == (made.kv_role, made.kv_connector_extra_config, made.engine_id)
    with pytest.raises(vc.UnsupportedField, match=r"KVTransferConfig\.nothing"):
        vc.make_kv_transfer_config(SavingConnector, nothing=1)
    with pytest.raises(vc.VllmCompatError, match="kv_transfer_config"):
        SavingConnector(config(), ROLES[0])


def test_beside_the_scheduler(tiny_llama: str, tmp_path: Path) -> None:
    """A finished request keeps its blocks until it is reported as saved; the next with its prompt loads them."""
    transfer = vc.make_kv_transfer_config(SavingConnector, extra={"folder": str(tmp_path)})
    options = {"dtype": "float32", "max_model_len": 256, "enable_prefix_caching": False, "skip_tokenizer_init": True}
    settings = vc.make_vllm_config(model=tiny_llama, block_size=BLOCK_SIZE, kv_transfer_config=transfer, **options)
    scheduler = vc.make_scheduler(settings, vc.make_kv_cache_config(settings, num_blocks=32))
    params = vc.make_sampling_params(temperature=0.0, max_tokens=1)
    prompt = list(range(10, 10 + 3 * BLOCK_SIZE))
    free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    scheduler.add_request(vc.make_request("a", prompt, params, scheduler=scheduler))
    step = scheduler.schedule()
    assert step.kv_connector_metadata == Work()
    scheduler.update_from_output(step, vc.make_model_runner_output({"a": [5]}))
    step = scheduler.schedule()
    ((file, block_ids, request_id),) = step.kv_connector_metadata.saves
    assert (2, "a", tmp_path) == (len(block_ids), request_id, file.parent)
    assert free - 3 == scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    saved = vc.make_kv_connector_output(finished_sending={"a"})
    scheduler.update_from_output(step, vc.make_model_runner_output({}, kv_connector_output=saved))
    assert free == scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    file.touch()
    scheduler.add_request(vc.make_request("b", prompt, params, scheduler=scheduler))
    step = scheduler.schedule()
    (request,) = vc.read_scheduler_output(step).requests
    assert (2 * BLOCK_SIZE, BLOCK_SIZE) == (request.num_computed_tokens, request.num_scheduled_tokens)
    assert [(file, list(step.scheduled_new_reqs[0].block_ids[0][:2]))] == step.kv_connector_metadata.loads
    assert [] == step.kv_connector_metadata.saves


class AsksNobody:
    """Schedules without a look at what a request may read, as every scheduler up to 0.30.0."""

    def schedule(self) -> None: ...


def test_a_capture_does_not_begin_where_a_connector_cannot_be_held_back(tiny_llama: str) -> None:
    """Its requests would be short of states. A connector that only saves does no harm."""
    scheduling = adapter("scheduler")
    for cls in (scheduling.scheduler_class(None, "sync"), scheduling.scheduler_class(None, "async")):
        assert scheduling.holds_connector_back(object.__new__(cls)) is HOLDS_CONNECTORS_BACK

    for role, refused in (("kv_both", True), ("kv_consumer", True), ("kv_producer", False)):
        transfer = vc.make_kv_transfer_config(SavingConnector, role)
        settings = vc.make_vllm_config(model=tiny_llama, **EAGER, kv_transfer_config=transfer)
        settings.parallel_config.worker_extension_cls = "vllm_compat.capture.worker.HiddenStatesWorkerExtension"
        loop: Any = SimpleNamespace(vllm_config=settings, scheduler=AsksNobody())
        # Whoever is not refused goes on to the workers, of which this loop has none.
        with pytest.raises(vc.CaptureError if refused else AttributeError) as caught:
            HiddenStatesCapture(loop, (0,))
        assert ("SavingConnector" in str(caught.value) and role in str(caught.value)) is refused


RUN = """
import sys
import vllm_compat as vc
assert "vllm" not in sys.modules
from keeping import KeepingConnector

if __name__ == "__main__":
    config = vc.make_vllm_config(
        model=sys.argv[1], dtype="float32", enforce_eager=True, gpu_memory_utilization=0.3, max_model_len=256,
        block_size=BLOCK_SIZE,
        distributed_executor_backend="mp",
        kv_transfer_config=vc.make_kv_transfer_config(KeepingConnector, extra={"folder": sys.argv[2]}),
    )
    with vc.EngineLoop(config, num_blocks=64) as loop:
        params = vc.make_sampling_params(temperature=0.0, max_tokens=3, ignore_eos=True)
        for done in loop.generate([list(range(10, 90)), list(range(100, 120))], params):
            print("finished", done.request_id, len(done.token_ids))
"""


def test_the_page_has_a_connector_that_works(tiny_llama: str, tmp_path: Path) -> None:
    """The example of docs/kv-connector.md, loaded by name in a worker process: a file per request, of every layer."""
    import torch

    page = (ROOT / "docs" / "kv-connector.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "keeping.py").write_text(example, encoding="utf-8")
    (tmp_path / "run.py").write_text(RUN.replace("BLOCK_SIZE", str(BLOCK_SIZE)), encoding="utf-8")

    done = subprocess.run(
        [sys.executable, "run.py", tiny_llama, str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")))},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )

    assert done.returncode == 0, done.stderr[-3000:]
    said = [line for line in done.stdout.splitlines() if line.startswith("finished")]  # vLLM logs there, too
    assert ["finished 0 3", "finished 1 3"] == said
    first, second = (torch.load(tmp_path / f"{request_id}.pt") for request_id in "01")
    assert len(first) == len(second) == 7  # layers
    assert all(layer.any() for layer in (*first.values(), *second.values()))
    blocks = [{-(-(prompt + 2) // BLOCK_SIZE)} for prompt in (80, 20)]
    assert blocks == [{len(layer) for layer in kept.values()} for kept in (first, second)]

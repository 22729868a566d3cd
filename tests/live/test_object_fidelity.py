"""What a factory makes is what vLLM's bare constructor makes: unset, None, copied, pickled and replaced alike."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy
import pytest
import torch
from here import RELEASE, by_release
from same import differences, fields

import vllm_compat as vc


@dataclass(frozen=True)
class Case:
    """A factory, the constructor it stands for, and one call of each that means the same.

    Attributes:
        factory: Our factory.
        symbol: vLLM's class, ``module:Name``.
        ours: Arguments of the factory.
        theirs: Arguments of the constructor. Every other parameter of it is an option of the factory by the same name,
            unless it is in ``left``.
        left: Parameters that the factory does not have by that name: mapped, or vLLM's own to fill in.
    """

    factory: Callable[..., Any]
    symbol: str
    ours: dict[str, Any]
    theirs: dict[str, Any]
    left: tuple[str, ...] = ()
    since: tuple[int, ...] = field(default=(0,))

    @property
    def native(self) -> Callable[..., Any]:
        module, _, name = self.symbol.partition(":")
        made: Callable[..., Any] = getattr(importlib.import_module(module), name)
        return made

    def options(self) -> list[str]:
        """What else both take."""
        return [name for name in inspect.signature(self.native).parameters if name not in {*self.theirs, *self.left}]


def _params() -> Any:
    return vc.make_sampling_params(max_tokens=4)


def _structured() -> dict[str, Any]:
    """Up to 0.11.0 the caller makes it, as ``Request.from_engine_core_request`` does."""
    if RELEASE >= (0, 11, 1):
        return {}
    from vllm.v1.structured_output.request import StructuredOutputRequest

    return {"structured_output_request": StructuredOutputRequest(sampling_params=PARAMS)}


PARAMS = _params()
REQUIRED_OF_REQUEST: dict[str, Any] = {} if RELEASE >= (0, 17, 0) else {"eos_token_id": None}
REQUIRED_OF_CORE_REQUEST = dict.fromkeys(("mm_features", "lora_request", "cache_salt", "data_parallel_rank"))
IDS, LOGPROBS, RANKS = [[5, 9], [7, 2]], [[-0.5, -1.0], [-0.25, -2.0]], [1, 2]
EMPTY_STEP: dict[str, Any] = {
    "num_scheduled_tokens": {},
    "total_num_scheduled_tokens": 0,
    "scheduled_new_reqs": [],
    "scheduled_cached_reqs": vc.make_cached_request_data({}, num_output_tokens={}),
    "scheduled_spec_decode_tokens": {},
    "scheduled_encoder_inputs": {},
    "finished_req_ids": set(),
    "free_encoder_mm_hashes": [],
    **by_release(("0", {"num_common_prefix_blocks": []}), ("0.32.0", {})),
    **by_release(("0", {"structured_output_request_ids": {}, "grammar_bitmask": None}), ("0.11.1", {})),
}
NEW: dict[str, Any] = {
    "prompt_token_ids": [1, 2],
    "sampling_params": PARAMS,
    "block_ids": ([3],),
    "num_computed_tokens": 0,
}
MASK = numpy.zeros((1, 2), dtype=numpy.int32)
ROWS = [numpy.array(row, dtype=numpy.int64) for row in ([3], [])]
RUNNER: dict[str, Any] = {
    "req_ids": ["a", "b"],
    "req_id_to_index": {"a": 0, "b": 1},
    "sampled_token_ids": by_release(("0", [[3], []]), ("0.11.1", ROWS), ("0.12.0", [[3], []])),
}
RUNNER |= by_release(("0", {"logprobs": None, "prompt_logprobs_dict": {}, "pooler_output": []}), ("0.14.0", {}))

CASES = {
    "sampling_params": Case(
        vc.make_sampling_params,
        "vllm:SamplingParams",
        {"temperature": 0.5, "stop": ["x"], "stop_token_ids": [3]},
        {"temperature": 0.5, "stop": ["x"], "stop_token_ids": [3]},
        left=(
            *("_real_n", "output_text_buffer_length", "_all_stop_token_ids", "_bad_words_token_ids", "_eos_token_id"),
            *("_watermarking_skipped", "guided_decoding"),
        ),
    ),
    "pooling_params": Case(
        vc.make_pooling_params,
        "vllm:PoolingParams",
        {"task": "embed"},
        {"task": "embed"},
        left=("normalize", "activation", "softmax", "use_activation"),
    ),
    "lora_request": Case(
        vc.make_lora_request,
        "vllm.lora.request:LoRARequest",
        {"lora_name": "l", "lora_int_id": 1, "lora_path": "/x"},
        {"lora_name": "l", "lora_int_id": 1, "lora_path": "/x"},
        left=("lora_local_path",),
    ),
    "request": Case(
        vc.make_request,
        "vllm.v1.request:Request",
        {"request_id": "r", "prompt_token_ids": (1, 2, 3), "sampling_params": PARAMS, "block_hasher": None}
        | {"arrival_time": 1.5},
        {"request_id": "r", "prompt_token_ids": [1, 2, 3], "sampling_params": PARAMS, "pooling_params": None}
        | {"block_hasher": None, "arrival_time": 1.5, **REQUIRED_OF_REQUEST, **_structured()},
    ),
    "engine_core_request": Case(
        vc.make_engine_core_request,
        "vllm.v1.engine:EngineCoreRequest",
        {"request_id": "r", "prompt_token_ids": (1, 2), "sampling_params": PARAMS, "arrival_time": 1.5},
        {"request_id": "r", "prompt_token_ids": [1, 2], "sampling_params": PARAMS, "pooling_params": None}
        | {"arrival_time": 1.5, **REQUIRED_OF_CORE_REQUEST, **REQUIRED_OF_REQUEST},
    ),
    "new_request_data": Case(
        vc.make_new_request_data,
        "vllm.v1.core.sched.output:NewRequestData",
        {"request_id": "r", **NEW},
        {"req_id": "r", **NEW, "pooling_params": None, "lora_request": None}
        | by_release(("0", {"mm_kwargs": [], "mm_hashes": [], "mm_positions": []}), ("0.11.0", {"mm_features": []})),
    ),
    "scheduler_output": Case(
        vc.make_scheduler_output,
        "vllm.v1.core.sched.output:SchedulerOutput",
        {"num_scheduled_tokens": {}},
        EMPTY_STEP,
    ),
    "grammar_output": Case(
        vc.make_grammar_output,
        "vllm.v1.core.sched.output:GrammarOutput",
        {"structured_output_request_ids": ("r",), "grammar_bitmask": MASK},
        {"structured_output_request_ids": ["r"], "grammar_bitmask": MASK},
        since=(0, 11, 1),
    ),
    "model_runner_output": Case(
        vc.make_model_runner_output,
        "vllm.v1.outputs:ModelRunnerOutput",
        {"token_ids": {"a": (3,), "b": ()}},
        RUNNER,
        left=("routed_experts_dict",),
    ),
    "draft_token_ids": Case(
        vc.make_draft_token_ids,
        "vllm.v1.outputs:DraftTokenIds",
        {"draft_token_ids": {"a": (3, 4), "b": ()}},
        {"req_ids": ["a", "b"], "draft_token_ids": [[3, 4], []]},
    ),
    "kv_connector_output": Case(vc.make_kv_connector_output, "vllm.v1.outputs:KVConnectorOutput", {}, {}),
    "ec_connector_output": Case(
        vc.make_ec_connector_output, "vllm.v1.outputs:ECConnectorOutput", {}, {}, since=(0, 11, 1)
    ),
    "logprobs_tensors": Case(
        vc.make_logprobs_tensors,
        "vllm.v1.outputs:LogprobsTensors",
        {"token_ids": IDS, "logprobs": LOGPROBS, "ranks": RANKS},
        {
            "logprob_token_ids": torch.tensor(IDS, dtype=torch.int32),
            "logprobs": torch.tensor(LOGPROBS),
            "selected_token_ranks": torch.tensor(RANKS, dtype=torch.int32),
        },
        left=("cu_num_generated_tokens", "cu_num_generated_tokens_tensor"),
    ),
    "engine_core_output": Case(
        vc.make_engine_core_output,
        "vllm.v1.engine:EngineCoreOutput",
        {"request_id": "r", "new_token_ids": (3,)},
        {"request_id": "r", "new_token_ids": [3]},
    ),
    "engine_core_outputs": Case(
        vc.make_engine_core_outputs,
        "vllm.v1.engine:EngineCoreOutputs",
        {"timestamp": 2.5},
        {"timestamp": 2.5},
        left=("outputs",),
    ),
    "kv_cache_spec": Case(
        vc.make_kv_cache_spec,
        "vllm.v1.kv_cache_interface:FullAttentionSpec",
        {"kind": "full_attention", "block_size": 16, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float16},
        {"block_size": 16, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float16}
        | by_release(("0", {"use_mla": False}), ("0.11.0", {})),
    ),
}
CASES = {name: case for name, case in CASES.items() if case.since <= RELEASE}
EACH = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def _or_error(make: Callable[[], Any]) -> Any:
    """What was made, or the kind of error."""
    try:
        return make()
    except Exception as error:  # noqa: BLE001 - which one is the result
        return type(error).__name__


@EACH
def test_unset(case: Case) -> None:
    """Options that are not given are vLLM's own defaults, and the object is of vLLM's own class, no subclass."""
    assert [] == differences(case.native(**case.theirs), case.factory(**case.ours))
    every = dict.fromkeys(case.options(), vc.UNSET)
    assert [] == differences(case.native(**case.theirs), case.factory(**case.ours, **every))


NONE = [pytest.param(case, name, id=f"{key}-{name}") for key, case in CASES.items() for name in case.options()]


@pytest.mark.parametrize(("case", "option"), NONE)
def test_none(case: Case, option: str) -> None:
    """An option that is None reaches vLLM as None: it is not the same as unset, where vLLM's default is another."""
    theirs = _or_error(lambda: case.native(**case.theirs, **{option: None}))
    ours = _or_error(lambda: case.factory(**case.ours, **{option: None}))
    assert [] == differences(theirs, ours)


def test_none_is_not_unset() -> None:
    """The test above would pass with a factory that drops None, if no option told them apart; these do."""
    unset, none = vc.make_request("r", [1], PARAMS), vc.make_request("r", [1], PARAMS, priority=None)
    assert (0, None) == (unset.priority, none.priority)
    unset, none = vc.make_kv_connector_output(), vc.make_kv_connector_output(finished_sending=None)
    assert [] == differences(unset, none)  # where None is the default
    unset, none = (vc.make_engine_core_request("r", [1], PARAMS, **o) for o in ({}, {"priority": None}))
    assert (0, None) == (unset.priority, none.priority)


def _replaced(made: Any) -> Any:
    """Replace the first field by itself, in the way of its kind."""
    if isinstance(made, msgspec.Struct):
        name = made.__struct_fields__[0]
        return msgspec.structs.replace(made, **{name: getattr(made, name)})
    if dataclasses.is_dataclass(made) and not isinstance(made, type):
        name = dataclasses.fields(made)[0].name
        return dataclasses.replace(made, **{name: getattr(made, name)})
    if isinstance(made, tuple):
        return made._replace(**{made._fields[0]: made[0]})
    return made  # a plain class has no such thing


WAYS: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda made: pickle.loads(pickle.dumps(made)),
    "replace": _replaced,
}


@pytest.mark.parametrize("way", WAYS)
@EACH
def test_copies(case: Case, way: str) -> None:
    """A copy of ours is a copy of vLLM's, and where vLLM's cannot be copied ours fails alike."""
    native, made = case.native(**case.theirs), case.factory(**case.ours)
    theirs, ours = _or_error(lambda: WAYS[way](native)), _or_error(lambda: WAYS[way](made))
    assert [] == differences(theirs, ours)
    assert case.native is type(ours)
    assert [] == differences(case.factory(**case.ours), ours)


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_deep_copies_share_nothing(way: str) -> None:
    """A request that goes on generating leaves its copy alone."""
    made = vc.make_request("r", [1, 2, 3], _params(), block_hasher=None)
    other = WAYS[way](made)
    made.append_output_token_ids([7])
    made.sampling_params.max_tokens = 99
    assert ([1, 2, 3], 4) == (list(other._all_token_ids), other.sampling_params.max_tokens)
    assert [1, 2, 3] == list(other.all_token_ids)  # the read-only view is of its own list


def test_a_hashed_request_copies_like_vllms_own() -> None:
    """With its block hashes, and with a hasher that goes on hashing."""
    made = vc.make_request("r", range(40), _params(), block_hasher=vc.make_block_hasher(block_size=16))
    other = copy.deepcopy(made)
    assert made.block_hashes == other.block_hashes
    for request in (made, other):
        request.append_output_token_ids(list(range(40, 50)))
    assert 3 == len(other.block_hashes)
    assert made.block_hashes == other.block_hashes


def test_the_callers_lists_stay_the_callers() -> None:
    """Nothing that a factory was given is changed, or changes what was made when the caller changes it."""
    ids, counts = [1, 2, 3], {"a": 2}
    made = [
        vc.make_request("r", ids, PARAMS, block_hasher=None),
        vc.make_engine_core_request("r", ids, PARAMS),
        vc.make_new_request_data("a", ids, PARAMS, block_ids=[ids]),
    ]
    output = vc.make_scheduler_output(counts, scheduled_new_reqs=[made[2]])
    ids.append(4)
    counts["b"] = 1
    assert [[1, 2, 3]] * 3 == [request.prompt_token_ids for request in made]
    assert ([1, 2, 3],) == made[2].block_ids
    assert {"a": 2} == output.num_scheduled_tokens


def test_the_config(tiny_llama: str) -> None:
    """make_vllm_config is EngineArgs and create_engine_config, field by field."""
    from vllm import EngineArgs

    options = {"model": tiny_llama, "dtype": "float32", "enforce_eager": True, "max_model_len": 128}
    theirs, ours = EngineArgs(**options).create_engine_config(), vc.make_vllm_config(**options)
    parts = [name for name in fields(theirs) if name.endswith("_config")]
    assert len(parts) > 8
    told = {"instance_id", "compilation_config", "parallel_config"}  # random ids and ports
    for name in (*parts, "additional_config"):
        if name in told:
            continue
        assert repr(getattr(theirs, name)) == repr(getattr(ours, name)), name
    # The worker extension through which hidden states can be captured is a loop's, not the config's.
    assert theirs.parallel_config.worker_extension_cls == ours.parallel_config.worker_extension_cls

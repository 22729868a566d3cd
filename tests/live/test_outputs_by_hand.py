"""Outputs of runner, connector and engine core made by hand, read by vLLM's own code."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from here import NIGHTLY, RELEASE, by_release
from same import differences

import vllm_compat as vc

IDS = [[5, 9], [7, 2], [8, 1]]
LOGPROBS = [[-0.5, -1.0], [-0.25, -2.0], [-1.5, -0.125]]
RANKS = [1, 1, 2]


def _rows(*indices: int) -> tuple[dict[int, float], ...]:
    return tuple(dict(zip(IDS[i], LOGPROBS[i], strict=True)) for i in indices)


def _running(config: Any, *names: str, **params: Any) -> Any:
    """A scheduler with requests that are about to decode."""
    scheduler = vc.make_scheduler(config, vc.make_kv_cache_config(config, num_blocks=64))
    for name in names:
        options = vc.make_sampling_params(temperature=0.0, max_tokens=8, **params)
        scheduler.add_request(vc.make_request(name, [1, 2, 3], options, scheduler=scheduler))
    return scheduler


def _update(scheduler: Any, runner_output: Any) -> dict[str, Any]:
    """Schedule, update, and read what came of it, by request."""
    outputs = scheduler.update_from_output(scheduler.schedule(), runner_output)
    read = [vc.read_engine_core_output(output) for output in outputs[0].outputs]
    return {update.request_id: update for update in read}


def test_logprobs_reach_each_request(scheduler_config: Any) -> None:
    """The scheduler cuts the rows of one step into those of its requests."""
    scheduler = _running(scheduler_config, "a", "b", logprobs=1)
    logprobs = vc.make_logprobs_lists(IDS[:2], LOGPROBS[:2], RANKS[:2])
    updates = _update(scheduler, vc.make_model_runner_output({"a": [5], "b": [7]}, logprobs=logprobs))
    assert {"a": _rows(0), "b": _rows(1)} == {name: update.logprobs for name, update in updates.items()}


def test_logprobs_of_several_tokens_per_request(scheduler_config: Any) -> None:
    """With drafts a request may have several rows: its own, not its neighbour's (0.11.1)."""
    if RELEASE < (0, 11, 1):
        with pytest.raises(vc.UnsupportedField, match="cu_num_generated_tokens"):
            vc.make_logprobs_lists(IDS, LOGPROBS, RANKS, num_generated_tokens=[2, 1])
        return
    scheduler = _running(scheduler_config, "a", "b", logprobs=1)
    logprobs = vc.make_logprobs_lists(IDS, LOGPROBS, RANKS, num_generated_tokens=[2, 1])
    updates = _update(scheduler, vc.make_model_runner_output({"a": [5, 7], "b": [8]}, logprobs=logprobs))
    assert {"a": _rows(0, 1), "b": _rows(2)} == {name: update.logprobs for name, update in updates.items()}


@pytest.mark.parametrize("form", [list, numpy.array, torch.tensor])
def test_the_containers_are_the_releases_own(form: Any) -> None:
    """Lists up to 0.11.0, arrays after; whatever the caller has."""
    made = vc.make_logprobs_lists(form(IDS), form(LOGPROBS), form(RANKS))
    expected = by_release(("0", list), ("0.11.1", numpy.ndarray))
    assert {expected} == {type(column) for column in made[:3]}
    assert (IDS, RANKS) == tuple(numpy.asarray(column).tolist() for column in (made[0], made[2]))
    assert numpy.allclose(made[1], LOGPROBS)


def test_prompt_logprobs(scheduler_config: Any) -> None:
    """Told once, with the first token."""
    scheduler = _running(scheduler_config, "a", prompt_logprobs=1)
    tensors = vc.make_logprobs_tensors(IDS[:2], LOGPROBS[:2], RANKS[:2])
    assert (torch.int32, torch.float32) == (tensors.logprob_token_ids.dtype, tensors.logprobs.dtype)
    updates = _update(scheduler, vc.make_model_runner_output({"a": [5]}, prompt_logprobs_dict={"a": tensors}))
    assert _rows(0, 1) == updates["a"].prompt_logprobs


@pytest.mark.parametrize(
    ("token_ids", "logprobs", "ranks", "options", "message"),
    [
        (IDS, LOGPROBS[:2], RANKS, {}, r"3 rows of \[2\], 2 rows of \[2\], 3 ranks"),
        (IDS, LOGPROBS, RANKS[:1], {}, "1 ranks"),
        ([[1], [2, 3]], [[-1.0], [-1.0, -2.0]], [1, 1], {}, r"2 rows of \[1, 2\]"),
        (IDS, LOGPROBS, RANKS, {"num_generated_tokens": [2, 2]}, "needs 4 rows"),
    ],
)
def test_shapes_that_do_not_go_together(
    token_ids: Any, logprobs: Any, ranks: Any, options: dict[str, Any], message: str
) -> None:
    """The rows would be cut in the wrong places."""
    with pytest.raises(vc.VllmCompatError, match=message.replace("needs ", "")):
        vc.make_logprobs_lists(token_ids, logprobs, ranks, **options)


def test_pooler_output_by_request() -> None:
    """In row order, None where pooling goes on."""
    vector = torch.ones(3)
    made = vc.make_model_runner_output({"a": [], "b": []}, pooler_output={"b": vector})
    assert [None, vector] == made.pooler_output


def test_drafts_reach_the_scheduler(scheduler_config: Any) -> None:
    """``update_draft_token_ids`` gives each running request its own drafts."""
    scheduler = _running(scheduler_config, "a", "b")
    _update(scheduler, vc.make_model_runner_output({"a": [5], "b": [7]}))
    scheduler.update_draft_token_ids(vc.make_draft_token_ids({"b": (4,), "a": (6, 7)}))
    assert {"a": [6, 7], "b": [4]} == {name: list(r.spec_token_ids) for name, r in scheduler.requests.items()}


def test_connector_outputs_are_aggregated() -> None:
    """vLLM's aggregator says a request is sent when every worker has said so."""
    from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator

    outputs = [
        vc.make_model_runner_output(
            {}, kv_connector_output=vc.make_kv_connector_output(finished_sending=sent, finished_recving=["r"])
        )
        for sent in (["both"], ["both", "one"])
    ]
    name = by_release(("0", "world_size"), ("0.11.1", "expected_finished_count"))
    found = KVOutputAggregator(**{name: 2}).aggregate(outputs, 0).kv_connector_output
    assert ({"both"}, {"r"}) == (found.finished_sending, found.finished_recving)


def test_connector_options() -> None:
    """Sets where vLLM wants sets; unset fields are vLLM's own; too new ones are refused."""
    from vllm.v1.outputs import KVConnectorOutput

    assert [] == differences(KVConnectorOutput(), vc.make_kv_connector_output())
    if RELEASE >= (0, 11, 1):
        assert {3, 4} == vc.make_kv_connector_output(invalid_block_ids=[4, 3]).invalid_block_ids
        assert {"h"} == vc.make_ec_connector_output(finished_sending=["h"]).finished_sending
    else:
        with pytest.raises(vc.UnsupportedField, match=r"0\.11\.1 or newer"):
            vc.make_ec_connector_output(finished_sending=["h"])
    if RELEASE < (0, 30, 0) and not NIGHTLY:
        with pytest.raises(vc.UnsupportedField, match=r"KVConnectorOutput\.failed_recving"):
            vc.make_kv_connector_output(failed_recving=["r"])


def test_engine_core_outputs_over_the_wire() -> None:
    """vLLM's encoder and decoder give back the message, and our reader what was put in."""
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    first = vc.make_engine_core_output(
        "a",
        (5,),
        new_logprobs=vc.make_logprobs_lists(IDS[:1], LOGPROBS[:1], RANKS[:1]),
        new_prompt_logprobs_tensors=vc.make_logprobs_tensors(IDS[1:], LOGPROBS[1:], RANKS[1:]),
        num_cached_tokens=16,
    )
    last = vc.make_engine_core_output("b", [7], finish_reason="stop", stop_reason=7)
    made = vc.make_engine_core_outputs([first, last], engine_index=1, finished_requests=["b"], timestamp=2.5)
    arrived = MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(made))
    assert (1, {"b"}, 2.5) == (arrived.engine_index, arrived.finished_requests, arrived.timestamp)
    one, other = map(vc.read_engine_core_output, arrived.outputs)
    assert (_rows(0), _rows(1, 2), 16, None) == (
        one.logprobs,
        one.prompt_logprobs,
        one.num_cached_tokens,
        one.finish_reason,
    )
    assert ("b", (7,), "stop", 7) == (other.request_id, other.new_token_ids, other.finish_reason, other.stop_reason)


def test_finish_reasons() -> None:
    """By name, or vLLM's own; a name that the release does not have is refused, with those that it has."""
    from vllm.v1.engine import FinishReason

    for reason in FinishReason:
        name = reason.name.lower()
        assert reason is vc.make_engine_core_output("r", finish_reason=name).finish_reason
        assert name == vc.read_engine_core_output(vc.make_engine_core_output("r", finish_reason=reason)).finish_reason
    with pytest.raises(vc.VllmCompatError, match="one of stop, length, abort"):
        vc.make_engine_core_output("r", finish_reason="stopped")


def test_cached_tokens() -> None:
    """The numbers go where the release keeps them, and must not contradict each other."""
    external = by_release(("0", {}), ("0.16.0", {"num_external_computed_tokens": 16}))
    made = vc.make_engine_core_output("r", [1], num_cached_tokens=48, **external)
    if RELEASE >= (0, 20, 0):
        stats = made.prefill_stats
        assert (48, 32, 16) == (
            stats.num_cached_tokens,
            stats.num_local_cached_tokens,
            stats.num_external_cached_tokens,
        )
        with pytest.raises(vc.VllmCompatError, match="and prefill_stats"):
            vc.make_engine_core_output("r", [1], num_cached_tokens=1, prefill_stats=stats)
        with pytest.raises(vc.VllmCompatError, match="8 cached, 16 external"):
            vc.make_engine_core_output("r", [1], num_cached_tokens=8, num_external_computed_tokens=16)
    assert 48 == vc.read_engine_core_output(made).num_cached_tokens
    assert vc.read_engine_core_output(vc.make_engine_core_output("r", [1])).num_cached_tokens in (None, 0)


def test_lora_reaches_the_hashes() -> None:
    """Requests of two adapters never share blocks; the same adapter's do."""
    params = vc.make_sampling_params(max_tokens=1)
    loras = [vc.UNSET, vc.make_lora_request("one", 1, "/tmp/one"), vc.make_lora_request("two", 2, "/tmp/two")]
    plain, one, two = (vc.make_request("r", range(64), params, lora_request=lora).block_hashes for lora in loras)
    again = vc.make_request("r", range(64), params, lora_request=vc.make_lora_request("one", 1, "/tmp/one"))
    assert one == again.block_hashes
    assert not ({*plain} & {*one}) | ({*one} & {*two}) | ({*plain} & {*two})


def test_lora_options() -> None:
    """Each exists in its own releases, and is refused outside them."""
    from pathlib import Path

    made = vc.make_lora_request("one", 1, Path("/tmp/one"), base_model_name="base")
    assert ("one", 1, "/tmp/one", "base") == (made.lora_name, made.lora_int_id, made.lora_path, made.base_model_name)
    for name, value, first, last in (
        ("load_inplace", True, (0, 15, 0), (9,)),
        ("is_3d_lora_weight", True, (0, 22, 0), (9,)),
        ("tensorizer_config_dict", {"a": "b"}, (0,), (0, 32, 0)),
        ("long_lora_max_len", 7, (0,), (0, 14, 0)),
    ):
        if first <= RELEASE < last:
            assert value == getattr(vc.make_lora_request("one", 1, "x", **{name: value}), name)
        else:
            with pytest.raises(vc.UnsupportedField, match=name):
                vc.make_lora_request("one", 1, "x", **{name: value})
    for number, path in ((0, "x"), (1, "")):
        with pytest.raises(vc.VllmCompatError, match="at least 1"):
            vc.make_lora_request("one", number, path)


@pytest.mark.parametrize("name", ["use_activation", "normalize"])
@pytest.mark.parametrize("value", [True, False])
def test_pooling_by_either_name(name: str, value: bool) -> None:
    """The option lands where the release reads it for the task; two names of it are too many."""
    made = vc.make_pooling_params("embed", **{name: value})
    assert value is getattr(made, by_release(("0", "normalize"), ("0.14.0", "use_activation")))
    assert "embed" == made.task
    with pytest.raises(vc.VllmCompatError, match="names of one option"):
        vc.make_pooling_params("embed", use_activation=True, softmax=True)
    if RELEASE < (0, 14, 0):
        with pytest.raises(vc.VllmCompatError, match="the task too"):
            vc.make_pooling_params(use_activation=True)
    assert 4 == vc.make_pooling_params(dimensions=4).dimensions

"""Engine core requests made by hand: over vLLM's wire, through vLLM's front end, into vLLM's scheduler."""

from __future__ import annotations

from typing import Any

import pytest
from here import by_release
from same import differences, fields

import vllm_compat as vc
from vllm_compat.adapters.select import adapter

#: Option -> its first release ("" where every supported one has it), and a value.
OPTIONS: dict[str, tuple[str, Any]] = {
    "arrival_time": ("", 12.5),
    "cache_salt": ("", "salt"),
    "data_parallel_rank": ("", 0),
    "client_index": ("", 2),
    "current_wave": ("", 4),
    "priority": ("", 3),
    "trace_headers": ("", {"traceparent": "00-0"}),
    "external_req_id": ("0.14.0", "mine"),
    "resumable": ("0.15.0", True),
    "reasoning_ended": ("0.16.0", True),
    "reasoning_parser_kwargs": ("0.20.1", {"a": 1}),
    "abort_immediately": ("0.21.0", True),
    "session_id": ("0.28.0", "s"),
}


def _options() -> dict[str, Any]:
    return {name: value for name, (since, value) in OPTIONS.items() if not since or by_release((since, True))}


def test_every_option_reaches_the_request() -> None:
    """What was given is what is read; the rest is what vLLM has as default."""
    params = vc.make_sampling_params(max_tokens=4)
    read = vc.read_engine_core_request(vc.make_engine_core_request("r", (1, 2, 3), params, **_options()))
    assert _options() == {name: read[name] for name in _options()}
    assert ("r", [1, 2, 3], None) == (read["request_id"], read["prompt_token_ids"], read["lora_request"])
    plain = vc.read_engine_core_request(vc.make_engine_core_request("r", [1], params))
    assert (0, 0, 0, None) == tuple(plain[n] for n in ("client_index", "current_wave", "priority", "trace_headers"))


@pytest.mark.parametrize("name", [name for name, (since, _) in OPTIONS.items() if since])
def test_an_option_that_is_too_new_is_refused(name: str) -> None:
    """By name, with the first release that has it."""
    since, value = OPTIONS[name]
    if by_release((since, True)):
        return  # reaches the request: see above
    with pytest.raises(vc.UnsupportedField, match=f"vLLM {since} or newer"):
        vc.make_engine_core_request("r", [1], vc.make_sampling_params(max_tokens=4), **{name: value})


def test_over_the_wire() -> None:
    """vLLM's encoder and decoder give back the same request, end-of-sequence id, LoRA and all options included."""
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    params = vc.make_sampling_params(max_tokens=4, min_tokens=2, stop_token_ids=[5])
    lora = vc.make_lora_request("adapter", 3, "/tmp/adapter")
    made = vc.make_engine_core_request("r", range(40), params, eos_token_id=9, lora_request=lora, **_options())
    decoder = MsgpackDecoder(EngineCoreRequest)
    arrived = decoder.decode(MsgpackEncoder().encode(made))
    assert [] == differences(made, arrived)
    assert 9 == vc.read_engine_core_request(arrived)["eos_token_id"]
    again = vc.make_engine_core_request(**_without_none(vc.read_engine_core_request(arrived)))
    assert [] == differences(made, again)


def _without_none(read: dict[str, Any]) -> dict[str, Any]:
    return {name: vc.UNSET if value is None and name != "pooling_params" else value for name, value in read.items()}


def test_it_is_what_vllms_front_end_makes(scheduler_config: Any) -> None:
    """From the same prompt, params and options, field by field."""
    inputs = adapter("input_processor")
    ids = list(range(3, 50))
    params = vc.make_sampling_params(temperature=0.0, max_tokens=5, min_tokens=2)
    given = {"request_id": "r", "params": params, "arrival_time": 1.5, "priority": 3}
    theirs = inputs.core_request(inputs.build(scheduler_config), {**given, "prompt": inputs.token_prompt(ids, "salt")})
    ours = vc.make_engine_core_request(
        "r", ids, params, eos_token_id=2030, arrival_time=1.5, priority=3, cache_salt="salt"
    )
    # What the front end takes from the engine's configuration is its own matter (0.32.0).
    assert by_release(("0", []), ("0.32.0", [".sampling_params.watermarking"])) == [
        found.partition(":")[0] for found in differences(theirs, ours)
    ]
    assert params is not ours.sampling_params  # a copy got the end-of-sequence id


def _scheduler(config: Any) -> Any:
    return vc.make_scheduler(config, vc.make_kv_cache_config(config, num_blocks=64))


def test_the_cores_request(scheduler_config: Any) -> None:
    """request_from_engine_core_request makes what make_request makes, block hashes included."""
    scheduler = _scheduler(scheduler_config)
    params = vc.make_sampling_params(max_tokens=4)
    options = {"arrival_time": 1.5, "cache_salt": "s", "priority": 2, "eos_token_id": 9}
    core = vc.make_engine_core_request("r", range(80), params, **options)
    made = vc.request_from_engine_core_request(core, scheduler=scheduler)
    direct = vc.make_request("r", range(80), params, scheduler=scheduler, **options)
    assert 80 // scheduler.block_size == len(made.block_hashes)
    assert made.block_hashes == direct.block_hashes
    one, other = fields(made), fields(direct)
    for values in (one, other):  # a function of its own per call
        values.pop("_block_hasher", None)
        values.pop("get_hash_new_full_blocks", None)
    assert [] == differences(one, other)
    assert [] == vc.request_from_engine_core_request(core, block_hasher=None).block_hashes


def test_multimodal_features(scheduler_config: Any) -> None:
    """They go over the wire and into the block hashes: the same tokens over another image share no block with it."""
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    scheduler = _scheduler(scheduler_config)
    params = vc.make_sampling_params(max_tokens=4)
    hashes = []
    for identifier in ("cat", "dog", "cat"):
        place = PlaceholderRange(offset=4, length=40)
        feature = MultiModalFeatureSpec(data=None, modality="image", identifier=identifier, mm_position=place)
        core = vc.make_engine_core_request("r", [9] * 80, params, mm_features=[feature], arrival_time=1.5)
        arrived = MsgpackDecoder(EngineCoreRequest).decode(MsgpackEncoder().encode(core))
        assert [] == differences(core, arrived)
        request = vc.request_from_engine_core_request(arrived, scheduler=scheduler)
        direct = vc.make_request("r", [9] * 80, params, mm_features=[feature], scheduler=scheduler)
        assert request.block_hashes == direct.block_hashes
        hashes.append(request.block_hashes)
        new = vc.make_new_request_data("r", [9] * 80, params, block_ids=([1, 2, 3],), mm_features=[feature])
        assert [identifier] == by_release(
            ("0", getattr(new, "mm_hashes", None)),
            ("0.11.0", [held.identifier for held in getattr(new, "mm_features", ())]),
        )
    assert hashes[0] == hashes[2]
    assert not {*hashes[0]} & {*hashes[1]}


@pytest.mark.parametrize(("ignore", "expected"), [(False, 1), (True, 3)])
def test_it_ends_at_its_eos(scheduler_config: Any, ignore: bool, expected: int) -> None:
    """In vLLM's scheduler, wherever the release keeps the id; ``ignore_eos`` goes past it."""
    scheduler = _scheduler(scheduler_config)
    params = vc.make_sampling_params(temperature=0.0, max_tokens=3, ignore_eos=ignore)
    core = vc.make_engine_core_request("r", [1, 2, 3], params, eos_token_id=9)
    request = vc.request_from_engine_core_request(core, scheduler=scheduler)
    scheduler.add_request(request)
    while scheduler.has_requests():
        output = scheduler.schedule()
        done = {r.request_id: [9] for r in vc.read_scheduler_output(output).requests}
        scheduler.update_from_output(output, vc.make_model_runner_output(done))
    assert [9] * expected == list(request.output_token_ids)


def test_pooling() -> None:
    """Pooling params instead of sampling params; there is no end-of-sequence id then."""
    made = vc.make_engine_core_request("p", [1, 2], pooling_params=vc.make_pooling_params("embed"), eos_token_id=9)
    read = vc.read_engine_core_request(made)
    assert (None, "embed") == (read["sampling_params"], read["pooling_params"].task)
    assert by_release(("0", 9), ("0.17.0", None)) == read["eos_token_id"]
    request = vc.request_from_engine_core_request(made, block_hasher=None)
    assert "embed" == request.pooling_params.task


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt_token_ids": [1]}, "exactly one of sampling_params and pooling_params"),
        ({"prompt_token_ids": [1, -1], "sampling_params": 1}, "integers from 0 on"),
        ({"prompt_token_ids": "text", "sampling_params": 1}, "integers from 0 on"),
        ({"prompt_token_ids": [1], "sampling_params": 1, "pooling_params": 1}, "both"),
    ],
)
def test_bad_input_is_refused(arguments: dict[str, Any], message: str) -> None:
    """As make_request refuses it."""
    with pytest.raises(vc.VllmCompatError, match=message):
        vc.make_engine_core_request("r", **arguments)

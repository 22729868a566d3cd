"""make_request on a real scheduler: hashed, cached, hit; and what a request without a hasher does there."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from typing import Any

import pytest
from conftest import run_script
from here import BLOCK_SIZE, EAGER, RELEASE, by_release
from vllm import SamplingParams

import vllm_compat as vc


def _scheduler(config: Any, num_blocks: int = 64) -> Any:
    return vc.make_scheduler(config, vc.make_kv_cache_config(config, num_blocks=num_blocks))


def _run_to_end(scheduler: Any, request: Any, token: int = 7) -> None:
    """Drive one request by hand-made runner outputs until the scheduler forgets it."""
    scheduler.add_request(request)
    while scheduler.has_requests():
        output = scheduler.schedule()
        batch = vc.read_scheduler_output(output)
        done = {
            r.request_id: [token] if r.num_computed_tokens + r.num_scheduled_tokens >= request.num_tokens else []
            for r in batch.requests
        }
        scheduler.update_from_output(output, vc.make_model_runner_output(done))


def test_blocks_are_cached_and_hit(scheduler_config: Any) -> None:
    """The second request of the same prompt finds every full block of the first but the last one's tail."""
    scheduler = _scheduler(scheduler_config)
    prompt = list(range(100, 180))
    params = vc.make_sampling_params(temperature=0.0, max_tokens=2)
    first = vc.make_request("first", prompt, params, scheduler=scheduler)
    _run_to_end(scheduler, first)
    assert len(first.block_hashes) == first.num_tokens // scheduler.block_size

    second = vc.make_request("second", prompt, params, scheduler=scheduler)
    scheduler.add_request(second)
    (scheduled,) = vc.read_scheduler_output(scheduler.schedule()).requests

    assert scheduled.num_computed_tokens == (len(prompt) - 1) // scheduler.block_size * scheduler.block_size > 0


def test_hasher_follows_the_schedulers_block_size(scheduler_config: Any) -> None:
    """Block size and hash function come from the scheduler's own configs."""
    scheduler = _scheduler(scheduler_config)
    params = vc.make_sampling_params(max_tokens=1)
    for length in (0, 1, scheduler.block_size - 1, scheduler.block_size, 3 * scheduler.block_size):
        request = vc.make_request(f"r{length}", list(range(length)), params, scheduler=scheduler)
        assert length // scheduler.block_size == len(request.block_hashes)


def test_a_scheduler_keeps_its_hasher(tiny_llama: str) -> None:
    """One per scheduler, made once, gone with it; another scheduler's requests are hashed at its own block size."""
    params = vc.make_sampling_params(max_tokens=1)
    schedulers = []
    for factor in (1, 2):
        config = vc.make_vllm_config(
            model=tiny_llama,
            dtype="float32",
            **EAGER,
            max_model_len=256,
            block_size=BLOCK_SIZE * factor,
            enable_prefix_caching=True,
        )
        schedulers.append(_scheduler(config))
    requests = [vc.make_request("r", range(4 * BLOCK_SIZE), params, scheduler=s) for s in (*schedulers, schedulers[0])]
    assert [4, 2, 4] == [len(request.block_hashes) for request in requests]
    hashers = [vc.read_request(request)["block_hasher"] for request in requests]
    assert hashers[0] is hashers[2] is not hashers[1]
    kept = [weakref.ref(scheduler) for scheduler in schedulers]
    del schedulers, requests, hashers
    gc.collect()
    assert [None, None] == [scheduler() for scheduler in kept]


@pytest.mark.parametrize("case", ["bare_request", "no_none_hash", "make_request"])
def test_what_the_bare_constructor_does(case: str, tiny_llama: str) -> None:
    """A Request without hasher dies of an AssertionError or IndexError, or is never cached (0.33); a hasher before
    NONE_HASH dies of a NameError; ours of neither (each in a fresh process, since NONE_HASH is one per process).
    """
    bare = by_release(("0.10.1", "AssertionError"), ("0.26.0", "IndexError"), ("0.33.0", ""))
    expected = {"bare_request": bare, "no_none_hash": "NameError", "make_request": ""}

    result = run_script("bare_request.py", case, tiny_llama)

    assert expected[case] == result["error"]
    assert result["cached_blocks"] == (4 if case == "make_request" else 0)


def test_a_loop_refuses_a_request_without_hashes(loop: Any) -> None:
    """From 0.33 vLLM itself would stay silent and never cache."""
    params = vc.make_sampling_params(max_tokens=1)
    bare = vc.make_request("bare", list(range(3, 60)), params, block_hasher=None)
    with pytest.raises(vc.VllmCompatError, match="block hashes"):
        loop.add_request(bare)
    assert not loop.has_unfinished()


def test_a_hand_made_request_runs_like_any_other(loop: Any, prompts: list[list[int]]) -> None:
    """add_request(make_request(…)) generates what add(…) generates."""
    params = vc.make_sampling_params(temperature=0.0, max_tokens=8)
    (expected,) = loop.generate([prompts[0]], params)
    request = vc.make_request("own", prompts[0], params, scheduler=loop.scheduler, eos_token_id=2030)
    loop.add_request(request)
    while loop.has_unfinished():
        loop.step()

    (actual,) = loop.collect()

    assert (expected.token_ids, expected.finish_reason) == (actual.token_ids, actual.finish_reason)


@pytest.mark.parametrize("skip_clone", [False, True])
def test_eos_leaves_the_callers_params_alone(skip_clone: bool) -> None:
    """The sampling params that get the end-of-sequence id are a copy, also where vLLM's own clone is shallow."""
    options = {"skip_clone": True} if skip_clone and RELEASE >= (0, 14, 0) else {}
    params = vc.make_sampling_params(max_tokens=4, min_tokens=2, **options)
    request = vc.make_request("r", [1, 2, 3], params, eos_token_id=9)
    assert vc.read_request(request)["eos_token_id"] == 9
    assert 9 in request.sampling_params.all_stop_token_ids  # which min_tokens suppresses
    assert 9 not in params.all_stop_token_ids
    assert getattr(params, "eos_token_id", None) is None


def test_a_request_ends_at_its_eos(scheduler_config: Any) -> None:
    """Wherever the release keeps the id; ``ignore_eos`` goes past it."""
    for ignore, expected in ((False, 1), (True, 3)):
        scheduler = _scheduler(scheduler_config)
        params = vc.make_sampling_params(temperature=0.0, max_tokens=3, ignore_eos=ignore)
        request = vc.make_request("r", [1, 2, 3], params, scheduler=scheduler, eos_token_id=9)
        _run_to_end(scheduler, request, token=9)
        assert [9] * expected == list(request.output_token_ids)


#: Option -> its first release ("" where every supported one has it), and a value.
OPTIONS: dict[str, tuple[str, Any]] = {
    "arrival_time": ("", 12.5),
    "cache_salt": ("", "salt"),
    "priority": ("", 3),
    "trace_headers": ("", {"traceparent": "00-0"}),
    "client_index": ("", 2),
    "resumable": ("0.15.0", True),
    "session_id": ("0.28.0", "s"),
    "abort_immediately": ("0.21.0", True),
}


def test_every_option_reaches_the_request() -> None:
    """Round trip: what make_request was given is what read_request reads."""
    options = {name: value for name, (since, value) in OPTIONS.items() if not since or by_release((since, True))}
    params = vc.make_sampling_params(max_tokens=4)
    read = vc.read_request(vc.make_request("r", [1, 2, 3], params, **options))
    assert options == {name: read[name] for name in options}
    assert read["prompt_token_ids"] == [1, 2, 3]


def test_what_is_read_makes_the_same_request() -> None:
    """read_request gives options of make_request, all of which this release takes."""
    params = vc.make_sampling_params(max_tokens=4, min_tokens=2)
    read = vc.read_request(vc.make_request("r", list(range(40)), params, eos_token_id=9, cache_salt="s"))
    again = vc.read_request(vc.make_request(**{name: vc.UNSET if v is None else v for name, v in _keep(read).items()}))
    assert read == again


def _keep(read: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in read.items() if name not in ("pooling_params",)}


@pytest.mark.parametrize("name", [name for name, (since, _) in OPTIONS.items() if since])
def test_an_option_that_is_too_new_is_refused(name: str) -> None:
    """By name, with the first release that has it; never dropped."""
    since, value = OPTIONS[name]
    if by_release((since, True)):
        return  # reaches the request: see above
    params = vc.make_sampling_params(max_tokens=4)
    with pytest.raises(vc.UnsupportedField, match=f"vLLM {since} or newer") as error:
        vc.make_request("r", [1, 2, 3], params, **{name: value})
    assert error.value.symbol == f"Request.{name}"


@pytest.mark.parametrize("option", ["structured_outputs", "guided_decoding"])
def test_structured_output_by_either_name(option: str) -> None:
    """The request waits for a grammar of what was asked for, in the class that the release has."""
    import vllm.sampling_params as module

    params = vc.make_sampling_params(
        max_tokens=4, **{option: {"choice": ["yes", "no"], "disable_any_whitespace": True}}
    )
    name = by_release(("0", "GuidedDecodingParams"), ("0.11.0", "StructuredOutputsParams"))
    asked = getattr(params, by_release(("0", "guided_decoding"), ("0.11.0", "structured_outputs")))
    assert type(asked) is getattr(module, name)
    assert (["yes", "no"], True) == (asked.choice, asked.disable_any_whitespace)
    request = vc.make_request("r", [1, 2, 3], params)
    assert request.use_structured_output
    assert request.status.name == by_release(
        ("0", "WAITING_FOR_FSM"), ("0.19.0", "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR")
    )
    # As it is, and as the class of a release that calls it otherwise.
    again = vc.make_sampling_params(max_tokens=4, **{option: asked})
    assert getattr(again, by_release(("0", "guided_decoding"), ("0.11.0", "structured_outputs"))) == asked
    assert not vc.make_request("r", [1], vc.make_sampling_params(max_tokens=1)).use_structured_output


def test_structured_output_by_another_releases_class() -> None:
    """Any dataclass with the fields; a field that is set and does not exist here is refused, one at its default not."""

    @dataclasses.dataclass
    class Foreign:
        regex: str | None = None
        backend: str | None = None
        not_yet_invented: str | None = None

    params = vc.make_sampling_params(max_tokens=4, structured_outputs=Foreign(regex="a+"))
    asked = getattr(params, by_release(("0", "guided_decoding"), ("0.11.0", "structured_outputs")))
    assert asked.regex == "a+"
    with pytest.raises(vc.UnsupportedField, match="not_yet_invented"):
        vc.make_sampling_params(max_tokens=4, structured_outputs=Foreign(regex="a+", not_yet_invented="x"))
    with pytest.raises(vc.VllmCompatError, match="two names of one option"):
        vc.make_sampling_params(max_tokens=4, structured_outputs={"regex": "a"}, guided_decoding={"regex": "a"})


def test_salt_changes_every_hash() -> None:
    """Requests of two tenants never share blocks."""
    params = vc.make_sampling_params(max_tokens=1)
    plain, salted = (vc.make_request("r", list(range(64)), params, cache_salt=salt) for salt in (vc.UNSET, "tenant"))
    assert len(plain.block_hashes) == len(salted.block_hashes) > 1
    assert not set(plain.block_hashes) & set(salted.block_hashes)


def test_pooling_request() -> None:
    """PoolingParams make a pooling request."""
    from vllm import PoolingParams

    request = vc.make_request("p", [1, 2, 3], pooling_params=PoolingParams(task="embed"))
    assert request.pooling_params.task == "embed"
    assert request.sampling_params is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt_token_ids": [1]}, "exactly one of sampling_params and pooling_params"),
        ({"prompt_token_ids": [1, -1], "sampling_params": 1}, "integers from 0 on"),
        ({"prompt_token_ids": [1, True], "sampling_params": 1}, "integers from 0 on"),
        ({"prompt_token_ids": ["a"], "sampling_params": 1}, "integers from 0 on"),
        ({"prompt_token_ids": 5, "sampling_params": 1}, "integers from 0 on"),
        ({"prompt_token_ids": [1], "sampling_params": SamplingParams(max_tokens=None)}, "max_tokens=None"),
    ],
)
def test_bad_input_is_refused(arguments: dict[str, Any], message: str) -> None:
    """The message says what is needed."""
    with pytest.raises(vc.VllmCompatError, match=message):
        vc.make_request("r", **arguments)

"""What the row readers reach for in the runners' own batches, which they find by attribute."""

from __future__ import annotations

import windows

BATCH = "vllm.v1.worker.gpu.input_batch:InputBatch"
STATE = "vllm.v1.worker.gpu.model_runner:ExecuteModelState"


def test_the_v2_runner_has_the_batch_that_is_read() -> None:
    """In every release with a V2 runner its batch has request ids, rows per request, and the index that marks it."""
    found = {api.release: call for api in windows.recorded() if (call := api.call(BATCH)) is not None}
    assert next(iter(found)) == "0.12.0"
    for release, call in found.items():
        names = {parameter.name for parameter in call.parameters}
        assert {"req_ids", "num_scheduled_tokens", "idx_mapping"} <= names, release


def test_the_v2_runner_hands_its_batch_on_by_name() -> None:
    """From 0.18.0 on the state between the two calls has it as ``input_batch``; before, the state has no names."""
    for api in windows.recorded():
        call = api.call(STATE)
        assert (call is not None) is (api.numbers >= (0, 18, 0)), api.release
        assert call is None or "input_batch" in {parameter.name for parameter in call.parameters}, api.release


def test_nothing_that_the_v1_runner_hands_on_looks_like_a_batch() -> None:
    """The V1 runner's state is a tuple too, and a field of that name would be taken for the V2 runner's batch."""
    for api in windows.recorded():
        call = api.call("vllm.v1.worker.gpu_model_runner:ExecuteModelState")
        assert call is None or "input_batch" not in {parameter.name for parameter in call.parameters}, api.release

"""vLLM's own extraction as a way of capturing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from here import RELEASE
from states import captured_states, open_loop

import vllm_compat as vc

#: The releases for whose form of vLLM's connector the test's one is written.
EXTRACTS = (0, 31) <= RELEASE < (0, 33)
NO_EXTRACTION = "vLLM's connector is for GPUs, and what stands in for it here is written for 0.31 and 0.32"


def arguments(folder: Path, *layers: int) -> dict[str, Any]:
    """``native_capture_args`` with the connector that works on a CPU."""
    made = vc.native_capture_args(layers, folder)
    made["kv_transfer_config"] |= {"kv_connector": "CpuExtraction", "kv_connector_module_path": "cpu_extraction"}
    return made


@pytest.mark.skipif(not EXTRACTS, reason=NO_EXTRACTION)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_native_extraction_agrees_bit_for_bit(
    dtype: str, tiny_llama: str, prompts: list[list[int]], tmp_path: Path
) -> None:
    """With hooks in the same loop; prompts and generated tokens; the files are read and gone."""
    params = vc.make_sampling_params(temperature=0.0, max_tokens=4, ignore_eos=True)
    with open_loop(tiny_llama, dtype, async_scheduling=False, **arguments(tmp_path, 2, 5, 7)) as loop:
        with vc.capture_hidden_states(loop, (2, 7), way="native") as capture:
            assert "native" == capture.way == capture.model_info["way"]
            with pytest.raises(vc.CaptureError, match="one at a time"):
                vc.capture_hidden_states(loop, (2,), way="native")
            native = [capture.pop(done.request_id) for done in loop.generate(prompts, params)]
            states = [one.hidden_states for one in native]
        assert not list(tmp_path.iterdir())
        hooks = captured_states(loop, (2, 7), prompts, params, "hooks")
    assert len(prompts) == len(native)
    for ours, theirs, found in zip(hooks, native, states, strict=True):
        assert (ours.token_ids, ours.layers) == (theirs.token_ids, theirs.layers)
        assert ours.hidden_states.nbytes == theirs.nbytes
        assert torch.equal(ours.hidden_states, found)


@pytest.mark.skipif(not EXTRACTS, reason=NO_EXTRACTION)
def test_files_that_nobody_takes_are_removed(tiny_llama: str, prompts: list[list[int]], tmp_path: Path) -> None:
    """Of requests that were aborted, did not fit, or had an id that is used again; what runs beside loses nothing."""
    long, short = (vc.make_sampling_params(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (40, 3))
    with open_loop(tiny_llama, async_scheduling=False, **arguments(tmp_path, 2, 7)) as loop:
        with vc.capture_hidden_states(loop, (2, 7), way="native") as capture:
            beside = loop.add(prompts[0], long)
            first = loop.add(prompts[1], short, request_id="again")
            aborted, unseen = loop.add(prompts[2], long), loop.add(prompts[3], long)
            new: dict[str, list[int]] = {}

            def step() -> None:
                for update in loop.step():
                    new.setdefault(update.request_id, []).extend(update.new_token_ids)

            while not any(done.request_id == first for done in loop.collect()):
                step()
            loop.abort(aborted)
            # The same id with another prompt, and popped while the other request runs: a step is needed for its file.
            loop.add(prompts[4], short, request_id="again")
            while "again" not in capture._ready:
                step()
            again = capture.pop("again")
            assert tuple(prompts[4]) == again.token_ids[: len(prompts[4])]
            assert again.hidden_states.shape[0] == len(again.token_ids)
            loop.abort(unseen)
            late = loop.add(prompts[3], long)
            loop.abort(late)  # before its first step: vLLM writes nothing
            while loop.has_unfinished():
                step()
            assert len(new[beside]) == 40
            finished = {done.request_id: done for done in loop.collect()}
            assert list(finished[beside].token_ids) == new[beside]
            assert capture.pop(beside).hidden_states.shape[0] == len(prompts[0]) + 39
        assert not list(tmp_path.iterdir())
        with vc.capture_hidden_states(loop, (2,), way="native", max_unpopped_bytes=1) as capture:
            (done,) = loop.generate(prompts[:1], short)
            with pytest.raises(vc.CaptureError, match="nobody popped"):
                capture.pop(done.request_id)
        assert not list(tmp_path.iterdir())

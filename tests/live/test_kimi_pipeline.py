"""The whole pipeline through its command line: interrupted, resumed, served, and judged by vllm.LLM."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import reference_shards
import torch
from conftest import FIXTURE, run_script
from here import CPU_MLA, KIMI_K25, NO_HEADS, NO_KIMI_K25, SERVES_HEADS
from kimi_k25 import build
from states import captured_states, open_loop, relative_error

import vllm_compat as vc
from vllm_compat.kimi.rows import read_rows
from vllm_compat.kimi.store import Store

SMALL = [
    "target.dtype=float32",
    "prepare.max_conversations=32",
    "prepare.heldout_fraction=0.15",
    "extract.shard_mb=1",
    "extract.baseline_rows=32",
    # Steps, not seconds: a head that is as good on a slow machine.
    "train.steps=160",
    "evaluate.num_prompts=16",
    # An MLA head needs MLA.
    *([] if CPU_MLA else ["train.architecture=llama"]),
]
STAGES = ["prepare", "extract", "vocab", "train", "export", *(["evaluate"] if SERVES_HEADS else [])]
served = pytest.mark.skipif(not SERVES_HEADS, reason=NO_HEADS)


def kimi(*arguments: str, **environment: str) -> str:
    """Run ``vllm-compat kimi …``; returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "vllm_compat", "kimi", *arguments],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def options(settings: list[str]) -> list[str]:
    return [part for setting in settings for part in ("--set", setting)]


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Of every command on the one run of this module."""
    return ["--preset", "tiny", "--run-dir", str(tmp_path_factory.mktemp("kimi") / "run"), *options(SMALL)]


@pytest.fixture(scope="module")
def extracted(arguments: list[str]) -> Path:
    """Rows, and their states: the extraction was killed with SIGKILL after its first shard, and taken to its end."""
    path = Path(arguments[3])
    kimi("prepare", *arguments)
    # Straight to what is to be killed.
    hurried = options(["extract.self_check=false", "extract.baseline_rows=0"])
    extract = subprocess.Popen([sys.executable, "-m", "vllm_compat", "kimi", "extract", *arguments, *hurried])
    try:
        deadline = time.monotonic() + 240
        store = path / "extract" / "train"
        while len(list(store.glob("shard-*"))) < 2 and extract.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
    finally:
        extract.send_signal(signal.SIGKILL)
        extract.wait()
    assert not (path / "extract" / "manifest.json").exists()
    (path / "killed.json").write_text(json.dumps(len(Store(store))))
    kimi("extract", *arguments)
    return path


@pytest.fixture(scope="module")
def run_dir(extracted: Path, arguments: list[str]) -> Path:
    """The same run with all of its stages."""
    commands = ["run"] if SERVES_HEADS else [*STAGES, "report"]
    (extracted / "output.txt").write_text("".join(kimi(command, *arguments) for command in commands))
    return extracted


@pytest.fixture(scope="module")
def summary(run_dir: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return result


def test_nothing_is_lost_or_doubled_by_kill_9(extracted: Path) -> None:
    """Every row is in its store exactly once, and what was there before the kill was not computed again.

    One kill of the real thing; kills at every moment are in tests/kimi/test_store_crash.py.
    """
    before = json.loads((extracted / "killed.json").read_text())
    metrics = json.loads((extracted / "extract" / "manifest.json").read_text())["metrics"]
    for split in ("train", "heldout"):
        rows = {row.row_id: row for row in read_rows(extracted / "prepare" / f"{split}.parquet")}
        store = Store(extracted / "extract" / split)
        store.verify()
        assert sorted(rows) == sorted(store.ids)
        for sample in store:
            assert rows[sample.sample_id].input_ids == sample.token_ids.tolist()
            assert rows[sample.sample_id].loss_mask == sample.loss_mask.tolist()
    assert 0 < before < len(Store(extracted / "extract" / "train"))
    assert metrics["tokens_this_run"] < metrics["tokens"]


def test_stored_states_are_those_of_each_row_alone(extracted: Path, tiny_kimi: str) -> None:
    """A stored row equals a capture of that row by itself, to bfloat16, across the interruption."""
    store = Store(extracted / "extract" / "train")
    chosen = [store[i] for i in range(0, len(store), max(1, len(store) // 8))]
    params = vc.make_sampling_params(temperature=0.0, max_tokens=1)
    with open_loop(tiny_kimi, max_num_seqs=1) as loop:
        alone = captured_states(loop, store.provenance.layers, [s.token_ids.tolist() for s in chosen], params)
    assert (2, 4, 5, 8) == store.provenance.layers
    for sample, states in zip(chosen, alone, strict=True):
        assert relative_error(sample.hidden_states, states.hidden_states).max() < 5e-3


def test_stored_states_are_those_of_another_release(run_dir: Path, record_property: Any) -> None:
    """The same rows were extracted once with another release: same tokens, same states, so any two releases agree."""
    about, reference = reference_shards.load()
    store = Store(run_dir / "extract" / "train")
    assert about["layers"] == ",".join(map(str, store.provenance.layers))
    rows = reference_shards.rows_of(reference)
    here = reference_shards.chosen(store, rows)

    assert all(torch.equal(reference[f"{row}/token_ids"], here[f"{row}/token_ids"]) for row in rows)
    theirs, ours = (torch.cat([side[f"{row}/hidden_states"] for row in rows]) for side in (reference, here))
    errors = relative_error(ours, theirs)
    record_property("relative_error_to_another_release", errors.tolist())
    assert errors.max() < reference_shards.TOLERANCE, errors


def test_summary_has_the_numbers(summary: dict[str, Any]) -> None:
    """The keys that the README names, with values of a pipeline that works."""
    assert summary["extract"]["tokens_per_second"] > 0
    assert summary["extract"]["ratio_to_prefill"] > 0.5
    assert summary["extract"]["self_check"]["ok"]
    assert summary["extract"]["self_check"]["next_token_agreement"] >= 0.99
    assert 0.9 < summary["vocab"]["coverage"] <= 1
    assert summary["train"]["loss"] < summary["train"]["first_loss"]


def test_an_existing_store_is_verified(extracted: Path) -> None:
    """`kimi verify`: bytes, what final states predict of the target's own answers, and the engine again."""
    said = kimi("verify", "--run-dir", str(extracted), "--rows", "6")
    assert said.count("all as written") == 2
    agreement, mean = re.findall(r"final states: ([\d.]+)% .* mean log p (-[\d.]+)", said)[0]
    assert float(agreement) > 97  # the target wrote these answers at temperature 0
    assert float(mean) < 0
    assert float(re.findall(r"mean \|Δ log p\| ([\d.e-]+)", said)[0]) < 5e-2
    assert "states computed one by one: differ by 0.00" in said
    for way in ("in chunks of 64 tokens", "with a warm prefix cache"):
        # vLLM has neither with MLA on a CPU.
        assert (f"computed {way}: not here" in said) == CPU_MLA


def test_states_that_are_not_the_engine_s_are_found(extracted: Path) -> None:
    """A final state one layer early, and aux boundaries that were swapped: each is beyond its limit."""
    from vllm_compat.kimi.config import load_config
    from vllm_compat.kimi.target import TargetHead
    from vllm_compat.kimi.target_engine import open_target
    from vllm_compat.kimi.verify import PARITY, TOLERANCE, difference, logprobs, some

    cfg = load_config(extracted / "config.toml")
    store = Store(extracted / "extract" / "train")
    head = TargetHead.load(cfg.target.model).to("cpu", torch.float32)
    samples = some(store, 3)
    early = [replace(s, hidden_states=s.hidden_states[:, [0, 1, 2, 2]]) for s in samples]
    swapped = [replace(s, hidden_states=s.hidden_states[:, [1, 0, 2, 3]]) for s in samples]
    with open_target(cfg.target, max_num_seqs=4, enable_prefix_caching=False, enforce_eager=True) as loop:
        limit = TOLERANCE["bfloat16"]
        right, wrong = (logprobs(loop, which, head, limit)[0].mean() for which in (samples, early))
        assert right < limit < wrong
        limit = PARITY["bfloat16"]
        assert difference(loop, samples, store) < limit < difference(loop, swapped, store)


@served
def test_the_head_helps_and_an_untrained_one_does_not(summary: dict[str, Any]) -> None:
    """Acceptance lengths, and the answers of the target are untouched by either head."""
    evaluate = summary["evaluate"]
    assert evaluate["acceptance_length"] > 1.5
    assert 1.0 <= evaluate["untrained_acceptance_length"] < 1.1
    assert evaluate["token_identical"]
    assert evaluate["distinct_bigram_ratio"] > 0.7
    assert sorted(evaluate["per_position"], reverse=True) == evaluate["per_position"]


@served
def test_offline_estimate_equals_serving(summary: dict[str, Any]) -> None:
    """The trainer's own replay of the served rows: its draft is the function that vLLM computes."""
    evaluate = summary["evaluate"]
    assert abs(evaluate["estimated_acceptance_length"] - evaluate["acceptance_length"]) < 0.05


@served
def test_vllm_llm_serves_the_checkpoint(run_dir: Path, summary: dict[str, Any], tmp_path: Path) -> None:
    """``vllm.LLM`` with the exported head: the same answers as without, and vLLM's own counters say what we say."""
    from vllm_compat.kimi.config import load_config
    from vllm_compat.kimi.evaluate import heldout_prompts

    cfg = load_config(run_dir / "config.toml")
    case = {
        "target": cfg.target.model,
        "head": str(run_dir / "export"),
        "prompts": list(heldout_prompts(cfg).values()),
        "max_tokens": cfg.evaluate.max_new_tokens,
        "drafts": cfg.evaluate.num_draft_tokens,
    }
    (tmp_path / "case.json").write_text(json.dumps(case))

    served = run_script("llm_serve_head.py", str(tmp_path / "case.json"))

    assert served["plain"] == served["speculative"]
    # vLLM also counts drafts behind the stop token, which nobody is sent.
    evaluate = summary["evaluate"]
    assert abs(served["acceptance_length"] - (1 + evaluate["accepted"] / evaluate["steps"])) < 0.1


@served
def test_a_finished_run_is_up_to_date(run_dir: Path) -> None:
    """The same command again computes nothing."""
    said = kimi("run", "--run-dir", str(run_dir))
    assert said.count("up to date") == 6


def test_the_report_stands_alone(run_dir: Path) -> None:
    """No link out of the file; the plots are beside it as PNG."""
    html = (run_dir / "report.html").read_text()
    assert "data:image/png;base64," in html
    assert "<script" not in html
    assert "http://" not in html.replace("http://www.w3.org", "")
    for png in ("loss", "rate", *(["acceptance"] if SERVES_HEADS else [])):
        assert (run_dir / "plots" / f"{png}.png").stat().st_size > 0


def test_the_console_shows_one_line_per_stage(run_dir: Path) -> None:
    """vLLM's own output is in engine.log, not between the lines."""
    lines = [line for line in (run_dir / "output.txt").read_text().splitlines() if line.strip()]
    assert STAGES == [line.split()[0] for line in lines][: len(STAGES)]
    assert len(lines) == len(STAGES) + 1  # the report's
    assert (run_dir / "engine.log").stat().st_size > 0


@served
@pytest.mark.skipif(not CPU_MLA, reason="here the run above has a Llama head already")
def test_a_llama_head_is_trained_and_served(run_dir: Path, tmp_path: Path) -> None:
    """On CPU an attention head cannot share MLA's block size, so the target runs without MLA there."""
    import shutil

    path = tmp_path / "llama"
    path.mkdir()
    for name in ("prepare", "extract", "vocab"):
        shutil.copytree(run_dir / name, path / name)
    settings = [*SMALL, "train.architecture=llama", "train.steps=120", "evaluate.untrained=false"]
    arguments = ["--preset", "tiny", "--run-dir", str(path), *options(settings)]
    for stage in ("train", "export"):
        kimi(stage, *arguments)
    kimi("evaluate", *arguments, VLLM_MLA_DISABLE="1")
    metrics = json.loads((path / "evaluate" / "manifest.json").read_text())["metrics"]
    assert metrics["acceptance_length"] > 1.3
    assert metrics["token_identical"]
    assert abs(metrics["estimated_acceptance_length"] - metrics["acceptance_length"]) < 0.05


@pytest.mark.skipif(not KIMI_K25, reason=NO_KIMI_K25)
def test_kimi_k25_runs_through_the_pipeline(tmp_path: Path) -> None:
    """The multimodal wrapper of K2.5, text only: every stage, EAGLE-3 serving included."""
    model = build(FIXTURE, tmp_path / "k25")
    settings = [
        *SMALL,
        f"target.model={model}",
        "target.engine_args={enforce_eager=true, gpu_memory_utilization=0.3, language_model_only=true}",
        "prepare.max_conversations=20",
        "train.steps=10",
        "evaluate.num_prompts=4",
        "evaluate.untrained=false",
    ]
    kimi("run", "--preset", "tiny", "--run-dir", str(tmp_path / "run"), *options(settings))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["extract"]["self_check"]["ok"]
    assert summary["evaluate"]["token_identical"]


@pytest.mark.skipif(not KIMI_K25, reason=NO_KIMI_K25)
def test_kimi_k25_states_are_those_of_its_language_model(tmp_path: Path, tiny_kimi: str) -> None:
    """Boundary 0 … N of the wrapper equal those of the same weights without it."""
    model = str(build(FIXTURE, tmp_path / "k25"))
    params = vc.make_sampling_params(temperature=0.0, max_tokens=3, ignore_eos=True)
    prompts = [list(range(10, 60)), list(range(200, 220))]
    with open_loop(tiny_kimi) as loop:
        plain = captured_states(loop, range(9), prompts, params)
    with open_loop(model, language_model_only=True) as loop:
        wrapped = captured_states(loop, range(9), prompts, params)
    for a, b in zip(plain, wrapped, strict=True):
        assert a.token_ids == b.token_ids
        torch.testing.assert_close(a.hidden_states, b.hidden_states, rtol=0, atol=1e-4)


@pytest.mark.parametrize("engine_dtype", ["float32", "bfloat16"])
def test_the_self_check_stops_a_wrong_final_state(engine_dtype: str, tiny_kimi: str, extracted: Path) -> None:
    """A state one layer early is refused with the numbers (the classic "N - 1 is the last layer")."""
    from vllm_compat.kimi.selfcheck import self_check
    from vllm_compat.kimi.target import TargetHead

    rows = [row for row, _ in zip(read_rows(extracted / "prepare" / "train.parquet"), range(8), strict=False)]
    head = TargetHead.load(tiny_kimi).to("cpu", torch.float32)
    with open_loop(tiny_kimi, engine_dtype) as loop:
        for dtype in (torch.float32, torch.bfloat16):
            assert self_check(loop, rows, head, (2, 8), dtype).ok
            with pytest.raises(vc.SelfCheckFailed, match=r"mean \|Δ log p\|"):
                self_check(loop, rows, head, (2, 7), dtype)

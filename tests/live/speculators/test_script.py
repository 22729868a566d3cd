"""``vllm-compat run -- python data_generation_offline.py …``, the script as it is in its repository."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from beside import CONVERSATIONS, EXPECTED, VERSION, conversations, digest, figure, script
from here import PATCHES
from states import Reference, relative_error
from test_generator import TOLERANCE

LENGTH = 1024
#: More than ten: 0.4.0 sorts the requests of a batch by name, and "req_0_10" comes before "req_0_2".
BATCH = 12
DESCRIPTION = "vllm_compat.json"


def run(script: Path, folder: Path, model: str, conversations: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """Into ``folder``/data; the command line is the documented one."""
    options = {
        "target-model-path": model,
        "train-data-path": conversations,
        "seq-length": LENGTH,
        "output-dir": "data",
        "batch-size": BATCH,
        "num-preprocessing-workers": 1,
        "tensor-parallel-size": 1,
    }
    if "--max-model-len" in script.read_text(encoding="utf-8"):
        options["max-model-len"] = LENGTH
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "vllm_compat", "run", "--", sys.executable, str(script), *words, *more]
    # What a CPU wants; speculators is switched on by the command itself.
    environment = {**os.environ, "VLLM_COMPAT_PATCHES": ",".join(PATCHES), "HF_DATASETS_CACHE": str(folder / "cache")}
    folder.mkdir(exist_ok=True)
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=300
    )


def read(path: Path) -> Any:
    return torch.load(path, weights_only=True)


@pytest.fixture(scope="module")
def made(script: Path, conversations: Path, tiny_kimi: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A complete run on the tiny Kimi: its folder, and what it said."""
    folder = tmp_path_factory.mktemp("run")
    done = run(script, folder, tiny_kimi, conversations)
    assert 0 == done.returncode, done.stdout[-3000:] + done.stderr[-3000:]
    return folder / "data", done


@pytest.fixture
def files(made: Any, tmp_path: Path) -> Path:
    """A copy of its files, to be spoiled."""
    data = tmp_path / "data"
    data.mkdir()
    for path in made[0].iterdir():
        os.link(path, data / path.name)
    return data


def test_ids_and_masks_are_those_of_its_own_pin(made: Any) -> None:
    """Sample by sample, as the unmodified script made them."""
    samples = [read(made[0] / f"data_{i}.pt") for i in range(CONVERSATIONS)]
    assert EXPECTED["samples"] == [
        [len(sample["input_ids"]), digest(sample["input_ids"]), digest(sample["loss_mask"])] for sample in samples
    ]
    for sample in samples:
        assert {"input_ids", "loss_mask", "hidden_states"} == sample.keys()
        assert [torch.int64] * 2 == [sample["input_ids"].dtype, sample["loss_mask"].dtype]


def test_states_equal_transformers(made: Any, tiny_kimi: str, figure: Callable[..., None]) -> None:
    """Of every file, at the default layers."""
    samples = [read(made[0] / f"data_{i}.pt") for i in range(CONVERSATIONS)]
    reference = Reference(tiny_kimi, torch.bfloat16)
    states = torch.cat([torch.stack(sample["hidden_states"], dim=1) for sample in samples])
    expected = torch.cat([reference(sample["input_ids"].tolist())[:, [3, 5, 6, 8]] for sample in samples])
    assert torch.bfloat16 == states.dtype
    error = float(relative_error(states, expected).max())
    figure("kimi", "transformers, script", error)
    assert error < TOLERANCE


def test_files_describe_themselves(made: Any, tiny_kimi: str) -> None:
    """data_config.json has the keys that it always had; beside it the convention is said."""
    config = json.loads((made[0] / "data_config.json").read_text(encoding="utf-8"))
    assert EXPECTED["config"][VERSION] == keys(config)
    assert ([2, 4, 5, 7], CONVERSATIONS) == (config["hidden_states"]["layer_ids"], config["data"]["num_samples"])
    assert "boundary l+1" in config["hidden_states"]["description"]
    said = json.loads((made[0] / DESCRIPTION).read_text(encoding="utf-8"))
    assert ([2, 4, 5, 7], [3, 5, 6, 8], False) == (said["layer_ids"], said["boundaries"], said["final_norm_applied"])
    assert (tiny_kimi, 8, 256, "bfloat16") == tuple(
        said[name] for name in ("model", "num_hidden_layers", "hidden_size", "dtype")
    )


def keys(value: Any) -> Any:
    """The names in nested dictionaries."""
    return {name: keys(inner) for name, inner in sorted(value.items())} if isinstance(value, dict) else None


def test_it_ends_in_silence(made: Any) -> None:
    """Nothing fails on the way out; its own __del__ logs through a name that is gone by then."""
    said = made[1].stdout + made[1].stderr
    assert "Exception ignored" not in said
    assert "NoneType" not in said


def test_a_complete_folder_is_left_alone(
    script: Path, made: Any, files: Path, tiny_kimi: str, conversations: Path
) -> None:
    """Run again, it does nothing."""
    before = {path.name: path.read_bytes() for path in files.iterdir()}
    done = run(script, files.parent, tiny_kimi, conversations)
    assert 0 == done.returncode, done.stderr[-3000:]
    # Not all releases leave it its log: what an engine says tells whether there was one.
    loading = "Loading safetensors"
    assert loading in made[1].stdout + made[1].stderr
    assert loading not in done.stdout + done.stderr
    assert before == {path.name: path.read_bytes() for path in files.iterdir()}


def test_what_it_would_continue_wrongly_is_refused(
    script: Path, files: Path, tiny_kimi: str, conversations: Path
) -> None:
    """A hole, which no run fills; a file that was cut off; a number that it cannot begin with."""
    whole = (files / "data_3.pt").read_bytes()
    (files / "data_3.pt").unlink()
    hole = run(script, files.parent, tiny_kimi, conversations)
    (files / "data_3.pt").write_bytes(whole[: len(whole) // 2])
    torn = run(script, files.parent, tiny_kimi, conversations)
    (files / "data_3.pt").write_bytes(whole)
    started = run(script, files.parent, tiny_kimi, conversations, "--start-idx", "100")
    for done, said in ((hole, "data_3.pt"), (torn, "cut off"), (started, "--start-idx 100")):
        assert 1 == done.returncode
        assert said in done.stderr
        assert "StoreError" in done.stderr


def test_other_layers_do_not_go_into_the_same_folder(
    script: Path, files: Path, tiny_kimi: str, conversations: Path
) -> None:
    """Resumed with other layers, it is refused before the model is loaded; its own pin mixes them."""
    for number in range(10, CONVERSATIONS):
        (files / f"data_{number}.pt").unlink()
    done = run(script, files.parent, tiny_kimi, conversations, "--layer-ids", "1", "3", "7")
    assert 1 == done.returncode
    assert "layer_ids=[2, 4, 5, 7], not [1, 3, 7]" in done.stderr
    assert not (files / "data_10.pt").exists()

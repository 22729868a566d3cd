"""Output folders of speculators: what is continued, what is refused, what is written beside. Needs no vLLM."""

from __future__ import annotations

import json
import sys
import types
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_compat import StoreError
from vllm_compat.patches.speculators import record


def write(folder: Path, *numbers: int) -> Path:
    """Whole files, as far as one can see without reading them."""
    folder.mkdir(exist_ok=True)
    for number in numbers:
        with zipfile.ZipFile(folder / f"data_{number}.pt", "w") as file:
            file.writestr("data.pkl", "x")
    return folder


@pytest.mark.parametrize(
    ("numbers", "start"), [((), 0), ((0,), 0), ((0, 1, 2), 0), ((0, 1, 2), 3), ((5, 6), 5)], ids=str
)
def test_folders_that_are_continued(tmp_path: Path, numbers: tuple[int, ...], start: int) -> None:
    """Empty, complete so far, begun at another number; other files do not count."""
    folder = write(tmp_path / "data", *numbers)
    (folder / "data_x.pt").write_text("")
    (folder / "data_config.json").write_text("{}")
    record.check_files(folder, start)


def test_a_folder_that_is_not_there_is_an_empty_one(tmp_path: Path) -> None:
    """The script makes it."""
    record.check_files(tmp_path / "none", 0)


@pytest.mark.parametrize(
    ("numbers", "start", "found"),
    [
        ((0, 1, 3), 0, "1 missing, the first one data_2.pt"),
        ((4,), 0, "4 missing, the first one data_0.pt"),
        ((0, 1, 2), 4, "data_3.pt would be the next"),
        ((), 1, "data_0.pt would be the next"),
    ],
    ids=str,
)
def test_folders_that_are_refused(tmp_path: Path, numbers: tuple[int, ...], start: int, found: str) -> None:
    """With holes, or to be begun at a number that the script cannot begin with."""
    with pytest.raises(StoreError) as caught:
        record.check_files(write(tmp_path / "data", *numbers), start)
    assert found == caught.value.found


def test_a_file_that_was_cut_off_is_refused(tmp_path: Path) -> None:
    """A crash while it was written; the script would take it for done."""
    folder = write(tmp_path / "data", 0, 1, 2)
    whole = (folder / "data_1.pt").read_bytes()
    (folder / "data_1.pt").write_bytes(whole[:-10])
    with pytest.raises(StoreError, match=r"1 cut off, the first one data_1\.pt"):
        record.check_files(folder, 0)


def generator(**said: Any) -> Any:
    config = SimpleNamespace(get_hidden_size=lambda: 64, dtype="torch.bfloat16")
    values = {"layer_ids": [2, 4, 5, 7], "model_path": "model", "vllm_config": SimpleNamespace(model_config=config)}
    return SimpleNamespace(**{**values, **said})


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As if the script were running, with its options; returns its folder."""
    main = types.ModuleType("__main__")
    main.generate_and_save_hidden_states = print  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(record, "installed", lambda: SimpleNamespace(version="0.32.0"))
    folder = tmp_path / "data"
    monkeypatch.setattr(sys, "argv", ["renamed.py", "--seed", "3", f"--output-dir={folder}", "--unknown", "x"])
    return folder


def test_a_description_is_written_before_the_first_file(script: Path) -> None:
    """Layer ids, the boundaries that they are, what was done to the last one, and whose states they are."""
    record.begin(generator(), 8)
    said = json.loads((script / "vllm_compat.json").read_text(encoding="utf-8"))
    assert {
        "layer_ids": [2, 4, 5, 7],
        "boundaries": [3, 5, 6, 8],
        "final_norm_applied": False,
        "model": "model",
        "num_hidden_layers": 8,
        "hidden_size": 64,
        "dtype": "bfloat16",
        "vllm": "0.32.0",
        "convention": record.CONVENTION,
    } == said
    assert ["vllm_compat.json"] == [path.name for path in script.iterdir()]
    record.begin(generator(), 8)  # resumed


@pytest.mark.parametrize("other", [{"layer_ids": [1, 4, 5, 7]}, {"layer_ids": [4, 2, 5, 7]}, {"model_path": "another"}])
def test_a_description_that_differs_is_refused(script: Path, other: dict[str, Any]) -> None:
    """Other layers, the same in another order, another model: nothing is changed."""
    record.begin(generator(), 8)
    before = (script / "vllm_compat.json").read_bytes()
    with pytest.raises(StoreError, match="one model and the same layers"):
        record.begin(generator(**other), 8)
    assert before == (script / "vllm_compat.json").read_bytes()


def test_files_of_a_run_without_us(script: Path) -> None:
    """They are continued when their data_config.json says the same layers, and refused when it says others."""
    write(script, 0, 1)
    config = {"hidden_states": {"layer_ids": [1, 2, 3, 7]}, "model": {"target_model_path": "model"}}
    (script / "data_config.json").write_text(json.dumps(config))
    with pytest.raises(StoreError, match="layer_ids"):
        record.begin(generator(), 8)
    record.begin(generator(layer_ids=[1, 2, 3, 7]), 8)


def test_a_program_that_is_not_the_script_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its --output-dir may be anything."""
    monkeypatch.setattr(sys, "argv", ["other.py", "--output-dir", str(tmp_path / "data")])
    record.begin(generator(), 8)
    assert not (tmp_path / "data").exists()

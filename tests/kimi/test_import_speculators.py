"""What speculators generated, taken over: our layer convention, our masks, a head trained on it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_compat.errors import DataError, StoreError
from vllm_compat.kimi.config import Config, load_config
from vllm_compat.kimi.import_speculators import import_samples, read_layout
from vllm_compat.kimi.progress import NullProgress
from vllm_compat.kimi.rows import read_rows
from vllm_compat.kimi.store import Store
from vllm_compat.kimi.train import train_stage
from vllm_compat.kimi.vocab import vocab_stage

COUNT = 12


def states_of(number: int, boundary: int, tokens: int) -> torch.Tensor:
    """bfloat16 [tokens, 256], told from every other by its content."""
    generator = torch.Generator().manual_seed(100 * number + boundary)
    return torch.randn(tokens, 256, generator=generator).bfloat16()


def write(folder: Path, order: tuple[int, ...], description: dict[str, Any], name: str) -> Path:
    """A folder as the script leaves it; ``order``: boundaries in each file. Row 5 has nothing to learn."""
    folder.mkdir(exist_ok=True)
    for number in range(COUNT):
        tokens = 20 + number
        generator = torch.Generator().manual_seed(number)
        mask = torch.zeros(tokens, dtype=torch.int64)
        mask[8:] = 0 if number == 5 else 1
        sample = {
            "input_ids": torch.randint(0, 400, (tokens,), generator=generator),
            "hidden_states": [states_of(number, boundary, tokens) for boundary in order],
            "loss_mask": mask,
        }
        torch.save(sample, folder / f"data_{number}.pt")
    (folder / name).write_text(json.dumps(description))
    return folder


def ours(*layer_ids: int, norm: bool = False) -> dict[str, Any]:
    """vllm_compat.json."""
    boundaries = [layer + 1 for layer in layer_ids]
    return {"layer_ids": layer_ids, "boundaries": boundaries, "final_norm_applied": norm, "vllm": "0.32.0"}


def theirs(*layer_ids: int) -> dict[str, Any]:
    """data_config.json, as far as it matters."""
    versions = {"package_versions": {"vllm": "0.11.0"}}
    return {"hidden_states": {"layer_ids": layer_ids}, "reproducibility": versions}


#: File -> (its name, what it says, boundaries of the tensors in each file).
FOLDERS = {
    "patched": ("vllm_compat.json", ours(4, 2, 7, 5), (5, 3, 8, 6)),
    "unmodified": ("data_config.json", theirs(4, 2, 7, 5, 2), (3, 5, 6, 8)),
}


@pytest.fixture
def cfg(tmp_path: Path) -> Config:
    settings = ["epochs=1", "batch_tokens=128", "ttt_steps=2", "threads=none", "max_seconds=none"]
    train = (f"train.{setting}" for setting in settings)
    return load_config("tiny", [f"run_dir={tmp_path / 'run'}", "vocab.draft_vocab_size=300", *train])


@pytest.mark.parametrize("kind", FOLDERS)
def test_every_state_is_where_it_belongs(tmp_path: Path, cfg: Config, kind: str) -> None:
    """Ascending boundaries whatever the order of the files; ids, masks and states are those of the file."""
    name, said, order = FOLDERS[kind]
    made = import_samples(cfg, write(tmp_path / "data", order, said, name), NullProgress())
    assert (1, COUNT - 1) == (made["without_loss"], sum(made["rows"].values()))
    seen = set()
    for split in ("train", "heldout"):
        store = Store(cfg.run_dir / "extract" / split)
        assert ((3, 5, 6, 8), "boundary", False) == (
            store.provenance.layers,
            store.provenance.convention,
            store.provenance.final_norm_applied,
        )
        rows = {row.row_id: row for row in read_rows(cfg.run_dir / "prepare" / f"{split}.parquet")}
        assert rows.keys() == {*store.ids}
        for sample in store:
            number = int(sample.sample_id.removeprefix("data_").removesuffix("/0"))
            tokens = 20 + number
            original = torch.load(tmp_path / "data" / f"data_{number}.pt")
            assert original["input_ids"].tolist() == sample.token_ids.tolist() == rows[sample.sample_id].input_ids
            assert original["loss_mask"].tolist() == sample.loss_mask.tolist() == rows[sample.sample_id].loss_mask
            assert 8 == rows[sample.sample_id].prompt_length
            for at, boundary in enumerate((3, 5, 6, 8)):
                assert torch.equal(states_of(number, boundary, tokens), sample.hidden_states[:, at])
            seen.add(number)
    assert {*range(COUNT)} - {5} == seen


def test_a_head_is_trained_on_it(tmp_path: Path, cfg: Config) -> None:
    """vocab and train go on from there; the head reads the boundaries that were imported."""
    name, said, order = FOLDERS["patched"]
    import_samples(cfg, write(tmp_path / "data", order, said, name), NullProgress())
    assert vocab_stage(cfg, NullProgress())["loss_tokens"] > 0
    assert train_stage(cfg, NullProgress())["steps"] > 0
    shape = json.loads((cfg.run_dir / "train" / "draft.json").read_text(encoding="utf-8"))
    assert [3, 5, 6] == list(shape["aux_layers"])


def test_the_command(tmp_path: Path, cfg: Config) -> None:
    """Twice is once; what is wrong is one paragraph."""
    name, said, order = FOLDERS["unmodified"]
    folder = write(tmp_path / "data", order, said, name)
    command = [sys.executable, "-m", "vllm_compat", "kimi", "import-speculators", str(folder), "--preset", "tiny"]
    command += ["--run-dir", str(cfg.run_dir)]
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        assert 0 == done.returncode, done.stderr
        assert "1 without a token to learn left out" in done.stdout
    assert (cfg.run_dir / "config.toml").is_file()
    (folder / "data_config.json").unlink()
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert 1 == done.returncode
    assert "Traceback" not in done.stderr
    assert "data_config.json" in done.stderr


def test_folders_that_do_not_say_what_they_hold(tmp_path: Path) -> None:
    """No description; or states after the final norm."""
    with pytest.raises(StoreError, match="neither"):
        read_layout(tmp_path)
    (tmp_path / "vllm_compat.json").write_text(json.dumps(ours(2, 7, norm=True)))
    with pytest.raises(StoreError, match="before the final norm"):
        read_layout(tmp_path)


@pytest.mark.parametrize(
    ("said", "order", "match"),
    [
        (ours(2, 4, 6), (3, 5, 7), r"boundaries \[3, 5, 7\]"),
        (ours(2, 4, 7), (3, 5, 6, 8), "4 tensors"),
        (ours(2, 4, 5, 7), (3, 5, 8), "3 tensors"),
    ],
)
def test_states_that_are_not_the_targets(
    tmp_path: Path, cfg: Config, said: dict[str, Any], order: tuple[int, ...], match: str
) -> None:
    """The last layer is missing; more or fewer tensors than the description says."""
    with pytest.raises(DataError, match=match):
        import_samples(cfg, write(tmp_path / "data", order, said, "vllm_compat.json"), NullProgress())


def test_a_file_that_was_cut_off(tmp_path: Path, cfg: Config) -> None:
    """It is named, and nothing of the run is left that could be taken for complete."""
    name, said, order = FOLDERS["patched"]
    folder = write(tmp_path / "data", order, said, name)
    whole = (folder / "data_7.pt").read_bytes()
    (folder / "data_7.pt").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"data_7\.pt"):
        import_samples(cfg, folder, NullProgress())
    assert not (cfg.run_dir / "prepare" / "train.parquet").exists()


def test_an_empty_folder(tmp_path: Path, cfg: Config) -> None:
    """There is nothing to import."""
    (tmp_path / "vllm_compat.json").write_text(json.dumps(ours(2, 7)))
    with pytest.raises(DataError, match="none"):
        import_samples(cfg, tmp_path, NullProgress())

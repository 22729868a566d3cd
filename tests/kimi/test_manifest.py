"""Manifests: complete means complete, and every change that matters makes a stage run again."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from vllm_compat.errors import ConfigError, DataError, StoreError
from vllm_compat.kimi.files import lock, write_atomic, write_json
from vllm_compat.kimi.fingerprints import model_fingerprint
from vllm_compat.kimi.manifest import (
    STAGES,
    Manifest,
    checksums,
    manifest_path,
    now,
    read_manifest,
    remove_manifest,
    versions,
    why_stale,
    write_manifest,
)


def make(**changes: Any) -> Manifest:
    """A manifest of "vocab" with one output."""
    fields: dict[str, Any] = {
        "stage": "vocab",
        "status": "complete",
        "started": now(),
        "finished": now(),
        "seconds": 1.5,
        "config": {"vocab": {"draft_vocab_size": 8, "layers": [1, 2]}, "seed": 0},
        "inputs": {"rows": "abc"},
        "outputs": {},
        "metrics": {"coverage": 0.9},
        "versions": versions(),
    }
    return Manifest(**{**fields, **changes})


@pytest.fixture
def written(tmp_path: Path) -> Manifest:
    """A complete stage with an output file."""
    (tmp_path / "out.bin").write_bytes(b"content")
    manifest = make(outputs=checksums(tmp_path, ("out.bin", "not-there.bin")))
    write_manifest(tmp_path, manifest)
    return manifest


def test_read_gives_back_what_was_written(tmp_path: Path, written: Manifest) -> None:
    """All fields, in <run>/<stage>/manifest.json."""
    assert written == read_manifest(tmp_path, "vocab")
    assert (tmp_path / "vocab/manifest.json").is_file()
    assert list(written.outputs) == ["out.bin"]


def test_up_to_date(tmp_path: Path, written: Manifest) -> None:
    """Same configuration, inputs and outputs: nothing to do."""
    assert why_stale(tmp_path, "vocab", written.config, written.inputs) is None


@pytest.mark.parametrize(
    ("config", "inputs", "reason"),
    [
        (
            {"vocab": {"draft_vocab_size": 9, "layers": [1, 2]}, "seed": 0},
            {"rows": "abc"},
            "vocab.draft_vocab_size",
        ),
        ({"vocab": {"draft_vocab_size": 8, "layers": [1, 3]}, "seed": 0}, {"rows": "abc"}, "vocab.layers"),
        ({"vocab": {"draft_vocab_size": 8}, "seed": 0}, {"rows": "abc"}, "vocab.layers"),
        ({"vocab": {"draft_vocab_size": 8, "layers": [1, 2]}, "seed": 1}, {"rows": "abc"}, "seed"),
        (make().config, {"rows": "abd"}, "other input: rows"),
        (make().config, {}, "other input: rows"),
        (make().config, {"rows": "abc", "model": "x"}, "other input: model"),
    ],
)
def test_what_changed_is_named(
    tmp_path: Path, written: Manifest, config: dict[str, Any], inputs: dict[str, str], reason: str
) -> None:
    """A setting added, removed or changed; an input added, removed or changed."""
    assert reason in str(why_stale(tmp_path, "vocab", config, inputs))


@pytest.mark.parametrize("damage", ["changed", "removed"])
def test_an_output_that_is_not_what_was_written_makes_it_stale(tmp_path: Path, written: Manifest, damage: str) -> None:
    """Somebody removed or changed the file that later stages read."""
    if damage == "changed":
        (tmp_path / "out.bin").write_bytes(b"contenT")
    else:
        (tmp_path / "out.bin").unlink()
    assert "out.bin" in str(why_stale(tmp_path, "vocab", written.config, written.inputs))


def test_incomplete_is_not_complete(tmp_path: Path, written: Manifest) -> None:
    """No manifest, a removed one, another status: the stage has to run."""
    for stage in STAGES[:2]:
        assert why_stale(tmp_path, stage, {}, {}) == "not complete"
    write_manifest(tmp_path, dataclasses.replace(written, status="running"))
    assert read_manifest(tmp_path, "vocab") is None
    remove_manifest(tmp_path, "vocab")
    remove_manifest(tmp_path, "vocab")
    assert read_manifest(tmp_path, "vocab") is None


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"stage": "vocab", "unknown": 1}'])
def test_a_manifest_that_cannot_be_read_is_an_error_with_its_path(tmp_path: Path, text: str) -> None:
    """Not a traceback, and not silently "not complete"."""
    manifest_path(tmp_path, "vocab").parent.mkdir()
    manifest_path(tmp_path, "vocab").write_text(text)
    with pytest.raises(DataError, match=r"vocab/manifest\.json"):
        read_manifest(tmp_path, "vocab")


def test_versions_name_what_made_the_numbers() -> None:
    """Packages with their releases; the engine with its distribution."""
    found = versions()
    assert {"python", "torch", "transformers", "safetensors"} <= set(found)
    assert "(" in found["vllm"]
    assert "patches" not in found


def test_versions_name_the_patches_that_are_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A patched engine is another one."""
    monkeypatch.setattr("vllm_compat.kimi.manifest.enabled", lambda: ("cpu-rms-norm", "cpu-shutdown"))
    assert versions()["patches"] == "cpu-rms-norm, cpu-shutdown"


def test_the_models_fingerprint(tmp_path: Path) -> None:
    """Another config, other tensors or another number of files are another model; where it lies does not
    matter.
    """

    def save(folder: Path, shape: int = 4, config: str = "{}", files: int = 1) -> str:
        folder.mkdir()
        (folder / "config.json").write_text(config)
        for i in range(files):
            save_file({"weight": torch.zeros(shape)}, folder / f"model-{i}.safetensors")
        return model_fingerprint(str(folder))

    first = save(tmp_path / "a")
    assert first == save(tmp_path / "b")
    others = {save(tmp_path / "c", shape=5), save(tmp_path / "d", config="[]"), save(tmp_path / "e", files=2)}
    assert len({first, *others}) == 4
    (tmp_path / "f").mkdir()
    with pytest.raises(ConfigError, match=r"no config\.json"):
        model_fingerprint(str(tmp_path / "f"))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_json_that_others_cannot_read_is_refused(tmp_path: Path, value: float) -> None:
    """NaN is no JSON; the file that was there stays."""
    write_json(tmp_path / "x.json", {"a": 1})
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(tmp_path / "x.json", {"a": value})
    assert (tmp_path / "x.json").read_text() == '{\n "a": 1\n}\n'


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Failing at the rename or before: the old content, and no temporary file."""
    write_atomic(tmp_path / "x", "old")

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    for name in ("replace", "fsync"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, fail)
            with pytest.raises(OSError, match="No space"):
                write_atomic(tmp_path / "x", "new")
        assert ["x"] == [path.name for path in tmp_path.iterdir()]
        assert (tmp_path / "x").read_text() == "old"


def test_a_lock_is_exclusive_and_names_its_holder(tmp_path: Path) -> None:
    """Held once; free again when closed."""
    held = lock(tmp_path / "a/b.lock", "writing here")
    with pytest.raises(StoreError, match=f"process {os.getpid()}"):
        lock(tmp_path / "a/b.lock", "writing here")
    os.close(held)
    os.close(lock(tmp_path / "a/b.lock", "writing here"))

"""The configuration: presets load, files round-trip, and mistakes are named together with what would be
right.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_compat import ConfigError
from vllm_compat.kimi.config import (
    Config,
    PrepareConfig,
    TargetConfig,
    TrainConfig,
    aux_layers,
    load_config,
    preset_names,
    save_config,
)

KIMI = ["prepare.conversations=mine.jsonl"]


def test_presets_load() -> None:
    """Both presets are valid; the tiny one is complete, Kimi's asks for nothing but conversations."""
    assert preset_names() == ["kimi-k2.5", "tiny"]
    tiny, kimi = load_config("tiny"), load_config("kimi-k2.5", KIMI)
    assert Path(tiny.target.model).is_dir()
    assert Path(tiny.prepare.conversations).is_file()
    assert Path("runs/tiny") == tiny.run_dir
    assert (2, 30, 58) == kimi.extract.layers
    assert 8 == kimi.target.tensor_parallel_size
    assert kimi.target.engine_args["language_model_only"] is True


def test_kimis_layers_are_vllms_default_for_61_layers() -> None:
    """The preset's boundaries, which are also what vLLM serves with, are (2, N//2, N-3) of N = 61."""
    assert load_config("kimi-k2.5", KIMI).extract.layers == aux_layers((), 61)


def test_kimis_prompt_and_answer_fit_the_model_length() -> None:
    """Room for the longest prompt of prepare plus what evaluate generates."""
    cfg = load_config("kimi-k2.5", KIMI)
    assert cfg.target.max_model_len >= cfg.prepare.max_length + cfg.evaluate.max_new_tokens


def test_the_tiny_preset_fits_its_own_model_length() -> None:
    """The same for the tiny preset."""
    cfg = load_config("tiny")
    assert cfg.target.max_model_len >= cfg.prepare.max_length + cfg.evaluate.max_new_tokens


def test_missing_conversations_are_asked_for() -> None:
    """The error names the key and what may stand there."""
    with pytest.raises(ConfigError, match=r"prepare.conversations.*\.jsonl"):
        load_config("kimi-k2.5")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.lrr=1", "did you mean 'lr'"),
        ("training.lr=1", "one of: run_dir, target, prepare"),
        ("train.lr=true", "train.lr = True .* needs: float"),
        ("train.lr=fast", "train.lr = 'fast'"),
        ("train.lr=0", "greater than 0"),
        ("train.lr=nan", "train.lr"),
        ("train.steps=1.5", "int or left out"),
        ("train.steps=true", "int or left out"),
        ("train.betas=[0.9]", "two numbers"),
        ("train.architecture=qwen", "one of mla, llama"),
        ("target.trust_remote_code=1", "bool"),
        ("target.dtype=int4", "bfloat16"),
        ("target.model=''", "hub id"),
        ("extract.layers=[5, 4]", "ascending"),
        ("extract.layers=[2, 2]", "ascending"),
        ("extract.layers=2", "tuple"),
        ("prepare.heldout_fraction=1.0", r"in \[0, 1\)"),
        ("prepare.temperature=-1", "0 or greater"),
        ("train=3", "table"),
        ("seed.x=3", "seed to be a section"),
        ("no equals sign", "section.key=value"),
        ("=3", "section.key=value"),
    ],
)
def test_mistakes_are_named(override: str, message: str) -> None:
    """Unknown keys list the valid ones, wrong types say which type, wrong values say which values."""
    with pytest.raises(ConfigError) as caught:
        load_config("tiny", [override])
    assert re.search(message, str(caught.value)), caught.value


def test_overrides(tmp_path: Path) -> None:
    """TOML values, bare words, None, nested engine arguments; the last one wins."""
    cfg = load_config(
        "tiny",
        [
            "train.lr=1",
            "train.lr=2e-4",
            "train.max_seconds=none",
            "train.architecture=llama",
            f"run_dir={tmp_path}",
            "target.engine_args.block_size=16",
            "extract.layers=[1,2,3]",
            "prepare.thinking=true",
        ],
    )
    assert 2e-4 == cfg.train.lr
    assert cfg.train.max_seconds is None
    assert "llama" == cfg.train.architecture
    assert tmp_path == cfg.run_dir
    assert {"enforce_eager": True, "gpu_memory_utilization": 0.3, "block_size": 16} == cfg.target.engine_args
    assert (1, 2, 3) == cfg.extract.layers
    assert cfg.prepare.thinking is True


def test_a_file_extends_a_preset_or_another_file(tmp_path: Path) -> None:
    """Only what differs has to be written; sections merge key by key; a circle is an error."""
    (tmp_path / "base.toml").write_text('extends = "tiny"\n[train]\nlr = 0.5\nsteps = 7\n')
    (tmp_path / "mine.toml").write_text('extends = "base.toml"\n[train]\nlr = 0.25\n')
    cfg = load_config(tmp_path / "mine.toml")
    assert (0.25, 7) == (cfg.train.lr, cfg.train.steps)
    assert load_config("tiny").prepare == cfg.prepare
    (tmp_path / "base.toml").write_text('extends = "mine.toml"\n')
    with pytest.raises(ConfigError, match="circle"):
        load_config(tmp_path / "mine.toml")


def test_a_file_without_run_dir_runs_under_its_own_name(tmp_path: Path) -> None:
    """Two configurations do not write over each other by default."""
    (tmp_path / "mine.toml").write_text('[target]\nmodel = "x"\n[prepare]\nconversations = "y.jsonl"\n')
    assert Path("runs/mine") == load_config(tmp_path / "mine.toml").run_dir


@pytest.mark.parametrize(("content", "message"), [(b"[train\n", "valid TOML"), (b"\xff", "UTF-8"), (None, "preset")])
def test_files_that_cannot_be_read(tmp_path: Path, content: bytes | None, message: str) -> None:
    """A ConfigError with the file's name, not a traceback of the parser."""
    path = tmp_path / "mine.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(path)
    assert str(path) in caught.value.asked


def test_fixtures_that_are_not_there_say_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside a checkout `fixtures:` cannot be found: clone, or give another model."""
    with pytest.raises(ConfigError, match=r"--set target.model=PATH"):
        load_config("tiny", ["target.model=fixtures:no-such-model"])
    monkeypatch.chdir(tmp_path)
    assert Path(load_config("tiny").target.model).is_dir()  # found from the package's own parents


text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)


@settings(max_examples=50, deadline=None)
@given(
    model=text.filter(lambda t: not t.startswith("fixtures:")),
    tokenizer=st.none() | text.filter(lambda t: not t.startswith("fixtures:")),
    arguments=st.dictionaries(
        text, st.booleans() | st.integers(-9, 9) | text | st.lists(st.floats(-9, 9), max_size=3), max_size=4
    ),
    lr=st.floats(1e-12, 1e3),
    steps=st.none() | st.integers(1, 10**9),
)
def test_save_and_load_is_the_identity(
    tmp_path_factory: pytest.TempPathFactory,
    model: str,
    tokenizer: str | None,
    arguments: dict[str, Any],
    lr: float,
    steps: int | None,
) -> None:
    """Whatever stands in a configuration, the saved file gives it back: quotes, controls, tiny floats,
    None.
    """
    path = tmp_path_factory.mktemp("config") / "config.toml"
    cfg = Config(
        run_dir=Path("runs/x"),
        target=TargetConfig(model=model, tokenizer=tokenizer, engine_args=arguments),
        prepare=PrepareConfig(conversations="c.jsonl"),
        train=TrainConfig(lr=lr, steps=steps),
    )
    save_config(cfg, path)
    assert cfg == load_config(path)


def test_presets_survive_save_and_load(tmp_path: Path) -> None:
    """Fixtures are saved as the paths that they were resolved to."""
    for cfg in (load_config("tiny"), load_config("kimi-k2.5", KIMI)):
        save_config(cfg, tmp_path / "config.toml")
        assert cfg == load_config(tmp_path / "config.toml")


def test_configs_cannot_be_changed() -> None:
    """A stage cannot alter what the manifest says it ran with."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        load_config("tiny").train.lr = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("layers", "n", "expected"),
    [((), 61, (2, 30, 58)), ((), 8, (2, 4, 5)), ((1, 6), 8, (1, 6)), ((), 7, (2, 3, 4))],
)
def test_aux_layers(layers: tuple[int, ...], n: int, expected: tuple[int, ...]) -> None:
    """Empty means vLLM's default."""
    assert expected == aux_layers(layers, n)


@pytest.mark.parametrize(("layers", "n"), [((), 6), ((), 2), ((0, 1), 8), ((2, 8), 8), ((2, 7), 8), ((2, 60), 60)])
def test_aux_layers_out_of_range(layers: tuple[int, ...], n: int) -> None:
    """What cannot be an aux boundary.

    N is the teacher's state, N - 1 means N by another count, 0 crashes DeepSeek models, and the default's ids coincide
    in small models.
    """
    with pytest.raises(ConfigError, match=r"extract\.layers"):
        aux_layers(layers, n)

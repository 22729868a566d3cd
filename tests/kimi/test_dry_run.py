"""dry-run: everything but the weights, on the preset for the real model with its real config's shape."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from kimi_tokenizers import make_tokenizer

from vllm_compat.kimi.config import Config, load_config
from vllm_compat.kimi.dry_run import Check, dry_run

# What the dry run reads of moonshotai/Kimi-K2.5's config.json.
KIMI = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "text_config": {
        "model_type": "kimi_k2",
        "num_hidden_layers": 61,
        "hidden_size": 7168,
        "vocab_size": 163840,
        "max_position_embeddings": 262144,
    },
}


@pytest.fixture
def kimi(tmp_path: Path) -> Path:
    """A directory with Kimi-K2.5's config and a tokenizer with its template: all that is needed without
    weights.
    """
    make_tokenizer("k2.5").save_pretrained(tmp_path / "kimi")
    (tmp_path / "kimi/config.json").write_text(json.dumps(KIMI))
    chats = [
        {
            "messages": [
                {"role": "user", "content": f"Question {i}"},
                {"role": "assistant", "content": "Answer"},
            ]
        }
        for i in range(300)
    ]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    return tmp_path


def load(path: Path, *overrides: str) -> Config:
    here = [f"target.model={path}/kimi", f"prepare.conversations={path}/data.jsonl", f"run_dir={path}/run"]
    return load_config("kimi-k2.5", [*here, *overrides])


def by_name(cfg: Config) -> dict[str, Check]:
    return {check.name: check for check in dry_run(cfg)}


def test_the_preset_for_kimi_is_right(kimi: Path) -> None:
    """Nothing is wrong with it. Boundaries 2, 30, 58 and 61; 57,344 bytes per token; what this machine lacks
    (GPUs, disk) is told apart from a wrong configuration.
    """
    checks = by_name(load(kimi))
    wrong = [check for check in checks.values() if check.status == "wrong"]
    assert wrong == []
    assert "61 layers, hidden 7168" in checks["target"].text
    assert checks["layers"].text == "boundaries 2, 30, 58 and 61 (final)"
    assert "57,344 bytes/token" in checks["disk"].text
    assert "300 conversations" in checks["conversations"].text
    assert "needs 8 accelerators" in checks["accelerators"].text or checks["accelerators"].status == "ok"
    assert "KimiK25ForConditionalGeneration, Eagle3DeepseekV2ForCausalLM" in checks["models"].text
    assert "language_model_only=True" in checks["engine_args"].text


def test_the_disk_estimate_counts_what_will_be_written(kimi: Path) -> None:
    """rows x tokens x states x hidden x bytes; more than is free is "missing", not "wrong"."""
    cfg = load(kimi, "prepare.max_new_tokens=10", "extract.dtype=float32")
    checks = by_name(cfg)
    assert "114,688 bytes/token" in checks["disk"].text
    (kimi / "many.jsonl").write_text((kimi / "data.jsonl").read_text() * 400)
    many = load(kimi, f"prepare.conversations={kimi}/many.jsonl", "prepare.max_new_tokens=8000")
    assert by_name(many)["disk"].status == "missing"
    assert "TB free" not in by_name(many)["disk"].text or "TB" in by_name(many)["disk"].text


@pytest.mark.parametrize(
    ("override", "name", "message"),
    [
        ("extract.layers=[2,30,60,61]", "layers", "between 1 and 59"),
        ("extract.layers=[2,30,99]", "layers", "between 1 and 59"),
        ("vocab.draft_vocab_size=999999", "vocabulary", "163840"),
        ("target.max_model_len=300000", "lengths", "262144"),
        ("target.engine_args.no_such_argument=1", "engine_args", "no_such_argument"),
        ("prepare.conversations=missing.jsonl", "conversations", "missing.jsonl"),
        ("target.model=/no/such/model", "target", "/no/such/model"),
    ],
)
def test_a_wrong_configuration_is_named(kimi: Path, override: str, name: str, message: str) -> None:
    """Each mistake is found before anything is loaded."""
    check = by_name(load(kimi, override))[name]
    assert check.status == "wrong"
    assert message in check.text


@pytest.mark.parametrize("config", [{}, [], {"architectures": [], "num_hidden_layers": 1}, None])
def test_a_target_without_a_usable_config(kimi: Path, config: Any) -> None:
    """Not a KeyError."""
    path = kimi / "kimi/config.json"
    if config is None:
        path.unlink()
    else:
        path.write_text(json.dumps(config))
    assert by_name(load(kimi))["target"].status == "wrong"


def test_a_tokenizer_of_another_kind(kimi: Path) -> None:
    """K3's template is found out here, not after days of masks that are all zero."""
    make_tokenizer("k3").save_pretrained(kimi / "kimi")
    check = by_name(load(kimi))["tokenizer"]
    assert check.status == "wrong"
    assert "chat template" in check.text


def test_mostly_malformed_conversations(kimi: Path) -> None:
    """Found on the first rows."""
    (kimi / "data.jsonl").write_text("x\ny\n" + (kimi / "data.jsonl").read_text().splitlines()[0])
    check = by_name(load(kimi))["conversations"]
    assert check.status == "wrong"
    assert "2 malformed" in check.text

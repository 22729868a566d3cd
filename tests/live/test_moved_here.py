"""vllm_compat.moved on the installed vLLM."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from typing import Any

import pytest
from here import RELEASE, wants_a_package

import vllm_compat as vc
from vllm_compat import moved
from vllm_compat.adapters import moves
from vllm_compat.adapters.moves import Move

TABLE = moves.table()
HERE = [pytest.param(move, id=name) for name, move in TABLE.items() if move.at(RELEASE)]
GONE = [pytest.param(move, id=name) for name, move in TABLE.items() if not move.at(RELEASE)]


@pytest.mark.parametrize("move", HERE)
def test_a_name_is_vllms_own_object(move: Move) -> None:
    """Each name that this release has is the object that its own module has, found where the table says."""
    module, _, name = move.at(RELEASE).partition(":")
    try:
        expected = getattr(importlib.import_module(module), name)
    except ImportError as error:
        if not wants_a_package(error):
            raise
        pytest.skip(f"{module} itself does not import here: {error}")

    assert move.at(RELEASE) == moved.where(move.name)
    if not move.adapted:
        assert expected is getattr(moved, move.name)


@pytest.mark.parametrize("move", GONE)
def test_a_name_that_is_gone_says_what_to_use(move: Move) -> None:
    """What this release does not have is an ImportError with the four parts of a message."""
    with pytest.raises(ImportError) as caught:
        exec(f"from vllm_compat.moved import {move.name}")

    error = caught.value
    assert isinstance(error, vc.UnsupportedName)
    assert f"{move.name} of vLLM" == error.asked
    assert move.life in error.needed
    assert str(vc.installed()) in error.found
    assert move.instead in error.advice
    assert moved.where(move.name) is None


def test_they_can_be_used() -> None:
    """Functions do what they are called for."""
    assert 4 == moved.cdiv(7, 2)
    assert 0 < moved.get_open_port() < 65536
    assert "tcp://127.0.0.1:29500" == moved.get_distributed_init_method("127.0.0.1", 29500)
    assert moved.sha256(("a", 1)) == moved.get_hash_fn_by_name("sha256")(("a", 1))
    assert [7, 8] == moved.TokensPrompt(prompt_token_ids=[7, 8])["prompt_token_ids"]


def test_the_tokenizer_of_a_config(scheduler_config: Any, tiny_llama: str) -> None:
    """One signature, and the tokenizer that vLLM itself would load, truncating on the left."""
    made = moved.init_tokenizer_from_configs(scheduler_config.model_config)

    assert moved.get_tokenizer(tiny_llama).encode("one two") == made.encode("one two")
    assert "left" == made.truncation_side


def test_no_tokenizer_is_wanted(tiny_llama: str) -> None:
    """With ``skip_tokenizer_init`` there is none, on every release."""
    config = vc.make_vllm_config(model=tiny_llama, skip_tokenizer_init=True, enforce_eager=True)

    assert moved.init_tokenizer_from_configs(config.model_config) is None


@pytest.mark.parametrize("given", [{}, {"cache_salt": "s"}, {"prompt": "text"}, {"prompt": "text", "cache_salt": "s"}])
def test_rendered_inputs(given: dict[str, str]) -> None:
    """``tokens_input`` carries what was set, under its own name, or refuses it."""
    if "prompt" in given and (0, 11, 1) <= RELEASE < (0, 17, 0):
        with pytest.raises(vc.UnsupportedField, match="prompt"):
            moved.tokens_input([1, 2], **given)
        return
    assert {"type": "token", "prompt_token_ids": [1, 2], **given} == moved.tokens_input([1, 2], **given)


def test_importing_the_module_imports_no_vllm() -> None:
    """vLLM is imported when a name is first asked for; until then dir() lists the names."""
    code = (
        "import json, sys; import vllm_compat.moved as m; listed = 'cdiv' in dir(m); before = 'vllm' in sys.modules\n"
        "from vllm_compat.moved import cdiv; print(json.dumps([listed, before, 'vllm' in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)

    assert [True, False, True] == json.loads(done.stdout.splitlines()[-1])

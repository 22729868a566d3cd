"""Live tests: real vLLM, real models, in this process unless a test says otherwise.

The environment has to stand before vLLM and torch are imported, so it is set here, at import.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from here import BLOCK_SIZE, EAGER, IN_PROCESS, PATCHES, RELEASE

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # on CPU the worker stays in this process
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",  # sampler helpers are compiled even in eager mode, which takes longer than the tests
    "OMP_WAIT_POLICY": "PASSIVE",  # two spinning threads on two busy cores wait for each other
}
for _name, _value in ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)

LIVE = Path(__file__).parent
sys.path.insert(0, str(LIVE.parents[1] / "matrix"))
from cells import deviations  # noqa: E402

import vllm_compat  # noqa: E402

for _name in PATCHES:
    vllm_compat.enable(_name)

#: Libraries that some tests have beside vLLM, where a session installs them; left out elsewhere.
collect_ignore = [name for name in ("speculators", "trl") if not any(metadata.distributions(name=name))]

FIXTURE = LIVE.parent / "fixtures" / "tiny-kimi"
SCRIPTS = LIVE / "scripts"


UNRAISABLE = "pytest.PytestUnraisableExceptionWarning"
#: What older releases do, and warnings that are errors would stop at: before which release, and the filter.
NOISE = (
    # The executor with worker processes leaves its sockets to the garbage collector.
    ((0, 32), f"ignore:Exception ignored in. <function (Socket|Context).__del__:{UNRAISABLE}"),
    # So does the search for the machine's address.
    ((0, 12), f"ignore:Exception ignored in. <socket.socket:{UNRAISABLE}"),
    # intel_extension_for_pytorch, which the CPU builds of that time run on, imports pkg_resources.
    ((0, 12), "ignore:pkg_resources is deprecated:DeprecationWarning"),
)


def pytest_configure(config: pytest.Config) -> None:
    """Let the noise of this release pass."""
    for until, line in NOISE:
        if RELEASE < until:
            config.addinivalue_line("filterwarnings", line)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What this release of vLLM does wrong by itself is expected to fail; that it does is checked (xfail_strict)."""
    known = [deviation for deviation in deviations.load() if deviation.covers(RELEASE)]
    for item in items:
        if item.path.parent == LIVE:
            name = f"{item.path.name}::{item.nodeid.partition('::')[2]}"
            for deviation in (deviation for deviation in known if deviation.matches(name)):
                item.add_marker(pytest.mark.xfail(reason=f"{deviation.reason} ({deviation.upstream})", strict=True))


def run_script(name: str, *args: str, timeout: float = 300) -> dict[str, Any]:
    """Run a script of ``scripts/`` in a process of its own and return the JSON of its last line."""
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / name), *args],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, f"{name} failed:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


@pytest.fixture(scope="session")
def tiny_kimi() -> str:
    """The committed target: Kimi's architecture, 8 layers, trained."""
    return str(FIXTURE)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Llama with random weights and the tiny target's tokenizer."""
    import shutil

    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    path = tmp_path_factory.mktemp("tiny-llama")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=7,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        eos_token_id=2030,
        pad_token_id=2047,
        initializer_range=0.05,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"):
        shutil.copy(FIXTURE / name, path / name)
    return str(path)


@pytest.fixture(scope="session")
def tokenizer(tiny_kimi: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_kimi)


@pytest.fixture(scope="session")
def prompts(tokenizer: Any) -> list[list[int]]:
    """Twelve rendered prompts of mixed lengths (about 15 to 200 tokens); several share a prefix."""
    made: list[list[int]] = []
    with (FIXTURE / "conversations.jsonl").open(encoding="utf-8") as lines:
        for line, _ in zip(lines, range(6), strict=False):
            messages = json.loads(line)["messages"]
            for turns in (1, 5):
                text = tokenizer.apply_chat_template(messages[:turns], tokenize=False, add_generation_prompt=True)
                made.append(tokenizer.encode(text, add_special_tokens=False)[:200])
    return made


@pytest.fixture(scope="module")
def loop(tiny_llama: str) -> Iterator[Any]:
    """An EngineLoop in float32, chunks of 64 tokens, prefix caching on; one per module.

    Of the Llama: on CPU vLLM 0.32 turns both off for models with MLA (platforms/cpu.py).
    """
    import vllm_compat as vc

    config = vc.make_vllm_config(
        model=tiny_llama,
        dtype="float32",
        **EAGER,
        max_model_len=512,
        max_num_batched_tokens=64,
        block_size=BLOCK_SIZE,
        max_num_seqs=4,
        enable_prefix_caching=True,
        **IN_PROCESS,
    )
    with vc.EngineLoop(config) as loop:
        yield loop


@pytest.fixture(scope="session")
def scheduler_config(tiny_llama: str) -> Any:
    """A VllmConfig for tests that need a scheduler and no model."""
    import vllm_compat as vc

    return vc.make_vllm_config(
        model=tiny_llama,
        dtype="float32",
        **EAGER,
        max_model_len=256,
        max_num_batched_tokens=64,
        block_size=BLOCK_SIZE,
        max_num_seqs=8,
        enable_prefix_caching=True,
    )

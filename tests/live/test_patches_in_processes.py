"""Patches in the processes that vLLM starts."""

from __future__ import annotations

import os

import pytest
from conftest import run_script
from here import PATCHES, RELEASE

import vllm_compat as vc
from vllm_compat.patches import CATALOGUE, VARIABLE

#: Of vLLM itself.
HERE = [patch for patch in CATALOGUE if patch.name in PATCHES and patch.applies(RELEASE, vc.installed().platform)]


@pytest.mark.skipif(not HERE, reason="no patch of the catalogue is for this release")
def test_an_engine_in_a_process_of_its_own_is_patched(tiny_llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every patch for this release is on, its targets changed, in a spawned worker; in one after disable, none is.

    vLLM is told of the variable, so that it does not warn of one that it does not know.
    """
    monkeypatch.delenv(VARIABLE, raising=False)
    names = [patch.name for patch in HERE]
    targets = {f"{change.module}:{change.attribute}" for patch in HERE for change in patch.changes}

    said = run_script("llm_patched.py", tiny_llama, ",".join(names))

    for kind, on in (("patched", True), ("plain", False)):
        (worker,) = said[kind]
        assert worker["pid"] not in (said["pid"], os.getpid())
        assert (names if on else []) == worker["enabled"]
        assert (targets if on else set()) == set(worker["changed"])
        assert on is worker["known_to_vllm"]

"""The inside of speculators' generator, as far as it needs no engine."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from vllm_compat.patches.speculators import generator

METHOD = "VLLM_WORKER_MULTIPROC_METHOD"


@pytest.mark.parametrize(
    ("platform", "said", "method"),
    [("cuda", None, "spawn"), ("rocm", None, "spawn"), ("cuda", "fork", "fork"), ("cpu", None, None)],
)
def test_how_workers_are_started(
    monkeypatch: pytest.MonkeyPatch, platform: str, said: str | None, method: str | None
) -> None:
    """Anew where there is a GPU, whose driver a forked process cannot use; what the user said stands."""
    monkeypatch.setenv(METHOD, said or "")  # so that it is put back
    if said is None:
        monkeypatch.delenv(METHOD)
    monkeypatch.setattr(generator, "installed", lambda: SimpleNamespace(platform=platform))
    generator._spawn_workers()
    assert method == os.environ.get(METHOD)
    os.environ.pop(METHOD, None)

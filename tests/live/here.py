"""Which vLLM the live tests meet: what one does differs between releases, and is said in the tests as data."""

from __future__ import annotations

import importlib
from typing import Any

import vllm_compat as vc

#: Of the installed vLLM. Live tests need a known one.
RELEASE = vc.installed().release or ()


def by_release(*steps: tuple[str, Any]) -> Any:
    """The value of the last step whose release is not newer than the installed one; steps are oldest first."""
    value: Any = None
    for since, expected in steps:
        if tuple(map(int, since.split("."))) <= RELEASE:
            value = expected
    return value


#: Tokens per block that the CPU takes: before 0.12 other sizes want intel_extension_for_pytorch.
BLOCK_SIZE = by_release(("0", 16), ("0.12.0", 32))


def hash_functions() -> Any:
    """The module with vLLM's sha256 and sha256_cbor."""
    return importlib.import_module(by_release(("0", "vllm.utils"), ("0.11.1", "vllm.utils.hashing")))

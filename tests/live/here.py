"""Which vLLM the live tests meet: what one does differs between releases, and is said in the tests as data."""

from __future__ import annotations

import importlib
from typing import Any

import vllm_compat as vc
from vllm_compat.patches import CATALOGUE

#: Of the installed vLLM. Live tests need a known one.
RELEASE = vc.installed().release or ()

#: The nightly of the matrix: by its number 0.29.1, and on its way to 0.30.0.
NIGHTLY = vc.installed().is_nightly


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


#: Engine arguments of every engine here: eager, and content with a part of the memory. A CPU worker of 0.32 does not
#: start where less than this share is free, and its default is 0.92.
EAGER = {"enforce_eager": True, "gpu_memory_utilization": 0.3}

#: Engine arguments that keep the worker in this process: from 0.20.0 to 0.22.1 the CPU platform turns "uni" into "mp".
IN_PROCESS = by_release(
    ("0", {}),
    ("0.20.0", {"distributed_executor_backend": "vllm.v1.executor.uniproc_executor.UniProcExecutor"}),
    ("0.23.0", {}),
)

#: Whether the scheduler can keep a request from reading through a KV connector.
HOLDS_CONNECTORS_BACK = RELEASE >= (0, 31) or NIGHTLY

#: Whether the CPU backend has MLA, or ``VLLM_MLA_DISABLE=1`` has to be set.
CPU_MLA = RELEASE >= (0, 29)

#: Ways of capturing hidden states, the final one of a Llama among them.
WAYS = ("aux", "hooks") if RELEASE >= (0, 18) else ("hooks",)

#: The same of Kimi's architecture.
KIMI_WAYS = ("aux", "hooks") if RELEASE >= (0, 25) else ("hooks",)

#: Whether the CPU runner knows speculation at all.
SPECULATES = RELEASE >= (0, 20)
NO_SPECULATION = "up to 0.19 the CPU runner refuses speculative decoding"

#: Whether the CPU runner serves an EAGLE-3 head: 0.20, 0.21, 0.23, 0.24 and 0.30 do with the catalogue's patches.
SERVES_HEADS = SPECULATES
NO_HEADS = "the CPU runner of this release does not serve EAGLE-3 heads"

#: The catalogue's patches of vLLM's bugs on a CPU. conftest.py enables them for every test, and through the environment
#: for the processes that tests start.
PATCHES = [patch.name for patch in CATALOGUE if patch.platform == "cpu"]

#: Kimi-K2.5 loads as it is; before, it wants remote code for its image processor.
KIMI_K25 = RELEASE >= (0, 25)
NO_KIMI_K25 = "up to 0.24 Kimi-K2.5 needs remote code of the checkpoint"


def wants_a_package(error: ImportError) -> bool:
    """Whether a module of vLLM does not import because a package of somebody else's is not installed (mooncake)."""
    cause = error.__cause__ or error.__context__ or error
    return isinstance(cause, ModuleNotFoundError) and not (cause.name or "vllm").startswith("vllm")


def structured_outputs(**constraint: Any) -> dict[str, Any]:
    """The option of SamplingParams that asks for structured output: ``choice``, ``regex`` or ``json``."""
    import vllm.sampling_params as module

    if RELEASE < (0, 11):
        return {"guided_decoding": module.GuidedDecodingParams(**constraint)}
    return {"structured_outputs": module.StructuredOutputsParams(**constraint)}


def lora_names(folder: str) -> tuple[str, int, str]:
    """Name, number and folder of an adapter whose folder ends in its number (``…/lora3``)."""
    name = folder.rpartition("/")[2]
    return name, int(name.removeprefix("lora")) + 1, folder

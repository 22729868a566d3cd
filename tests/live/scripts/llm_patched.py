"""Ask the workers of ``vllm.LLM``, in processes of its own, which patches are on there; with patches, then without.

Arguments: a model; names of patches, with commas. Prints JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
# A forked process would have the patches by being a copy.
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH"))))

from here import EAGER

import vllm_compat


def ask(model: str) -> list[dict[str, Any]]:
    from vllm import LLM

    llm = LLM(
        model,
        dtype="float32",
        **EAGER,
        max_model_len=256,
        max_num_seqs=4,
        worker_extension_cls="patched_worker.PatchedWorker",
    )
    try:
        said: list[dict[str, Any]] = llm.collective_rpc("patches_here")
        return said
    finally:
        llm.llm_engine.engine_core.shutdown()


def main(model: str, names: list[str]) -> None:
    for name in names:
        vllm_compat.enable(name)
    patched = ask(model)
    for name in names:
        vllm_compat.disable(name)
    print(json.dumps({"pid": os.getpid(), "patched": patched, "plain": ask(model)}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2].split(","))

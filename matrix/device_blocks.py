"""Rendered blocks of what the scripts in tests/device showed on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from markdown_table import table


def engine(result: Mapping[str, Any]) -> str:
    """EngineLoop against vllm.LLM, and two GPUs against one, of one release."""
    cases = result["EngineLoop against vllm.LLM"]
    rows = [(name, _said(case, "greedy"), _said(case, "seeded")) for name, case in cases.items()]
    source = f"`{result['command']}` · vLLM {result['vllm']} ({result['distribution']}) "
    source += (
        f"· {result['gpus']} {result['gpu']}, torch {result['torch']} · {result['date']} · commit {result['commit']}"
    )
    parts = [table(("target, mode, model runner", "greedy", "seeded sampling"), rows), source]
    errors = {
        name.partition(",")[0].upper(): max(map(float, listed))
        for name, listed in result.get("two GPUs against one", {}).items()
        if isinstance(listed, list)
    }
    if errors:
        told = ", ".join(f"{error:.1e} on the {runner} runner" for runner, error in errors.items())
        parts.insert(1, f"Tensor parallelism over two GPUs: the median token's states differ from one GPU's by {told}.")
    return "\n\n".join(parts)


def _said(case: Mapping[str, Any], kind: str) -> str:
    return str(case.get(kind, "FAILED")).replace(" prompts token-identical", "")

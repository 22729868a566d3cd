"""Rendered blocks of what the scripts in tests/device showed on a GPU."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from markdown_table import table


def engine(result: Mapping[str, Any]) -> str:
    """EngineLoop against vllm.LLM, and two GPUs against one, of one release."""
    cases = {name: case for name, case in result["checks"].items() if not name.startswith("states-")}
    rows = [(name, _said(case, "greedy"), _said(case, "seeded")) for name, case in cases.items()]
    parts = [table(("target, mode, model runner", "greedy", "seeded sampling"), rows), _from(result)]
    found = result.get("together", {}).get("two_gpus_median_relative_error_per_boundary", {})
    if found:
        worst = {runner: max(map(float, errors)) for runner, errors in found.items()}
        told = ", ".join(f"{error:.1e} on the {runner.upper()} runner" for runner, error in worst.items())
        parts.insert(1, f"Tensor parallelism over two GPUs: the median token's states differ from one GPU's by {told}.")
    return "\n\n".join(parts)


def _said(case: Mapping[str, Any], kind: str) -> str:
    return str(case.get(kind, "FAILED")).replace(" prompts token-identical", "")


def capture(result: Mapping[str, Any]) -> str:
    """The ways of capturing against each other, vLLM's own extraction and compiled code, of one release."""
    rows = [(name, _captured(entry)) for name, entry in result["checks"].items()]
    rows += [
        (f"{target}, V1 against V2", ", ".join(f"{way} {_yes(same)}" for way, same in found.items()))
        for target, parts in result.get("together", {}).items()
        if isinstance(parts, Mapping)
        for found in parts.values()
    ]
    return f"{table(('target, what, model runner', 'shown'), rows)}\n\n{_from(result)}"


def _captured(entry: Mapping[str, Any]) -> str:
    """One check of check_capture.py in words."""
    if not entry["ok"]:
        return "FAILED"
    said = []
    if "aux_equals_hooks_bit_for_bit" in entry:
        said.append(f"auxiliary outputs and hooks equal bit for bit: {_yes(entry['aux_equals_hooks_bit_for_bit'])}")
        said.append(f"{entry['prompts']} prompts; boundaries {entry['boundaries']}")
    if "equal_prompts" in entry:
        said.append(f"equal to vLLM's own extraction bit for bit: {entry['equal_prompts']} prompts")
    if "cudagraph_mode" in entry:
        worst = max(map(float, entry["median_relative_error_per_boundary"]))
        graphs = entry["cudagraph_mode"].rpartition(".")[2]
        said.append(f"median token {worst:.1e} from eager at worst; graphs {graphs}")
        said.append(f"tokens as compiled without capture: {entry['same_tokens_as_compiled_without']} of {entry['of']}")
    elif "median_relative_error_per_boundary" in entry:
        medians = entry["median_relative_error_per_boundary"].items()
        worst_of = (f"{way} {max(map(float, errors)):.1e}" for way, errors in medians)
        said.append(f"median token from transformers at worst: {', '.join(worst_of)}")
    if "acceptance_length" in entry:
        said.append(f"prompts identical with a head: {entry['identical_prompts_with_head']}")
        said.append(f"captured beside it by {entry['way_beside_a_head']}")
    return "; ".join(said)


def extraction(result: Mapping[str, Any]) -> str:
    """Rates of extraction beside plain prefill, of one release."""
    kinds = ("plain", "aux", "hooks", "files", "store", "native")
    rows = []
    for name, entry in result["checks"].items():
        rates = {kind: statistics.median(found) for kind, found in entry.get("tokens_per_second", {}).items()}
        if rates or not entry["ok"]:
            cells = [f"{rates[kind]:,.0f}{_shares(entry, kind)}" if kind in rates else "" for kind in kinds]
            rows.append((name, *cells, f"{entry['kv_tokens']:,}" if "kv_tokens" in entry else "FAILED"))
    head = ("engine", "plain prefill", "aux", "hooks", "in files", "in the store", "vLLM's own, in files", "KV tokens")
    ceilings = result.get("together", {}).get("ceilings_tokens_per_second", {})
    limits = ", ".join(f"{name} {value:,}" for name, value in ceilings.items())
    limit = f"\n\nCeilings in tokens per second: {limits}." if limits else ""
    return f"{table(head, rows)}{limit}\n\n{_from(result)}"


def _shares(entry: Mapping[str, Any], kind: str) -> str:
    """Of plain prefill: with the last write, which a run has once however long it is, and without."""
    if kind not in entry.get("ratio_to_plain", {}):
        return ""
    share = f"{entry['ratio_to_plain'][kind]:.3f}"
    tails = entry["tail_seconds"][kind]
    if not any(tails):
        return f" ({share})"
    rates, plain = entry["tokens_per_second"][kind], entry["tokens_per_second"]["plain"]
    rounds = zip(rates, plain, tails, strict=True)
    before = statistics.median(rate / other / (1 - tail * rate / entry["tokens"]) for rate, other, tail in rounds)
    return f" ({share}; before the last write {before:.3f})"


def speculators(result: Mapping[str, Any]) -> str:
    """The generator of speculators against transformers, of one release."""
    batches = ("mixed", "over the budget", "again")
    rows = [
        (
            name,
            entry.get("way", ""),
            *(_batch(entry, batch) for batch in batches),
            "refused" if "empty prompt" in entry else "NOT REFUSED",
        )
        for name, entry in result["checks"].items()
    ]
    head = (
        "target, model runner",
        "way",
        "mixed lengths",
        "over the token budget",
        "the first again",
        "an empty prompt",
    )
    return f"{table(head, rows)}\n\n{_from(result)}"


def _batch(entry: Mapping[str, Any], name: str) -> str:
    if not entry["ok"]:
        return "FAILED"
    found = entry[name]
    wrong = len(found["prompts_with_rows_of_others"])
    worst = max(map(float, found["median_relative_error_per_layer_id"]))
    return f"{worst:.1e}" + (f", {wrong} of {found['prompts']} prompts WRONG" if wrong else "")


def _yes(value: object) -> str:
    return "yes" if value else "NO"


def _from(result: Mapping[str, Any]) -> str:
    """Where the numbers come from, and what is to be said about them."""
    command = result["command"].partition(" --out")[0]
    note = f"{result['note']}\n\n" if "note" in result else ""
    machine = f"{result['gpu']}, torch {result['torch']}"
    vllm = f"vLLM {result['vllm']} ({result['distribution']})"
    return f"{note}`{command}` · {vllm} · {machine} · {result['date']} · commit {result['commit']}"

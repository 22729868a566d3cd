"""How much a factory adds to vLLM's own work: ratios, measured in one run.

    nox -s bench                    print them
    nox -s bench -- --write         and write matrix/results/bench-<release>.json; render.py makes the table of it

Both sides run in turn, in short blocks, with the garbage collector off. The clock is the thread's processor time, so
what else the machine does weighs little. The ratio is the median of the blocks' ratios; times are medians too, and
only of this machine.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from bench_cases import Pair, pairs
from record import RESULTS, provenance

from vllm_compat import installed

BLOCK_SECONDS = 0.0005
ROUNDS = 1001
#: Enough for what takes long anyway.
SECONDS_PER_PAIR = 10.0


def per_call(call: Callable[[], Any], calls: int) -> float:
    """Seconds of processor time of one call, from a block of them."""
    began = time.thread_time_ns()
    for _ in range(calls):
        call()
    return (time.thread_time_ns() - began) / calls / 1e9


def measure(pair: Pair) -> dict[str, Any]:
    """Medians over alternating blocks."""
    for call in (pair.ours, pair.native):
        call()
    gc.collect()
    gc.freeze()  # what stays is not looked at again
    once = max(per_call(pair.native, 3), 1e-7)
    calls = max(1, round(BLOCK_SECONDS / once))
    rounds = max(9, min(ROUNDS, round(SECONDS_PER_PAIR / (2 * calls * once))))
    ours: list[float] = []
    native: list[float] = []
    for index in range(rounds):
        # Whoever goes second finds warmer caches, so they take turns.
        order = ((native, pair.native), (ours, pair.ours))
        for times, call in order if index % 2 else reversed(order):
            times.append(per_call(call, calls))
    return {
        "factory": pair.factory,
        "compared_with": pair.compared_with,
        "whole": pair.whole,
        "ratio": round(statistics.median(o / n for o, n in zip(ours, native, strict=True)), 3),
        "microseconds": round(statistics.median(ours) * 1e6, 2),
        "native_microseconds": round(statistics.median(native) * 1e6, 2),
        "rounds": rounds,
    }


def main(arguments: list[str]) -> int:
    """Measure, print, and write when asked to."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the result into matrix/results")
    parser.add_argument("--only", default="", help="pairs whose factory contains this")
    given = parser.parse_args(arguments)
    here = installed()
    logging.disable(logging.WARNING)
    began = datetime.now(timezone.utc).isoformat()
    found = []
    gc.disable()
    print(f"vLLM {here.version}; ratio = factory / native, medians of alternating blocks of processor time\n")
    print(f"{'factory':44} {'ratio':>7} {'ours µs':>10} {'native µs':>10}   compared with")
    for pair in pairs():
        if given.only not in pair.factory:
            continue
        row = measure(pair)
        found.append(row)
        numbers = f"{row['ratio']:7.3f} {row['microseconds']:10.1f} {row['native_microseconds']:10.1f}"
        print(f"{row['factory']:44} {numbers}   {row['compared_with']}", flush=True)
    if given.write:
        path = RESULTS / f"bench-{here.version}.json"
        result = {
            **provenance(began, datetime.now(timezone.utc).isoformat()),
            "release": here.version,
            "distribution": here.distribution,
            "command": "nox -s bench -- --write",
            "numbers": found,
        }
        path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"{path.name} written: now run `python matrix/render.py`")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

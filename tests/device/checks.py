"""What the device scripts share: checks in processes of their own, each with its entry in one JSON document.

A machine's time may end in the middle and nobody is there to ask, so a check that fails or takes too long leaves its
traceback in its entry and the next one runs; the document is written after each.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the worker stays in the check's process
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # compiled when first used, which takes longer than the checks
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}

Check = Callable[[argparse.Namespace], Mapping[str, Any]]
#: The options and the entries so far -> what only several of them together say.
Compare = Callable[[argparse.Namespace, dict[str, Any]], Mapping[str, Any]]


class Checks:
    """Named checks of one script, and the options to choose among them.

    The script calls itself for each: ``python script.py <the same options> --one NAME``. The last line that a check
    prints with a "{" at its start is its result. What one check leaves for another is in the folder ``given.scratch``.
    """

    def __init__(self, script: str, parser: argparse.ArgumentParser) -> None:
        self._script, self._parser = script, parser
        self._checks: dict[str, tuple[Check, dict[str, str], int]] = {}
        self._usual: list[str] = []

    def add(self, name: str, check: Check, *, limit: int, usual: bool = True, **environment: str) -> None:
        """A check, its time limit in seconds, and its environment beyond ``ENVIRONMENT``; run unasked if ``usual``."""
        self._checks[name] = check, environment, limit
        self._usual += [name] if usual else []

    def main(self, facts: Check, compare: Compare) -> int:
        """Run the checks asked for; 1 when one failed.

        Args:
            facts: What the document begins with: versions and device.
            compare: Called after each check.
        """
        names = ", ".join(self._checks)
        unasked = ",".join(self._usual)
        self._parser.add_argument("--only", default=unasked, help=f"names, with commas between: {names}; {unasked}")
        self._parser.add_argument(
            "--budget", type=int, default=345, help="seconds; no check begins that may run over it"
        )
        self._parser.add_argument("--out", type=Path, default=Path(f"{Path(self._script).stem}.json"))
        self._parser.add_argument("--one", help=argparse.SUPPRESS)
        self._parser.add_argument("--scratch", type=Path, help=argparse.SUPPRESS)
        given = self._parser.parse_args()
        if given.one:
            print(json.dumps(self._checks[given.one][0](given)))
            return 0
        with tempfile.TemporaryDirectory() as scratch:
            given.scratch = Path(scratch)
            return self._run_all(given, facts, compare)

    def _run_all(self, given: argparse.Namespace, facts: Check, compare: Compare) -> int:
        began = time.monotonic()
        report: dict[str, Any] = {"command": f"python {' '.join(sys.argv)}", **facts(given), "checks": {}}
        chosen = given.only.split(",")
        unknown = sorted({*chosen} - {*self._checks})
        if unknown:
            self._parser.error(f"no such check: {', '.join(unknown)}")
        for name in chosen:
            left = given.budget - (time.monotonic() - began)
            report["checks"][name] = self._run(name, given.scratch, min(self._checks[name][2], int(left)))
            try:
                report["together"] = compare(given, report["checks"])
            except Exception as error:  # noqa: BLE001 - the entries that it is made of are in the document
                report["together"] = {"error": f"{type(error).__name__}: {error}"}
            report["seconds"] = round(time.monotonic() - began, 1)
            given.out.parent.mkdir(parents=True, exist_ok=True)
            given.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
            entry = report["checks"][name]
            sys.stderr.write(f"{name}: {'ok' if entry['ok'] else 'FAILED'} in {entry['seconds']} s\n")
        print(json.dumps(report, indent=1))
        return 0 if all(entry["ok"] for entry in report["checks"].values()) else 1

    def _run(self, name: str, scratch: Path, limit: int) -> dict[str, Any]:
        if limit < 20:
            return {"ok": False, "seconds": 0, "error": "not begun: no time left (--budget)"}
        began = time.monotonic()
        command = [sys.executable, self._script, *sys.argv[1:], "--scratch", str(scratch), "--one", name]
        environment = {**os.environ, **ENVIRONMENT, **self._checks[name][1]}
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit, check=False)
        except subprocess.TimeoutExpired as late:
            said = "".join(_text(part) for part in (late.stdout, late.stderr))
            return {"ok": False, "seconds": limit, "error": f"still running after {limit} s\n{said[-3000:]}"}
        seconds = round(time.monotonic() - began, 1)
        said = (done.stdout[-1500:] + done.stderr[-4500:]).strip()
        if done.returncode:
            return {"ok": False, "seconds": seconds, "error": f"exit status {done.returncode}\n{said}"}
        # vLLM may still log when the process ends.
        results = [line for line in done.stdout.splitlines() if line.startswith("{")]
        try:
            return {"ok": True, "seconds": seconds, **json.loads(results[-1])}
        except (ValueError, IndexError) as error:
            return {"ok": False, "seconds": seconds, "error": f"{error}\n{said}"}


def _text(part: str | bytes | None) -> str:
    return part.decode(errors="replace") if isinstance(part, bytes) else part or ""


def machine(_: argparse.Namespace) -> dict[str, Any]:
    """Versions and device. Asked of a process of its own: this one must not hold a part of the GPU."""
    code = (
        "import json, torch, vllm_compat as vc; here = vc.installed();"
        "print(json.dumps({'vllm': here.version, 'distribution': here.distribution, 'torch': torch.__version__,"
        "'gpu': torch.cuda.get_device_name() if torch.cuda.is_available() else None}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    results = [line for line in done.stdout.splitlines() if line.startswith("{")]
    found: dict[str, Any] = json.loads(results[-1]) if results else {"error": done.stderr[-2000:]}
    revision = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=12", "HEAD"]
    commit = subprocess.run(revision, capture_output=True, text=True, check=False)
    today = datetime.now(timezone.utc).date().isoformat()
    return {"date": today, "commit": commit.stdout.strip() or "unknown", **found}

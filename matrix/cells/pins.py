"""What a release on a CPU resolves to, ``constraints/<release>.txt``: every package, pinned."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

from cells.recipe import KERNELS, LEFT_OUT, ROOT, Recipe

#: Extras of this project that the tests on a release need.
EXTRAS = ("kimi", "test")
#: Ray takes 200 MB; whether replicas work depends on it and not on vLLM's release, so one has it.
WITH_RAY = KERNELS

_PIN = re.compile(r"^[A-Za-z0-9._-]+==[A-Za-z0-9._!-]+$")


class Unresolvable(Exception):
    """There is no such environment; says why."""


def resolve(cell: Recipe) -> str:
    """The text of a release's constraints file.

    Raises:
        Unresolvable: uv finds no set of packages that fits.
    """
    # The CPU build asks for torch under a local version, which a general index does not have.
    never = [f'{name}; sys_platform == "never"' for name in LEFT_OUT if not name.endswith("-")]
    command = ["uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--python-version", cell.python]
    extras = (*EXTRAS, "replicas") if cell.release == WITH_RAY else EXTRAS
    command += [option for extra in extras for option in ("--extra", extra)]
    with tempfile.TemporaryDirectory() as folder:
        overrides = Path(folder, "overrides.txt")
        overrides.write_text("\n".join([f"torch=={cell.torch}", *never]), encoding="utf-8")
        command += ["--override", str(overrides), "pyproject.toml", "-"]
        wanted = "\n".join(cell.requirements)
        try:
            done = subprocess.run(
                command, cwd=ROOT, input=wanted, capture_output=True, text=True, check=False, timeout=300
            )
        except FileNotFoundError as error:
            raise Unresolvable("there is no uv on the PATH") from error
    if done.returncode:
        raise Unresolvable(f"uv, for Python {cell.python}: {' '.join(done.stderr.split())}")
    # Without the local part (2.13.0+cpu) a pin fits either build; what a marker switches off is none.
    lines = [line.partition("+")[0].strip() for line in done.stdout.splitlines()]
    pins = [line for line in lines if not line.startswith(LEFT_OUT) and "sys_platform" not in line]
    strange = [pin for pin in pins if not _PIN.match(pin)]
    if strange:
        raise Unresolvable(f"not a plain pin: {', '.join(strange)}")
    head = [f"# Everything that vLLM {cell.release} on a CPU and the tests run with. Written by"]
    return "\n".join([*head, f"#   nox -s freeze -- {cell.release}", *pins, ""])

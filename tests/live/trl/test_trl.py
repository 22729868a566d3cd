"""TRL 0.25.0's server module on a vLLM that it was not written for, repaired as its authors could.

`nox -s trl` installs TRL beside vLLM. The patch comes as an entry point, as a package would bring it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm_compat.patches import GROUP

HERE = Path(__file__).parent
LOOK = """
import json, sys, warnings
warnings.simplefilter("ignore")
import multiprocessing
import vllm_compat
import trl.scripts.vllm_serve as served
import vllm.sampling_params, vllm.utils

if __name__ == "__main__":
    asked = served.GuidedDecodingParams(regex="[ab]+")
    params = served.SamplingParams(n=2, temperature=0.5, truncate_prompt_tokens=None, guided_decoding=asked, logprobs=0)
    plain = served.SamplingParams(max_tokens=3, guided_decoding=None)
    try:
        served.SamplingParams(truncate_prompt_tokens=5, no_such_option=1)
        refused = ""
    except vllm_compat.UnsupportedField as error:
        refused = str(error)
    print(json.dumps({
        "regex": params.structured_outputs.regex, "n": params.n, "plain": plain.structured_outputs is None,
        "kind": type(params).__module__, "port": served.get_open_port(), "refused": refused,
        "vllm": [hasattr(vllm.sampling_params, "GuidedDecodingParams"), hasattr(vllm.utils, "get_open_port")],
        "enabled": vllm_compat.enabled(),
    }))
"""


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """In a folder that is on the path, with the patch brought by an installed package."""
    info = folder / "trl_patch-1.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: trl-patch\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\ntrl-vllm-serve = trl_patch:PATCH\n")
    (folder / "look.py").write_text(LOOK)
    path = os.pathsep.join(filter(None, (str(folder), str(HERE), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=300
    )


def test_without_the_patch_it_cannot_be_imported(tmp_path: Path) -> None:
    """So that the next test tests something."""
    done = run(tmp_path, "look.py")
    assert done.returncode
    assert "cannot import name 'GuidedDecodingParams'" in done.stderr


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("trl")
    done = run(folder, "-m", "vllm_compat", "run", "--patch", "trl-vllm-serve", "--", sys.executable, "look.py")
    assert 0 == done.returncode, done.stderr[-3000:]
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


def test_its_names_are_what_took_their_place(patched: dict[str, Any]) -> None:
    """Guided decoding is structured output, in vLLM's own sampling params; the port is one."""
    assert ("[ab]+", 2, True, "vllm.sampling_params") == tuple(patched[k] for k in ("regex", "n", "plain", "kind"))
    assert 1024 < patched["port"] < 65536
    assert ["trl-vllm-serve"] == patched["enabled"]


def test_an_option_that_vllm_lacks_is_refused(patched: dict[str, Any]) -> None:
    """Through the factory: nothing is dropped."""
    assert "no_such_option" in patched["refused"] or "truncate_prompt_tokens" in patched["refused"]


def test_vllm_is_as_it_was(patched: dict[str, Any]) -> None:
    """The lent names were there for one import."""
    assert [False, False] == patched["vllm"]

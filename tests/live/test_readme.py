"""The README's example of the library, as it is printed there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_library_example_runs_as_it_stands(tmp_path: Path) -> None:
    """At the root of a checkout, in a fresh interpreter: a scheduled batch, then each prompt's states."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    (example,) = [block for block in blocks if "import vllm_compat as vc" in block]
    (tmp_path / "example.py").write_text(example, encoding="utf-8")

    # The variable that the tests set for vllm.LLM is not needed.
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    done = subprocess.run(
        [sys.executable, str(tmp_path / "example.py")],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )

    assert done.returncode == 0, done.stderr[-3000:]
    assert "ScheduledBatch(requests=(ScheduledRequest(request_id='a', num_computed_tokens=0" in done.stdout
    first, second = (line for line in done.stdout.splitlines() if line.endswith("(2, 4, 5, 8)"))
    assert "(51, 4, 256)" in first
    assert "(27, 4, 256)" in second

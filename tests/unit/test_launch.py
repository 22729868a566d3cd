"""``vllm-compat run``: the script is itself, and in all of its processes the patches come before its imports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_compat import ConfigError, launch

SCRIPT = '''\
"""A script."""
import json
import multiprocessing
import sys

import beside
from speculators.utils.pydantic_utils import ReloadableBaseModel


class Box:
    content = 3


def look(box: Box):
    assert look.__annotations__ == {"box": Box}  # compiled as it is, not with our own `from __future__`
    wrapped = hasattr(ReloadableBaseModel.reload_schema, "__wrapped__")
    return [__name__, wrapped, sys.argv, box.content, beside.WHERE, sorted(globals())]


if __name__ == "__main__":
    answers = {"here": look(Box())}
    for method in ("spawn", "fork", "forkserver"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            answers[method] = pool.apply(look, (Box(),))
    print(json.dumps([answers, __file__, __doc__]))
    sys.exit(7)
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A script with a module beside it; elsewhere, a vLLM and a speculators to be found on the path."""
    inner = tmp_path / "scripts"
    inner.mkdir()
    (inner / "script.py").write_text(SCRIPT)
    (inner / "beside.py").write_text("WHERE = 'beside'\n")
    for name, text in {
        "vllm/__init__.py": "",
        "vllm/_version.py": "__version__ = '0.32.0'\n",
        "speculators/__init__.py": "",
        "speculators/utils/__init__.py": "",
        "speculators/utils/pydantic_utils.py": (
            "class ReloadableBaseModel:\n    @classmethod\n    def reload_schema(cls):\n        pass\n"
        ),
        "speculators-0.3.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: speculators\nVersion: 0.3.0\n",
    }.items():
        (tmp_path / "site" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "site" / name).write_text(text)
    return tmp_path


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    paths = [str(folder / "site"), str(Path(launch.__file__).parents[1])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    environment.pop("VLLM_COMPAT_PATCHES", None)
    command = [sys.executable, "-m", "vllm_compat", "run", *words]
    return subprocess.run(
        command, cwd=folder / "scripts", env=environment, capture_output=True, text=True, check=False, timeout=120
    )


def test_every_process_of_the_script_has_the_patches(folder: Path) -> None:
    """Spawned, forked and from a fork server: applied before the import, with the script's own names and arguments."""
    done = run(folder, "--", "python", "script.py", "--flag", "value")
    assert 7 == done.returncode, done.stderr
    answers, file, documentation = json.loads(done.stdout.splitlines()[-1])
    script = str(folder / "scripts" / "script.py")
    assert (script, "A script.") == (file, documentation)
    own = ["Box", "ReloadableBaseModel", "beside", "json", "look", "multiprocessing", "sys"]
    for method, name in (
        ("here", "__main__"),
        ("spawn", "__mp_main__"),
        ("fork", "__main__"),
        ("forkserver", "__mp_main__"),
    ):
        found, wrapped, argv, content, where, names = answers[method]
        assert (name, True, 3, "beside") == (found, wrapped, content, where)
        assert ["script.py", "--flag", "value"] == argv
        assert own == [
            name for name in names if not name.startswith("__") and name not in ("answers", "method", "pool")
        ]


def test_only_the_patches_that_were_asked_for(folder: Path) -> None:
    """``--patch`` names them; without it those of other libraries are on."""
    done = run(folder, "--patch", "cpu-shutdown", "--", "python", "script.py")
    assert 7 == done.returncode, done.stderr
    answers, _, _ = json.loads(done.stdout.splitlines()[-1])
    assert [False] * 4 == [answer[1] for answer in answers.values()]


def test_what_cannot_be_run_is_said(folder: Path) -> None:
    """A wrong name of a patch, no command, no such script, an option of Python."""
    for words, said in (
        (("--patch", "spekulators", "--", "python", "script.py"), "spekulators"),
        ((), "vllm-compat run"),
        (("--", "python", "missing.py"), "no such file"),
        (("--", "python", "-c", "pass"), "call vllm_compat.enable"),
        (("--", "no-such-program-anywhere"), "on the PATH"),
    ):
        done = run(folder, *words)
        assert done.returncode not in (0, 7)
        assert said in done.stderr
        assert "Traceback" not in done.stderr


def test_the_command(tmp_path: Path) -> None:
    """A script runs in that Python; another program is left as it is."""
    script = tmp_path / "script.py"
    script.write_text("")
    ours = [sys.executable, "-m", "vllm_compat.launch", str(script), "--x"]
    assert ours == launch.command([sys.executable, str(script), "--x"])
    assert ours == launch.command([str(script), "--x"])
    assert launch.command(["env", "python"])[1:] == ["python"]
    with pytest.raises(ConfigError):
        launch.command([])

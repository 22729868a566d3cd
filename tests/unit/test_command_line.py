"""The command line: what it prints, and its exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import vllm_compat

LIBRARY = Path(str(vllm_compat.__file__)).parents[1]


def run(*arguments: str, code: str = "", env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run ``vllm-compat`` in a fresh interpreter, after `code`."""
    program = f"import sys\nsys.argv = ['vllm-compat', *{arguments!r}]\n{code}\n"
    program += "from vllm_compat.__main__ import main\nmain()\n"
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb", **(env or {})},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def block(*modules: str) -> str:
    """Code that makes modules look as if they were not installed."""
    return textwrap.dedent(f"""
        class Blocker:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] in {modules!r}:
                    raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
        sys.meta_path.insert(0, Blocker())
    """)


@pytest.mark.parametrize("module", ["typer", "rich"])
def test_without_the_extra_cli(module):
    """Without the extra `cli` one line says what to install, and the exit code is 2."""
    done = run("releases", code=block(module))

    assert done.returncode == 2
    assert done.stderr == f"This command needs {module}: pip install 'vllm-compat[cli]'\n"
    assert done.stdout == ""


def test_help_names_every_command():
    """Help lists the commands of the library and the pipeline."""
    done = run("--help")

    assert done.returncode == 0, done.stderr
    for command in ("doctor", "releases", "diff", "kimi"):
        assert command in done.stdout


def test_python_dash_m():
    """`python -m vllm_compat` is the same program."""
    done = subprocess.run(
        [sys.executable, "-m", "vllm_compat", "releases", "--json"],
        capture_output=True,
        text=True,
        check=True,
    )

    assert json.loads(done.stdout)[0]["version"] == "0.10.2"


def test_releases_table():
    """The table shows every release with its date, torch and status."""
    done = run("releases")

    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if "0.32.0" in line.split()[:1]]
    assert line.split() == ["0.32.0", "2026-10-18", "3.11", "2.13.0", "0.32.0", "live"]


def test_releases_table_in_a_narrow_terminal():
    """A hundred columns are enough for every cell."""
    done = run("releases", env={"COLUMNS": "100"})

    assert "…" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100


def test_doctor_exit_code_says_whether_there_are_problems():
    """A bad override is a problem: exit code 1, the report on standard output all the same."""
    done = run("doctor", "--no-import", "--json", env={"VLLM_COMPAT_VLLM_VERSION": "latest"})

    assert done.returncode == 1
    assert json.loads(done.stdout)["ok"] is False


def test_doctor_text(tmp_path: Path):
    """The text ends with the verdict and goes to standard output alone."""
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "_version.py").write_text("__version__ = version = '0.32.0'\n")

    done = run("doctor", "--no-import", env={"PYTHONPATH": f"{tmp_path}{os.pathsep}{LIBRARY}"})

    assert done.returncode == 0, done.stdout + done.stderr
    assert "0.32.0 (from version file), no distribution" in done.stdout
    assert done.stdout.splitlines()[-1] == "ok"


def test_what_vllm_prints_does_not_get_into_the_json(tmp_path: Path):
    """vLLM logs to standard output while it is imported; the JSON stays clean."""
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text("print('INFO noise'); __version__ = '0.32.0'\n")

    done = run("doctor", "--json", env={"PYTHONPATH": f"{tmp_path}{os.pathsep}{LIBRARY}"})

    assert "INFO noise" in done.stderr
    assert json.loads(done.stdout)["ok"] is False


@pytest.mark.parametrize("arguments", [("--help",), ("releases",), ("doctor", "--no-import")])
def test_other_commands_without_the_extra_kimi(arguments):
    """Without the extra `kimi` everything else works."""
    code = block("datasets", "transformers", "torch", "matplotlib", "pyarrow", "safetensors", "numpy")

    done = run(*arguments, code=code, env={"VLLM_COMPAT_VLLM_VERSION": ""})

    assert "pip install" not in done.stderr
    assert done.returncode == 0 or "vLLM" in done.stdout


def test_kimi_without_its_extra():
    """A stage that needs a package of the extra `kimi` says which, and what to install."""
    code = textwrap.dedent("""
        import vllm_compat.cli
        def missing(self, ctx):
            raise ModuleNotFoundError("No module named 'datasets.x'", name="datasets.x")
        vllm_compat.cli._Pipeline.list_commands = missing
    """)

    done = run("kimi", "--help", code=code)

    assert done.returncode == 2
    assert done.stderr == "This command needs datasets: pip install 'vllm-compat[kimi]'\n"


def test_kimi_commands():
    """The stages of the pipeline are commands under `kimi`."""
    done = run("kimi", "--help")

    assert done.returncode == 0, done.stderr
    for stage in ("prepare", "extract", "vocab", "train", "export", "evaluate", "run"):
        assert stage in done.stdout


def test_a_missing_module_of_ours_is_a_bug():
    """Only packages of our extras are excused; any other missing module keeps its traceback."""
    code = "import vllm_compat.releases as r\ndef fail(): import vllm_compat.nowhere\nr.all_releases = fail\n"

    done = run("releases", code=code)

    assert done.returncode == 1
    assert "Traceback" in done.stderr


def test_kimi_is_imported_only_when_asked_for():
    """`doctor` and `releases` do not pay for the pipeline's imports."""
    check = "import atexit; atexit.register(lambda: print([m for m in sys.modules if 'vllm_compat.kimi' in m]))"

    done = run("releases", "--json", code=check)

    assert done.stdout.splitlines()[-1] == "[]"


def test_own_errors_are_one_paragraph():
    """What goes wrong on purpose is said without a traceback, and the exit code is 1."""
    fail = textwrap.dedent("""
        import vllm_compat.releases
        from vllm_compat.errors import ConfigError
        def fail():
            raise ConfigError("the table", advice="look elsewhere")
        vllm_compat.releases.all_releases = fail
    """)

    done = run("releases", code=fail)

    assert done.returncode == 1
    assert done.stderr == "ConfigError: the table — do: look elsewhere\n"


def test_other_errors_keep_their_traceback():
    """A bug is not dressed up as a user's mistake."""
    done = run("releases", code="import vllm_compat.releases as r\nr.all_releases = lambda: 1 / 0\n")

    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr
    assert "Traceback" in done.stderr

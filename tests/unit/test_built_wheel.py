"""The wheel that this project builds, installed elsewhere: what people get who have no checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with nothing but this project's wheel, built by its build backend, installed by pip; no network."""
    made, target = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(made)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=60)
    (wheel,) = made.glob("*.whl")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", str(target)]
    subprocess.run([*install, str(wheel)], check=True, capture_output=True, timeout=60)
    return target


def python(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python where the wheel is, and the checkout is not."""
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": str(site)},
        cwd=site,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_the_wheel_has_the_recordings(site: Path) -> None:
    """`diff` says the same as in the checkout, for releases and for a nightly, from the wheel's own files."""
    where = python(site, "-c", "from vllm_compat.recorded import store; print(store.FOLDER)")
    assert str(site / "vllm_compat" / "recorded" / "api") == where.stdout.strip(), where.stderr
    for old, new in (("0.31.0", "0.32.0"), ("0.32.0", "0.33.0"), ("0.29.0", "0.29.1.dev202609171111")):
        command = ["-m", "vllm_compat", "diff", old, new, "--json"]
        done = python(site, *command)
        assert done.returncode == 0, done.stderr
        here = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=True)
        assert json.loads(here.stdout) == json.loads(done.stdout)


def test_the_wheel_has_its_other_data(site: Path) -> None:
    """The table of releases, the presets and the marker for type checkers are files of the package too."""
    done = python(site, "-m", "vllm_compat", "releases", "--json")
    assert json.loads(done.stdout)[0]["version"] == "0.10.2", done.stderr
    assert (site / "vllm_compat" / "py.typed").exists()
    assert (site / "vllm_compat" / "kimi" / "presets" / "tiny.toml").exists()


def test_vllm_finds_the_plugin_in_the_wheel(site: Path) -> None:
    """As vLLM looks for it (vllm/plugins/__init__.py); it runs where nothing else is installed."""
    code = (
        "from importlib.metadata import entry_points\n"
        "(entry,) = [e for e in entry_points(group='vllm.general_plugins') if e.name == 'vllm_compat']\n"
        "print(entry.load()(), entry.load().__module__)\n"
    )
    done = python(site, "-c", code)
    assert "None vllm_compat.plugin" == done.stdout.strip(), done.stderr

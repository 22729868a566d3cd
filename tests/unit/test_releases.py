"""The table of releases: complete, consistent, and found by any spelling of a release."""

from __future__ import annotations

import datetime
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_compat import releases
from vllm_compat.installed import parse_release

# Every release from 0.10.2 on: candidates and post releases left out.
EVERY_RELEASE = """
    0.10.2 0.11.0 0.11.1 0.11.2 0.12.0 0.13.0 0.14.0 0.14.1 0.15.0 0.15.1 0.16.0 0.17.0 0.17.1 0.18.0 0.18.1
    0.19.0 0.19.1 0.20.0 0.20.1 0.20.2 0.21.0 0.22.0 0.22.1 0.23.0 0.24.0 0.25.0 0.25.1 0.26.0 0.27.0 0.27.1
    0.28.0 0.29.0 0.30.0 0.31.0 0.32.0 0.33.0
""".split()


def test_live_is_what_a_run_has_shown():
    """A release is called live when the live tests ran on it and none failed, and only then."""
    shown = set()
    for path in (Path(__file__).parents[2] / "matrix" / "results" / "live").glob("*.json"):
        if not json.loads(path.read_text(encoding="utf-8"))["numbers"]["counts"].get("failed"):
            shown.add(path.stem)

    assert shown == {row.version for row in releases.all_releases() if row.status == "live"}


def test_the_table_is_complete_and_in_order():
    """No release is missing, none is there twice, and they come oldest first."""
    versions = [release.version for release in releases.all_releases()]

    assert EVERY_RELEASE == versions[: len(EVERY_RELEASE)]
    assert sorted(set(versions), key=parse_release) == versions


@pytest.mark.parametrize("release", releases.all_releases(), ids=lambda release: release.version)
def test_every_row_is_filled_in(release):
    """A row has a date, a Python floor, a torch, and a status that means something."""
    assert isinstance(release.date, datetime.date)
    assert re.fullmatch(r"3\.\d+", release.python)
    assert re.fullmatch(r"\d+\.\d+\.\d+", release.torch)
    assert release.status in ("live", "planned", "known_bad")
    assert release.cpu == "" or parse_release(release.cpu) == release.numbers


@pytest.mark.parametrize("column", ["python", "torch"])
def test_floors_only_rise(column):
    """A newer release never goes back to an older Python or torch."""
    values = [tuple(map(int, getattr(row, column).split("."))) for row in releases.all_releases()]

    assert sorted(values) == values


def test_the_release_proved_here_is_live():
    """0.32.0 is the release whose live suite this repository runs."""
    release = releases.get("0.32.0")

    assert release is not None
    assert ("live", "3.11", "2.13.0") == (release.status, release.python, release.torch)


@pytest.mark.parametrize("spelling", ["0.32.0", "0.32", "v0.32.0", "0.32.0+cu129", "0.32.0rc2.dev7+gabc", (0, 32, 0)])
def test_get_by_any_spelling(spelling):
    """Any build of a release, and its release numbers, lead to its row."""
    release = releases.get(spelling)

    assert release is not None
    assert release.version == "0.32.0"


@pytest.mark.parametrize("spelling", ["0.32.1", "dev", "0.1.dev3+gabc", None, (0, 99, 0)])
def test_get_of_what_has_no_row(spelling):
    """A release without a row gives None; the nearest one must be asked for by name."""
    assert releases.get(spelling) is None


@pytest.mark.parametrize(
    ("release", "row"),
    [
        ("0.32.0", "0.32.0"),
        ("0.17.2", "0.17.1"),
        ("0.32.1.dev3", "0.32.0"),
        ((0, 25, 0, 1), "0.25.0"),
        ("0.9.1", "0.10.2"),
        ("99.0", releases.newest().version),
    ],
)
def test_nearest(release, row):
    """The row at or before a release; the first row for anything older than the table."""
    assert row == releases.nearest(release).version


def test_nearest_of_junk():
    """A string without release numbers is refused by name, not taken for the oldest release."""
    with pytest.raises(ValueError, match="'dev' has no release numbers"):
        releases.nearest("dev")


@given(st.tuples(st.integers(0, 3), st.integers(0, 99), st.integers(0, 9)))
def test_nearest_is_the_closest_from_below(numbers):
    """Between the row that is found and the release that was asked for there is no other row."""
    found = releases.nearest(numbers)

    for row in releases.all_releases():
        assert not found.numbers < row.numbers <= numbers
    assert found.numbers <= numbers or found is releases.all_releases()[0]


@pytest.mark.parametrize(
    ("release", "is_dev", "why"),
    [
        ((0, 32, 0), False, ""),
        ((0, 10, 2), False, ""),
        ((0, 33, 0), True, "a nightly from between 0.32.0 and 0.33.0"),
        ((0, 29, 1), True, "a nightly from between 0.29.0 and 0.30.0"),
        ((0, 99, 0), True, f"a nightly from after {releases.newest().version}"),
        ((0, 10, 2), True, "a nightly from before 0.10.2"),
        ((0, 99, 0), False, f"newer than the newest release known, {releases.newest().version}"),
        ((0, 17, 2), False, "not in the table of releases; the nearest is 0.17.1"),
        (None, True, "its release is unknown"),
    ],
)
def test_unverified(release, is_dev, why):
    """Why nothing is proved of a build; a development build is not the release whose number it has."""
    assert why == releases.unverified(release, is_dev=is_dev)


def test_known_bad_names_releases_of_the_table():
    """Every entry is about releases that have a row, and says what, why, and what to do."""
    seen = [entry for row in releases.all_releases() for entry in releases.known_bad(row.version)]

    assert seen
    for entry in seen:
        assert all(releases.get(version) is not None for version in entry.releases)
        assert entry.what
        assert entry.reason
        assert entry.advice


def test_known_bad_by_platform():
    """What is about a CPU does not trouble anybody on a GPU, and what is about all devices stays."""
    everywhere = releases.known_bad("0.33.0")
    on_gpu = releases.known_bad((0, 33, 0), platform="cuda")

    assert any(entry.platform == "cpu" for entry in everywhere)
    assert on_gpu
    assert all(entry.platform is None for entry in on_gpu)
    assert releases.known_bad("0.99.0") == ()

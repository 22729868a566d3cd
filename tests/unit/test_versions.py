"""Release numbers out of version strings, for every form that vLLM builds are found with."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version

from vllm_compat.installed import parse_release

# Any release that vLLM could have from 0.2 on, written with two to four numbers.
releases = (
    st.tuples(st.integers(0, 3), st.integers(0, 60), st.integers(0, 20), st.integers(0, 20))
    .filter(lambda numbers: numbers >= (0, 2))
    .map(lambda numbers: (*numbers[:3], numbers[3]) if numbers[3] else numbers[:3])
)
prereleases = st.one_of(
    st.just(""), st.builds("{}{}".format, st.sampled_from(["a", "b", "rc", "-rc."]), st.integers(0, 9))
)
posts = st.one_of(st.just(""), st.builds(".post{}".format, st.integers(0, 9)))
devs = st.one_of(st.just(""), st.builds(".dev{}".format, st.integers(0, 202612312359)))
locals_ = st.one_of(
    st.just(""),
    st.sampled_from(["+cpu", "+cu129", "+rocm721", "+empty", "+lumi.aif.gfx90a.x", "+g1234567.d20261130.cu130"]),
)
suffixes = st.builds("{}{}{}{}".format, prereleases, posts, devs, locals_)


def written(release: tuple[int, ...]) -> str:
    return ".".join(map(str, release))


@given(releases, suffixes, st.sampled_from(["", "v", " "]))
def test_every_build_of_a_release_counts_as_that_release(release, suffix, prefix):
    """Candidates, nightlies, post releases and local builds of X all give X."""
    assert release == parse_release(f"{prefix}{written(release)}{suffix}")


@given(releases, suffixes, releases, suffixes)
def test_order_agrees_with_pep_440(one, one_suffix, other, other_suffix):
    """Builds of different releases are ordered like their versions, whatever their suffixes."""
    versions = Version(written(one) + one_suffix), Version(written(other) + other_suffix)
    ours = parse_release(str(versions[0])), parse_release(str(versions[1]))

    assert ours == (one, other)
    if one < other:
        assert versions[0] < versions[1]
        assert ours[0] < ours[1]


@given(releases, st.integers(0, 3))
def test_trailing_zeros_mean_nothing(release, zeros):
    """0.33, 0.33.0 and 0.33.0.0 are one release, though tuples of different lengths are not equal."""
    expected = parse_release(written(release))

    assert expected == parse_release(written(release) + ".0" * zeros)
    if release[2:] == (0,):
        assert expected == parse_release(written(release[:2]))


@given(st.one_of(st.text(), st.none(), st.integers(), st.binary(), st.lists(st.text())))
def test_junk_never_raises(junk):
    """Whatever is passed, the answer is a release of at least three numbers, or None."""
    release = parse_release(junk)

    assert release is None or (len(release) >= 3 and all(isinstance(number, int) for number in release))


@pytest.mark.parametrize(
    "version",
    [
        "dev",
        "",
        "N/A",
        "unknown",
        "0.1.dev8666+gabc1234",
        "0.1.0.dev1",
        "0.0.0",
        "0+unknown",
        "1!0.33.0",  # an epoch says that numbers are not to be compared with ours
        "0.33.x",
        "9" * 5000,  # more digits than int() takes
        None,
        0.33,
    ],
)
def test_versions_that_say_nothing(version):
    """None, never a small number: it must not look like an ancient release."""
    assert parse_release(version) is None

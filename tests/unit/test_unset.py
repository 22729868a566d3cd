"""UNSET: not given, as opposed to None."""

from __future__ import annotations

import copy
import pickle

import pytest

from vllm_compat import UNSET


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_it_pickles_to_itself(protocol):
    """`option is UNSET` still holds after a trip through another process."""
    assert pickle.loads(pickle.dumps(UNSET, protocol)) is UNSET


def test_it_copies_to_itself():
    """Copying a structure of options does not make a second sentinel."""
    assert copy.copy(UNSET) is UNSET
    assert copy.deepcopy([UNSET])[0] is UNSET


def test_it_has_no_truth_value():
    """`if option` and `option or default` raise instead of taking unset for None, 0 or an empty list."""
    with pytest.raises(TypeError, match="option is UNSET"):
        bool(UNSET)


def test_it_is_nothing_else():
    """It equals itself only, and reads well in a signature."""
    assert UNSET not in (None, False, 0, "", "UNSET")
    assert repr(UNSET) == str(UNSET) == f"{UNSET}" == "UNSET"

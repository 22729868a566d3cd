"""Token ids as callers give them: whatever the container, plain integers come out, or an error."""

from __future__ import annotations

import enum
import subprocess
import sys
from pathlib import Path

import msgspec  # noqa: F401 - with it loaded, as beside vLLM, most prompts are looked at in C
import pytest

from vllm_compat import VllmCompatError
from vllm_compat._token_ids import plain_token_ids


class Token(enum.IntEnum):
    START = 7


class Index:
    """What NumPy and torch have for integers."""

    def __index__(self) -> int:
        return 5


GOOD = [
    ([], []),
    ([0, 1, 2**40], [0, 1, 2**40]),
    ((3, 4), [3, 4]),
    (range(3), [0, 1, 2]),
    (iter([1]), [1]),
    ([1, Token.START], [1, 7]),
    ([1, Index()], [1, 5]),
]
BAD = ([1, -1], [1, True], [1, 2.0], [1, "2"], [1, None], [[1]], "12", b"12", 5, None, [1, [2]], (False,))


@pytest.mark.parametrize(
    ("given", "expected"), GOOD, ids=[f"{type(given).__name__}-{expected}" for given, expected in GOOD]
)
def test_integers(given: object, expected: list[int]) -> None:
    """Of the type int exactly, in a list of their own."""
    made = plain_token_ids("r", given)  # type: ignore[arg-type]
    assert expected == made
    assert {int} >= {type(token) for token in made}
    assert made is not given


@pytest.mark.parametrize("given", BAD, ids=repr)
def test_anything_else_is_refused(given: object) -> None:
    """With the request and the value that is none."""
    with pytest.raises(VllmCompatError, match=r"prompt of request 'r'.*integers from 0 on"):
        plain_token_ids("r", given)  # type: ignore[arg-type]


def test_the_same_without_msgspec() -> None:
    """Nothing depends on what is loaded: a process without msgspec says the same of the same prompts."""
    code = """
import sys, test_token_ids as t
del sys.modules["msgspec"]
def outcome(given):
    try:
        return t.plain_token_ids("r", given)
    except t.VllmCompatError:
        return "refused"
assert [outcome(given) for given, _ in t.GOOD if not hasattr(given, "__next__")] == [
    expected for given, expected in t.GOOD if not hasattr(given, "__next__")]
assert {"refused"} == {outcome(given) for given in t.BAD}
assert "msgspec" not in sys.modules
"""
    folder = Path(__file__).parent
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)
    assert (0, "") == (done.returncode, done.stderr)

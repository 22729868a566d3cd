"""Errors carry fields, read as one paragraph, and travel between processes."""

from __future__ import annotations

import copy
import pickle

import pytest

from vllm_compat import errors
from vllm_compat.errors import SignatureMismatch, UnsupportedField, VllmCompatError

CLASSES = [getattr(errors, name) for name in errors.__all__ if name != "UnverifiedRelease"]


def test_the_paragraph():
    """The text says, in this order: what was asked, what it needs, what is here, what to do."""
    error = UnsupportedField(
        symbol="Request.kv_hints",
        needed="vLLM 0.31.0 or newer",
        found="vLLM 0.28.0+cu129 (distribution vllm)",
        advice="leave kv_hints unset, or upgrade vLLM",
    )

    expected = (
        "Request.kv_hints — needs: vLLM 0.31.0 or newer — here: vLLM 0.28.0+cu129 (distribution vllm) "
        "— do: leave kv_hints unset, or upgrade vLLM"
    )
    assert expected == str(error)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "VllmCompatError"),
        ({"asked": "layer 62"}, "layer 62"),
        ({"advice": "ask again"}, "do: ask again"),
        ({"asked": "layer 62", "found": "61 layers"}, "layer 62 — here: 61 layers"),
    ],
)
def test_empty_fields_leave_no_trace(fields, text):
    """A field that nobody filled does not show as an empty slot; an error is never an empty string."""
    assert text == str(VllmCompatError(**fields))


@pytest.mark.parametrize("cls", CLASSES)
def test_one_base_class(cls):
    """`except VllmCompatError` catches everything that the library raises on purpose."""
    assert issubclass(cls, VllmCompatError)
    with pytest.raises(VllmCompatError, match="what was asked"):
        raise cls("what was asked")


def test_the_warning_is_no_error():
    """Nothing that catches our errors catches it, and what silences user warnings does."""
    assert issubclass(errors.UnverifiedRelease, UserWarning)
    assert not issubclass(errors.UnverifiedRelease, VllmCompatError)


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("through", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy, copy.deepcopy])
def test_fields_survive_pickling(cls, through):
    """Every field arrives in another process, the message too."""
    error = cls("asked", needed="needed", found="found", advice="advice")

    arrived = through(error)

    assert type(arrived) is cls
    assert vars(arrived) == vars(error)
    assert str(error) == str(arrived)


class OwnError(VllmCompatError):
    def __init__(self, shard: int) -> None:
        super().__init__(f"shard {shard}")
        self.shard = shard


def test_subclasses_with_their_own_constructor_survive_pickling():
    """A subclass need not know how errors are pickled, whatever its __init__ takes."""
    arrived = pickle.loads(pickle.dumps(OwnError(3)))

    assert (3, "shard 3") == (arrived.shard, str(arrived))


def test_notes_survive_pickling():
    """Notes that a caller added on the way (PEP 678) travel along."""
    error = VllmCompatError("asked")
    error.__notes__ = ["while reading row 7"]

    assert ["while reading row 7"] == pickle.loads(pickle.dumps(error)).__notes__


def test_signature_mismatch_says_both_signatures_and_their_difference():
    """The reader sees at once which parameter is gone and which is new."""
    error = SignatureMismatch(
        symbol="vllm.v1.request.Request",
        expected=["request_id", "eos_token_id"],
        live=["request_id", "kv_hints"],
    )

    expected = (
        "vllm.v1.request.Request — needs: parameters (request_id, eos_token_id) "
        "— here: parameters (request_id, kv_hints); not here: eos_token_id; new here: kv_hints"
    )
    assert expected == str(error)
    assert ("request_id", "kv_hints") == error.live


def test_repr_shows_every_field():
    """A log line with repr loses nothing."""
    error = UnsupportedField(symbol="Request.kv_hints", needed="0.31.0")

    fields = "asked='Request.kv_hints', needed='0.31.0', found='', advice='', symbol='Request.kv_hints'"
    expected = f"UnsupportedField({fields})"
    assert expected == repr(error)

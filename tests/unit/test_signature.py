"""The constructor view of every kind of class that vLLM's internals are made of."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any, NamedTuple

import msgspec
import pydantic.dataclasses
import pytest

from vllm_compat.adapters.signature import Parameter, Signature, attributes_lacking, signature_of


class Plain:
    def __init__(self, request_id, prompt, pooling_params=None, *, priority=0):
        pass


@dataclasses.dataclass
class Data:
    request_id: str
    prompt: list[int]
    pooling_params: object = None
    seen: int = dataclasses.field(default=0, init=False)
    priority: int = dataclasses.field(default=0, kw_only=True)


@pydantic.dataclasses.dataclass(config=pydantic.ConfigDict(extra="forbid"))
class PydanticData:
    request_id: str
    prompt: dataclasses.InitVar[int]
    pooling_params: Any = pydantic.Field(default=None)
    seen: int = dataclasses.field(default=0, init=False)
    priority: int = pydantic.Field(default_factory=int, kw_only=True)

    def __post_init__(self, prompt):
        pass


class Struct(msgspec.Struct, array_like=True, omit_defaults=True):
    request_id: str
    prompt: list[int]
    pooling_params: object = None


class KeywordStruct(Struct, kw_only=True):
    priority: int = msgspec.field(default_factory=int)

    @property
    def eos_token_id(self):
        return None


class Named(NamedTuple):
    request_id: str
    prompt: list[int]
    pooling_params: object = None
    priority: int = 0


def function(request_id, prompt, pooling_params=None, *, priority=0):
    pass


class Built:
    """Built by __new__, as vLLM's platform-dependent classes are."""

    def __new__(cls, request_id, prompt, pooling_params=None, *, priority=0):
        return super().__new__(cls)


@pytest.mark.parametrize("target", [Plain, Data, PydanticData, KeywordStruct, Named, function, Built])
def test_every_kind_of_class_reads_alike(target):
    """Names, order and what is required come out the same however the class was made."""
    signature = signature_of(target)

    assert ("request_id", "prompt", "pooling_params", "priority") == signature.names
    assert ("request_id", "prompt") == signature.required
    assert not signature.accepts_var_keyword
    assert f"{__name__}:{target.__name__}" == signature.symbol


@pytest.mark.parametrize("target", [Plain, Data, PydanticData, KeywordStruct, function])
def test_kinds(target):
    """Keyword-only parameters are told from those that may also be passed by position."""
    expected = ("positional_or_keyword",) * 3 + ("keyword_only",)

    assert expected == tuple(parameter.kind for parameter in signature_of(target).parameters)


def test_a_readable_property_is_no_parameter():
    """A field that became a property can still be read; the constructor view does not list it."""
    assert hasattr(KeywordStruct, "eos_token_id")
    assert not signature_of(KeywordStruct).accepts("eos_token_id")


def test_parameters_that_cannot_be_passed_by_name():
    """A positional-only name is listed but not accepted by keyword."""

    def target(first, /, second):
        pass

    signature = signature_of(target)

    assert ("first", "second") == signature.names
    assert not signature.accepts("first")
    assert signature.accepts("second")


def test_var_keyword_accepts_everything():
    """With **kwargs any name is accepted, and neither *args nor **kwargs is a name of its own."""

    def target(first, *args, second=1, **kwargs):
        pass

    signature = signature_of(target)

    assert ("first", "second") == signature.names
    assert signature.accepts_var_keyword
    assert signature.accepts("anything")


def test_methods():
    """A method read from its class has a self that callers do not pass; a bound one has none."""

    class Scheduler:
        def schedule(self, throttle=False):
            pass

        def forward(*args, **kwargs):
            pass

        def rename(**kwargs):
            pass

        @classmethod
        def from_config(cls, config):
            pass

    assert ("self", "throttle") == signature_of(Scheduler.schedule).names
    assert ("throttle",) == signature_of(Scheduler.schedule, bound=True).names
    assert ("throttle",) == signature_of(Scheduler().schedule).names
    assert ("config",) == signature_of(Scheduler.from_config).names
    assert () == signature_of(Scheduler.forward, bound=True).names
    assert signature_of(Scheduler.rename, bound=True).accepts_var_keyword


def test_wrapped_functions_show_what_they_wrap():
    """A decorator made with functools.wraps does not hide the real parameters."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    assert signature_of(function).names == signature_of(wrapper).names


def test_pydantic_alias():
    """A pydantic field with an alias is passed by its alias."""

    @pydantic.dataclasses.dataclass
    class Aliased:
        algo: str = pydantic.Field(default="sha256", alias="prefix_caching_hash_algo")

    assert ("prefix_caching_hash_algo",) == signature_of(Aliased).names


@pytest.mark.parametrize("target", [dict, 3, type])
def test_no_signature(target):
    """What has no readable signature is refused by name, with one kind of error."""
    with pytest.raises(TypeError, match=r"some\.module:thing has no signature"):
        signature_of(target, symbol="some.module:thing")


def test_values():
    """Signatures compare and hash by content, so that recorded and live ones can be compared."""
    one, other = signature_of(Struct, symbol="x"), signature_of(Struct, symbol="x")

    assert one == other
    assert hash(one) == hash(other)
    assert Signature("x", (Parameter("a", required=True),)) != one


def test_the_view_agrees_with_python():
    """What the view accepts can be bound, and leaving out what it requires cannot."""
    for target in (Plain, Data, PydanticData, KeywordStruct, Named):
        view, real = signature_of(target), inspect.signature(target)
        real.bind(**dict.fromkeys(view.names))
        real.bind(**dict.fromkeys(view.required))
        for name in view.required:
            with pytest.raises(TypeError, match=name):
                real.bind(**dict.fromkeys(set(view.required) - {name}))


class Machine:
    kind: str
    speed = 1

    def __init__(self, power: int) -> None:
        self.engine = power

    @functools.wraps(print)
    def run(self) -> None:
        """A wrapper, as torch.inference_mode makes one."""

    def start(self) -> None:
        self.started = self.engine.fuel  # type: ignore[attr-defined]

    @classmethod
    def made(cls) -> Machine:
        machine = cls(1)
        machine.origin = "here"  # type: ignore[attr-defined]
        return machine

    @property
    def heat(self) -> int:
        return 0


class Wrapped(Machine):
    def stop(self) -> None:
        self.stopped = True

    stop = functools.wraps(stop)(lambda self: None)


@pytest.mark.parametrize(
    ("cls", "there", "lacking"),
    [
        (Plain, [], ["request_id", "prompt", "priority"]),  # parameters are not kept by themselves
        (Data, ["request_id", "prompt", "seen", "priority"], ["gone"]),
        (PydanticData, ["request_id", "pooling_params", "seen", "priority"], ["gone"]),
        (Struct, ["request_id", "prompt", "pooling_params"], ["priority"]),
        (KeywordStruct, ["request_id", "priority", "eos_token_id"], ["gone"]),
        (Named, ["request_id", "prompt", "pooling_params"], ["gone", "mro"]),
        (Machine, ["speed", "engine", "started", "origin", "heat", "run"], ["power", "fuel", "mro"]),
        (Wrapped, ["engine", "heat", "stopped"], ["fuel"]),
    ],
)
def test_attributes_are_found_without_an_instance(cls: type, there: list[str], lacking: list[str]) -> None:
    """Fields, properties and what methods set, inherited or behind a wrapper; not what is only passed or read."""
    assert lacking == attributes_lacking(cls, [*there, *lacking])
    assert [] == attributes_lacking(cls, there)


def test_a_signature_is_read_once() -> None:
    """Of a class, a function and a method, whichever instance it is reached through; each keeps its own."""

    class One:
        def method(self, a: int) -> None: ...

    class Other:
        def method(self, b: int) -> None: ...

    assert signature_of(Plain) is signature_of(Plain)
    assert signature_of(function) is signature_of(function)
    assert signature_of(One().method) is signature_of(One().method)
    assert (("a",), ("b",)) == (signature_of(One().method).names, signature_of(Other().method).names)
    assert (("self", "a"), ("a",)) == (signature_of(One.method).names, signature_of(One.method, bound=True).names)
    assert "name" == signature_of(Plain, symbol="name").symbol != signature_of(Plain).symbol

"""The recorded API is what the installed vLLM really has."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from here import wants_a_package

from vllm_compat import installed
from vllm_compat.adapters.base import Need, resolve
from vllm_compat.adapters.select import SURFACES, adapters_of
from vllm_compat.adapters.signature import signature_of

sys.path.insert(0, str(Path(__file__).parents[2] / "matrix"))

from vllm_compat.recorded import store
from vllm_compat.recorded.calls import Call, parse
from vllm_compat.recorded.store import RecordedApi

NEEDS = {need.symbol: need for surface in SURFACES for adapter in adapters_of(surface) for need in adapter.needs}
#: NONE_HASH is a bare annotation until init_none_hash has run; Ray is not installed with the CPU build.
NOT_HERE = {"NONE_HASH", "RayExecutorV2"}
#: What is recorded of a class whose constructor is that of a base outside vLLM.
ANYTHING = Call(var_positional=True, var_keyword=True)
CLASS_WORDS = ("classmethod", "staticmethod")


@pytest.fixture(scope="module")
def api() -> RecordedApi:
    """The recording of the installed release, or nightly."""
    return store.find(installed().version)


def view(parameters: Any) -> list[tuple[str, bool, str]]:
    return [(p.name, p.required, p.kind) for p in parameters]


@pytest.mark.parametrize("need", NEEDS.values(), ids=NEEDS)
def test_what_adapters_need_is_recorded_as_it_is(api: RecordedApi, need: Need) -> None:
    """Name, order, required or not, how it can be passed, ``**kwargs``: the recording and Python agree.

    This is what lets the contract tests speak for releases that are not installed.
    """
    recorded = api.call(need.symbol)
    record = api.symbol(need.symbol)
    if record is not None and record["kind"] == "enum":  # nobody calls one
        assert record["members"] == list(resolve(need.symbol).__members__)
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", DeprecationWarning)
            live = need.live()
    except DeprecationWarning:
        return  # an old name that the module still answers to, by __getattr__: nothing that a recording could read
    except (ImportError, AttributeError):
        assert recorded is None, f"{need.symbol} is recorded, but not there"
        return
    record = api.symbol(need.symbol)
    if need.read_only and record is not None and record["kind"] == "enum":  # nobody calls one
        assert record["members"] == list(resolve(need.symbol).__members__)
        return
    assert recorded is not None, f"{need.symbol} is there, but not recorded: add it to matrix/api/targets.toml"
    assert view(live.parameters) == view(recorded.parameters)
    assert live.accepts_var_keyword is recorded.var_keyword


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_every_recorded_symbol_is_there(api: RecordedApi) -> None:
    """Each can be imported from every module that is recorded for it, and takes what is recorded, methods too."""
    wrong, seen = [], 0
    for records in api.surfaces.values():
        for key, record in records.items():
            if record is None or key in NOT_HERE:
                continue
            for module in (record["module"], *record.get("also", ())):
                symbol = f"{module}:{record.get('name', key)}"
                try:
                    value = resolve(symbol)
                except ImportError as error:
                    if not wants_a_package(error):
                        raise
                    continue
                if record["kind"] == "typed_dict":
                    continue  # Python does not say what keys a dict takes
                calls = {symbol: (value, parse(record["call"]))} if "call" in record else {}
                for name, text in record.get("methods", {}).items():
                    calls[f"{symbol}.{name}"] = (getattr(value, name), parse(text))
                for name, (target, recorded) in calls.items():
                    if "property" in recorded.words or recorded == ANYTHING:
                        continue
                    live = signature_of(target, bound=name != symbol and not {*CLASS_WORDS} & {*recorded.words})
                    seen += 1
                    here, there = view(live.parameters), view(recorded.parameters)
                    if hasattr(target, "__pydantic_fields__"):
                        # How they can be passed changes when pydantic completes the class, at its first use.
                        here, there = [p[:2] for p in here], [p[:2] for p in there]
                    if (here, live.accepts_var_keyword) != (there, recorded.var_keyword):
                        apart = [p for p in here if p not in there], [p for p in there if p not in here]
                        wrong.append(f"{name}: here alone {apart[0]}, recorded alone {apart[1]}")
    assert not wrong, "\n".join(wrong)
    assert seen > 900

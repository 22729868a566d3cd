"""Options of EngineArgs over the releases: which exist when, and which took another's place."""

from __future__ import annotations

from typing import Any

import pytest
import windows

from vllm_compat.adapters.engine_args import LIVES, RENAMED, translated
from vllm_compat.recorded import store

FIRST, LAST = store.releases()[0], store.releases()[-1]


def options_of(release: str) -> set[str]:
    """The options of a recorded release's EngineArgs."""
    call = store.load(release).call("vllm.engine.arg_utils:EngineArgs")
    assert call is not None
    return {parameter.name for parameter in call.parameters}


def test_options_live_as_the_table_says() -> None:
    """Every option that some recorded release lacks is listed with the releases that have it, and no other is."""
    found: dict[str, list[str]] = {}
    for api in windows.recorded():
        for name in options_of(api.release):
            found.setdefault(name, []).append(api.release)
    lives = {}
    for name, releases in found.items():
        if releases != store.releases() and not name.startswith("_"):
            lives[name] = releases[0] if releases[-1] == LAST else f"{releases[0]}-{releases[-1]}"
    assert lives == LIVES


def test_an_option_is_there_from_its_first_release_to_its_last() -> None:
    """None is gone in between, so two releases say it all."""
    for api in windows.recorded():
        there = options_of(api.release)
        wrong = [name for name, life in LIVES.items() if windows.promised(api.release, life) is not (name in there)]
        assert not wrong, f"{api.release}: {wrong}"


@pytest.mark.parametrize("renamed", RENAMED, ids=lambda renamed: renamed.old)
def test_renamed_options_are_options(renamed: Any) -> None:
    """The old name is one that is gone now; the new one is there in the newest release."""
    assert renamed.old in LIVES
    assert "-" in LIVES[renamed.old]
    assert renamed.new in options_of(LAST)


@pytest.mark.parametrize(
    ("given", "old", "new"),
    [
        ({"override_pooler_config": 1}, {"override_pooler_config": 1}, {"pooler_config": 1}),
        (
            {"guided_decoding_backend": "xgrammar", "guided_decoding_disable_any_whitespace": True},
            {"guided_decoding_backend": "xgrammar", "guided_decoding_disable_any_whitespace": True},
            {"structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True}},
        ),
        (
            {"structured_outputs_config": {"backend": "xgrammar"}},
            {"guided_decoding_backend": "xgrammar"},
            {"structured_outputs_config": {"backend": "xgrammar"}},
        ),
        ({"pooler_config": 1}, {"override_pooler_config": 1}, {"pooler_config": 1}),
        ({"task": "generate"}, {"runner": "generate"}, {"runner": "generate"}),
        ({"num_redundant_experts": 2}, {"eplb_config": {"num_redundant_experts": 2}}, None),
        ({"disable_mm_preprocessor_cache": True}, {"mm_processor_cache_gb": 0}, {"mm_processor_cache_gb": 0}),
        ({"disable_mm_preprocessor_cache": False}, {}, {}),
        (
            {"enable_multimodal_encoder_data_parallel": True},
            {"mm_encoder_tp_mode": "data"},
            {"mm_encoder_tp_mode": "data"},
        ),
        ({"max_model_len": 5}, {"max_model_len": 5}, {"max_model_len": 5}),
    ],
)
def test_renamed_options_say_the_same_in_both(
    given: dict[str, Any], old: dict[str, Any], new: dict[str, Any] | None
) -> None:
    """The oldest release gets its own words, the newest its own, whichever the caller used."""
    assert old == translated(given, options_of(FIRST))
    assert (old if new is None else new) == translated(given, options_of(LAST))


@pytest.mark.parametrize(
    "given",
    [
        {"task": "embed"},  # two options now
        {"guided_decoding_backend": "xgrammar", "structured_outputs_config": object()},
        {"override_pooler_config": 1, "pooler_config": 2},
        {"swap_space": 4},
    ],
)
def test_what_cannot_be_translated_is_left_to_be_refused(given: dict[str, Any]) -> None:
    """Rather than one of two contradicting options, or a guess."""
    assert given == translated(given, options_of(LAST))


def test_a_dictionary_is_translated_whole_or_not_at_all() -> None:
    """0.10.2 has no place for the reasoning parser in it, so the caller is told instead."""
    given = {"structured_outputs_config": {"backend": "xgrammar", "reasoning_parser": "kimi_k2"}}
    assert given == translated(given, options_of(FIRST))


def test_the_caller_keeps_its_own_dictionary() -> None:
    """Translation writes into a copy."""
    config: dict[str, Any] = {"backend": "xgrammar"}
    given = {"structured_outputs_config": config, "guided_decoding_disable_any_whitespace": True}
    translated(given, options_of(LAST))
    assert config == {"backend": "xgrammar"}
    assert set(given) == {"structured_outputs_config", "guided_decoding_disable_any_whitespace"}

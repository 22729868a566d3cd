"""VllmConfig, through EngineArgs: the one way that keeps every sub-config consistent in every release."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

from vllm_compat._unset import UNSET
from vllm_compat.adapters.base import Adapter, Need, refuse, resolve
from vllm_compat.adapters.engine_args import LIVES, translated
from vllm_compat.errors import UnsupportedField
from vllm_compat.installed import installed

_ENGINE_ARGS = "vllm.engine.arg_utils:EngineArgs"


class VllmConfig_0_11(Adapter):
    """``EngineArgs(**options).create_engine_config()``.

    Unknown options are refused here: the pydantic dataclasses of 0.9.1-0.15.1 ignore them silently. Renamed ones are
    translated (``engine_args.RENAMED``).
    """

    surface = "vllm_config"
    since = (0, 11, 0)
    create = Need(
        "vllm.engine.arg_utils:EngineArgs.create_engine_config",
        options={"usage_context": "", "headless": ""},
        bound=True,
    )
    args = Need(_ENGINE_ARGS, options=LIVES)
    needs: ClassVar[tuple[Need, ...]] = (create, args)
    left: ClassVar[Mapping[str, tuple[str, ...]]] = {"EngineArgs": ("*",)}  # what every release has goes by its name

    def build(self, options: Mapping[str, Any]) -> Any:
        engine_args = resolve(self.args.symbol)
        known = {field.name for field in dataclasses.fields(engine_args) if field.init}
        given = translated({name: value for name, value in options.items() if value is not UNSET}, known)
        for name in given:
            if name not in known:
                _refuse(name, known)
        with _core_in_this_process():
            return engine_args(**given).create_engine_config()


class VllmConfig_0_10(VllmConfig_0_11):
    """vLLM has two engines, and takes the old one for what the new one does not support (until 0.10.2).

    It decides while it makes the config, and says so in ``VLLM_USE_V1``. Nothing here can drive the old one.
    """

    since = (0, 10, 2)

    def build(self, options: Mapping[str, Any]) -> Any:
        config = super().build(options)
        if not importlib.import_module("vllm.envs").VLLM_USE_V1:
            raise UnsupportedField(
                symbol="EngineArgs",
                needed="options and a model that vLLM's V1 engine supports",
                found=f"vLLM {installed().version} chose its V0 engine for them",
                advice="set VLLM_USE_V1=1 to see which option it is, or use vLLM 0.11.0 or newer",
            )
        return config


@contextmanager
def _core_in_this_process() -> Iterator[None]:
    """Say, while the config is made, that the engine core runs in the calling process, as it does with us.

    On CPU, vLLM would otherwise put even a single worker into a process of its own (platforms/cpu.py, from 0.24.0).
    A value that the caller set is left alone.
    """
    name = "VLLM_ENABLE_V1_MULTIPROCESSING"
    if name in os.environ:
        yield
        return
    os.environ[name] = "0"
    try:
        yield
    finally:
        del os.environ[name]


def _refuse(name: str, known: set[str]) -> None:
    """Raise UnsupportedField for an option that EngineArgs does not have here."""
    if name in LIVES:
        refuse(Need(_ENGINE_ARGS, options={name: LIVES[name]}), name)
    close = difflib.get_close_matches(name, known, n=3)
    raise UnsupportedField(
        symbol=f"EngineArgs.{name}",
        needed="an option of EngineArgs" + (f" (near: {', '.join(close)})" if close else ""),
        found=f"vLLM {installed().version}",
        advice=f"leave {name} unset, or use the option's name in this release",
    )


ADAPTERS = (VllmConfig_0_11, VllmConfig_0_10)
#: Earlier releases have all that these need as well; see ``select.in_order``.
UNSEEN = (VllmConfig_0_11,)

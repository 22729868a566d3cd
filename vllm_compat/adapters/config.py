"""VllmConfig, through EngineArgs: the one way that keeps every sub-config consistent in every release."""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from vllm_compat._unset import UNSET
from vllm_compat.adapters.base import Adapter, Need, resolve
from vllm_compat.errors import UnsupportedField
from vllm_compat.installed import installed


class VllmConfig_0_10(Adapter):
    """``EngineArgs(**options).create_engine_config()``.

    Unknown options are refused here: the pydantic dataclasses of 0.9.1-0.15.1 ignore them silently.
    """

    surface = "vllm_config"
    since = (0, 10, 0)
    create = Need(
        "vllm.engine.arg_utils:EngineArgs.create_engine_config",
        options={"usage_context": "", "headless": ""},
        bound=True,
    )
    needs = (create,)

    def build(self, options: Mapping[str, Any]) -> Any:
        engine_args = resolve("vllm.engine.arg_utils:EngineArgs")
        known = {field.name for field in dataclasses.fields(engine_args) if field.init}
        given = {name: value for name, value in options.items() if value is not UNSET}
        for name in given:
            if name not in known:
                close = difflib.get_close_matches(name, known, n=3)
                raise UnsupportedField(
                    symbol=f"EngineArgs.{name}",
                    needed="an option of EngineArgs" + (f" (near: {', '.join(close)})" if close else ""),
                    found=f"vLLM {installed().version}",
                    advice=f"leave {name} unset, or use the option's name in this release",
                )
        with _core_in_this_process():
            return engine_args(**given).create_engine_config()


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


ADAPTERS = (VllmConfig_0_10,)

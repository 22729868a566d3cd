"""The pipeline's configuration: one TOML file, one section per stage (`settings.py` has the keys).

`load_config("tiny")` reads a preset, `load_config("my.toml", ["train.lr=1e-3"])` a file with overrides. A
file may say `extends = "kimi-k2.5"` (a preset or another file) and give only what differs.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import types
import typing
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from vllm_compat.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from .files import write_atomic
from .settings import (
    Config,
    EvaluateConfig,
    ExportConfig,
    ExtractConfig,
    PrepareConfig,
    TargetConfig,
    TrainConfig,
    VocabConfig,
    aux_layers,
)

__all__ = [
    "Config",
    "EvaluateConfig",
    "ExportConfig",
    "ExtractConfig",
    "PrepareConfig",
    "TargetConfig",
    "TrainConfig",
    "VocabConfig",
    "aux_layers",
    "load_config",
    "preset_names",
    "save_config",
]

_PRESETS = Path(__file__).parent / "presets"
_FIXTURE = "fixtures:"


def preset_names() -> list[str]:
    """Names that `load_config` takes besides a file."""
    return sorted(path.stem for path in _PRESETS.glob("*.toml"))


def load_config(source: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration of a preset or a TOML file, with `section.key=value` overrides.

    A value is written as in TOML, or as a bare word; `none` leaves an optional key open. ConfigError names
    the valid keys for an unknown one.
    """
    path = _find(source)
    raw = _read(path, ())
    for override in overrides:
        _override(raw, override)
    raw.setdefault("run_dir", str(Path("runs") / path.stem))
    made: Config = _build(Config, raw, "")
    for section, key in (("target", "model"), ("target", "tokenizer"), ("prepare", "conversations")):
        value = getattr(getattr(made, section), key)
        if value and value.startswith(_FIXTURE):
            part = dataclasses.replace(getattr(made, section), **{key: _fixture(value, section, key)})
            made = dataclasses.replace(made, **{section: part})
    return made


def save_config(cfg: Config, path: Path) -> None:
    """Write TOML that `load_config` reads back to an equal Config; atomic."""
    lines = [f"run_dir = {_toml(str(cfg.run_dir))}", f"seed = {cfg.seed}"]
    for item in dataclasses.fields(cfg):
        section = getattr(cfg, item.name)
        if dataclasses.is_dataclass(section):
            lines += ["", f"[{item.name}]"]
            values = {f.name: getattr(section, f.name) for f in dataclasses.fields(section)}
            lines += [f"{key} = {_toml(value)}" for key, value in values.items() if value is not None]
    write_atomic(Path(path), "\n".join(lines) + "\n")


def _find(source: str | Path) -> Path:
    preset = _PRESETS / f"{source}.toml"
    path = preset if isinstance(source, str) and source in preset_names() else Path(source)
    if not path.is_file():
        raise ConfigError(
            asked=f"configuration {str(source)!r}",
            needed="a TOML file, or a preset: " + ", ".join(preset_names()),
            found=f"no such file as seen from {Path.cwd()}",
        )
    return path


def _read(path: Path, chain: tuple[Path, ...]) -> dict[str, Any]:
    try:
        raw: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(asked=f"configuration {path}", needed="valid TOML in UTF-8", found=str(error)) from error
    base = raw.pop("extends", None)
    if base is None:
        return raw
    beside = path.parent / str(base)
    base_path = beside.resolve() if beside.is_file() else _find(base)
    if base_path in (*chain, path.resolve()):
        raise ConfigError(asked=f'extends = "{base}" in {path}', needed="a chain of files that ends", found="a circle")
    merged: dict[str, Any] = _read(base_path, (*chain, path.resolve()))
    for key, value in raw.items():
        if isinstance(value, dict) and isinstance(merged.get(key), dict):
            merged[key] = {**merged[key], **value}
        else:
            merged[key] = value
    return merged


def _override(raw: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(asked=f"override {override!r}", needed="the form section.key=value, as in train.lr=1e-3")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = None if text.strip().lower() == "none" else text.strip()  # a bare word: a name or a path
    for part in parts[:-1]:
        raw = raw.setdefault(part, {})
        if not isinstance(raw, dict):
            raise ConfigError(asked=f"override {override!r}", needed=f"{part} to be a section", found=f"{raw!r}")
    raw[parts[-1]] = value


def _build(cls: Any, raw: Any, where: str) -> Any:
    """A dataclass from a TOML table, each value checked against the field's annotation."""
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    label = f"[{where}]" if where else "the top level"
    if not isinstance(raw, dict):
        raise ConfigError(asked=f"{where} = {raw!r}", needed=f"a table {label} with keys: {', '.join(fields)}")
    for key in raw:
        if key not in fields:
            close = get_close_matches(key, fields, n=1)
            raise ConfigError(
                asked=f"key {key!r} in {label}",
                needed=f"one of: {', '.join(fields)}",
                advice=f"did you mean {close[0]!r}?" if close else "",
            )
    made = {}
    for name, item in fields.items():
        path = f"{where}.{name}" if where else name
        if dataclasses.is_dataclass(hints[name]):
            made[name] = _build(hints[name], raw.get(name, {}), path)
        elif name in raw:
            made[name] = _convert(raw[name], hints[name], path)
        elif item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING:
            raise ConfigError(asked=label, needed=f"the key {name!r}")
    return cls(**made)


def _convert(value: Any, hint: Any, path: str) -> Any:
    options = typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
    for option in options:
        for made in _as(value, option):
            return made
    names = " or ".join("left out" if o is types.NoneType else getattr(o, "__name__", str(o)) for o in options)
    raise ConfigError(asked=f"{path} = {value!r}", needed=names, found=type(value).__name__)


def _as(value: Any, kind: Any) -> Iterator[Any]:
    """Yields the converted value, or nothing when `value` is not of that kind.

    A bool is never a number here.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is types.NoneType:
        if value is None:
            yield None
    elif kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        if math.isfinite(value):
            yield float(value)
    elif kind is Path and isinstance(value, str):
        yield Path(value).expanduser()
    elif origin is tuple:
        if isinstance(value, list):
            items = [list(_as(item, arguments[0])) for item in value]
            if all(items):
                yield tuple(item[0] for item in items)
    elif origin is dict:
        if isinstance(value, dict):
            yield {key: item for key, item in value.items() if item is not None}
    elif isinstance(kind, type) and type(value) is kind:
        yield value


def _fixture(value: str, section: str, key: str) -> str:
    relative = Path("tests", "fixtures", value.removeprefix(_FIXTURE))
    here = Path.cwd()
    for root in (here, *here.parents, *Path(__file__).resolve().parents):
        if (root / relative).exists():
            return str(root / relative)
    raise ConfigError(
        asked=f"{section}.{key} = {value!r}",
        needed=f"{relative} of a checkout of this project (fixtures are not part of the installed package)",
        found=f"none in {here}, above it, or above the installed package",
        advice=f"clone the project and run inside it, or give your own with --set {section}.{key}=PATH",
    )


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Path):
        return _toml(str(value))
    if isinstance(value, dict):
        pairs = (f"{_toml(str(key))} = {_toml(item)}" for key, item in value.items())
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    raise ConfigError(asked=f"saving {value!r}", needed="a value that TOML can hold", found=type(value).__name__)

"""Are two native objects the same, field by field? Their own ``__eq__`` may look at a name only, or at identity."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy
import torch


def differences(one: Any, other: Any, path: str = "") -> list[str]:
    """Where the two differ, as paths; [] when they are the same, types included."""
    if type(one) is not type(other):
        return [f"{path}: {type(one).__name__} {one!r} and {type(other).__name__} {other!r}"]
    if isinstance(one, (str, bytes, int, float, type(None), type, types.FunctionType)):
        return [] if one == other else [f"{path}: {one!r} and {other!r}"]
    if isinstance(one, (numpy.ndarray, torch.Tensor)):
        same = one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
        return [] if same else [f"{path}: {one!r} and {other!r}"]
    if isinstance(one, Mapping):
        if list(one) != list(other):
            return [f"{path}: keys {list(one)} and {list(other)}"]
        return [found for key in one for found in differences(one[key], other[key], f"{path}[{key!r}]")]
    if isinstance(one, (set, frozenset)):
        return [] if one == other else [f"{path}: {one!r} and {other!r}"]
    if isinstance(one, (list, tuple)):
        if len(one) != len(other):
            return [f"{path}: {len(one)} and {len(other)} items"]
        pairs = enumerate(zip(one, other, strict=True))
        return [found for i, (a, b) in pairs for found in differences(a, b, f"{path}[{i}]")]
    if not hasattr(one, "__dict__") and not isinstance(one, msgspec.Struct):  # a dtype, a device
        return [] if one == other else [f"{path}: {one!r} and {other!r}"]
    mine, theirs = fields(one), fields(other)
    if mine.keys() != theirs.keys():
        return [f"{path}: fields {sorted(mine)} and {sorted(theirs)}"]
    return [found for name in mine for found in differences(mine[name], theirs[name], f"{path}.{name}")]


def fields(value: Any) -> dict[str, Any]:
    """What an object holds: fields of a struct or dataclass, attributes of anything else."""
    if isinstance(value, msgspec.Struct):
        return {name: getattr(value, name) for name in value.__struct_fields__}
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return dict(vars(value))

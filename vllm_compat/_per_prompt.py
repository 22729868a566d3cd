"""An option of ``EngineLoop.generate``: one value for all prompts, or a sequence with one per prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_compat.errors import VllmCompatError

_NONE_LEFT = object()


class PerPrompt:
    """Hands out the value of each prompt in turn; VllmCompatError when a sequence has fewer or more than there are."""

    def __init__(self, what: str, value: Any) -> None:
        self._what = what
        self._value = value
        self._each = iter(value) if isinstance(value, Sequence) else None

    def take(self) -> Any:
        """The value of the next prompt."""
        value = self._value if self._each is None else next(self._each, _NONE_LEFT)
        if value is _NONE_LEFT:
            raise self._unpaired("fewer")
        return value

    def end(self) -> None:
        """There is no further prompt."""
        if self._each is not None and next(self._each, _NONE_LEFT) is not _NONE_LEFT:
            raise self._unpaired("more")

    def _unpaired(self, found: str) -> VllmCompatError:
        return VllmCompatError(
            f"generate with a sequence of {self._what}",
            needed="exactly one per prompt",
            found=f"{found} {self._what} than prompts",
            advice="pass as many as there are prompts, or a single one for all",
        )

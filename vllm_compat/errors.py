"""The errors of vllm_compat, and its one warning: fields say what was asked, needed, found, and what to do.

A caller who wants to react reads the fields; a person reads ``str(error)``, one paragraph of the same::

    Request.kv_hints — needs: vLLM 0.31.0 or newer — here: vLLM 0.28.0+cu129 (distribution vllm)
    — do: leave kv_hints unset, or upgrade vLLM

They survive pickling with every field, those of subclasses too: vLLM sends exceptions between its processes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

__all__ = [
    "CaptureError",
    "ConfigError",
    "DataError",
    "ExportError",
    "HashFunctionMismatch",
    "SelfCheckFailed",
    "SignatureMismatch",
    "StoreError",
    "UnsupportedField",
    "UnsupportedName",
    "UnsupportedRelease",
    "UnverifiedRelease",
    "VllmCompatError",
    "VllmNotInstalled",
]


def _restore(cls: type[VllmCompatError], state: dict[str, Any]) -> VllmCompatError:
    # Not through __init__: a subclass may require arguments of its own, and the state is what it made of
    # them.
    error = cls.__new__(cls)
    error.__dict__.update(state)
    return error


class VllmCompatError(Exception):
    """Base of all errors that vllm_compat raises on purpose.

    Args:
        asked: What the caller wanted, in the caller's words ("Request.kv_hints", "layer 62").
        needed: What it takes ("vLLM 0.31.0 or newer", "a layer id between 0 and 61").
        found: What is here instead ("vLLM 0.28.0+cu129 (distribution vllm)").
        advice: What to do about it, as an imperative.

    Any of them may be left empty; an empty one does not appear in the message.
    """

    asked: str
    needed: str
    found: str
    advice: str

    def __init__(self, asked: str = "", *, needed: str = "", found: str = "", advice: str = "") -> None:
        super().__init__()
        self.asked = asked
        self.needed = needed
        self.found = found
        self.advice = advice

    def __str__(self) -> str:
        parts = (
            self.asked,
            self.needed and f"needs: {self.needed}",
            self.found and f"here: {self.found}",
            self.advice and f"do: {self.advice}",
        )
        return " — ".join(part for part in parts if part) or type(self).__name__

    def __repr__(self) -> str:
        shown = {name: value for name, value in vars(self).items() if not name.startswith("__")}
        fields = ", ".join(f"{name}={value!r}" for name, value in shown.items())
        return f"{type(self).__name__}({fields})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (type(self), dict(self.__dict__))


class VllmNotInstalled(VllmCompatError):
    """There is no vLLM to import in this environment."""


class UnsupportedRelease(VllmCompatError):
    """The installed vLLM is older than the oldest release that vllm_compat serves."""


class UnverifiedRelease(UserWarning):
    """The installed vLLM is a build that nothing is proved about: newer than the table, a nightly, an unknown one.

    What is called has been compared with its live signatures and fits. Given once per process, when the first factory
    or reader is used. To go on silently: ``warnings.simplefilter("ignore", vllm_compat.UnverifiedRelease)``; to refuse
    such builds: ``"error"``.
    """


class UnsupportedField(VllmCompatError):
    """The installed vLLM cannot express an option that the caller set; dropping it silently would be a bug.

    Args:
        symbol: The option, qualified by the vLLM class that lacks it ("Request.kv_hints").
    """

    symbol: str

    def __init__(
        self, asked: str = "", *, symbol: str = "", needed: str = "", found: str = "", advice: str = ""
    ) -> None:
        super().__init__(asked or symbol, needed=needed, found=found, advice=advice)
        self.symbol = symbol


class UnsupportedName(UnsupportedField, ImportError):
    """The installed vLLM has a name of ``vllm_compat.moved`` in none of the places it is known in.

    An ImportError as well, so that ``try: from vllm_compat.moved import … except ImportError:`` works.
    """


class SignatureMismatch(VllmCompatError):
    """No adapter fits the live signature of a vLLM class.

    Args:
        symbol: Qualified name of the class or function ("vllm.v1.request.Request").
        expected: Parameter names that the nearest adapter passes.
        live: Parameter names that the installed vLLM has.

    ``needed`` and ``found`` are filled with the two lists and their difference when they are left empty.
    """

    symbol: str
    expected: tuple[str, ...]
    live: tuple[str, ...]

    def __init__(
        self,
        asked: str = "",
        *,
        symbol: str = "",
        expected: Iterable[str] = (),
        live: Iterable[str] = (),
        needed: str = "",
        found: str = "",
        advice: str = "",
    ) -> None:
        self.symbol = symbol
        self.expected = tuple(expected)
        self.live = tuple(live)
        missing = [name for name in self.expected if name not in self.live]
        unknown = [name for name in self.live if name not in self.expected]
        super().__init__(
            asked or symbol,
            needed=needed or f"parameters ({', '.join(self.expected)})",
            found=found
            or f"parameters ({', '.join(self.live)}); "
            f"not here: {', '.join(missing) or 'none'}; new here: {', '.join(unknown) or 'none'}",
            advice=advice,
        )


class HashFunctionMismatch(VllmCompatError):
    """This process initialised NONE_HASH with another function; the hashes made so far would not match."""


class CaptureError(VllmCompatError):
    """Hidden states cannot be captured as asked, or what was captured is incomplete."""


class StoreError(VllmCompatError):
    """A store of samples on disk is damaged, holds something else, or is being written by another process."""


class ConfigError(VllmCompatError):
    """A setting (file, override or environment variable) is unknown or has a value that cannot be used."""


class DataError(VllmCompatError):
    """The input data cannot be used: malformed, empty, or without a single token to learn from."""


class SelfCheckFailed(VllmCompatError):
    """Captured states do not rebuild what the engine itself computed; the numbers are in ``found``."""


class ExportError(VllmCompatError):
    """A draft checkpoint is refused because vLLM would load it wrongly, or not at all."""


@dataclass(frozen=True)
class Refusal:
    """An error on its way from a worker, which returns it.

    Wrapped, since vLLM makes a RuntimeError of what a worker process raises, and of any exception that it returns
    (v1/executor/multiproc_executor.py, ``WorkerProc.enqueue_output``).
    """

    error: VllmCompatError

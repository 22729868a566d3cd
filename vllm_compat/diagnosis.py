"""What `vllm_compat.doctor` finds, as a value, as text and as JSON."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from vllm_compat.installed import Installed

__all__ = ["Finding", "Limit", "Report", "Surface"]

_WIDTH = 100
_OPTIONS = 15  # of one factory that the text names


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that a person should know.

    Attributes:
        level: "problem" (something that was asked for cannot work) or "hint".
        what: What is the case.
        advice: What to do about it; may be empty.
    """

    level: Literal["problem", "hint"]
    what: str
    advice: str = ""

    def __str__(self) -> str:
        return f"{self.what} {self.advice}".strip()


@dataclass(frozen=True, kw_only=True)
class Surface:
    """A surface of vLLM and the adapter that serves it.

    Attributes:
        name: Name of the surface ("request").
        adapter: The adapter chosen ("request since 0.31.0"); None when none fits.
        reason: Why this one, or why none.
    """

    name: str
    adapter: str | None
    reason: str


@dataclass(frozen=True, kw_only=True)
class Limit:
    """An option that the installed release cannot express; setting it raises `UnsupportedField`.

    Attributes:
        call: The name that takes it ("make_request").
        option: The option ("kv_hints"); one of a nested object is "StructuredOutputsParams.backend"; "" when the call
            itself is refused.
        needs: The releases that have it ("vLLM 0.31.0 or newer").
    """

    call: str
    option: str
    needs: str

    def __str__(self) -> str:
        return f"{self.call}: {self.option} needs {self.needs}" if self.option else f"{self.call} needs {self.needs}"


@dataclass(frozen=True, kw_only=True, repr=False)
class Report:
    """The state of vllm_compat in this environment.

    ``str(report)`` is for people, ``report.to_json()`` for programs.

    Attributes:
        vllm_compat: Version of this library.
        python: Version and path of the interpreter.
        installed: What `vllm_compat.installed` says; None when it could not say anything (see `findings`).
        release: What the table of releases says about it, in a sentence.
        hash_seed: What block hashes of this process depend on, in a sentence.
        surfaces: The adapter of every surface; empty when vLLM was not imported.
        limits: What this release cannot do, by factory; oldest first.
        findings: Problems first, then hints.
    """

    vllm_compat: str
    python: str
    installed: Installed | None
    release: str
    hash_seed: str
    surfaces: tuple[Surface, ...]
    limits: tuple[Limit, ...]
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether there is no problem; hints do not count."""
        return not any(finding.level == "problem" for finding in self.findings)

    def to_json(self) -> str:
        """Return the report as a JSON object: the attributes, nested, and ``ok``."""
        values: dict[str, Any] = {**dataclasses.asdict(self), "ok": self.ok}
        return json.dumps(values, indent=2, default=str)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    # So that `vllm_compat.doctor()` at a prompt shows the report.
    __repr__ = __str__

    def _lines(self) -> Iterator[str]:
        yield _row("vllm_compat", f"{self.vllm_compat}, Python {self.python}")
        if self.installed is None:
            yield _row("vLLM", "unknown")
        else:
            here = self.installed
            owner = f"distribution {here.distribution}" if here.distribution else "no distribution"
            version = f"{here.version}, a nightly" if here.is_nightly else here.version
            yield _row("vLLM", f"{version} (from {here.source}), {owner}, in {here.location}")
            yield _row("release", self.release)
            yield _row("platform", f"{here.platform} ({here.platform_source})")
            yield _row("model runner", f"{here.runner} ({here.runner_reason})")
            yield _row("block hashes", self.hash_seed)
        if self.surfaces:
            yield ""
            yield "surfaces"
            for surface in self.surfaces:
                adapter = (surface.adapter or "NONE FITS").removeprefix(f"{surface.name} ")
                yield _row(surface.name, f"{adapter}: {surface.reason}", indent=2)
        if self.limits:
            yield ""
            yield "not in this release"
            for call in dict.fromkeys(limit.call for limit in self.limits):
                yield _row(call, _listed([limit for limit in self.limits if limit.call == call]), indent=2)
        for level, title in (("hint", "hints"), ("problem", "problems")):
            chosen = [finding for finding in self.findings if finding.level == level]
            if chosen:
                yield ""
                yield title
                yield from (_bullet(str(finding)) for finding in chosen)
        yield ""
        count = sum(finding.level == "problem" for finding in self.findings)
        yield "ok" if not count else f"{count} problem{'s' if count > 1 else ''}"


def _listed(limits: list[Limit]) -> str:
    """Options by the releases that have them; the last ones, for somebody who wonders whether to upgrade."""
    shown = limits[-_OPTIONS:]
    groups = {
        limit.needs: [other.option or "all of it" for other in shown if other.needs == limit.needs] for limit in shown
    }
    parts = [f"{', '.join(options)} ({needs.removeprefix('vLLM ')})" for needs, options in groups.items()]
    if len(limits) > len(shown):
        parts.append(f"{len(limits) - len(shown)} older ones, which --json lists")
    return "; ".join(parts)


def _row(label: str, text: str, indent: int = 0) -> str:
    head = " " * indent + label.ljust(22 - indent) + " "
    return textwrap.fill(
        text,
        _WIDTH,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _bullet(text: str) -> str:
    return textwrap.fill(
        text,
        _WIDTH,
        initial_indent="  - ",
        subsequent_indent="    ",
        break_long_words=False,
        break_on_hyphens=False,
    )

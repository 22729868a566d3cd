"""Running stages: skip what is up to date, run the rest in order, say one line about each."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm_compat.errors import ConfigError, DataError

from .config import save_config
from .engine_log import redirected
from .files import lock
from .manifest import (
    STAGES,
    Manifest,
    checksums,
    now,
    read_manifest,
    remove_manifest,
    versions,
    why_stale,
    write_manifest,
)
from .progress import NullProgress, Progress, RichProgress
from .stages import STAGE_TABLE, Stage
from .summary import stage_line, write_summary

if TYPE_CHECKING:
    from .config import Config


def run(
    cfg: Config, stages: Sequence[str] | None = None, console: Any = None, *, force: bool = False
) -> dict[str, Any]:
    """Run `stages` (default: all of them, then the report) in pipeline order and return the summary.

    A stage that is complete with the same configuration and inputs is skipped; once a stage has run, all
    later ones of this call run too. `force` runs them regardless. Each stage's manifest is written last, so
    an interrupted stage is not complete and the same call goes on with it. `console`: a rich console for the
    lines and bars; None is silent.

    ConfigError: an unknown stage. DataError: an earlier stage has not run. StoreError: another process is at
    work in this run directory.
    """
    chosen = _in_order(stages)
    leader = int(os.environ.get("RANK", "0")) == 0  # under torchrun every process trains, one writes
    held = lock(cfg.run_dir / ".lock", f"running in {cfg.run_dir}") if leader else -1
    try:
        if leader:
            save_config(cfg, cfg.run_dir / "config.toml")
        say = partial(_say, console) if console is not None and leader else _silent
        progress: Progress = RichProgress(console) if console is not None and leader else NullProgress()
        ran = force
        for stage in chosen:
            reason = "asked for" if ran else _why(stage, cfg)
            if reason is None:
                manifest = read_manifest(cfg.run_dir, stage.name)
                assert manifest is not None
                say(stage.name, stage_line(stage.name, manifest.metrics), "up to date")
                continue
            ran = True
            # vLLM's own output would come between the lines and bars.
            quiet = redirected(cfg.run_dir / "engine.log") if console is not None else nullcontext()
            with quiet:
                seconds, metrics = _run_stage(stage, cfg, progress, leader)
            changed = f" ({reason})" if reason not in ("asked for", "not complete") else ""
            say(stage.name, stage_line(stage.name, metrics), f"{seconds:.1f} s{changed}")
        if not leader:
            return {}
        summary = write_summary(cfg.run_dir)
        if stages is None:
            from .report import report

            say("report", str(report(cfg)))
        return summary
    finally:
        if held >= 0:
            os.close(held)


def _in_order(names: Sequence[str] | None) -> list[Stage]:
    unknown = [name for name in names or () if name not in STAGE_TABLE]
    if unknown:
        raise ConfigError(f"the stage {unknown[0]!r}", needed="one of: " + ", ".join(STAGES))
    return [stage for name, stage in STAGE_TABLE.items() if names is None or name in names]


def _why(stage: Stage, cfg: Config) -> str | None:
    """Why the stage has to run; None when it is up to date."""
    if read_manifest(cfg.run_dir, stage.name) is None:  # before fingerprints, which may ask the hub
        return "not complete"
    return why_stale(cfg.run_dir, stage.name, stage.config(cfg), stage.fingerprints(cfg))


def _run_stage(stage: Stage, cfg: Config, progress: Progress, leader: bool) -> tuple[float, dict[str, Any]]:
    missing = stage.missing(cfg)
    if missing:
        raise DataError(
            f"the stage {stage.name}",
            needed=", ".join(missing),
            found=f"not in {cfg.run_dir}",
            advice=f"run the stage {missing[0].split('/')[0]} first, or everything: `vllm-compat kimi run`",
        )
    inputs = stage.fingerprints(cfg)
    if leader:
        remove_manifest(cfg.run_dir, stage.name)
    started, began = now(), time.monotonic()
    metrics = stage.entry_point()(cfg, progress)
    seconds = round(time.monotonic() - began, 3)
    if leader:
        write_manifest(
            cfg.run_dir,
            Manifest(
                stage=stage.name,
                status="complete",
                started=started,
                finished=now(),
                seconds=seconds,
                config=stage.config(cfg),
                inputs=inputs,
                outputs=checksums(cfg.run_dir, stage.outputs),
                metrics=metrics,
                versions=versions(),
            ),
        )
    return seconds, metrics


def _say(console: Any, name: str, text: str, end: str = "") -> None:
    """One line on the console; it is not cut, so that a log has all of it."""
    from rich.text import Text

    console.print(Text.assemble((f"{name:<9}", "bold"), " ", text, "  ", (end, "dim")), soft_wrap=True)


def _silent(*_: Any) -> None:
    pass

"""`vllm-compat kimi …`: the pipeline's commands."""

from __future__ import annotations

import json
import os
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from vllm_compat.errors import ConfigError

from .config import Config, load_config, preset_names
from .manifest import STAGES
from .said import said
from .store_cli import store

__all__ = ["app", "kimi"]

app = kimi = typer.Typer(
    help="Conversations to hidden states to a served EAGLE-3 head.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(store, name="store")

Preset = Annotated[str | None, typer.Option(help=f"A configuration that comes along: {', '.join(preset_names())}.")]
File = Annotated[Path | None, typer.Option("--config", help='A TOML file (it may say extends = "kimi-k2.5").')]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a setting; repeatable."),
]
RunDir = Annotated[
    Path | None,
    typer.Option(help="Where the run is written. Alone: go on with that run's own configuration."),
]
Force = Annotated[bool, typer.Option("--force", help="Run although the stage is up to date.")]
Replicas = Annotated[
    int | None, typer.Option(metavar="N", help="Extract with N copies of the target, through Ray (extract.replicas).")
]
RayAddress = Annotated[
    str | None, typer.Option(metavar="ADDRESS", help="Of a running Ray cluster, for replicas on many machines.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


class Depth(str, Enum):
    """How far `verify` goes."""

    BYTES = "bytes"
    TARGET = "target"
    ENGINE = "engine"


_HELP = {
    "prepare": "Conversations to rows: rendered prompt plus the target's own tokens, with a loss mask.",
    "extract": "Rows to hidden states in a sharded store; goes on where it was interrupted.",
    "vocab": "Choose the draft vocabulary by frequency over the tokens with loss.",
    "train": "Train the EAGLE-3 head; goes on where it was interrupted. Needs no vLLM.",
    "export": "Write the head as vLLM loads it, after checks that refuse a wrong one.",
    "evaluate": "Serve target and head with vLLM and measure the acceptance length.",
}


def _load(preset: str | None, config: Path | None, overrides: list[str] | None, run_dir: Path | None) -> Config:
    if preset is not None and config is not None:
        raise ConfigError("--preset and --config", needed="one of the two", advice='write extends = "…" into the file')
    source: str | Path | None = preset or config
    if source is None and run_dir is not None:
        source = run_dir / "config.toml"
    if source is None:
        raise ConfigError(
            "a configuration",
            needed=f"--preset ({', '.join(preset_names())}), --config FILE, or --run-dir of an earlier run",
        )
    chosen = [*(overrides or ()), *([f"run_dir={json.dumps(str(run_dir))}"] if run_dir is not None else [])]
    return load_config(source, chosen)


def _replicated(overrides: list[str] | None, replicas: int | None, ray_address: str | None) -> list[str]:
    """The overrides with those that two options stand for."""
    chosen = {"extract.replicas": replicas, "extract.ray_address": ray_address}
    return [*(overrides or ()), *(f"{key}={json.dumps(value)}" for key, value in chosen.items() if value is not None)]


def _pipeline(cfg: Config, stages: list[str] | None, *, force: bool) -> None:
    from rich.console import Console

    from .engine_log import console_stream
    from .pipeline import run as run_pipeline

    # Two spinning OpenMP threads on two busy cores wait for each other; torch reads this when it is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with console_stream() as stream:
        run_pipeline(cfg, stages, Console(file=stream, highlight=False), force=force)


@app.command()
@said
def run(
    preset: Preset = None,
    config: File = None,
    overrides: Overrides = None,
    run_dir: RunDir = None,
    *,
    replicas: Replicas = None,
    ray_address: RayAddress = None,
    force: Force = False,
) -> None:
    """Run all stages that are not up to date, then write the report."""
    _pipeline(_load(preset, config, _replicated(overrides, replicas, ray_address), run_dir), None, force=force)


def _extract(
    preset: Preset = None,
    config: File = None,
    overrides: Overrides = None,
    run_dir: RunDir = None,
    *,
    replicas: Replicas = None,
    ray_address: RayAddress = None,
    force: Force = False,
) -> None:
    """Run the stage extract."""
    cfg = _load(preset, config, _replicated(overrides, replicas, ray_address), run_dir)
    _pipeline(cfg, ["extract"], force=force)


def _add_stage(stage: str) -> None:
    def command(
        preset: Preset = None,
        config: File = None,
        overrides: Overrides = None,
        run_dir: RunDir = None,
        *,
        force: Force = False,
    ) -> None:
        _pipeline(_load(preset, config, overrides, run_dir), [stage], force=force)

    app.command(name=stage, help=_HELP[stage])(said(command))


for _stage in STAGES:
    if _stage == "extract":
        app.command(name=_stage, help=_HELP[_stage])(said(_extract))
    else:
        _add_stage(_stage)


@app.command()
@said
def report(preset: Preset = None, config: File = None, overrides: Overrides = None, run_dir: RunDir = None) -> None:
    """Write report.html, the plots and summary.json from what is there."""
    from .report import report as write_report
    from .summary import write_summary

    cfg = _load(preset, config, overrides, run_dir)
    write_summary(cfg.run_dir)
    typer.echo(str(write_report(cfg)))


@app.command()
@said
def verify(
    preset: Preset = None,
    config: File = None,
    overrides: Overrides = None,
    run_dir: RunDir = None,
    *,
    depth: Annotated[Depth, typer.Option(help="How far to go; each includes those before it.")] = Depth.ENGINE,
    rows: Annotated[int, typer.Option(min=1, help="Rows compared with target and engine.")] = 16,
    repair: Annotated[bool, typer.Option("--repair", help="Set damaged shards aside for extract to redo.")] = False,
) -> None:
    """Check the extracted stores against what was written, against the target's weights, and against vLLM.

    bytes: every checksum. target: what final states, norm and lm_head say the rows' next tokens are. engine: they must
    rebuild vLLM's log-probabilities; and states computed in a batch, one by one, in chunks and beside a warm prefix
    cache must be those stored.
    """
    from .verify import verify_run

    verify_run(_load(preset, config, overrides, run_dir), depth, rows, repair=repair, say=typer.echo)


@app.command(name="import-speculators")
@said
def import_speculators(
    folder: Annotated[Path, typer.Argument(help="The --output-dir of data_generation_offline.py.", file_okay=False)],
    preset: Preset = None,
    config: File = None,
    overrides: Overrides = None,
    run_dir: RunDir = None,
) -> None:
    """Take over what speculators 0.3.0 or 0.4.0 generated, in place of prepare and extract; vocab and train follow."""
    from rich.console import Console

    from .config import save_config
    from .import_speculators import import_samples
    from .progress import RichProgress

    cfg = _load(preset, config, overrides, run_dir)
    made = import_samples(cfg, folder, RichProgress(Console(stderr=True, highlight=False)))
    save_config(cfg, cfg.run_dir / "config.toml")
    typer.echo(
        f"{made['rows']['train']} rows to train on and {made['rows']['heldout']} held out, {made['tokens']:,} tokens; "
        f"{made['without_loss']} without a token to learn left out"
    )


@app.command(name="dry-run")
@said
def dry_run(
    preset: Preset = None,
    config: File = None,
    overrides: Overrides = None,
    run_dir: RunDir = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Check everything but the weights: layers, tokenizer, data, disk, GPUs, vLLM.

    Exits with 2 if the configuration is wrong, with 0 if at most this machine lacks something.
    """
    from .dry_run import as_json as to_json
    from .dry_run import dry_run as examine

    checks = examine(_load(preset, config, overrides, run_dir))
    if as_json:
        typer.echo(json.dumps(to_json(checks), indent=1))
    else:
        for check in checks:
            typer.echo(f"{check.status:<8} {check.name:<14} {check.text}")
    if any(check.status == "wrong" for check in checks):
        raise typer.Exit(2)
    lacking = [check.name for check in checks if check.status == "missing"]
    if lacking and not as_json:
        sys.stderr.write(f"The configuration is right; this machine lacks: {', '.join(lacking)}.\n")

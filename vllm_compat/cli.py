"""The command ``vllm-compat``."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from typing import Annotated, Any

import typer
import typer.core
import typer.main

__all__ = ["app"]

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


class _Pipeline(typer.core.TyperGroup):
    """The commands of ``vllm_compat.kimi.cli``, which is imported only when one of them is asked for."""

    def _commands(self) -> typer.core.TyperGroup:
        from vllm_compat.kimi.cli import app as pipeline

        group = typer.main.get_command(pipeline)
        assert isinstance(group, typer.core.TyperGroup)
        return group

    def list_commands(self, ctx: Any) -> list[str]:
        return self._commands().list_commands(ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return self._commands().get_command(ctx, cmd_name)


app = typer.Typer(
    help="Stable factories for vLLM's internals: what is installed, what works, and the Kimi pipeline.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(
    typer.Typer(cls=_Pipeline, help="Conversations to hidden states to a served EAGLE-3 head.", no_args_is_help=True),
    name="kimi",
)


@app.command()
def doctor(
    *,
    as_json: JsonOption = False,
    import_vllm: Annotated[
        bool,
        typer.Option("--import/--no-import", help="Import vLLM to compare its live signatures (seconds)."),
    ] = True,
) -> None:
    """Say what is installed, which adapter serves which surface and why.

    Exits with 1 if there are problems.
    """
    from vllm_compat import doctor as examine

    # vLLM logs to standard output, which is for the report alone.
    with contextlib.redirect_stdout(sys.stderr):
        report = examine(import_vllm=import_vllm)
    typer.echo(report.to_json() if as_json else str(report))
    raise typer.Exit(0 if report.ok else 1)


@app.command()
def releases(*, as_json: JsonOption = False) -> None:
    """List the vLLM releases that are known, and what has been proved about them."""
    from vllm_compat import releases as table

    rows = [dataclasses.asdict(release) for release in table.all_releases()]
    if as_json:
        typer.echo(json.dumps(rows, indent=2, default=str))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table

    columns = [field.name for field in dataclasses.fields(table.Release)]
    shown = Table(*columns, box=box.SIMPLE_HEAD)
    for row in rows:
        shown.add_row(*(str(row[column]) for column in columns))
    Console().print(shown)


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def run(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="COMMAND", help="After `--`: python script.py and its arguments.")
    ] = None,
    *,
    patch: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Only this patch; may be given again. Default: those of other libraries."),
    ] = None,
) -> None:
    """Run a Python script with patches of the libraries that it imports, in all of its processes.

    `vllm-compat run -- python data_generation_offline.py --target-model-path …`
    """
    from vllm_compat.launch import execute
    from vllm_compat.patches import CATALOGUE

    execute(words or [], patch or [each.name for each in CATALOGUE if each.library])


@app.command()
def diff(
    old: Annotated[str, typer.Argument(metavar="OLD", help="A recorded release or nightly, such as 0.31.0.")],
    new: Annotated[str, typer.Argument(metavar="NEW", help="Another one.")],
    *,
    surface: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only this surface; may be given again.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say what changed in vLLM's internals between two releases, by surface, what breaks callers first.

    Needs no vLLM: it compares what was recorded of the releases' sources.
    """
    from vllm_compat.recorded import diff as difference
    from vllm_compat.recorded import store

    changes = difference.between(store.find(old), store.find(new), surface or ())
    typer.echo(json.dumps(difference.as_json(changes), indent=2) if as_json else difference.as_text(changes))

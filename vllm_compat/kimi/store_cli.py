"""`vllm-compat kimi store …`: one store at a path, whatever run it belongs to. Needs no vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from .said import said

store = typer.Typer(help="Look after a store of hidden states.", no_args_is_help=True, pretty_exceptions_enable=False)

Path_ = Annotated[Path, typer.Argument(metavar="STORE", help="The store's directory, e.g. runs/mine/extract/train.")]


@store.command()
@said
def verify(path: Path_) -> None:
    """Read every byte and compare checksums."""
    from .store import Store

    typer.echo(as_written(Store(path).verify()))


@store.command()
@said
def stat(path: Path_, *, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """What is in it, and where it comes from."""
    numbers = store_numbers(path)
    if as_json:
        typer.echo(json.dumps(numbers, indent=1))
        return
    for name, value in numbers.items():
        if isinstance(value, dict):
            typer.echo(f"{name}:")
            for key, item in value.items():
                typer.echo(f"  {key:<20} {item}")
        else:
            typer.echo(f"{name:<22} {value:,}" if isinstance(value, int) else f"{name:<22} {value}")


@store.command()
@said
def merge(
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="A new store, or one that this merge began.")],
    sources: Annotated[list[Path], typer.Argument(metavar="SOURCE...", help="Stores; they are not changed.")],
) -> None:
    """Copy the samples of several stores into one, each once."""
    from .store_merge import merge as merge_stores

    typer.echo(", ".join(f"{value:,} {name}" for name, value in merge_stores(target, sources).items()))


@store.command()
@said
def repair(path: Path_) -> None:
    """Set damaged shards aside, take in whole ones that the index lacks, make a lost index again."""
    from .store import Store
    from .store import repair as repair_store

    for sentence in repair_store(path) or ["nothing to repair"]:
        typer.echo(sentence)
    typer.echo(as_written(Store(path).verify()))


def as_written(found: dict[str, int]) -> str:
    """What `Store.verify` found, as a sentence."""
    return ", ".join(f"{value:,} {name}" for name, value in found.items()) + ": all as written"


def store_numbers(path: Path) -> dict[str, Any]:
    """JSON-able: counts, bytes per token, lengths, the fp8 error per aux boundary, and the provenance."""
    from .store import Store

    opened = Store(path)
    lengths = sorted(opened.lengths)
    size = sum(shard.bytes for shard in opened.shards)
    return {
        "shards": len(opened.shards),
        "samples": len(opened),
        "tokens": opened.num_tokens,
        "final states": sum(place.final_length for shard in opened.shards for place in shard.samples),
        "bytes": size,
        "bytes per token": round(size / max(1, opened.num_tokens), 1),
        "tokens per sample": {
            "shortest": lengths[0] if lengths else 0,
            "median": lengths[len(lengths) // 2] if lengths else 0,
            "longest": lengths[-1] if lengths else 0,
        },
        "relative fp8 error": dict(
            zip(map(str, opened.provenance.layers), opened.quantisation_error or (), strict=False)
        ),
        "provenance": opened.provenance.to_json(),
    }

"""How a command says what went wrong."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import typer

from vllm_compat.errors import ConfigError, DataError, VllmCompatError

_F = TypeVar("_F", bound=Callable[..., Any])


def said(command: _F) -> _F:
    """Show errors raised on purpose as one paragraph, without a traceback.

    Exit code 2 when the user's input is the reason, else 1; 130 after Ctrl-C.
    """

    @functools.wraps(command)
    def wrapped(*args: Any, **options: Any) -> Any:
        try:
            return command(*args, **options)
        except VllmCompatError as error:
            typer.echo(f"{type(error).__name__}: {error}", err=True)
            raise typer.Exit(2 if isinstance(error, (ConfigError, DataError)) else 1) from error
        except KeyboardInterrupt:
            typer.echo("interrupted; the same command goes on with what is complete", err=True)
            raise typer.Exit(130) from None

    return wrapped  # type: ignore[return-value]

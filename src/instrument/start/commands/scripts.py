"""What commands that run a script in this process share: its arguments, its output and its end."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import typer

from .. import cli

_ARGUMENTS = f"{__name__}.arguments"
MODULE = "-m"


class WithArguments(cli.Command):
    """A command that passes the arguments after ``--``, or after ``-m MODULE``, to the script."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Set the arguments of the script aside; ``-m MODULE`` becomes one word."""
        at = next((at for at, word in enumerate(args) if word in ("--", MODULE)), len(args))
        own, rest = args[:at], args[at + 1 :]
        if args[at : at + 1] == [MODULE]:
            if not rest:
                raise typer.BadParameter("-m must be followed by the name of a module")
            own, rest = [*own, "--", f"{MODULE} {rest[0]}"], rest[1:]
            rest = rest[1:] if rest[:1] == ["--"] else rest
        ctx.meta[_ARGUMENTS] = rest
        return super().parse_args(ctx, own)


class ScriptCommand(WithArguments):
    """A command whose script, with its arguments, follows ``--``."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Set the script and its arguments aside."""
        at = args.index("--") if "--" in args else len(args)
        after = args[at + 1 :]
        if after:
            args = [*args[:at], *after] if after[0] == MODULE else [*args[:at], after[0], "--", *after[1:]]
        return super().parse_args(ctx, args)


def program_of(script: str) -> tuple[Path | str, str | None]:
    """Return the file, or the name of a module, and the function of the file.

    Raises:
        ValueError: it is neither.
    """
    if script.startswith(f"{MODULE} "):
        return script.removeprefix(f"{MODULE} "), None
    file, _, function = script.rpartition("::")
    if file and not Path(script).is_file():
        return Path(file), function
    if not script.endswith(".py"):
        raise ValueError(f"it is neither a script (train.py), nor train.py::FUNCTION, nor -m MODULE: {script}")
    return Path(script), None


def arguments_of(ctx: typer.Context) -> list[str]:
    """Return the arguments of the script."""
    arguments: list[str] = ctx.meta[_ARGUMENTS]
    return arguments


def exit_at_once(conclude: Callable[[], int], out: TextIO) -> None:
    """End the process with the exit code of ``conclude``, without running any more code of the script."""
    code = 1
    try:
        code = conclude()
    except typer.Exit as error:
        code = error.exit_code
    except OSError as error:
        cli.print_message(cli.describe_unwritten(error))
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        for stream in filter(None, (out, sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)


def exit_code_of_signal(error: BaseException | None) -> int:
    """Return the exit code for the signal that ended a run, given its error; 0 if none did."""
    from ...base.early_stop import EarlyStop

    return int(error.code or 0) if isinstance(error, EarlyStop) else 0


def reserve_stdout() -> TextIO:
    """Return standard output, for JSON and the like: until this process ends, other output goes to standard error.

    That includes the output of child processes of a script and of its exit handlers.
    """
    out = sys.stdout
    with contextlib.suppress(OSError, ValueError):  # a test's stream has no descriptor
        if out.fileno() == 1:
            out.flush()
            out = open(os.dup(1), "w", encoding=out.encoding, errors=out.errors)  # noqa: PTH123, SIM115
            os.dup2(2, 1)
    sys.stdout = sys.stderr
    return out

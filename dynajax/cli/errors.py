"""How a command ends: one line on stderr with the remedy, and an exit code that says what kind of trouble it was."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Sequence
from typing import cast

import typer

from dynajax.cli.interrupts import Interrupted, Interrupts
from dynajax.cli.output import PipeClosed, note
from dynajax.errors import DynajaxError, FitError, StorageError, UsageError

UNEXPECTED = 1
BROKEN_PIPE = 128 + 13  # what a shell shows for a process that SIGPIPE ended
# Base of every mistake in flags: of click, or of the copy of click that newer versions of typer carry.
FLAG_ERROR = cast(type[Exception], typer.BadParameter.__mro__[2])


def run(app: typer.Typer, argv: Sequence[str]) -> int:
    """Run `app` and return its exit code. Commands find an `Interrupts` in `ctx.obj`."""
    debug = "--debug" in argv
    logging.basicConfig(format="%(message)s")
    logging.getLogger("dynajax").setLevel(logging.DEBUG if debug else logging.INFO)
    try:
        with Interrupts() as interrupts:
            code = app(args=list(argv), standalone_mode=False, obj=interrupts)
            sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except PipeClosed:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the last flush does not complain
        return BROKEN_PIPE
    except Interrupted as interrupt:
        note("interrupted")
        return interrupt.exit_code
    except Exception as error:
        if debug:
            traceback.print_exc()
        code, line = judge(error, debug)
        note(f"error: {line}")
        return code


def judge(error: Exception, debug: bool = False) -> tuple[int, str]:
    """Exit code and message, in one line, for what a command raised."""
    line = " ".join(str(error).split())
    if isinstance(error, FLAG_ERROR):
        message = cast(typer.BadParameter, error).format_message()
        return UsageError.exit_code, f"{' '.join(message.split())} (--help lists the flags)"
    match error:
        case DynajaxError():
            return error.exit_code, line
        case OSError():
            return StorageError.exit_code, line
        case MemoryError():
            return FitError.exit_code, f"the host ran out of memory {line}".strip()
    hint = "" if debug else " (run with --debug for the traceback)"
    return UNEXPECTED, f"{type(error).__name__}: {line}{hint}"

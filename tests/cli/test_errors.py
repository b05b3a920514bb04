"""Every exit code, and the one line that goes with it."""

import errno
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from dynajax import errors
from dynajax.cli.errors import run

ROOT = Path(__file__).parents[2]


def ended(capfd, raised, *argv):
    """(exit code, stderr) of a command that raises; its stdout must be empty."""
    app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)

    @app.command()
    def command(debug: bool = False, number: int = 1) -> None:
        raise raised

    code = run(app, argv)
    out, err = capfd.readouterr()
    assert out == ""
    return code, err


@pytest.mark.parametrize(
    ("raised", "code", "line"),
    [
        (errors.DynajaxError("odd"), 1, "odd"),
        (errors.UsageError("too long"), 2, "too long"),
        (errors.ModelError("no such model"), 3, "no such model"),
        (errors.FitError("needs 9 GiB"), 4, "needs 9 GiB"),
        (errors.MismatchError("other model"), 5, "other model"),
        (errors.StorageError("cannot write"), 6, "cannot write"),
        (errors.NumericalError("NaN in layer 2"), 7, "NaN in layer 2"),
        (errors.EngineError("closed"), 8, "closed"),
        (OSError(errno.ENOSPC, "No space left on device", "/x"), 6, "[Errno 28] No space left on device: '/x'"),
        (PermissionError(13, "Permission denied"), 6, "[Errno 13] Permission denied"),
        (MemoryError(), 4, "the host ran out of memory"),
        (ValueError("a bug"), 1, "ValueError: a bug (run with --debug for the traceback)"),
        (errors.ModelError("one\n  line\tonly "), 3, "one line only"),
    ],
)
def test_an_error_is_one_line_and_a_code(capfd, raised, code, line):
    assert ended(capfd, raised) == (code, f"error: {line}\n")


def test_debug_shows_the_traceback_and_keeps_the_line(capfd):
    code, err = ended(capfd, ValueError("a bug"), "--debug")
    assert code == 1
    assert err.startswith("Traceback (most recent call last)")
    assert err.endswith("\nerror: ValueError: a bug\n")


def test_mistakes_in_flags_are_one_line(capfd):
    code, err = ended(capfd, AssertionError("not reached"), "--number", "x")
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith("error: Invalid value for '--number'")
    assert ended(capfd, AssertionError("not reached"), "--bogus") == (
        2,
        "error: No such option: --bogus (--help lists the flags)\n",
    )


def test_exit_of_typer_is_a_code_without_a_word(capfd):
    assert ended(capfd, typer.Exit(5)) == (5, "")


@pytest.mark.parametrize(
    ("argv", "code", "line"),
    [
        ((), 2, "error: give one of --prompt TEXT, --prompt - (reads stdin) and --prompt-ids FILE"),
        (("--prompt", "a", "--prompt-ids", "random:3"), 2, "error: give one of --prompt"),
        (("--prompt", "a", "--frobnicate"), 2, "error: No such option: --frobnicate"),
        (("--prompt", "a", "--max-new-tokens", "-1"), 2, "error: max_new_tokens must be an integer >= 0, got -1"),
        (
            ("--prompt", "a", "--temperature", "nan"),
            2,
            "error: temperature must be a number between 0 and 10000, got nan",
        ),
        (("--prompt", "a", "--stop", ""), 2, "error: stop must be at most 16 strings of 1 to 256 characters"),
        (("--prompt", "a", "--policy", "best"), 2, "error: --policy must be one of auto,"),
        (("--prompt", "a", "--host-mode", "fork"), 2, "error: --host-mode must be one of auto, threads,"),
        (("--prompt", "a", "--ctx", "0"), 2, "error: --ctx must be an integer >= 1, got 0"),
        (("--prompt", "a", "--predictor", ""), 2, "error: --predictor must be auto, mlp, gate, none or a folder, got"),
        (("--prompt", "a", "--set", "lambda=1"), 2, "error: --set knows no 'lambda'"),
        (("--prompt", "a", "--staging", "usb"), 2, "error: --staging must be one of auto, pinned_host"),
        (("--prompt", "a", "--assign", "greedy"), 2, "error: --assign must be one of auto, scan"),
        (("--prompt", "a", "--vram-budget", "8"), 2, "error: --vram-budget '8' has no unit"),
        (("--prompt", "a", "--model", "tiny-relulama"), 3, "error: no model tiny-relulama"),
        (("--prompt", "a", "--model", "/nonexistent"), 3, "error: no model /nonexistent"),
    ],
)
def test_generate_refuses_before_it_loads_anything(argv, code, line):
    command = [sys.executable, "-X", "importtime", "scripts/generate.py", *argv]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    said = [text for text in done.stderr.splitlines() if not text.startswith("import time:")]
    assert (done.returncode, done.stdout, len(said)) == (code, "", 1)
    assert said[0].startswith(line)
    assert not {text.split("|")[-1].strip() for text in done.stderr.splitlines()} & {"jax", "transformers", "flax"}

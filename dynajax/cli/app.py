"""The typer applications: `dynajax VERB` with every verb, or one verb alone for a script."""

from __future__ import annotations

from typing import Annotated

import typer

import dynajax
from dynajax.cli.bench import bench
from dynajax.cli.collecting import collect_stats
from dynajax.cli.convert import convert
from dynajax.cli.evaluate import evaluate
from dynajax.cli.fetch import fetch_model
from dynajax.cli.generate import generate
from dynajax.cli.options import flat
from dynajax.cli.plan import plan
from dynajax.cli.predictors import train_predictors
from dynajax.cli.profiling import profile_machine
from dynajax.cli.residency import plot_residency
from dynajax.cli.simulate import simulate
from dynajax.cli.training import build_corpus, train_tiny
from dynajax.cli.verify import verify

VERBS = {
    "generate": generate,
    "plan": plan,
    "verify": verify,
    "collect-stats": collect_stats,
    "train-predictors": train_predictors,
    "evaluate": evaluate,
    "bench": bench,
    "simulate": simulate,
    "plot-residency": plot_residency,
    "profile-machine": profile_machine,
    "convert": convert,
    "fetch-model": fetch_model,
    "build-corpus": build_corpus,
    "train-tiny": train_tiny,
}
EXIT_CODES = (
    "Exit codes: 0 ok, 1 unexpected, 2 usage, 3 model, 4 does not fit, 5 predictors or statistics of another model, "
    "6 files, 7 numbers, 8 engine, 130 interrupted, 143 terminated."
)
SETTINGS = {"help_option_names": ["-h", "--help"]}


def application(verb: str | None = None) -> typer.Typer:
    """All verbs as sub-commands, or `verb` as the only command."""
    app = typer.Typer(
        add_completion=verb is None, rich_markup_mode=None, pretty_exceptions_enable=False, context_settings=SETTINGS
    )
    if verb is None:
        app.callback(epilog=EXIT_CODES)(about)
    for name in VERBS if verb is None else (verb,):
        app.command(name, epilog=EXIT_CODES, context_settings=SETTINGS)(flat(VERBS[name]))
    return app


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"dynajax {dynajax.__version__}")
        raise typer.Exit


def about(
    version: Annotated[bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show it.")] = False,
) -> None:
    """Run language models that do not fit the GPU, in JAX."""

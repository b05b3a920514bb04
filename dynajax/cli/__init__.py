"""The command line: one application, a verb per task. jax is imported only once there is work for it."""

from __future__ import annotations


def main(verb: str | None = None) -> None:
    """Run the command line of this process and exit; `verb` makes it a command of its own, as in scripts/."""
    import sys

    from dynajax.cli.app import application
    from dynajax.cli.errors import run

    sys.exit(run(application(verb), sys.argv[1:]))

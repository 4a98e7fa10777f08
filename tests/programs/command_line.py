"""A training behind a command line of click or typer, which ends as the second argument says.

Arguments: "click", "typer", "exit" for none of them, or "click-returning" for `standalone_mode=False`; an exception.
"""

from __future__ import annotations

import sys

import click
import typer

from flyteplugins_tracking import get_run, tracking_init

HOW = {
    "Exit(0)": lambda: click.exceptions.Exit(0),
    "Exit(3)": lambda: click.exceptions.Exit(3),
    "UsageError": lambda: click.UsageError("made to fail"),
    "Abort": lambda: click.Abort(),
    "typer.Exit(0)": lambda: typer.Exit(0),
    "typer.Exit(3)": lambda: typer.Exit(3),
    "typer.BadParameter": lambda: typer.BadParameter("made to fail"),
    "typer.Abort": lambda: typer.Abort(),
    "True": lambda: SystemExit(True),
    "False": lambda: SystemExit(False),
}


@tracking_init(project="tests", id="cli")
def train() -> None:
    get_run().log({"x": 1})
    if sys.argv[1] == "exit":
        sys.exit(sys.argv[2] == "True")
    raise HOW[sys.argv[2]]()


def main() -> None:
    train()


if sys.argv[1] == "exit":
    main()
elif sys.argv[1] == "typer":
    app = typer.Typer()
    app.command()(main)
    app(args=[])
elif sys.argv[1] == "click":
    click.command()(main)(args=[])
else:
    sys.exit(click.command()(main)(args=[], standalone_mode=False))

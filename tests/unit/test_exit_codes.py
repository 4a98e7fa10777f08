"""The status of a process that ends with an exception, as its run has it."""

from __future__ import annotations

import subprocess

import click
import pytest
import rich_click
import typer

from flyteplugins_tracking._runs.exit_codes import exit_code_of


class OwnUsageError(click.UsageError):
    exit_code = 64


class OtherError(Exception):
    """Another package's, whose number click does not see."""

    exit_code = 3


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (click.exceptions.Exit(0), 0),
        (click.exceptions.Exit(3), 3),
        (click.UsageError("no such option"), 2),
        (click.Abort(), 1),
        (OwnUsageError("no"), 64),
        (typer.Exit(3), 3),
        (typer.BadParameter("too long"), 2),
        (rich_click.ClickException("cannot"), 1),
        (rich_click.UsageError("no"), 2),
        (OtherError(), 1),
        (subprocess.CalledProcessError(7, "false"), 1),
        (SystemExit(None), 0),
        (SystemExit(False), 0),
        (SystemExit(True), 1),
        (SystemExit(-1), 255),
        (SystemExit(2**32 + 3), 3),
        (SystemExit(2**70), 255),
        (SystemExit("text"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_a_run_has_the_status_of_the_process(error, code):
    assert exit_code_of(error) == code

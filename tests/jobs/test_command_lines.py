"""A run has the status with which a command line's framework ends the process."""

from __future__ import annotations

import pytest
from support import jobs

PROGRAM = jobs.PROGRAMS / "command_line.py"
CASES = [
    ("click", "Exit(3)", 3),
    ("typer", "typer.Exit(0)", 0),
    ("exit", "True", 1),
    ("exit", "False", 0),
]
MORE = [
    ("click", "Exit(0)", 0),
    ("click", "UsageError", 2),
    ("click", "Abort", 1),
    ("typer", "typer.Exit(3)", 3),
    ("typer", "typer.BadParameter", 2),
    ("typer", "typer.Abort", 1),
    ("click-returning", "Exit(0)", 0),
    ("click-returning", "Exit(3)", 3),
]


@pytest.mark.parametrize(
    ("framework", "how", "code"), [*CASES, *(pytest.param(*case, marks=pytest.mark.full) for case in MORE)]
)
def test_a_run_has_the_status_of_its_process(tmp_path, framework, how, code):
    done = jobs.python(tmp_path, PROGRAM, framework, how)
    assert done.returncode == code, done.output
    assert [run.exit_code for run in done.runs] == [code]
    assert "Traceback" not in done.output
    assert "TypeError" not in done.output  # of the client's own end

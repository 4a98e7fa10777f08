"""Every snippet of the README and of the page of trackers runs, and the demo shows what it says."""

from __future__ import annotations

import ast
import os
import re
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from typing import get_args

import pytest
from support import jobs

from flyteplugins_tracking.policy import RANK_SCOPES, RUN_MODES
from flyteplugins_tracking.trackers.base import Feature, find_tracker

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
TRACKERS = (ROOT / "docs" / "trackers.md").read_text()


def snippets(text: str) -> dict[str, str]:
    """The code of a page, by the names of files in its first lines."""
    blocks = re.findall(r"```python\n(.+?)```", text, re.DOTALL)
    return {code.splitlines()[0].removeprefix("# "): code for code in blocks}


SNIPPETS = snippets(README)
# What the rows of the table of trackers are about, in their order.
FEATURES = (
    "shared",
    "resume",
    "offline",
    "media",
    "system metrics",
    "sweeps",
    "config file",
    "allow_config",
    "download_logs",
)
# These set up this very environment, or run this very suite.
SET_UP = ("make ", "pip install ")


def test_every_python_snippet_has_a_file_name():
    assert list(SNIPPETS) == [
        "train.py",
        "workflow.py",
        "flyte2.py",
        "arguments.py",
        "secret.py",
        "stacked.py",
        "shared.py",
        "configured.py",
        "sweep.py",
        "info.py",
    ]


@pytest.mark.parametrize("name", SNIPPETS)
def test_python_snippets_run(tmp_path, name):
    (tmp_path / name).write_text(SNIPPETS[name])
    done = jobs.python(tmp_path, name)
    assert done.returncode == 0, done.output
    runs = {"train.py": 1, "workflow.py": 2, "flyte2.py": 1, "shared.py": 1, "configured.py": 2}.get(name, 0)
    assert [run.exit_code for run in done.runs] == [0] * runs
    # Those that only decorate have nothing at their end that would call.
    assert (
        isinstance(ast.parse(SNIPPETS[name]).body[-1], (ast.FunctionDef, ast.AsyncFunctionDef))
        or runs
        or name == "info.py"
    )


def test_console_snippets_run(tmp_path):
    commands = [
        line.partition("  #")[0].strip()
        for block in re.findall(r"```console\n(.+?)```", README, re.DOTALL)
        for line in block.splitlines()
    ]
    assert [command for command in commands if command.startswith(SET_UP)] == [
        "make demo",
        "make test",
        'pip install "flyteplugins-tracking[wandb]"',
    ]
    for name, code in SNIPPETS.items():
        (tmp_path / name).write_text(code)
    others = [command for command in commands if not command.startswith(SET_UP)]
    assert others
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    for command in others:
        done = jobs.run(command.split(), tmp_path, {"PATH": path})
        assert done.returncode == 0, done.output
    assert [(run.exit_code, len(run.rows)) for run in done.runs] == [(0, 10)]


def test_the_tables_have_every_mode_and_scope():
    for mode in RUN_MODES:
        for scope in RANK_SCOPES:
            assert f'| `"{mode}"` | `"{scope}"` | `{{base}}' in README


def test_the_table_of_trackers_says_what_each_refuses_and_why():
    table = [line.strip("| ").split(" | ") for line in TRACKERS.splitlines() if line.startswith("| ")]
    rows = table[1 : len(FEATURES) + 1]
    assert set(FEATURES) == set(get_args(Feature))
    for column, name in enumerate(("wandb", "pluto", "mlflow", "trackio"), start=1):
        lacks = find_tracker(name).lacks
        expected = ["no" if feature in lacks else "yes" for feature in FEATURES]
        assert [row[column] for row in rows] == expected, name
        assert all(reason in TRACKERS for reason in lacks.values()), name


def test_the_trackers_own_snippets_run(tmp_path):
    written = snippets(TRACKERS)
    assert list(written) == ["pluto_train.py", "mlflow_train.py", "trackio_train.py", "jsonl_tracker.py"]
    example = (ROOT / "examples" / "jsonl_tracker" / "jsonl_tracker.py").read_text()
    assert written["jsonl_tracker.py"].partition("\n")[2] == example
    for name, code in written.items():
        (tmp_path / name).write_text(code)
    code = f"import runpy; [runpy.run_path(name, run_name='__main__') for name in {list(written)}]"
    done = jobs.python(tmp_path, "-c", code, env={"TRACKIO_DIR": str(tmp_path)})
    assert done.returncode == 0, done.output
    with closing(sqlite3.connect(tmp_path / "llm.db")) as database:
        assert database.execute("SELECT COUNT(*) FROM metrics").fetchone() == (10,)


def test_the_demo_shows_the_stored_runs(tmp_path):
    env = {"PYTHONPATH": str(ROOT / "examples"), "WANDB_SILENT": "true"}
    done = jobs.python(tmp_path, ROOT / "examples" / "digits.py", "out", "1", env=env)
    assert done.returncode == 0, done.output
    table = done.output.partition("run  ")[2].splitlines()[1:6]
    assert [line.split()[1] for line in table] == ["finished"] * 5
    assert sorted(line.split()[2] for line in table) == ["0", "0", "1", "2", "3"]
    assert {line.split()[3] for line in table} == {"12"}
    assert (tmp_path / "out" / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_the_flyte_2_example_shows_one_run_of_a_task_and_its_children(tmp_path):
    done = jobs.python(tmp_path, ROOT / "examples" / "flyte2_children.py", "out")
    assert done.returncode == 0, done.output
    assert "best accuracy: 0.875" in done.output
    assert ": 6 rows of accuracy, epoch, loss, exit code 0" in done.output
    assert ": 1 rows of accuracy, epoch, exit code 0" in done.output


def test_without_a_key_the_demo_logs_offline_and_says_so_in_one_line(tmp_path):
    code = (
        "import os; del os.environ['WANDB_MODE']; from pathlib import Path; import digits; "
        "digits.log_offline_without_a_key(Path('out')); print(os.environ['WANDB_MODE'])"
    )
    done = jobs.python(tmp_path, "-c", code, env={"PYTHONPATH": str(ROOT / "examples")})
    assert "logging offline. To send it later: wandb sync out/wandb/offline-run-*\noffline" in done.output

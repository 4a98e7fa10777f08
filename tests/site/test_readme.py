"""The tables of the README and of the page of trackers are true, and the demo shows what it says."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import get_args

import pytest
from support import jobs
from support.terminal import Terminal

from flyteplugins_tracking._rank.plan import RANK_SCOPES, RUN_MODES
from flyteplugins_tracking.trackers.base import Feature
from flyteplugins_tracking.trackers.registry import find_tracker

ROOT = Path(__file__).parents[2]
MODES = (ROOT / "docs" / "guides" / "ranks.md").read_text()
TRACKERS = (ROOT / "docs" / "reference" / "trackers.md").read_text()
TABLES = (ROOT / "docs" / "about" / "matrix.md").read_text()


# What the rows of the table of trackers are about, in their order.
FEATURES = (
    "shared",
    "resume",
    "offline",
    "media",
    "system metrics",
    "sweeps",
    "config file",
    "download_logs",
)


def test_the_tables_have_every_mode_and_scope():
    for mode in RUN_MODES:
        for scope in RANK_SCOPES:
            assert f'| `"{mode}"` | `"{scope}"` | `{{base}}' in MODES


def test_the_table_of_trackers_says_what_each_refuses_and_why():
    table = [line.strip("| ").split(" | ") for line in TRACKERS.splitlines() if line.startswith("| ")]
    rows = table[1 : len(FEATURES) + 1]
    assert set(FEATURES) == set(get_args(Feature))
    for column, name in enumerate(("wandb", "pluto", "mlflow", "trackio"), start=1):
        unsupported = find_tracker(name).unsupported
        expected = ["no" if feature in unsupported else "yes" for feature in FEATURES]
        assert [row[column] for row in rows] == expected, name
        assert all(reason in TABLES for reason in unsupported.values()), name


@pytest.mark.parametrize(
    "cold", [pytest.param(False, marks=pytest.mark.full), pytest.param(True, marks=pytest.mark.wide)]
)
def test_the_demo_shows_the_stored_runs(tmp_path, cold):
    """It starts nine interpreters; if all of them are real, for two minutes."""
    env = {"PYTHONPATH": str(ROOT / "examples"), "WANDB_SILENT": "true"}
    command = [sys.executable, ROOT / "examples" / "digits.py", "out", "1"]
    # On a machine with other work, that takes minutes.
    done = jobs.finish(jobs.start(command, tmp_path, env, cold), tmp_path, timeout_s=540)
    assert done.returncode == 0, done.output
    table = done.output.partition("run  ")[2].splitlines()[1:6]
    assert [line.split()[1] for line in table] == ["finished"] * 5
    assert [line.split()[2] for line in table] == ["0", "0", "1", "2", "3"]
    assert {line.split()[3] for line in table} == {"12"}
    assert (tmp_path / "out" / "loss.png").read_bytes().startswith(b"\x89PNG")
    (command,) = re.findall(r"in W&B's terminal viewer: (.*)", done.output)
    with Terminal(command, tmp_path) as viewer:
        # It shows the newest: ranks that start in the same second have no order.
        any_id = "|".join(re.escape(line.split()[0]) for line in table)
        viewer.wait_for(re.escape("[5 items]"), "digits", f"ID: ({any_id})", "loss", "batch_size")


@pytest.mark.wide
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
    assert "logging offline. To send it later: flyteplugins-tracking send out/wandb\noffline" in done.output

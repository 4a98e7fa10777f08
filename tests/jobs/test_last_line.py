"""W&B's own last lines name the command that sends a local run, and its viewer shows the run."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from support import jobs
from support.terminal import Terminal

# Short: the viewer's list has room for 13 characters of it.
RUN_ID = f"v-{os.getpid()}"
DOWN, SPACE = b"\x1b[B", b" "
PROGRAMS = Path(sys.executable).parent


@pytest.mark.full
def test_wandbs_viewer_shows_the_rows_of_all_nodes(tmp_path):
    """Two nodes with one file system: the command names the directory with both nodes' rows, which the viewer shows."""
    tracking = {"project": "p", "id": RUN_ID, "run_mode": "shared"}
    command = [
        *jobs.torchrun("--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d"),
        f"--rdzv-endpoint=127.0.0.1:{jobs.free_port()}",
        *jobs.train(tracking=tracking, rows=7),
    ]
    nodes = [jobs.start(command, tmp_path, {"WANDB_SILENT": "false"}) for _ in range(2)]
    done = [jobs.finish(node, tmp_path) for node in nodes]
    assert [node.returncode for node in done] == [0, 0], done
    assert "".join(node.output for node in done).count(f"flyteplugins-tracking send {tmp_path / 'wandb'}\n") == 2
    view = f"wandb leet {tmp_path / 'wandb'}"
    assert_viewer_shows(f"{PROGRAMS}/{view}", tmp_path, re.escape("[2 items]"), f"ID: {RUN_ID}", "row", "attempt")


def test_wandbs_own_last_lines_name_the_command_that_knows_all_rows(tmp_path):
    """`wandb sync` does not know the rows that are kept beside W&B's file."""
    program = jobs.train(tracking={"project": "p", "id": RUN_ID}, rows=2)
    done = jobs.run([sys.executable, *program], tmp_path, {"WANDB_SILENT": "false"})
    (directory,) = (tmp_path / "wandb").glob("offline-run-*")
    assert "You can sync this run" in done.output
    assert "wandb sync" not in done.output
    assert done.output.count(f"flyteplugins-tracking send {directory}") == 1


def assert_viewer_shows(command: str, directory: Path, *patterns: str) -> None:
    """Open the viewer, and draw one run after the other: W&B's begins with the newest node's, or with none."""
    with Terminal(command, directory) as viewer:
        viewer.wait_for(*patterns, timeout_s=180, presses=(DOWN, SPACE))

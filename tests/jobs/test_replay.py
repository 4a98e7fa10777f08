"""`send --tracker`: a run that one tracker has kept goes to another one, row by row, once."""

from __future__ import annotations

import json
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import pytest
from support import jobs
from support.mlflow_server import MlflowServer
from support.wandb_server import WandbServer

ROWS = 12


@pytest.fixture
def offline(tmp_path) -> Path:
    """The directory of a run that W&B has logged offline."""
    done = jobs.python(tmp_path, *jobs.train(rows=ROWS, tracking={"id": "replayed", "project": "p"}))
    assert done.returncode == 0, done.output
    (run,) = done.runs
    assert len(run.rows) == ROWS
    return run.path.parent


def send(directory: Path, tracker: str, env: dict[str, str]) -> list[str]:
    """Send it twice."""
    command = [sys.executable, "-m", "flyteplugins_tracking", "send", str(directory), "--tracker", tracker]
    done = [jobs.run(command, directory, env) for _ in range(2)]
    assert [one.returncode for one in done] == [0, 0], done
    return [one.output for one in done]


def rows_of(directory: Path) -> list[dict]:
    (run,) = jobs.Done(0, "", directory.parent.parent).runs
    return run.rows


def logged(row: dict) -> dict:
    return {key: value for key, value in row.items() if not key.startswith("_")}


def test_a_run_of_wandb_goes_to_trackio(offline, tmp_path):
    pytest.importorskip("trackio")
    outputs = send(offline, "trackio", {"TRACKIO_DIR": str(tmp_path / "trackio")})
    assert f"sent {ROWS} rows of {offline} to trackio, as run replayed" in outputs[0]
    assert f"trackio has all {ROWS} rows of {offline}" in outputs[1]
    with closing(sqlite3.connect(tmp_path / "trackio" / "p.db")) as database:
        found = database.execute("SELECT run_id, step, metrics FROM metrics ORDER BY id").fetchall()
        ((config,),) = database.execute("SELECT config FROM configs").fetchall()
    wanted = [("replayed", row["_step"], logged(row)) for row in rows_of(offline)]
    assert [(run_id, step, json.loads(row)) for run_id, step, row in found] == wanted
    assert '"status": "finished"' in config


@pytest.mark.full
def test_a_run_of_wandb_goes_to_mlflow(offline, tmp_path):
    (tmp_path / "server").mkdir()
    with MlflowServer(tmp_path / "server") as server:
        send(offline, "mlflow", {"MLFLOW_TRACKING_URI": server.url})
        (run,) = server.runs("p")
    wanted = [
        (key, float(value), row["_step"], round(row["_timestamp"] * 1000))
        for row in rows_of(offline)
        for key, value in logged(row).items()
    ]
    assert sorted(run.rows) == sorted(wanted)
    assert (run.id, run.status) == ("replayed", "FINISHED")


@pytest.mark.full
def test_a_run_that_another_tracker_has_kept_goes_to_wandb(tmp_path):
    pytest.importorskip("trackio")
    (tmp_path / "a-file").touch()
    env = {"TRACKIO_DIR": str(tmp_path / "a-file" / "trackio")}
    tracking = {"tracker": "trackio", "id": "kept", "project": "p", "if_unavailable": "degrade"}
    done = jobs.run([sys.executable, *jobs.train(rows=ROWS, tracking=tracking)], tmp_path, env)
    assert done.returncode == 0, done.output
    with WandbServer() as server:
        send(tmp_path / "tracking-offline" / "trackio-kept", "wandb", server.environment)
        run = server.run("kept")
    assert [row["_step"] for row in run.rows] == list(range(ROWS))
    assert (run.state, run.rows_overwritten, len(run.exit_codes)) == ("finished", 0, 1)

"""A run that cannot be opened: an outage, a refusal, and an exception of the user's own that comes meanwhile."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support import backends, jobs
from support.loopback import Fault
from support.waiting import wait_for_file
from support.wandb_server import WandbServer

PROGRAM = jobs.PROGRAMS / "unavailable.py"


@pytest.fixture(
    params=["wandb", *(pytest.param(name, marks=pytest.mark.wide) for name in ("mlflow", "pluto", "trackio"))]
)
def service(request, tmp_path):
    pytest.importorskip({"pluto": "wandb"}.get(request.param, request.param))
    if request.param == "pluto" and not (Path(sys.prefix) / "pluto").exists():
        pytest.skip("pluto-ml is not installed: make pluto")
    with backends.BACKENDS[request.param](tmp_path) as backend:
        yield backend


def opened(service: Any, directory: Path, fault: Fault | None, **settings: Any) -> jobs.Done:
    """The program, at a service that fails in this way at every request; with None, at one that does not."""
    tracking = {"tracker": service.name, "init_timeout_s": 60 if fault is None else 10}
    with away(service, fault) as addresses:
        command = [sys.executable, PROGRAM, json.dumps({"tracking": tracking, **settings})]
        return jobs.run(command, directory, addresses)


@contextlib.contextmanager
def away(service: Any, fault: Fault | None) -> Iterator[dict[str, str]]:
    """The variables of a job whose service fails in this way."""
    with contextlib.ExitStack() as failing:
        addresses: dict[str, str] = {}
        if fault is not None and service.name in ("mlflow", "trackio"):  # whose servers have no faults
            server = failing.enter_context(WandbServer())
            failing.enter_context(server.failing(fault))
            token = {"TRACKIO_WRITE_TOKEN": "a-token-of-a-test"}
            addresses = {"MLFLOW_TRACKING_URI": server.url, "TRACKIO_SERVER_URL": server.url, **token}
        elif fault is not None:
            failing.enter_context(service._server.failing(fault))
        yield {**service.environment(), **addresses}


def test_a_refusal_is_an_error_by_default(service, tmp_path):
    done = opened(service, tmp_path, Fault.status(403))
    assert done.returncode == 1, done.output
    assert "BODY" not in done.output
    assert "TrackerUnavailableError" in done.output
    assert "degrade" not in done.output  # it would not help
    assert service.name != "wandb" or re.search("TrackerUnavailableError: .*returned error 403", done.output)


@pytest.mark.crossed
@pytest.mark.parametrize(
    "fault",
    [Fault.status(503), pytest.param(Fault.mute(), marks=pytest.mark.wide)],
    ids=lambda fault: f"{fault.kind} {fault.code}",
)
def test_the_rows_of_an_outage_are_sent_by_the_next_attempt(service, tmp_path, fault):
    away = opened(service, tmp_path, fault)
    assert away.returncode == 0, away.output
    assert away.output.count("BODY True") == 1
    (directory,) = set(re.findall(r"This run is logged (?:to files|offline,) in (\S+?)\. ", away.output))
    assert "The next attempt that finds" in away.output
    assert re.search(rf"flyteplugins-tracking send .*{re.escape(directory)}", away.output)
    assert service.runs("tests") == []
    back = opened(service, tmp_path, None)
    assert back.returncode == 0, back.output
    assert rows_of(service) == 2, back.output


def rows_of(service: Any) -> int:
    """How many rows of the program its one run has at the service."""
    if service.name == "trackio":
        with closing(sqlite3.connect(service.directory / "tests.db")) as database:
            rows: list[Any] = [json.loads(row) for (row,) in database.execute("SELECT metrics FROM metrics")]
    else:
        (run,) = service._server.runs("tests") if service.name == "mlflow" else service._server.runs
        rows = run.rows
    return len([row for row in rows if "x" in row])


def failure_shown(service: Any) -> set[str]:
    """The keys of a failure that the run has at its service."""
    if service.name == "wandb":
        (run,) = service._server.runs
        return {key for key in run.summary if key.startswith("failure/")}
    if service.name == "mlflow":
        (stored,) = service._server.runs("tests")
        return {key for key in stored.tags if key.startswith("failure/")}
    (kept,) = service.runs("tests")
    return {key for key, value in kept.config.items() if key.startswith("failure/") and value is not None}


@pytest.mark.full
@pytest.mark.crossed
@pytest.mark.parametrize("away", ["never", "second"])
def test_an_attempt_that_succeeds_shows_no_failure_of_an_earlier_one(service, tmp_path, away):
    """Also if the service has been away at one of them: the rows of that one are sent later."""
    fault = Fault.status(503)
    failed = opened(service, tmp_path, None, fails=True)
    assert failed.returncode == 1, failed.output
    assert {"failure/type", "failure/message"} <= failure_shown(service)
    done = opened(service, tmp_path, fault if away == "second" else None)
    assert done.returncode == 0, done.output
    if away == "second":
        said = re.findall(r"(?:is available, run|answers): flyteplugins-tracking (.+)$", done.output, re.MULTILINE)
        command = [sys.executable, "-m", "flyteplugins_tracking", *shlex.split(said[0])]
        sent = jobs.run(command, tmp_path, service.environment())
        assert sent.returncode == 0, sent.output
    (run,) = service.runs("tests")
    assert run.status == "finished"
    assert failure_shown(service) == set()


ARTIFACT = """
import pathlib, time, wandb
from flyteplugins_tracking import get_run, tracking_init

@tracking_init(project="p", id="art")
def train():
    get_run().log({"x": 1})
    pathlib.Path("is-open").touch()
    while not pathlib.Path("is-away").exists():
        time.sleep(0.05)
    pathlib.Path("model.txt").write_text("weights")
    artifact = wandb.Artifact("model", type="model")
    artifact.add_file("model.txt")
    get_run().log_artifact(artifact)  # the first one: W&B's client asks whose key it is
    get_run().log({"x": 2})
    pathlib.Path("is-logged").touch()

train()
"""


@pytest.mark.full
def test_the_first_artifact_of_a_run_may_be_logged_in_an_outage(tmp_path):
    with WandbServer() as server:
        process = jobs.start([sys.executable, "-c", ARTIFACT], tmp_path, server.environment)
        wait_for_file(tmp_path / "is-open", process)
        with server.failing(Fault.status(503)):
            (tmp_path / "is-away").touch()
            wait_for_file(tmp_path / "is-logged", process)
        done = jobs.finish(process, tmp_path)
        assert done.returncode == 0, done.output
        run = server.run("art")
        assert (run.state, [row["x"] for row in run.rows]) == ("finished", [1, 2])
        assert [(one.committed, one.contents["model.txt"]) for one in run.versions.values()] == [(True, b"weights")]


KEY_REFUSED = """
import os, wandb
from flyteplugins_tracking.trackers.wandb import vendor

vendor.tolerate_outages()
wandb.Api(api_key=os.environ["WANDB_API_KEY"])
"""


@pytest.mark.full
def test_a_key_that_is_refused_is_told_where_an_outage_is_not(tmp_path):
    with WandbServer() as server:
        env = {**server.environment, "WANDB_API_KEY": "b" * 40}
        done = jobs.run([sys.executable, "-c", KEY_REFUSED], tmp_path, env)
    assert done.returncode == 1
    assert "AuthenticationError" in done.output

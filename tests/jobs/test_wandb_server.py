"""The recording W&B server is as strict as the service, and fails on command: shown with the real client."""

from __future__ import annotations

import base64
import json
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from support import jobs
from support.wandb_server import WandbServer

pytest.importorskip("wandb", reason='wandb is not installed: pip install "flyteplugins-tracking[wandb]"')
pytestmark = pytest.mark.full

QUICK = {  # whole seconds, or wandb takes its own: 15 s between transmissions, 2-60 s between retries
    "WANDB__FILE_STREAM_TRANSMIT_INTERVAL": "1",
    "WANDB__FILE_STREAM_RETRY_WAIT_MIN_SECONDS": "1",
    "WANDB__FILE_STREAM_RETRY_WAIT_MAX_SECONDS": "1",
    "WANDB_ERROR_REPORTING": "false",  # its telemetry, which waits for a failing server at exit
}


@pytest.fixture
def server():
    with WandbServer() as server:
        yield server


def start(server: WandbServer, directory: Path, *arguments: str, **env: str) -> jobs.Process:
    """Start a function of `wandb_clients.py`."""
    command = [sys.executable, jobs.PROGRAMS / "wandb_clients.py", *arguments]
    return jobs.start(command, directory, {**server.environment, **QUICK, **env})


def train(server: WandbServer, directory: Path, *arguments: str, **env: str) -> jobs.Done:
    return jobs.finish(start(server, directory, *arguments, **env), directory)


def post(server: WandbServer, path: str, body: object, **headers: str) -> int:
    """The status of a request as the client would send it."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    authorization = "Basic " + base64.b64encode(f"api:{server.key}".encode()).decode()
    request = urllib.request.Request(server.url + path, data, {"Authorization": authorization, **headers})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def upsert(server: WandbServer, **variables: object) -> int:
    query = {"operationName": "UpsertBucket", "query": "mutation UpsertBucket { upsertBucket }"}
    return post(server, "/graphql", {**query, "variables": {"name": "r", "project": "p", **variables}})


def values(run) -> list[int]:
    return [row["x"] for row in run.rows]


@pytest.mark.parametrize(
    ("counts_on_upsert", "kept", "overwritten"),
    [(False, [20, 21, 22], 3), (True, [10, 11, 12, 20, 21, 22], 0)],
)
def test_a_run_that_is_not_resumed_is_overwritten_unless_it_was_counted(tmp_path, counts_on_upsert, kept, overwritten):
    with WandbServer(counts_on_upsert=counts_on_upsert) as server:
        for attempt in ("1", "2"):
            train(server, tmp_path, "attempt", attempt)
    run = server.run("r")
    assert values(run) == kept
    assert (run.state, run.exit_codes, run.rows_overwritten) == ("failed", [1, 2], overwritten)


def test_shared_writers_keep_their_rows_apart_and_one_that_is_not_shared_is_noticed(server, tmp_path):
    writers = [start(server, tmp_path, "shared_writer", writer) for writer in ("1", "2")]
    for writer in writers:
        assert jobs.finish(writer, tmp_path).returncode == 0
    run = server.run("r")
    assert sorted(values(run)) == [*range(100, 150), *range(200, 250)]
    assert (len(run.clients), len(run.senders), run.exit_codes, run.mixed_writers) == (2, 2, [0], False)
    train(server, tmp_path, "shared_writer", "0")
    assert run.mixed_writers


def test_an_unknown_sweep_has_no_agent_and_one_without_a_method_is_refused(server, tmp_path):
    done = train(server, tmp_path, "wrong_sweeps")
    assert "REFUSED could not find sweep e/p/nobody during createAgent" in done.output
    assert "REFUSED Invalid sweep config" in done.output
    assert server.sweeps == []


def test_recorded_values_are_read_back(server, tmp_path):
    done = train(server, tmp_path, "reads_back")
    assert done.returncode == 0, done.output
    (sweep,), trials = server.sweeps, server.runs[:2]
    assert json.loads((tmp_path / "read.json").read_text()) == {
        "run": ["r", "finished", "g", {"a": {"b": 1}}, 29, 29],
        "history": list(range(30)),
        "sampled": 10,
        "keys": [{"_step": 5, "z": -5}],
        "scanned": list(range(30)),
        "file": 4,
        "pattern": ["a note.txt"],
        "sweep": [sweep.id, "RUNNING", 2, 2],
        "trials": [[trials[0].id, 1, sweep.id], [trials[1].id, 2, sweep.id]],
        "group": ["r"],
        "pages": ["r", trials[1].id, trials[0].id],
    }
    run = server.run("r")
    assert {path.name: path.read_bytes() for path in (tmp_path / "read").iterdir()} == run.files
    assert run.files["a note.txt"] == b"kept"
    assert server.unknown_operations == []


def test_reading_a_missing_run_is_an_error(server, tmp_path):
    upsert(server, entity="e")
    done = train(server, tmp_path, "reads_nothing")
    assert "CommError Could not find run <Run e/p/nobody (not found)>" in done.output
    assert "CommError Could not find run <Run e/none/r (not found)>" in done.output
    assert "CommError Could not find sweep <Sweep e/p/nobody" in done.output
    assert "ValueError Could not find project none" in done.output
    assert "STATUS 404 401" in done.output
    assert "FOUND" not in done.output

"""The recording W&B server is as strict as the service, and fails on command: shown with the real client."""

from __future__ import annotations

import base64
import gzip
import json
import signal
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from support import jobs
from support.loopback import Fault
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


def test_a_run_is_recorded_with_all_that_belongs_to_it(server, tmp_path):
    done = train(server, tmp_path, "everything")
    assert done.returncode == 0, done.output
    run = server.run("i")
    assert (run.entity, run.project, run.group, run.name) == ("e", "p", "g", "n")
    assert (run.tags, run.notes, run.job_type, run.config) == (["t"], "no", "j", {"a": {"b": 1}, "late": 2})
    assert [(row["_step"], row.get("x")) for row in run.rows] == [(0, 1), (1, 3), (2, 2), (3, None)]
    assert run.summary["x"] == {"max": 3}
    assert (run.state, run.exit_codes) == ("finished", [0])
    assert any("on the console" in line for line in run.log)
    assert "model-of-i" in run.artifacts
    assert any(name.endswith(".table.json") for name in run.files)
    assert (len(run.senders), run.open_connections, run.clients, run.mixed_writers) == (1, 0, frozenset(), False)
    assert server.unknown_operations == []


def test_a_resumed_run_continues(server, tmp_path):
    for attempt in ("1", "0"):
        done = train(server, tmp_path, "attempt", attempt, "allow")
        assert done.returncode == int(attempt), done.output
    run = server.run("r")
    assert [(row["_step"], row["x"]) for row in run.rows] == [(0, 10), (1, 11), (2, 12), (3, 0), (4, 1), (5, 2)]
    assert (run.state, run.exit_codes, run.config) == ("finished", [1, 0], {"1": 1, "0": 1})
    assert (run.rows_overwritten, run.rows_after_completion) == (0, 0)


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


def test_a_run_that_does_not_exist_cannot_be_resumed(server, tmp_path):
    done = train(server, tmp_path, "attempt", "0", "must")
    assert "does not exist" in done.output
    assert server.runs == []


def test_shared_writers_keep_their_rows_apart_and_one_that_is_not_shared_is_noticed(server, tmp_path):
    writers = [start(server, tmp_path, "shared_writer", writer) for writer in ("1", "2")]
    for writer in writers:
        assert jobs.finish(writer, tmp_path).returncode == 0
    run = server.run("r")
    assert sorted(values(run)) == [*range(100, 150), *range(200, 250)]
    assert (len(run.clients), len(run.senders), run.exit_codes, run.mixed_writers) == (2, 2, [0], False)
    train(server, tmp_path, "shared_writer", "0")
    assert run.mixed_writers


def test_a_wrong_key_is_refused_at_once(server, tmp_path):
    """Not tried again and again, until wandb gives up."""
    done = train(server, tmp_path, "opens_only", WANDB_API_KEY="0" * 40)
    assert "user is not logged in" in done.output
    assert server.runs == []


def wait_for_more(directory: Path, rows: int = 50) -> None:
    """Wait until the client has logged so many more rows."""

    def logged() -> int:
        path = Path(directory, "logged")
        return int(path.read_text() or 0) if path.exists() else 0

    before = logged()
    while logged() < before + rows:
        time.sleep(0.02)


@pytest.mark.parametrize(
    "fault",
    [
        Fault.refuse(),
        pytest.param(Fault.mute(), marks=pytest.mark.full),
        pytest.param(Fault.slow(0.3), marks=pytest.mark.full),
        pytest.param(Fault.status(500), marks=pytest.mark.full),
        pytest.param(Fault.status(429, retry_after_s=0.5), marks=pytest.mark.full),
        pytest.param(Fault.status(503, only="filestream"), marks=pytest.mark.full),
    ],
    ids=lambda fault: f"{fault.kind} {fault.code or ''}",
)
def test_no_row_is_lost_in_a_fault_that_passes(server, tmp_path, fault):
    process = start(server, tmp_path, "until_stopped")
    server.wait_for(lambda: server.run("r").rows)
    run = server.run("r")
    with server.failing(fault):
        server.wait_for(lambda: fault.hits)
        wait_for_more(tmp_path)
    seen = len(run.rows)
    server.wait_for(lambda: len(run.rows) > seen, 120)
    (tmp_path / "stop").touch()
    done = jobs.finish(process, tmp_path)
    logged = int(done.output.split("LOGGED")[1])
    assert values(run) == list(range(logged))
    assert (run.state, run.exit_codes, run.rows_overwritten) == ("finished", [0], 0)
    assert run.connections == (2 if fault.kind == "refuse" else 1)


def test_the_client_gives_up_at_a_400_and_the_run_stays_open(server, tmp_path):
    process = start(server, tmp_path, "until_stopped")
    server.wait_for(lambda: server.run("r").rows)
    with server.failing(Fault.status(400, only="filestream")) as fault:
        server.wait_for(lambda: fault.hits)
    (tmp_path / "stop").touch()
    done = jobs.finish(process, tmp_path)
    run = server.run("r")
    assert done.returncode == 0
    assert (run.state, run.exit_codes) == ("running", [])
    assert len(run.rows) < int(done.output.split("LOGGED")[1])


def test_a_killed_process_leaves_its_run_open(server, tmp_path):
    process = start(server, tmp_path, "until_stopped")
    server.wait_for(lambda: server.run("r").rows)
    process.send_signal(signal.SIGKILL)
    jobs.finish(process, tmp_path)
    run = server.run("r")
    server.wait_for(lambda: run.open_connections == 0)
    assert (run.state, run.exit_codes) == ("running", [])


@pytest.mark.parametrize(
    ("exit_code", "state"), [pytest.param(0, "finished", marks=pytest.mark.full), (143, "preempted")]
)
def test_a_preempting_run_ends_in_the_state_of_its_exit_code(server, tmp_path, exit_code, state):
    process = start(server, tmp_path, "preempted", str(exit_code))
    server.wait_for(lambda: server.run("r").state == "preempting")
    (tmp_path / "stop").touch()
    jobs.finish(process, tmp_path)
    assert (server.run("r").state, server.run("r").exit_codes) == (state, [exit_code])


def test_many_rows_arrive_in_order_also_compressed(server, tmp_path, monkeypatch):
    compressed = []
    decompress = gzip.decompress
    monkeypatch.setattr(gzip, "decompress", lambda data: compressed.append(data) or decompress(data))
    done = train(server, tmp_path, "compressed")
    assert done.returncode == 0, done.output
    assert values(server.run("r")) == list(range(20_000))
    assert compressed


def test_an_agent_runs_the_trials_of_a_sweep_until_the_grid_is_done(server, tmp_path):
    done = train(server, tmp_path, "agents")
    assert done.returncode == 0, done.output
    (sweep,) = server.sweeps
    assert (sweep.entity, sweep.project, sweep.state, sweep.agents) == ("e", "p", "FINISHED", 2)
    assert (sweep.config["method"], sweep.config["parameters"]["x"]) == ("grid", {"values": [1, 2, 4]})
    assert f"Create sweep with ID: {sweep.id}" in done.output
    assert f"REFUSED Sweep e/p/{sweep.id} is not running" in done.output
    assert [run.id for run in server.runs] == sweep.run_ids
    assert [run.sweep for run in server.runs] == [sweep.id] * 3
    assert [(run.config["x"], run.config["y"], run.config["c"]) for run in server.runs] == [
        (1, 3, 7),
        (2, 3, 7),
        (4, 3, 7),
    ]
    assert [run.config["lr"] for run in server.runs] == [0.5, 0.75, pytest.approx(5 / 6)]
    assert [(run.config["own"], run.summary["product"]) for run in server.runs] == [(True, 3), (True, 6), (True, 12)]
    assert [(run.state, run.exit_codes) for run in server.runs] == [("finished", [0])] * 3
    assert server.unknown_operations == []


def test_a_trial_that_raises_fails_its_run_and_the_sweep_goes_on(server, tmp_path):
    done = train(server, tmp_path, "failing_trial")
    assert done.returncode == 0, done.output
    assert [(run.config["x"], run.state) for run in server.runs] == [(1, "failed"), (2, "finished")]
    assert server.sweeps[0].state == "RUNNING"


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

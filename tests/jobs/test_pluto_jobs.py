"""Jobs with Pluto, beyond what all trackers have in common: the real client, a server as strict as the service."""

from __future__ import annotations

import inspect
import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import jobs
from support.backends import pluto_environment
from support.kills import kill_with_children, logged
from support.loopback import Fault
from support.pluto_server import KEY, PlutoServer, RecordedRun
from support.waiting import wait_for_file, wait_until

from flyteplugins_tracking.trackers.journal import Journal, encode
from flyteplugins_tracking.trackers.pluto import INIT_ARGUMENTS
from flyteplugins_tracking.trackers.pluto.vendor import Queue

SCRIPT = jobs.PROGRAMS / "pluto_runs.py"

JOB_NAME = "konduktor-job-1a2b"

RANKS = 2


def facts(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in directory.glob("facts-*") for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> Iterator[tuple[PlutoServer, jobs.Done, dict[int, dict[str, Any]]]]:
    """A shared run in a pod of konduktor's, whose service registers no key before all rows are logged."""
    directory = tmp_path_factory.mktemp("ranks")
    (directory / "key").write_text(KEY)
    with PlutoServer() as server:
        server.fault = Fault.mute(only="names")
        env = {**pluto_environment(server), "PLUTO_RUN_ID": JOB_NAME, "KONDUKTOR_JOB_NAME": JOB_NAME}
        del env["PLUTO_API_KEY"]
        command = [*jobs.torchrun("--standalone", f"--nproc-per-node={RANKS}"), str(SCRIPT), "ranks"]
        job = jobs.start(command, directory, env)
        for rank in range(RANKS):
            wait_for_file(directory / f"logged-{rank}", job)
        server.fault = None
        done = jobs.finish(job, directory)
        assert done.returncode == 0, done.output
        yield server, done, {told["rank"]: told for told in facts(directory)}


def test_the_run_is_the_vendors_and_konduktors_jobs(ranks):
    server, _, told = ranks
    run = server.run(JOB_NAME)
    for rank in range(RANKS):
        assert told[rank]["vendors"] == "pluto.op.Op"
        assert (told[rank]["id"], told[rank]["run_id"], told[rank]["resumed"]) == (run.number, JOB_NAME, rank != 0)
    assert "konduktor" in run.tags


def test_only_the_primary_sends_the_config_the_name_the_tags_and_the_status(ranks):
    server, _, _ = ranks
    run = server.run(JOB_NAME)
    assert [create["name"] for create in run.creates] == ["named", JOB_NAME]
    assert [sorted(create["config"]) for create in run.creates] == [
        ["long", "lr", "tracking_init"],
        [],
    ]
    assert ("tag" in run.creates[0]["tags"], "tag" in run.creates[1]["tags"]) == (True, False)
    assert (run.notes, run.statuses, run.status, run.late) == ("a note", ["COMPLETED"], "COMPLETED", 0)
    assert run.metadata["process"]


def test_a_new_key_is_registered_and_does_not_hold_up_its_row(ranks):
    server, _, _ = ranks  # where all rows were logged before the first key was registered
    names = server.run(JOB_NAME).names
    assert {f"rank{rank}/new{number}" for rank in range(RANKS) for number in range(20)} <= names["METRIC"]
    assert names["DATA"] == {"phase"}


def test_ranks_that_log_the_same_key_without_a_step_keep_all_their_values(ranks):
    server, _, _ = ranks
    values = [point.value for point in server.run(JOB_NAME).charted["loss"].values()]
    assert sorted(values) == sorted([*range(20)] * RANKS)


def test_values_that_the_service_would_drop_warn_once_for_each_key(ranks):
    server, done, _ = ranks
    run = server.run(JOB_NAME)
    for key in ("none", "dict", "list", "ä", "step=-1"):
        told = [line for line in done.output.splitlines() if re.search(rf"Pluto: '{key}': ", line)]
        assert len(told) == 1, (key, told)
    assert {key: run.charted[key][10_000].value for key in ("truth", "list", "large")} == {
        "truth": 1,
        "list": 2,
        "large": 1e30,
    }
    assert not {"none", "dict"} & run.charted.keys()
    assert [line["data"] for line in run.data] == ["warmup"] * 2
    assert run.duplicates == 0


def test_the_key_is_in_no_command_line_and_no_file(ranks):
    _, done, told = ranks
    assert [told[rank]["has_key"] for rank in range(RANKS)] == [False] * RANKS
    assert not any(told[rank]["has_uploader"] for rank in range(RANKS))
    assert KEY not in done.output
    written = [path for path in done.directory.rglob("*") if path.is_file() and path.name != "key"]
    assert not [path for path in written if KEY.encode() in path.read_bytes()]
    assert not list(done.directory.glob(".pluto*"))  # all is sent


def test_one_rank_of_the_node_sends_its_metrics_and_each_its_console(ranks):
    server, done, _ = ranks
    run = server.run(JOB_NAME)
    assert (
        len([line for line in run.lines if line["step"] == 1 and any(k.startswith("sys/") for k in line["data"])]) == 1
    )
    assert any(name.startswith("sys/") for name in run.names["METRIC"])
    said = {line["message"] for line in run.logs}
    assert {f"[rank{rank}] said by rank {rank}" for rank in range(RANKS)} <= said
    assert all(f"said by rank {rank}" in done.output for rank in range(RANKS))


def test_a_forked_child_has_no_run_and_writes_nothing(ranks):
    server, _, told = ranks
    assert [told[rank]["in_children"] for rank in range(RANKS)] == [["None"] * 4] * RANKS
    assert "of_the_child" not in server.run(JOB_NAME).charted


@pytest.fixture(scope="module")
def singles(tmp_path_factory) -> Iterator[tuple[PlutoServer, jobs.Done, dict[str, dict[str, Any]]]]:
    directory = tmp_path_factory.mktemp("singles")
    with PlutoServer() as server:
        done = jobs.python(directory, SCRIPT, "singles", env=pluto_environment(server))
        assert done.returncode == 0, done.output
        yield server, done, {told["what"]: told for told in facts(directory)}


@pytest.mark.full
def test_noop_needs_no_server(singles):
    server, _, told = singles
    assert "error" not in told["noop"], told
    assert told["noop"]["id"] not in [run.id for run in server.runs]


@pytest.mark.full
def test_a_run_that_exists_keeps_its_name_and_goes_on(singles):
    server, _, told = singles
    assert told["named again"]["id"] == "again"
    assert (server.run("again").name, len(server.run("again").creates)) == ("first", 2)
    assert [point.value for point in server.run("again").charted["x"].values()] == [1, 1]  # at steps 1 and 2


@pytest.mark.full
def test_ids_of_the_variables(singles):
    server, _, told = singles
    assert told["MLOP_RUN_ID=theirs"]["id"] == "theirs"
    for given in ("PLUTO_RUN_ID=42", "MLOP_RUN_ID=ABC-1"):
        assert told[given]["error"] == "ConfigError"
        assert given.partition("=")[0] in told[given]["text"]
    assert {"42", "ABC-1"}.isdisjoint(run.id for run in server.runs)


@pytest.mark.full
def test_a_key_that_is_wrong_or_missing_is_named(singles):
    _, done, told = singles
    assert (told["wrong key"]["error"], told["no key"]["error"]) == ("TrackerUnavailableError",) * 2
    assert "the service refuses the API key" in told["wrong key"]["text"]
    assert "PLUTO_API_KEY" in told["no key"]["text"]
    assert "plt_s_wrong" not in done.output + told["wrong key"]["text"]


@pytest.mark.full
def test_the_status_is_the_truth(singles):
    server, _, _ = singles
    assert server.run("KeyboardInterrupt").statuses == ["TERMINATED"]
    assert server.run("SystemExit").statuses == ["FAILED"]
    assert server.run("told").statuses == ["FAILED"]  # by the function's first finish()


@pytest.mark.full
def test_an_inner_init_joins_the_run_and_describes_it(singles):
    server, done, told = singles
    run = server.run("inner")
    assert (told["inner"]["joined"], run.statuses, sorted(run.tags)) == (True, ["COMPLETED"], ["a", "own"])
    assert [row["x"] for row in run.rows if "x" in row] == [1, 2]
    config = {key: run.config.get(key) for key in ("lr", "path", "depth")}
    assert config == {"lr": 0.1, "path": "/data", "depth": 2}
    assert [other.name for other in server.runs if other.name in ("given", "child")] == []
    assert done.output.count("Without effect: config['lr'], project='elsewhere', name='given'. Pass these to") == 1


@pytest.fixture(scope="module")
def mute(tmp_path_factory) -> Iterator[tuple[PlutoServer, jobs.Done, dict[str, dict[str, Any]]]]:
    """A service that does not answer, at the start and at the end, and that is away in between."""
    directory = tmp_path_factory.mktemp("mute")
    with PlutoServer() as server:
        server.fault = Fault.mute(only="create")
        process = jobs.start([sys.executable, SCRIPT, "mute"], directory, pluto_environment(server))
        wait_for_file(directory / "started", process)
        server.fault = None
        server.wait_for(lambda: server.run("never").statuses)
        (directory / "serves").touch()
        wait_for_file(directory / "logged", process)
        server.wait_for(lambda: len(server.run("kept").charted["x"]) == 50 if server.run("kept").lines else False)
        with server.failing(Fault.refuse()):
            (directory / "refuses").touch()
            wait_for_file(directory / "logged-in-outage", process)
            time.sleep(1)
        server.wait_for(lambda: len(server.run("kept").charted["x"]) == 100)
        server.fault = Fault.mute()
        muted = time.time()
        (directory / "mute").touch()
        done = jobs.finish(process, directory)
        assert done.returncode == 0, done.output
        told = {told["what"]: told for told in facts(directory)}
        told["end"]["took"] = told["end"]["ended"] - muted
        yield server, done, told


@pytest.mark.full
def test_a_mute_service_raises_within_the_deadline_and_leaves_no_run_open(mute):
    server, _, told = mute
    assert told["start"]["error"] == "TrackerUnavailableError"
    assert "init_timeout_s=2" in told["start"]["text"]
    assert told["start"]["seconds"] < 2 * jobs.TIME_SCALE
    assert (server.run("never").lines, server.run("never").statuses) == ([], ["FAILED"])


@pytest.mark.full
def test_an_outage_holds_up_no_step(mute):
    _, _, told = mute  # where 50 rows were logged while the service was away
    assert told["end"]["slowest"] < 0.2 * jobs.TIME_SCALE


@pytest.mark.full
def test_rows_that_a_mute_service_has_not_taken_are_kept_and_can_be_sent(mute):
    server, done, told = mute
    assert told["end"]["took"] < 3 * jobs.TIME_SCALE  # kill_after_s=6
    assert server.run("kept").statuses == []
    found = re.finditer(r"when it answers: flyteplugins-tracking (.+)$", done.output, re.M)
    (arguments,) = {match[1] for match in found}
    server.fault = None
    command = [sys.executable, "-m", "flyteplugins_tracking", *shlex.split(arguments)]
    sent = jobs.run(command, done.directory, pluto_environment(server))
    assert sent.returncode == 0, sent.output
    run = server.run("kept")
    assert sorted(point.value for point in run.charted["x"].values()) == list(range(150))
    assert (run.status, run.statuses, run.config["lr"], run.duplicates) == ("COMPLETED", ["COMPLETED"], 0.1, 0)
    assert "new14" in run.names["METRIC"]


TRAINING = [sys.executable, jobs.PROGRAMS / "killed_training.py", "pluto", "p"]


def assert_each_once(run: RecordedRun, logged_rows: list[int]) -> None:
    """Assert that charts have each row that was logged, once and at a step of its own."""
    rows = [(line["step"], int(line["data"]["rank0"])) for line in run.lines if "rank0" in line["data"]]
    values = [value for _, value in rows]
    assert set(logged_rows) <= set(values)
    assert len(values) == len(set(values))
    assert len({step for step, _ in rows}) == len(rows)
    assert [value for _, value in sorted(rows)] == sorted(values)  # an attempt's number is part of its values


def start_and_kill(directory: Path, server: PlutoServer, rows: int) -> None:
    """Start a job whose run exists and whose rows the service does not take, and kill its rank and its uploader."""
    process = jobs.start(TRAINING, directory, pluto_environment(server))
    wait_until(lambda: len(logged(directory)) >= rows, process)
    kill_with_children(process.pid)
    process.wait()


@pytest.mark.sampled_full(1)
@pytest.mark.full
@pytest.mark.parametrize("how", ["next attempt", pytest.param("send", marks=pytest.mark.full)])
def test_rows_of_a_killed_rank_and_uploader_arrive_once(tmp_path, how):
    with PlutoServer() as server:
        with server.failing(Fault.status(503, only="ingest")):
            start_and_kill(tmp_path, server, 50)
            start_and_kill(tmp_path, server, 100)
        (tmp_path / "stop").touch()
        if how == "send":
            (tmp_path / "moved").mkdir()
            for path in (tmp_path / "tracking-offline").iterdir():  # to another machine, say
                path.rename(tmp_path / "moved" / path.name)
            command = [sys.executable, "-m", "flyteplugins_tracking", "send", *sorted((tmp_path / "moved").iterdir())]
        else:
            command = TRAINING
        done = jobs.run(command, tmp_path, pluto_environment(server))
        assert done.returncode == 0, done.output
        run = server.run("killed")
        assert_each_once(run, logged(tmp_path))
        if how == "send":
            assert run.statuses == ["FAILED"]
            again = jobs.run(command, tmp_path, pluto_environment(server))
            assert "has nothing that is not sent yet" in again.output
        else:
            assert re.search(r"Pluto: run killed: sent \d+ rows again that an earlier attempt had logged", done.output)
            assert run.statuses == ["COMPLETED"]
    assert run.duplicates == 0
    assert not (tmp_path / ".pluto").exists()


@pytest.mark.full
def test_a_proxy_that_only_the_data_names_gets_no_key(tmp_path):
    with PlutoServer() as server, PlutoServer() as proxy:
        header = {"tracker": "pluto", "id": "kept", "group": None, "primary": True, "attempt": 0, "run_metadata": {}}
        arguments = {"project": "p", "settings": {"http_proxy": proxy.url, "x_log_level": 10}}
        journal = Journal(tmp_path / "kept", "0000-1-0-rank-0-a", {**header, "arguments": arguments})
        journal.add(encode({"row": {"x": 1}, "step": 1, "time": 1.0}))
        journal.close()
        command = [sys.executable, "-m", "flyteplugins_tracking", "send", tmp_path / "kept"]
        with proxy.failing(Fault.status(500)) as fault:
            done = jobs.run(command, tmp_path, pluto_environment(server))
        assert (done.returncode, fault.hits) == (0, 0), done.output
        assert len(server.run("kept").charted["x"]) == 1


@pytest.mark.full
def test_all_arguments_of_the_vendors_init_can_be_passed(tmp_path):
    code = "import inspect, json, pluto; print(json.dumps(list(inspect.signature(pluto.init).parameters)))"
    env = jobs.environment(tmp_path, PYTHONPATH=str(Path(sys.prefix) / "pluto"))
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True, timeout=60)
    ours = {"project", "name", "config", "tags", "run_id", "resume", "kwargs"}
    assert set(json.loads(done.stdout)) - ours == INIT_ARGUMENTS


@pytest.mark.full
def test_our_queue_has_each_call_of_the_vendors(tmp_path):
    code = """
import inspect, json
from pluto.sync import SyncProcessManager as Theirs
calls = {name: list(inspect.signature(call).parameters) for name, call in vars(Theirs).items() if "enqueue" in name}
print(json.dumps(calls))
"""
    env = jobs.environment(tmp_path, PYTHONPATH=str(Path(sys.prefix) / "pluto"))
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True, timeout=60)
    for name, parameters in json.loads(done.stdout).items():
        ours = list(inspect.signature(getattr(Queue, name)).parameters)
        assert ours == parameters or ours[-1] == "record", name

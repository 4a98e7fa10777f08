"""MLflow: a real server, real clients, real torchrun. What holds for every tracker is in `test_conformance.py`."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import jobs
from support.jobs import TIME_SCALE
from support.kills import (
    journals_left,
    left_by_killed_training,
    logged_by_killed_training,
    moments,
    send_in_spite_of_kills,
)
from support.loopback import Fault
from support.mlflow_server import GROUP_TAG, MlflowServer, StoredRun
from support.vendors import skip_where_lost
from support.waiting import wait_for_file, wait_until
from support.wandb_server import WandbServer

from flyteplugins_tracking import get_run, tracking_init
from flyteplugins_tracking._commands.send import main as send

SCRIPT = jobs.PROGRAMS / "mlflow_runs.py"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    with MlflowServer(tmp_path_factory.mktemp("server")) as running:
        yield running


def environment(server: MlflowServer) -> dict[str, str]:
    return {"MLFLOW_TRACKING_URI": server.url, "MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL": "0.2"}


def seen(directory: Path, rank: int = 0) -> dict:
    return json.loads((directory / f"seen-{rank}").read_text())


def by_id(server: MlflowServer, project: str) -> dict[str | None, StoredRun]:
    return {run.id: run for run in server.runs(project)}


@pytest.fixture(scope="module")
def fluent(server, tmp_path_factory) -> tuple[jobs.Done, dict, list[StoredRun]]:
    """A process that uses MLflow's own functions inside the decorated one."""
    directory = tmp_path_factory.mktemp("fluent")
    done = jobs.python(directory, SCRIPT, "fluent", "fluent", env=environment(server))
    assert done.returncode == 0, done.output
    return done, seen(directory), server.runs("fluent")


def test_the_run_is_mlflows_active_one_which_nothing_but_the_functions_end_ends(fluent):
    _, noted, runs = fluent
    (run,) = (run for run in runs if run.id == "fluent")
    assert noted["is_active"] is noted["is_active_after"] is True
    assert (noted["active_outside"], noted["last_active"]) == (None, run.run_id)
    assert noted["status_inside"] == "RUNNING"
    assert noted["run_id"] == run.run_id
    assert noted["url"].endswith(f"/runs/{run.run_id}")
    assert run.values("fluent") == run.values("thread") == run.values("before_fork") == [1.0]
    nested = [other for other in runs if other.tags.get("mlflow.parentRunId") == run.run_id]
    assert [(other.status, other.values("child")) for other in nested] == [("FINISHED", [1.0])]


def test_a_continued_run_has_its_rows_steps_and_the_newest_config(fluent):
    done, noted, runs = fluent
    (run,) = (run for run in runs if run.id == "fluent")
    steps = sorted((step, value) for key, value, step, _ in run.rows if key == "loss")
    assert [value for _, value in steps] == [1.0, 3.0, 4.0, 5.0]
    assert [step for step, _ in steps][:3] == [0, 7, 8]
    assert steps[3][0] > 8
    assert (noted["resumed"], noted["resumed_again"]) == (False, True)
    assert run.status == "FAILED"  # sys.exit(3)
    assert run.config == {"lr": 0.2}
    assert (run.params["lr"], run.params["deep.a"], run.params["late"]) == ("0.1", "1", "1")
    assert done.output.count("run fluent: params keep their first values") == 2  # once in each attempt
    assert (run.name, run.tags["mlflow.note.content"]) == ("named", "why")
    assert (run.tags["plain"], run.tags["team"], run.tags["later"]) == ("", "m=l", "tag")


def test_values_that_mlflow_cannot_hold_warn_once_for_each_key(fluent):
    done, _, runs = fluent
    (run,) = (run for run in runs if run.id == "fluent")
    assert run.values("truth") == [1.0]
    assert math.isnan(run.values("nan")[0])
    assert run.values("odd_key") == [1.0]
    assert {"none", "text", "odd#key"}.isdisjoint(key for key, *_ in run.rows)
    for said in ("'none': None", "'text': a str", "'odd#key'"):
        assert done.output.count(f"MLflow: {said}") == 1, said


def test_a_called_task_continues_the_callers_run_and_does_not_end_it(fluent):
    _, noted, runs = fluent
    (run,) = (run for run in runs if run.id == "fluent")
    assert run.values("called") == [1.0]
    assert noted["status_after_call"] == "RUNNING"


def test_a_forked_child_neither_hangs_nor_logs(fluent):
    skip_where_lost("mlflow", "in a forked process")
    _, noted, runs = fluent
    (run,) = (run for run in runs if run.id == "fluent")
    assert noted["child"] == 0
    assert run.values("forked") == []
    assert "forked" not in run.params


def test_mlflow_run_id_chooses_the_run_and_stays_set(fluent):
    _, noted, runs = fluent
    (run,) = (run for run in runs if run.run_id == noted["chosen"])
    assert noted["is_chosen"] is noted["is_nested"] is noted["variable"] is True
    assert (run.status, run.values("chosen")) == ("FINISHED", [1.0])


@pytest.mark.wide
def test_autologging_is_the_ranks_own_that_has_a_run(server, tmp_path):
    agent = jobs.torchrun("--standalone", "--nproc-per-node=2", "--monitor-interval=0.1")
    done = jobs.run([*agent, SCRIPT, "ranks", "ranks"], tmp_path, environment(server))
    assert done.returncode == 0, done.output
    runs = by_id(server, "ranks")
    assert set(runs) == {"auto", "new-rank-0", "new-rank-1"}
    assert len(server.runs("ranks")) == 3  # rank 1 has made none in "auto"
    assert "training_mean_squared_error" in {key for key, *_ in runs["auto"].rows}
    of_ranks = [runs["new-rank-0"], runs["new-rank-1"]]
    assert [(run.tags[GROUP_TAG], run.status) for run in of_ranks] == [("new", "FINISHED")] * 2
    system = [{key for key, *_ in run.rows if key.startswith("system/")} for run in of_ranks]
    assert system[0]
    assert all(key.startswith("system/worker-0/") for key in system[0])
    assert system[1] == set()


@pytest.mark.full
def test_a_start_run_of_the_function_joins_its_run_and_describes_it(server, tmp_path):
    agent = jobs.torchrun("--standalone", "--nproc-per-node=2", "--monitor-interval=0.1")
    done = jobs.run([*agent, SCRIPT, "starts", "starts"], tmp_path, environment(server))
    assert done.returncode == 0, done.output
    runs, children = by_id(server, "starts"), [run for run in server.runs("starts") if run.name == "child"]
    assert set(runs) == {"auto", "kept", "shared", "failed-rank-0", "failed-rank-1", None}
    described = {
        name: (run.name, run.tags["mlflow.note.content"], run.tags["t"], run.status, run.values("x0"), run.values("x1"))
        for name, run in runs.items()
        if name in ("auto", "kept", "shared")
    }
    assert described == {
        "auto": ("inner", "by the script", "0", "FINISHED", [1.0, 2.0], []),
        "kept": ("outer", "outer", "0", "FINISHED", [1.0, 2.0], []),
        "shared": ("inner", "by the script", "0", "FINISHED", [1.0, 2.0], [1.0, 2.0]),
    }
    assert [runs[f"failed-rank-{rank}"].status for rank in range(2)] == ["FAILED", "FAILED"]
    parents = sorted(child.tags["mlflow.parentRunId"] for child in children)
    assert parents == sorted(runs[name].run_id for name in ("auto", "kept", "shared", "shared"))
    joined = {"is_own": True, "is_child": True, "is_joined_again": True}
    assert [seen(tmp_path, rank) for rank in range(2)] == [
        {**joined, "outside": f"outside-{rank}"} for rank in range(2)
    ]
    assert done.output.count("Without effect: experiment_id='0'. Pass these") == 1
    assert done.output.count("Without effect: run_name='inner', description='by the script'. Pass these") == 1


@pytest.mark.wide
def test_mlflows_monitor_logs_to_the_run_until_its_end_which_a_mute_server_does_not_hold(
    server, tmp_path, bare_environment, monkeypatch
):
    import mlflow

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.2")
    monkeypatch.setenv("MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING", "false")  # so that it is put back
    mlflow.enable_system_metrics_logging()

    @tracking_init(tracker="mlflow", project="system", id="system", tracking_uri=server.url, kill_after_s=7)
    def train(at_end):
        for _ in range(2):  # mlflow.end_run() ends the monitor of a run that it ends
            before = sampled()
            wait_until(lambda before=before: len(sampled()) > len(before))
            mlflow.end_run()
        at_end()
        return time.monotonic()

    def sampled():
        history = mlflow.MlflowClient().get_metric_history(get_run().run_id, "system/cpu_utilization_percentage")
        return sorted(point.step for point in history)

    train(lambda: None)
    with contextlib.ExitStack() as muted:
        ends_at = train(lambda: muted.enter_context(server.mute()))
        assert time.monotonic() - ends_at < 4 * TIME_SCALE
    (run,) = server.runs("system")
    steps = [step for key, _, step, _ in run.rows if key == "system/cpu_utilization_percentage"]
    assert len(steps) >= 4
    assert sorted(steps) == list(range(len(steps)))


@pytest.mark.full
def test_an_outage_loses_nothing_and_a_mute_servers_rows_are_sent_later(server, tmp_path):
    process = jobs.start([sys.executable, SCRIPT, "outage", "outage"], tmp_path, environment(server))
    wait_for_file(tmp_path / "started", process)
    with server.mute():
        (tmp_path / "is-stopped").touch()
        wait_for_file(tmp_path / "logged-in-outage", process)
    wait_for_file(tmp_path / "mute", process)
    with server.mute():
        (tmp_path / "is-mute").touch()
        done = jobs.finish(process, tmp_path)
    assert done.returncode == 0, done.output
    noted = seen(tmp_path)
    assert noted["slowest_s"] < 0.2 * jobs.TIME_SCALE
    assert noted["end_s"] < 3 * jobs.TIME_SCALE  # kill_after_s=6
    (said,) = (line for line in done.output.splitlines() if "They are kept in files" in line)
    words, more = jobs.printed(said.rpartition("it answers: ")[2])
    command = [sys.executable, "-m", "flyteplugins_tracking", *words]
    sent = jobs.run(command, tmp_path, {**environment(server), **more})
    assert sent.returncode == 0, sent.output
    runs = by_id(server, "outage")
    assert runs["outage"].values("loss") == [float(number) for number in range(600)]
    assert runs["mute"].values("loss") == [float(number) for number in range(50)]
    assert [run.status for run in runs.values()] == ["FINISHED"] * 2
    assert runs["mute"].params == {"late": "1"}


@pytest.mark.full
def test_a_mute_or_refusing_server_raises_in_time_and_without_the_key(tmp_path):
    with WandbServer() as denies, WandbServer() as mute, denies.failing(Fault.status(401)), mute.failing(Fault.mute()):
        wrong_key, silent = denies.url, mute.url
        nobody = f"http://127.0.0.1:{jobs.free_port()}"
        done = jobs.python(tmp_path, SCRIPT, "unavailable", wrong_key, silent, nobody, "nonsense://x")
    assert done.returncode == 0, done.output
    noted = seen(tmp_path)
    assert noted["variables"] == []
    said = {uri: noted[uri] for uri in (wrong_key, silent, nobody, "nonsense://x")}
    assert all(name == "TrackerUnavailableError" for name, *_ in said.values()), said
    assert max(seconds for *_, seconds in said.values()) < 3 * jobs.TIME_SCALE  # init_timeout_s=3
    assert "HTTP 401" in said[wrong_key][1]
    assert "secret=" in said[wrong_key][1]
    assert "does not answer" in said[silent][1]
    assert "the-password" not in done.output + json.dumps(noted)


@pytest.mark.full
def test_params_and_tags_of_a_run_in_files_are_sent_and_other_calls_are_lost(
    server, tmp_path, monkeypatch, bare_environment, caplog
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{jobs.free_port()}")

    @tracking_init(tracker="mlflow", project="kept", id="kept", init_timeout_s=2)
    def train():
        run = get_run()
        run.log_param("lr", 0.1)
        run.log_params({"epochs": 3})
        run.set_tag("name", "b")
        run.set_tags({"number": 1})
        for name in ("model", "data"):
            run.log_artifact(name)
        run.log({"loss": 1.0})

    train()
    assert caplog.text.count("calls of log_artifact() are lost") == 1
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.url)
    assert send([str(tmp_path)]) == 0
    (run,) = server.runs("kept")
    assert {"lr": "0.1", "epochs": "3"}.items() <= run.params.items()
    assert {"name": "b", "number": "1"}.items() <= run.tags.items()
    assert (run.status, run.values("loss")) == ("FINISHED", [1.0])


def assert_each_once(server, project: str, logged: list[int]) -> str:
    """Assert that the server has each row once. Returns the run's status."""
    (run,) = server.runs(project)
    values = sorted(int(value) for key, value, *_ in run.rows if key == "rank0")
    assert set(logged) <= set(values)
    assert len(values) == len(set(values))
    return run.status


@pytest.mark.parametrize("when", ["logged", pytest.param("opening", marks=pytest.mark.wide)])
def test_every_row_of_a_killed_process_arrives_once(server, tmp_path, when):
    kills = 1 if when == "logged" else moments(4)
    logged = logged_by_killed_training(tmp_path, "mlflow", when, environment(server), kills, 1.0, when)
    assert assert_each_once(server, when, logged) == "FINISHED"
    assert not journals_left(tmp_path)


@pytest.mark.wide
def test_a_send_that_is_killed_again_and_again_sends_each_row_once(server, tmp_path):
    logged = left_by_killed_training(tmp_path, "mlflow", "sent", environment(server))
    kept = tmp_path / "tracking-offline" / "mlflow-killed"
    send_in_spite_of_kills(kept, tmp_path, environment(server), moments(4), 2.0)
    assert assert_each_once(server, "sent", logged) == "FAILED"
    assert not journals_left(tmp_path)


@pytest.mark.full
def test_rows_arrive_if_no_journal_can_be_written(server, tmp_path):
    (tmp_path / "tracking-offline").touch()
    logged = logged_by_killed_training(tmp_path, "mlflow", "full", environment(server), kills=0)
    assert assert_each_once(server, "full", logged) == "FINISHED"


def test_a_run_that_is_ended_in_any_thread_stays_active_until_the_function_ends(server, bare_environment, caplog):
    import mlflow

    @tracking_init(tracker="mlflow", project="ended", id="ended", tracking_uri=server.url)
    def train():
        outer = get_run()
        mlflow.end_run()
        mlflow.end_run()
        with mlflow.start_run(nested=True):
            mlflow.end_run()
            mlflow.log_metric("a", 1)
        ended_elsewhere = threading.Thread(target=lambda: mlflow.MlflowClient().set_terminated(outer.run_id))
        ended_elsewhere.start()
        ended_elsewhere.join()
        return mlflow.active_run() is outer

    assert train()
    assert mlflow.active_run() is None
    run, nested = server.runs("ended")
    assert (run.values("a"), run.status, nested.status) == ([1.0], "FINISHED", "FINISHED")
    assert caplog.text.count("mlflow.end_run() does not end it") == 1

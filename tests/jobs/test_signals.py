"""Signals in real jobs beyond the fault matrix: how the process ends, its children, its threads and its loops."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
from support import backends, jobs
from support.harness import ends, job, python
from support.loopback import Fault, SlowProxy
from support.mlflow_server import MlflowServer
from support.pluto_server import PlutoServer
from support.waiting import wait_for_file, wait_until
from support.wandb_server import WandbServer

PROGRAM = jobs.PROGRAMS / "signal_runs.py"


def trained(directory: Path, *arguments: str, env: Mapping[str, str] | None = None) -> jobs.Done:
    """A function of `signal_runs.py`."""
    return jobs.python(directory, PROGRAM, *arguments, env=env)


@pytest.mark.full
def test_a_handler_that_exits_gives_the_process_its_status(tmp_path):
    with job(tmp_path) as started:
        process = started.start(python(), **ends("sleep", handler="exit 5"))
        started.wait_for("ready 0 0")
        started.signal(process.pid)
        found = started.outcome()
        assert (found.returncode, found.exit_codes, found.lost) == (5, (143,), 0)


@pytest.mark.full
def test_a_handler_inside_that_exits_with_success_hides_no_signal(tmp_path):
    """The function has logged no row since it has installed it, so nothing but the wakeup fd tells of the signal."""
    with job(tmp_path) as started:
        process = started.start(python(), **ends("sleep", handler_after_rows="exit 0"))
        started.wait_for("ready 0 0")
        started.signal(process.pid)
        found = started.outcome()
        assert (found.returncode, found.exit_codes, found.lost) == (0, (143,), 0)
        assert "ows are lost" not in found.output


@pytest.mark.full
def test_a_function_that_catches_the_exit_and_returns_ends_with_the_signals_status(tmp_path):
    with job(tmp_path) as started:
        process = started.start(python(), **ends("catches all"))
        started.wait_for("ready 0 0")
        started.signal(process.pid)
        found = started.outcome()
        assert (found.returncode, found.exit_codes, found.lost) == (143, (143,), 0)


def test_a_second_signal_does_not_cut_the_runs_end_short(tmp_path):
    with job(tmp_path) as started, started.server.failing(Fault.slow(1, only="filestream")) as fault:
        process = started.start(python(), **ends("loop"))
        started.wait_for("ready 0 0")
        started.signal(process.pid)
        started.wait_until(lambda: fault.hits, "the run's end is not being sent")
        started.signal(process.pid)
        found = started.outcome()
        assert (found.exit_codes, found.lost) == ((143,), 0), found.output


@pytest.mark.full
def test_a_process_that_the_signal_would_have_ended_does_not_wait_for_its_threads(tmp_path):
    done = trained(tmp_path, "with_a_thread")
    assert (done.returncode, [run.exit_code for run in done.runs]) == (143, [143])


# Children


def test_a_signal_to_a_child_ends_the_child_alone(tmp_path):
    done = trained(tmp_path, "children")
    assert done.output.split() == ["True", "True", "-15", "-15"]
    (run,) = done.runs
    assert (run.exit_code, len(run.rows)) == (0, 1)


@pytest.mark.full
def test_a_signal_to_a_child_that_has_just_been_forked_ends_the_child_alone(tmp_path):
    done = trained(tmp_path, "fork_race")
    assert done.returncode == 0, done.output
    assert [(run.exit_code, len(run.rows)) for run in done.runs] == [(0, 50)]


def group(process: jobs.Process, _: Path) -> None:
    os.killpg(process.pid, signal.SIGTERM)


def workers_first(process: jobs.Process, _: Path) -> None:
    """As a scheduler does that signals one process after the other. wandb-core goes on without its parent."""
    for child in psutil.Process(process.pid).children():
        if child.name() != "wandb-core":
            child.terminate()
    process.send_signal(signal.SIGTERM) if hasattr(process, "send_signal") else os.kill(process.pid, signal.SIGTERM)


@pytest.mark.parametrize(
    ("is_persistent", "how"), [(False, group), pytest.param(True, workers_first, marks=pytest.mark.full)]
)
def test_sigterm_with_the_workers_of_a_data_loader(tmp_path, is_persistent, how):
    """torch's handler for SIGCHLD raises in the main thread, for each loader whose worker was killed."""
    with WandbServer() as server:
        command = [sys.executable, str(PROGRAM), "loader", str(is_persistent)]
        process = jobs.start(command, tmp_path, server.environment)
        wait_until((tmp_path / "ready-0").exists, process)
        how(process, tmp_path)
        done = jobs.finish(process, tmp_path)
        (run,) = server.runs
    assert (done.returncode, run.exit_codes, run.state) == (143, [143], "preempted"), done.output
    assert "failure/type" not in run.summary


# What is logged, and how the run ends


@pytest.mark.full
def test_an_ignored_signal_stays_ignored(tmp_path):
    done = trained(tmp_path, "ignored")
    assert (done.returncode, [run.exit_code for run in done.runs]) == (0, [0]), done.output


@pytest.mark.full
def test_a_run_whose_wandb_core_was_terminated_first_is_sent_and_ended_by_a_new_one(tmp_path):
    """As by DeepSpeed's launcher, when a peer fails. What the function has said just before is not sent by then."""
    with WandbServer() as server:
        done = trained(tmp_path, "core_first", env=server.environment)
        (run,) = server.runs
        assert (done.returncode, run.exit_codes, run.state) == (143, [143], "preempted"), done.output
        assert [row.get("x") for row in run.rows] == [*range(200), None]
        assert {key: run.config.get(key) for key in ("a", "nested", "c")} == {"a": 1, "nested": {"b": 2}, "c": 3}
        assert {key: run.summary[key] for key in ("best", "x", "late")} == {"best": 3.5, "x": -1, "late": 2}
        assert (run.name, run.notes, run.tags) == ("named", "noted", ["tagged"])
        assert "checkpoint.txt" in run.files
        assert str(tmp_path / "wandb") in done.output  # in the warning


@pytest.mark.full
def test_a_function_that_has_not_returned_when_the_process_ends_is_never_finished(tmp_path):
    with WandbServer() as server:
        done = trained(tmp_path, "left_behind", env=server.environment)
        (run,) = server.runs
        assert (done.returncode, run.exit_codes, run.state) == (0, [1], "failed"), done.output
        assert run.summary["failure/message"] == "the process ended before the function returned"
        assert "the process ends before the decorated function has returned, and with it run ours" in done.output
        assert [row["x"] for row in run.rows] == list(range(len(run.rows)))
        # The thread is told that its run has ended, if it logs another row. The process may end while it prints that.
        assert done.output.count("Traceback") <= done.output.count("Exception in thread")


@pytest.mark.full
def test_rows_after_a_survived_signal_stay_in_their_own_run(tmp_path):
    rows = {"outer": [0, 2, 3], "inner": [0, 1, 2], "evaluation": [0]}
    with WandbServer() as server:
        done = trained(tmp_path, "survived", env=server.environment)
        assert done.returncode == 0, done.output
        assert {run.id: [row["n"] for row in run.rows] for run in server.runs} == rows
        assert {run.id: run.exit_codes for run in server.runs} == {**{name: [143] for name in rows}, "evaluation": [0]}


@pytest.mark.full
def test_nothing_is_left_in_the_process_after_many_runs(tmp_path):
    done = trained(tmp_path, "many_runs")
    assert done.output.strip().endswith("True"), done.output
    assert len(done.runs) == 33


# The opening


def interrupted(directory: Path, env: Mapping[str, str], is_slow: Callable[[], object], **settings: Any) -> int:
    """Open a run, and send SIGTERM when the service has been asked. Returns the process's status."""
    process = jobs.start([sys.executable, str(PROGRAM), "opening", json.dumps(settings)], directory, env)
    wait_until(is_slow, process)
    os.kill(process.pid, signal.SIGTERM)
    done = jobs.finish(process, directory)
    assert "called" not in done.output.split(), done.output
    return done.returncode


SLOW_S = 3.0


@pytest.mark.wide
def test_a_slow_opening_that_sigterm_interrupts_is_no_success_at_pluto(tmp_path):
    with PlutoServer() as server, server.failing(Fault.slow(SLOW_S)) as fault:
        settings = {"tracker": "pluto", "project": "tests"}
        env = backends.pluto_environment(server)
        assert interrupted(tmp_path, env, lambda: fault.hits, **settings) == 143
        assert all(run.status != "COMPLETED" for run in server.runs)
        assert [run.statuses for run in server.runs if run.status != "RUNNING"] == [["TERMINATED"]]


@pytest.mark.wide
def test_a_slow_opening_that_sigterm_interrupts_is_no_success_at_mlflow(tmp_path):
    with MlflowServer(tmp_path) as server, SlowProxy(server.port, SLOW_S / 2) as proxy:
        settings, env = {"tracker": "mlflow", "project": "slow"}, {"MLFLOW_TRACKING_URI": proxy.url}
        assert interrupted(tmp_path, env, lambda: proxy.hits > 2, **settings) == 143
        assert {run.status for run in server.runs("slow")} <= {"KILLED"}  # it may not have been made yet


@pytest.mark.wide
def test_a_slow_opening_ends_with_the_failure_of_another_rank_or_by_its_sigterm(tmp_path):
    with WandbServer() as server, server.failing(Fault.slow(SLOW_S)) as fault:
        settings = json.dumps({"project": "tests", "run_mode": "auto", "failing_rank": 1})
        command = [*jobs.torchrun("--standalone", "--nproc-per-node=2"), str(PROGRAM), "opening", settings]
        process = jobs.start(command, tmp_path, server.environment)
        # wandb-core asks the service to make the run: it has asked whether there is one to resume.
        wait_until(lambda: "RunResumeStatus" in server.operations or fault.hits > 4, process)
        (tmp_path / "go").touch()
        done = jobs.finish(process, tmp_path)
        assert done.returncode == 1, done.output
        assert all(code in (1, 143) for run in server.runs for code in run.exit_codes), server.runs
        assert all(run.state != "finished" for run in server.runs)


# asyncio, and functions in threads beside a loop


@pytest.mark.parametrize(
    ("function", "exit_code"), [("interrupted_async", 130), pytest.param("cancelled_async", 1, marks=pytest.mark.full)]
)
def test_ctrl_c_in_an_async_function_is_told_from_a_cancellation(tmp_path, function, exit_code):
    with WandbServer() as server:
        done = trained(tmp_path, function, env=server.environment)
        assert [run.exit_codes for run in server.runs] == [[exit_code]], done.output


def test_the_signal_reaches_an_asyncio_loop(tmp_path):
    """The loop's own handler, which the function has set, runs while the run is open."""
    done = trained(tmp_path, "asyncio_handler")
    assert done.returncode == 0, done.output
    assert [run.exit_code for run in done.runs] == [143]
    assert [row["x"] for run in done.runs for row in run.rows] == [1, 2]


@pytest.mark.full
def test_a_loop_that_is_closed_inside_leaves_nothing_of_it_behind(tmp_path):
    """asyncio closes the socket that was the wakeup fd; its number is another file's then."""
    done = trained(tmp_path, "closed_loop")
    assert done.returncode == 0, done.output
    assert {path.read_bytes() for path in tmp_path.glob("file-*")} == {b""}


def ended_by_sigterm(process: jobs.Process, directory: Path, count: int = 1) -> jobs.Done:
    """Send SIGTERM when `count` of the job's processes have logged."""
    for rank in range(count):
        wait_for_file(directory / f"ready-{rank}", process)
    os.kill(process.pid, signal.SIGTERM)
    return jobs.finish(process, directory)


def start_pod(task: str, directory: Path, server: WandbServer, module: str = "flyte2_sigterm") -> jobs.Process:
    pytest.importorskip("flyte", reason="flyte is not installed")
    pytest.importorskip("flyteplugins.pytorch", reason="flyteplugins-pytorch is not installed")
    from support import flyte2_pods

    return flyte2_pods.start(task, directory, run="sigterm", module=module, **server.environment)


def start_script(function: str, directory: Path, server: WandbServer) -> jobs.Process:
    """A function of `signal_runs.py`."""
    return jobs.start([sys.executable, PROGRAM, function], directory, server.environment)


def ended_by_the_signal(done: jobs.Done) -> bool:
    return done.returncode in (-signal.SIGTERM, 143)


def test_the_run_of_an_evicted_pod_ends_with_143_and_has_its_rows(tmp_path):
    with WandbServer() as server:
        done = ended_by_sigterm(start_pod("sleeps", tmp_path, server), tmp_path)
        (run,) = server.runs
    assert (run.exit_codes, run.state, len(run.rows)) == ([143], "preempted", 1), done.output
    assert ended_by_the_signal(done), done.output


@pytest.mark.full
def test_the_agent_of_an_elastic_pod_has_its_workers_end_their_run(tmp_path):
    with WandbServer() as server:
        agent = start_pod("workers", tmp_path, server, module="flyte2_sigterm_workers")
        done = ended_by_sigterm(agent, tmp_path, count=2)
        (run,) = server.runs
    assert str(agent.pid) not in [path.read_text() for path in tmp_path.glob("ready-*")]
    assert (run.exit_codes, run.state, len(run.rows)) == ([143], "preempted", 1), done.output


def test_a_function_that_stops_by_itself_is_waited_for(tmp_path):
    with WandbServer() as server:
        done = ended_by_sigterm(start_script("stops_in_thread", tmp_path, server), tmp_path)
        (run,) = server.runs
    assert (run.exit_codes, run.state, run.summary["stop/reason"]) == ([143], "preempted", "SIGTERM"), done.output
    assert Path(tmp_path, "saved").exists()
    assert ended_by_the_signal(done), done.output


def test_a_handler_of_the_users_is_called_once_and_the_run_stays_open(tmp_path):
    """What is logged after it is in the run, which ends once, with the function."""
    with WandbServer() as server:
        done = ended_by_sigterm(start_script("handled_in_thread", tmp_path, server), tmp_path)
        (run,) = server.runs
    assert (done.returncode, done.output.count("told")) == (0, 1), done.output
    assert (run.exit_codes, [row["row"] for row in run.rows]) == ([143], [0, 1])
    assert run.rows_after_completion == 0


@pytest.mark.full
def test_the_runs_of_threads_are_ended_and_of_none_that_has_returned(tmp_path):
    with WandbServer() as server:
        done = ended_by_sigterm(start_script("two_threads", tmp_path, server), tmp_path)
    assert ended_by_the_signal(done), done.output
    assert {run.id: run.exit_codes for run in server.runs} == {"first": [0], "second": [143]}
    assert [len(run.rows) for run in server.runs] == [1, 1]

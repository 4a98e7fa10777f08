"""Signals that meet a run's opening and closing: those of DataLoaders' workers, of the program, of its whole group."""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from support import backends, jobs
from support.loopback import Fault, SlowProxy
from support.mlflow_server import MlflowServer
from support.pluto_server import PlutoServer
from support.waiting import wait_until
from support.wandb_server import WandbServer

PROGRAM = jobs.PROGRAMS / "signal_runs.py"


def group(process: jobs.Process, _: Path) -> None:
    os.killpg(process.pid, signal.SIGTERM)


def workers_first(process: jobs.Process, _: Path) -> None:
    """As a scheduler does that signals one process after the other. wandb-core goes on without its parent."""
    for child in psutil.Process(process.pid).children():
        if child.name() != "wandb-core":
            child.terminate()
    process.send_signal(signal.SIGTERM) if hasattr(process, "send_signal") else os.kill(process.pid, signal.SIGTERM)


def alone(process: jobs.Process, _: Path) -> None:
    os.kill(process.pid, signal.SIGTERM)


@pytest.mark.parametrize(
    ("workers", "context", "is_persistent", "how"),
    [
        (4, "fork", False, group),
        (4, "fork", True, workers_first),
        pytest.param(1, "fork", False, workers_first, marks=pytest.mark.full),
        pytest.param(16, "fork", False, group, marks=pytest.mark.wide),
        pytest.param(16, "fork", True, workers_first, marks=pytest.mark.full),
        pytest.param(2, "spawn", True, group, marks=pytest.mark.wide),
        pytest.param(4, "fork", False, alone, marks=pytest.mark.full),
    ],
)
def test_sigterm_with_the_workers_of_a_data_loader(tmp_path, workers, context, is_persistent, how):
    """torch's handler for SIGCHLD raises in the main thread, for each loader whose worker was killed."""
    with WandbServer() as server:
        command = [sys.executable, str(PROGRAM), "loader", str(workers), context, str(is_persistent)]
        process = jobs.start(command, tmp_path, server.environment)
        wait_until((tmp_path / "ready-0").exists, process)
        how(process, tmp_path)
        done = jobs.finish(process, tmp_path)
        (run,) = server.runs
    assert (done.returncode, run.exit_codes, run.state) == (143, [143], "preempted"), done.output
    assert "failure/type" not in run.summary


def test_an_exception_on_a_rank_with_a_worker_is_told_on_rank_0(tmp_path):
    """The rank has no run. Its announcement must not be cut off by its worker's end."""
    with WandbServer() as server:
        command = [
            *jobs.torchrun("--standalone", "--nproc-per-node=2"),
            str(PROGRAM),
            "loader",
            "1",
            "fork",
            "False",
            "1",
        ]
        done = jobs.run(command, tmp_path, server.environment)
        (run,) = server.runs
    assert done.returncode == 1, done.output
    assert (run.exit_codes, run.state) == ([1], "failed"), done.output
    assert run.summary["failure/message"] == "made to fail"
    assert len(run.rows) >= 20


def test_sigterm_to_two_agents_and_all_that_they_have_started(tmp_path):
    with WandbServer() as server:
        address = f"--rdzv-endpoint=127.0.0.1:{jobs.free_port()}"
        options = ("--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=loaders", address)
        command = [*jobs.torchrun(*options), str(PROGRAM), "loader", "4", "fork", "False"]
        agents = [jobs.start(command, tmp_path, server.environment) for _ in range(2)]
        wait_until(lambda: all((tmp_path / f"ready-{rank}").exists() for rank in range(2)), agents[0])
        processes = [process for agent in agents for process in psutil.Process(agent.pid).children(recursive=True)]
        for process in processes:
            with suppress(psutil.NoSuchProcess):  # another's end has ended it
                if process.name() != "wandb-core":
                    process.terminate()
        for agent in agents:
            os.kill(agent.pid, signal.SIGTERM)
        outputs = [jobs.finish(agent, tmp_path).output for agent in agents]
        (run,) = server.runs
    assert (run.exit_codes, run.state) == ([143], "preempted"), outputs
    assert "failure/type" not in run.summary


@pytest.mark.parametrize(
    ("case", "sent", "expected"),
    [
        ("returns", [signal.SIGUSR1], (0, 0, ["SIGUSR1"])),
        ("returns", [signal.SIGALRM, signal.SIGUSR1], (1, 0, ["TimeoutError", "SIGALRM SIGUSR1"])),
        ("raises", [signal.SIGALRM, signal.SIGTERM], (143, 1, ["SystemExit", ""])),
        ("returns", [signal.SIGUSR1, signal.SIGTERM], (143, 0, ["SystemExit", ""])),
    ],
    ids=str,
)
def test_signals_while_the_run_is_closed(tmp_path, case, sent, expected):
    """They are delivered when it is closed. Where SIGTERM ends the process, none of the handlers would have run.

    The function has ended before the SIGTERM: the run keeps its status.
    """
    with WandbServer() as server:
        process = jobs.start([sys.executable, str(PROGRAM), "in_closing", case], tmp_path, server.environment)
        with server.failing(Fault.mute("filestream")) as fault:
            server.wait_for(lambda: fault.hits, 120)
            wait_until((tmp_path / "closing").exists, process)
            for number in sent:
                os.kill(process.pid, number)
        done = jobs.finish(process, tmp_path)
        (run,) = server.runs
    assert done.returncode == expected[0], done.output
    assert run.exit_codes[-1] in {expected[1], 143 if signal.SIGTERM in sent else expected[1]}, done.output
    lines = [line.strip() for line in done.output.splitlines()]
    assert all(line in lines or " ".join(reversed(line.split())) in lines for line in expected[2]), done.output


# The opening


def interrupted(
    directory: Path, env: Mapping[str, str], is_slow: Callable[[], object], sent: int, **settings: Any
) -> int:
    """Open a run, and send a signal when the service has been asked. Returns the process's status."""
    process = jobs.start([sys.executable, str(PROGRAM), "opening", json.dumps(settings)], directory, env)
    wait_until(is_slow, process)
    if sent:
        os.kill(process.pid, sent)
    done = jobs.finish(process, directory)
    assert "called" not in done.output.split(), done.output
    return done.returncode


SLOW_S = 3.0


def is_about_to_be_made(server: WandbServer, fault: Fault) -> bool:
    """Whether wandb-core asks the service to make the run: it has asked whether there is one to resume."""
    return "RunResumeStatus" in server.operations or fault.hits > 4


@pytest.mark.parametrize(
    ("run_mode", "sent", "status", "exit_code"),
    [
        ("auto", signal.SIGTERM, 143, 143),
        pytest.param("shared", signal.SIGTERM, 143, 143, marks=pytest.mark.wide),
        pytest.param("new", signal.SIGTERM, 143, 143, marks=pytest.mark.wide),
        pytest.param("auto", signal.SIGINT, -2, 130, marks=pytest.mark.wide),
    ],
)
def test_a_slow_opening_that_a_signal_interrupts_is_no_success_at_wandb(tmp_path, run_mode, sent, status, exit_code):
    with WandbServer() as server, server.failing(Fault.slow(SLOW_S)) as fault:
        settings = {"project": "tests", "run_mode": run_mode}
        is_asked = functools.partial(is_about_to_be_made, server, fault)
        assert interrupted(tmp_path, server.environment, is_asked, sent, **settings) == status
        assert [run.exit_codes for run in server.runs] == [[exit_code]]


@pytest.mark.wide
def test_a_slow_opening_that_a_watchdog_interrupts_is_no_success(tmp_path):
    with WandbServer() as server, server.failing(Fault.slow(SLOW_S)) as fault:
        settings = {"project": "tests", "alarm": 7, "if_unavailable": "raise"}
        assert interrupted(tmp_path, server.environment, lambda: fault.hits > 1, 0, **settings) == 1
        assert all(0 not in run.exit_codes for run in server.runs)


@pytest.mark.full
@pytest.mark.parametrize(
    "run_mode", ["auto", *(pytest.param(one, marks=pytest.mark.wide) for one in ("shared", "new"))]
)
def test_a_slow_opening_that_sigterm_interrupts_is_no_success_at_pluto(tmp_path, run_mode):
    with PlutoServer() as server, server.failing(Fault.slow(SLOW_S)) as fault:
        settings = {"tracker": "pluto", "project": "tests", "run_mode": run_mode}
        env = backends.pluto_environment(server)
        assert interrupted(tmp_path, env, lambda: fault.hits, signal.SIGTERM, **settings) == 143
        assert all(run.status != "COMPLETED" for run in server.runs)
        assert [run.statuses for run in server.runs if run.status != "RUNNING"] == [["TERMINATED"]]


@pytest.mark.wide
def test_a_slow_opening_that_sigterm_interrupts_is_no_success_at_mlflow(tmp_path):
    statuses = []
    with MlflowServer(tmp_path) as server:
        for run_mode in ("auto", "shared", "new"):
            with SlowProxy(server.port, SLOW_S / 2) as proxy:
                settings = {"tracker": "mlflow", "project": run_mode, "run_mode": run_mode}
                env, is_asked = {"MLFLOW_TRACKING_URI": proxy.url}, lambda proxy=proxy: proxy.hits > 2
                assert interrupted(tmp_path / run_mode, env, is_asked, signal.SIGTERM, **settings) == 143
            statuses += [run.status for run in server.runs(run_mode)]
    assert set(statuses) == {"KILLED"}  # in some of them, the run was not made yet


def test_a_slow_opening_ends_with_the_failure_of_another_rank_or_by_its_sigterm(tmp_path):
    with WandbServer() as server, server.failing(Fault.slow(SLOW_S)) as fault:
        settings = json.dumps({"project": "tests", "run_mode": "auto", "failing_rank": 1})
        command = [*jobs.torchrun("--standalone", "--nproc-per-node=2"), str(PROGRAM), "opening", settings]
        process = jobs.start(command, tmp_path, server.environment)
        wait_until(functools.partial(is_about_to_be_made, server, fault), process)
        (tmp_path / "go").touch()
        done = jobs.finish(process, tmp_path)
        assert done.returncode == 1, done.output
        assert all(code in (1, 143) for run in server.runs for code in run.exit_codes), server.runs
        assert all(run.state != "finished" for run in server.runs)

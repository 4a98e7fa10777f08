"""Signals in real jobs beyond the fault matrix: how the process ends, its children, its threads and its loops."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from support import backends, jobs
from support.harness import ends, job, python, torchrun
from support.loopback import Fault, SlowProxy
from support.mlflow_server import MlflowServer
from support.pluto_server import PlutoServer
from support.waiting import wait_until
from support.wandb_server import WandbServer

PROGRAM = jobs.PROGRAMS / "signal_runs.py"


def trained(directory: Path, *arguments: str, env: Mapping[str, str] | None = None) -> jobs.Done:
    """A function of `signal_runs.py`."""
    return jobs.python(directory, PROGRAM, *arguments, env=env)


def lines_of(job) -> list[str]:
    return [line for lines in job.notes().values() for line in lines if not line.startswith(("logged", "held"))]


@pytest.mark.sampled_full(1)
@pytest.mark.full
@pytest.mark.parametrize("settings", [{}, {"handler": "flag"}, {"nested": True}], ids=str)
def test_the_old_handlers_are_put_back(tmp_path, settings):
    with job(tmp_path) as started:
        started.start(python(), **ends("return", **settings))
        assert started.outcome().returncode == 0
        assert lines_of(started)[-2:] == ["restored True", "threads []"]


@pytest.mark.parametrize(
    ("settings", "returncode", "expected"),
    [
        pytest.param(ends("sleep", handler="exit 5"), 5, ["handler", "unwound"], marks=pytest.mark.full),
        (ends("loop", handler_inside="flag"), 0, ["handler", "returns", "unwound", "restored False", "threads []"]),
    ],
    ids=str,
)
def test_the_process_ends_as_it_would_without_tracking(tmp_path, settings, returncode, expected):
    with job(tmp_path) as started:
        process = started.start(python(), **settings)
        started.wait_for("ready 0 0")
        started.signal(process.pid)
        assert started.outcome().returncode == returncode
        lines = lines_of(started)
        assert lines[lines.index("ready 0 0") + 1 :] == expected


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


@pytest.mark.full
def test_repeated_signals_interrupt_no_finally(tmp_path):
    with job(tmp_path) as started:
        process = started.start(python(), **ends("slow finally"))
        started.wait_for("ready 0 0")
        started.signal(process.pid)
        started.wait_for("in finally")
        for _ in range(4):
            started.signal(process.pid)
        started.go()
        found = started.outcome()
        assert (found.returncode, found.exit_codes, found.lost) == (143, (143,), 0)
        assert "finally" in lines_of(started)


@pytest.mark.full
def test_a_process_in_a_collective_ends_soon_after_its_run(tmp_path):
    """Nothing else would end it: neither its peer nor its agent has been told to."""
    with job(tmp_path) as started:
        started.start(torchrun(), **ends({"0": "collective", "1": "sleep"}))
        (rank_0,) = started.wait_for("blocked 0")
        started.wait_for("ready 1 0")
        started.signal(rank_0)
        started.server.wait_for(lambda: started.server.runs[0].completed)
        ended = time.monotonic()
        while Path("/proc", str(rank_0), "cmdline").exists() and Path("/proc", str(rank_0), "cmdline").read_text():
            assert time.monotonic() < ended + 2 * jobs.TIME_SCALE
            time.sleep(0.02)
        assert "unwound" not in started.notes()[rank_0]
        assert started.outcome().exit_codes == (143,)


@pytest.mark.parametrize("second", [pytest.param(signal.SIGINT, marks=pytest.mark.full), signal.SIGTERM], ids=str)
def test_a_second_signal_does_not_cut_the_runs_end_short(tmp_path, second):
    with job(tmp_path) as started, started.server.failing(Fault.slow(1, only="filestream")) as fault:
        process = started.start(python(), **ends("loop"))
        started.wait_for("ready 0 0")
        started.signal(process.pid)
        started.wait_until(lambda: fault.hits, "the run's end is not being sent")
        started.signal(process.pid, second)
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


@pytest.mark.sampled_full(1)
@pytest.mark.full
@pytest.mark.parametrize("program", ["fork_race", "forks_in_thread"])
def test_a_signal_to_a_child_that_has_just_been_forked_ends_the_child_alone(tmp_path, program):
    done = trained(tmp_path, program)
    assert done.returncode == 0, done.output
    assert [(run.exit_code, len(run.rows)) for run in done.runs] == [(0, 50)]


@pytest.mark.full
def test_in_a_data_loaders_worker_there_is_no_run_and_none_is_ended(tmp_path):
    with WandbServer() as server:
        done = trained(tmp_path, "data_loader", env=server.environment)
        (run,) = server.runs
        assert (done.returncode, run.exit_codes, len(run.rows)) == (0, [0], 20), done.output


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


@pytest.mark.sampled_full(3)
@pytest.mark.parametrize(
    ("workers", "context", "is_persistent", "how"),
    [
        (4, "fork", False, group),
        pytest.param(4, "fork", True, workers_first, marks=pytest.mark.full),
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


@pytest.mark.full
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


@pytest.mark.full
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


# What is logged, and how the run ends


@pytest.mark.full
def test_an_ignored_signal_stays_ignored(tmp_path):
    done = trained(tmp_path, "ignored")
    assert (done.returncode, [run.exit_code for run in done.runs]) == (0, [0]), done.output


@pytest.mark.sampled_full(1)
@pytest.mark.full
@pytest.mark.parametrize("log", ["wandb.log", "hoisted"])
def test_a_log_that_was_fetched_before_the_signal_works_after_it(tmp_path, log):
    """The module's function, and a method in a variable."""
    done = trained(tmp_path, "fetched_log", log)
    assert done.returncode == 0, done.output
    assert [row["n"] for run in done.runs for row in run.rows] == list(range(500))
    assert [run.exit_code for run in done.runs] == [143]


@pytest.mark.full
@pytest.mark.parametrize(
    ("signals_rank", "exit_code", "state"),
    [("True", 143, "preempted"), pytest.param("False", 0, "finished", marks=pytest.mark.full)],
)
def test_a_run_whose_wandb_core_was_terminated_first_is_sent_and_ended_by_a_new_one(
    tmp_path, signals_rank, exit_code, state
):
    """As by DeepSpeed's launcher, when a peer fails. What the function has said just before is not sent by then."""
    with WandbServer() as server:
        done = trained(tmp_path, "core_first", "200", signals_rank, env=server.environment)
        (run,) = server.runs
        assert (done.returncode, run.exit_codes, run.state) == (exit_code, [exit_code], state), done.output
        assert [row.get("x") for row in run.rows] == [*range(200), None]
        assert {key: run.config.get(key) for key in ("a", "nested", "c")} == {"a": 1, "nested": {"b": 2}, "c": 3}
        assert {key: run.summary[key] for key in ("best", "x", "late")} == {"best": 3.5, "x": -1, "late": 2}
        assert (run.name, run.notes, run.tags) == ("named", "noted", ["tagged"])
        assert "checkpoint.txt" in run.files
        assert str(tmp_path / "wandb") in done.output  # in the warning


@pytest.mark.sampled_full(1)
@pytest.mark.full
@pytest.mark.parametrize("where", ["thread", "task"])
def test_a_function_that_has_not_returned_when_the_process_ends_is_never_finished(tmp_path, where):
    with WandbServer() as server:
        done = trained(tmp_path, "left_behind", where, env=server.environment)
        (run,) = server.runs
        assert (done.returncode, run.exit_codes, run.state) == (0, [1], "failed"), done.output
        assert run.summary["failure/message"] == "the process ended before the function returned"
        assert "the process ends before the decorated function has returned, and with it run ours" in done.output
        assert [row["x"] for row in run.rows] == list(range(len(run.rows)))
        # The thread is told that its run has ended, if it logs another row. The process may end while it prints that.
        assert done.output.count("Traceback") <= (where == "thread" and done.output.count("Exception in thread"))


@pytest.mark.sampled_full(2)
@pytest.mark.full
@pytest.mark.parametrize(
    ("case", "rows"),
    [
        ("log", {"outer": [0, 1], "evaluation": [0]}),
        ("handler logs", {"outer": [0, 1, 2], "evaluation": [0]}),
        ("summary", {"outer": [0], "evaluation": [0]}),
        ("nested", {"outer": [0, 1], "inner": [0, 1], "evaluation": [0]}),
    ],
    ids=["log", "handler logs", "summary", "nested"],
)
def test_rows_after_a_survived_signal_stay_in_their_own_run(tmp_path, case, rows):
    with WandbServer() as server:
        done = trained(tmp_path, "survived", case, env=server.environment)
        assert done.returncode == 0, done.output
        assert {run.id: [row["n"] for row in run.rows] for run in server.runs} == rows
        assert {run.id: run.exit_codes for run in server.runs} == {**{name: [143] for name in rows}, "evaluation": [0]}


@pytest.mark.full
def test_nothing_is_left_in_the_process_after_many_runs(tmp_path):
    done = trained(tmp_path, "many_runs")
    assert done.output.strip().endswith("True"), done.output
    assert len(done.runs) == 33


# The opening


def interrupted(
    directory: Path, env: Mapping[str, str], is_slow: Callable[[], object], sent: int, **settings: Any
) -> int:
    """Open a run, and send a signal when the service has been asked. Returns the process's status."""
    process = jobs.start([sys.executable, str(PROGRAM), "opening", json.dumps(settings)], directory, env)
    wait_until(is_slow, process)
    os.kill(process.pid, sent)
    done = jobs.finish(process, directory)
    assert "called" not in done.output.split(), done.output
    return done.returncode


SLOW_S = 3.0


def is_about_to_be_made(server: WandbServer, fault: Fault) -> bool:
    """Whether wandb-core asks the service to make the run: it has asked whether there is one to resume."""
    return "RunResumeStatus" in server.operations or fault.hits > 4


@pytest.mark.full
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


@pytest.mark.wide
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


# asyncio, and functions in threads beside a loop


@pytest.mark.parametrize(
    ("function", "exit_code"), [("interrupted_async", 130), pytest.param("cancelled_async", 1, marks=pytest.mark.full)]
)
def test_ctrl_c_in_an_async_function_is_told_from_a_cancellation(tmp_path, function, exit_code):
    with WandbServer() as server:
        done = trained(tmp_path, function, env=server.environment)
        assert [run.exit_codes for run in server.runs] == [[exit_code]], done.output


@pytest.mark.parametrize("place", [pytest.param("before", marks=pytest.mark.full), "inside"])
def test_the_signal_reaches_an_asyncio_loop(tmp_path, place):
    """Its own handler runs while the run is open, also where the function has set it."""
    done = trained(tmp_path, "asyncio_handler", place)
    assert done.returncode == 0, done.output
    assert [run.exit_code for run in done.runs] == [143]
    assert [row["x"] for run in done.runs for row in run.rows] == [1, 2]


@pytest.mark.full
def test_a_loop_that_is_closed_inside_leaves_nothing_of_it_behind(tmp_path):
    """asyncio closes the socket that was the wakeup fd; its number is another file's then."""
    done = trained(tmp_path, "closed_loop")
    assert done.returncode == 0, done.output
    assert {path.read_bytes() for path in tmp_path.glob("file-*")} == {b""}


@dataclass(frozen=True)
class RunningJob:
    """A job that can be ended by SIGTERM.

    Attributes:
        pids: The ids of the processes that have logged, by rank.
    """

    process: subprocess.Popen[str]
    directory: Path
    server: WandbServer
    pids: list[int]

    def end(self) -> jobs.Done:
        self.process.send_signal(signal.SIGTERM)
        return jobs.finish(self.process, self.directory)


@contextmanager
def running_job(
    process: subprocess.Popen[str], directory: Path, server: WandbServer, count: int = 1
) -> Iterator[RunningJob]:
    """Yield the job when `count` of its processes have logged. Kill it after the block if it still runs."""
    files = [directory / f"ready-{rank}" for rank in range(count)]
    try:
        pids: dict[Path, str] = {}  # a file is read until it is not empty: writing it anew empties it for a moment
        while len(pids) < count:
            assert process.poll() is None, process.communicate()[0]
            pids |= {file: pid for file in files if file not in pids and file.exists() and (pid := file.read_text())}
            time.sleep(0.05)
        yield RunningJob(process, directory, server, [int(pids[file]) for file in files])
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


@contextmanager
def pod(task: str, directory: Path, count: int = 1, module: str = "flyte2_sigterm") -> Iterator[RunningJob]:
    pytest.importorskip("flyte", reason="flyte is not installed")
    pytest.importorskip("flyteplugins.pytorch", reason="flyteplugins-pytorch is not installed")
    from support import flyte2_pods

    with WandbServer() as server:
        process = flyte2_pods.start(task, directory, run="sigterm", module=module, **server.environment)
        with running_job(process, directory, server, count) as started:
            yield started


@contextmanager
def script(directory: Path, *arguments: str) -> Iterator[RunningJob]:
    """A function of `loop_signals.py`."""
    with WandbServer() as server:
        command = [sys.executable, PROGRAM, *arguments]
        process = jobs.start(command, directory, server.environment)
        with running_job(process, directory, server) as started:
            yield started


def ended_by_the_signal(done: jobs.Done) -> bool:
    return done.returncode in (-signal.SIGTERM, 143)


@pytest.mark.parametrize("task", ["sleeps", pytest.param("sleeps_async", marks=pytest.mark.full)])
def test_the_run_of_an_evicted_pod_ends_with_143_and_has_its_rows(tmp_path, task):
    with pod(task, tmp_path) as started:
        done = started.end()
        (run,) = started.server.runs
        assert (run.exit_codes, run.state, len(run.rows)) == ([143], "preempted", 1), done.output
        assert ended_by_the_signal(done), done.output


@pytest.mark.full
def test_what_a_thread_logs_when_the_run_has_ended_does_not_open_it_again(tmp_path):
    with pod("loops", tmp_path) as started:
        done = started.end()
        (run,) = started.server.runs
        assert ended_by_the_signal(done), done.output
        assert (run.exit_codes, run.state, run.rows_after_completion) == ([143], "preempted", 0), done.output
        assert [row["row"] for row in run.rows] == list(range(len(run.rows)))
        assert len(run.rows) >= 50


@pytest.mark.full
def test_an_end_that_is_being_recorded_is_waited_for(tmp_path):
    """The function has returned, and the server does not answer yet."""
    with pod("returns", tmp_path) as started:
        with started.server.failing(Fault.mute()) as fault:
            Path(tmp_path, "go").touch()
            wait_until(lambda: fault.hits)
            started.process.send_signal(signal.SIGTERM)
            with pytest.raises(subprocess.TimeoutExpired):
                started.process.wait(1)
        done = jobs.finish(started.process, tmp_path)
        (run,) = started.server.runs
        assert (run.exit_codes, run.state != "running", len(run.rows)) in [([0], True, 1), ([143], True, 1)], (
            done.output
        )
        assert ended_by_the_signal(done), done.output


@pytest.mark.full
def test_the_agent_of_an_elastic_pod_has_its_workers_end_their_run(tmp_path):
    with pod("workers", tmp_path, count=2, module="flyte2_sigterm_workers") as started:
        assert started.process.pid not in started.pids
        done = started.end()
        (run,) = started.server.runs
        assert (run.exit_codes, run.state, len(run.rows)) == ([143], "preempted", 1), done.output


@pytest.mark.full
def test_a_function_that_stops_by_itself_is_waited_for(tmp_path):
    with script(tmp_path, "stops_in_thread") as started:
        done = started.end()
        (run,) = started.server.runs
        assert (run.exit_codes, run.state, run.summary["stop/reason"]) == ([143], "preempted", "SIGTERM"), done.output
        assert Path(tmp_path, "saved").exists()
        assert ended_by_the_signal(done), done.output


@pytest.mark.parametrize("installer", ["loop", pytest.param("signal", marks=pytest.mark.full)])
def test_a_handler_of_the_users_is_called_once_and_the_run_stays_open(tmp_path, installer):
    """What is logged after it is in the run, which ends once, with the function."""
    with script(tmp_path, "handled_in_thread", installer) as started:
        done = started.end()
        (run,) = started.server.runs
        assert (done.returncode, done.output.count("told")) == (0, 1), done.output
        assert (run.exit_codes, [row["row"] for row in run.rows]) == ([143], [0, 1])
        assert run.rows_after_completion == 0


@pytest.mark.full
def test_a_handler_that_unwinds_the_main_thread_ends_the_run_once(tmp_path):
    with script(tmp_path, "exits_beside_thread") as started:
        done = started.end()
        (run,) = started.server.runs
        assert (done.returncode, run.exit_codes, run.state) == (5, [143], "preempted"), done.output


@pytest.mark.sampled_full(1)
@pytest.mark.full
@pytest.mark.parametrize(("first_is", "expected"), [("returned", [0]), ("running", [143])])
def test_the_runs_of_all_threads_are_ended_and_of_none_that_has_returned(tmp_path, first_is, expected):
    with script(tmp_path, "two_threads", first_is) as started:
        done = started.end()
        assert ended_by_the_signal(done), done.output
        assert {run.id: run.exit_codes for run in started.server.runs} == {"first": expected, "second": [143]}
        assert [len(run.rows) for run in started.server.runs] == [1, 1]

"""SIGTERM beyond the fault matrix: what was installed is put back, and children and threads are left alone."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from support import jobs
from support.harness import ends, job, python, torchrun
from support.loopback import Fault
from support.wandb_server import WandbServer

from flyteplugins_tracking import tracking_init
from flyteplugins_tracking._runs.sigterm import MainThreadListener
from flyteplugins_tracking.testing import RecordingTracker


def trained(directory: Path, *arguments: str, env: Mapping[str, str] | None = None) -> jobs.Done:
    """A function of `signal_runs.py`."""
    return jobs.python(directory, jobs.PROGRAMS / "signal_runs.py", *arguments, env=env)


def lines_of(job) -> list[str]:
    return [line for lines in job.notes().values() for line in lines if not line.startswith(("logged", "held"))]


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, marks=pytest.mark.full),
        {"handler": "flag"},
        pytest.param({"nested": True}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_the_old_handlers_are_put_back(tmp_path, settings):
    with job(tmp_path) as started:
        started.start(python(), **ends("return", **settings))
        assert started.outcome().returncode == 0
        assert lines_of(started)[-2:] == ["restored True", "threads []"]


def test_a_handler_that_the_function_installs_stays(tmp_path):
    with job(tmp_path) as started:
        started.start(python(), **ends("return", handler_inside="flag"))
        assert started.outcome().returncode == 0
        assert lines_of(started)[-2:] == ["restored False", "threads []"]


@pytest.mark.parametrize(
    ("settings", "returncode", "expected"),
    [
        pytest.param(ends("loop"), 143, ["unwound"], marks=pytest.mark.full),
        pytest.param(ends("finally"), 143, ["finally", "unwound"], marks=pytest.mark.full),
        pytest.param(
            ends("loop", handler="flag"),
            0,
            ["handler", "returns", "unwound", "restored True", "threads []"],
            marks=pytest.mark.full,
        ),
        (ends("sleep", handler="exit 5"), 5, ["handler", "unwound"]),
        pytest.param(ends("loop", handler="os._exit 6"), 6, ["handler"], marks=pytest.mark.full),
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


def test_a_handler_inside_that_exits_with_success_hides_no_signal(tmp_path):
    """The function has logged no row since it has installed it, so nothing but the wakeup fd tells of the signal."""
    with job(tmp_path) as started:
        process = started.start(python(), **ends("sleep", handler_after_rows="exit 0"))
        started.wait_for("ready 0 0")
        started.signal(process.pid)
        found = started.outcome()
        assert (found.returncode, found.exit_codes, found.lost) == (0, (143,), 0)
        assert "ows are lost" not in found.output


def test_a_function_that_catches_the_exit_and_returns_ends_with_the_signals_status(tmp_path):
    with job(tmp_path) as started:
        process = started.start(python(), **ends("catches all"))
        started.wait_for("ready 0 0")
        started.signal(process.pid)
        found = started.outcome()
        assert (found.returncode, found.exit_codes, found.lost) == (143, (143,), 0)


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


def test_a_signal_to_a_child_ends_the_child_alone(tmp_path):
    done = trained(tmp_path, "children")
    assert done.output.split() == ["True", "True", "-15", "-15"]
    (run,) = done.runs
    assert (run.exit_code, len(run.rows)) == (0, 1)


def test_an_ignored_signal_stays_ignored(tmp_path):
    done = trained(tmp_path, "ignored")
    assert (done.returncode, [run.exit_code for run in done.runs]) == (0, [0]), done.output


def test_a_function_in_a_thread_works_without_signals():
    recorder, before, seen = RecordingTracker(), signal.getsignal(signal.SIGTERM), []

    @tracking_init(tracker=recorder)
    def train() -> None:
        seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert seen == [before]
    assert [run.exit_codes for run in recorder.runs] == [(0,)]


@pytest.mark.full
def test_a_signal_to_a_child_that_has_just_been_forked_ends_the_child_alone(tmp_path):
    done = trained(tmp_path, "fork_race")
    assert done.returncode == 0, done.output
    assert [(run.exit_code, len(run.rows)) for run in done.runs] == [(0, 150)]


@pytest.mark.parametrize("log", [pytest.param("wandb.log", marks=pytest.mark.full), "hoisted"])
def test_a_log_that_was_fetched_before_the_signal_works_after_it(tmp_path, log):
    """The module's function, and a method in a variable."""
    done = trained(tmp_path, "fetched_log", log)
    assert done.returncode == 0, done.output
    assert [row["n"] for run in done.runs for row in run.rows] == list(range(500))
    assert [run.exit_code for run in done.runs] == [143]


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


@pytest.mark.parametrize("where", ["thread", pytest.param("task", marks=pytest.mark.full)])
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


@pytest.mark.parametrize(
    ("function", "exit_code"), [("interrupted_async", 130), pytest.param("cancelled_async", 1, marks=pytest.mark.full)]
)
def test_ctrl_c_in_an_async_function_is_told_from_a_cancellation(tmp_path, function, exit_code):
    with WandbServer() as server:
        done = trained(tmp_path, function, env=server.environment)
        assert [run.exit_codes for run in server.runs] == [[exit_code]], done.output


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


@pytest.mark.parametrize("place", [pytest.param("before", marks=pytest.mark.full), "inside"])
def test_the_signal_reaches_an_asyncio_loop(tmp_path, place):
    """Its own handler runs while the run is open, also where the function has set it."""
    done = trained(tmp_path, "asyncio_handler", place)
    assert done.returncode == 0, done.output
    assert [run.exit_code for run in done.runs] == [143]
    assert [row["x"] for run in done.runs for row in run.rows] == [1, 2]


def test_nothing_is_left_in_the_process_after_many_runs(tmp_path):
    done = trained(tmp_path, "many_runs")
    assert done.output.strip().endswith("True"), done.output
    assert len(done.runs) == 33


def test_in_a_data_loaders_worker_there_is_no_run_and_none_is_ended(tmp_path):
    with WandbServer() as server:
        done = trained(tmp_path, "data_loader", env=server.environment)
        (run,) = server.runs
        assert (done.returncode, run.exit_codes, len(run.rows)) == (0, [0], 20), done.output


@pytest.mark.parametrize(
    ("case", "rows"),
    [
        pytest.param("log", {"outer": [0, 1], "evaluation": [0]}, marks=pytest.mark.full),
        ("handler logs", {"outer": [0, 1, 2], "evaluation": [0]}),
        pytest.param("summary", {"outer": [0], "evaluation": [0]}, marks=pytest.mark.full),
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


def test_a_loop_that_is_closed_inside_leaves_nothing_of_it_behind(tmp_path):
    """asyncio closes the socket that was the wakeup fd; its number is another file's then."""
    done = trained(tmp_path, "closed_loop")
    assert done.returncode == 0, done.output
    assert {path.read_bytes() for path in tmp_path.glob("file-*")} == {b""}


def test_a_signal_that_is_missed_before_a_wait_is_sent_again(tmp_path):
    done = trained(tmp_path, "missed")
    assert (done.returncode, {run.exit_code for run in done.runs}) == (0, {143}), done.output


@pytest.mark.full
def test_a_process_with_thousands_of_open_files_is_watched(tmp_path):
    """Its main thread is in a C call, so that only the thread can end the run."""
    done = trained(tmp_path, "many_files")
    assert (done.returncode, [run.exit_code for run in done.runs]) == (143, [143]), done.output


@pytest.mark.parametrize("is_reinstalled", [True, False])
def test_a_handler_that_calls_ours_decides_how_the_function_ends(is_reinstalled, monkeypatch):
    """Lightning's does: its loop then ends all ranks behind the same batch, with a checkpoint."""
    monkeypatch.setattr(MainThreadListener, "_exit_in_the_end", lambda _: None)
    told: list[int] = []
    ended: list[int] = []
    listener, before = MainThreadListener(lambda _: ended.append(143)), signal.getsignal(signal.SIGTERM)
    try:
        assert listener.start(None, timeout_s=1)
        listener.run_opened()
        chained = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, lambda *received: (told.append(received[0]), chained(*received)))
        if is_reinstalled:
            listener.before_row()
        signal.raise_signal(signal.SIGTERM)  # unwinds nothing
        until = time.monotonic() + 60
        while not (told and ended) and time.monotonic() < until:
            time.sleep(0.01)
        assert (told, ended[0], listener.terminated) == ([signal.SIGTERM], 143, True)
        listener.stop()  # nor does this
    finally:
        signal.signal(signal.SIGTERM, before)

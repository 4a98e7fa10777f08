"""`should_stop()` in one process and in a simulation. Real jobs are in tests/jobs/test_stopping_jobs.py."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from flyteplugins_tracking import get_distributed_info, request_stop, should_stop, tracking_init
from flyteplugins_tracking.testing import RecordingTracker, simulate


@pytest.fixture
def recorder():
    return RecordingTracker()


def steps_until_stop(most: int = 100, at: int = 3, reason: str = "a reason") -> int:
    """How many steps are made if the stop is requested in step `at`."""
    for step in range(1, most + 1):
        if step == at:
            request_stop(reason)
        if should_stop():
            return step
    return most


def test_the_next_call_returns_true_until_each_functions_end_and_its_run_tells_why(recorder):
    train = tracking_init(tracker=recorder)(steps_until_stop)
    assert [train(at=at, most=5) for at in (1, 3, 2, 9)] == [1, 3, 2, 5]
    assert [run.summary.get("stop/step") for run in recorder.runs] == [1, 3, 2, None]
    assert (recorder.runs[0].exit_codes, recorder.runs[0].summary["stop/reason"]) == ((0,), "a reason")

    @tracking_init(tracker=recorder)
    def stays() -> list[bool]:
        thread = threading.Thread(target=request_stop)  # a thread of the function may ask
        thread.start()
        thread.join()
        return [should_stop() for _ in range(3)]

    assert stays() == [True] * 3
    assert recorder.runs[-1].summary["stop/reason"] == "request_stop"


def test_outside_of_a_function_it_is_false_and_a_request_is_ignored(caplog):
    request_stop("a reason")
    assert not should_stop()
    assert "request_stop('a reason') is ignored: it is not called in a decorated function" in caplog.text


def test_sigusr1_asks_for_a_stop_and_is_put_back(recorder):
    @tracking_init(tracker=recorder)
    def train() -> bool:
        assert not should_stop()
        signal.raise_signal(signal.SIGUSR1)
        return should_stop()

    assert train()
    assert recorder.runs[0].summary["stop/reason"] == "SIGUSR1"
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_a_handler_of_the_users_for_sigusr1_stays(recorder):
    signals: list[int] = []

    @tracking_init(tracker=recorder)
    def train() -> bool:
        assert not should_stop()
        signal.raise_signal(signal.SIGUSR1)
        return should_stop()

    signal.signal(signal.SIGUSR1, lambda number, _: signals.append(number))
    try:
        assert not train()
        assert signals == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def loops(most_s: float = 30) -> bool:
    until = time.monotonic() + most_s
    while time.monotonic() < until:
        if should_stop():
            return True
        time.sleep(0.005)
    return False


def test_the_time_limit_of_slurm_stops_in_time(recorder, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 60))
    assert tracking_init(tracker=recorder, stop_before_s=60)(loops)()
    assert recorder.runs[0].summary["stop/reason"] == "time limit"


def test_a_time_limit_that_is_far_away_or_not_watched_stops_nothing(recorder, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 60))
    assert not tracking_init(tracker=recorder, stop_before_s=5)(loops)(0.1)
    assert not tracking_init(tracker=recorder)(loops)(0.1)


@pytest.mark.parametrize("job", [None, "4711"])
def test_a_time_limit_that_nobody_tells_is_said(recorder, monkeypatch, caplog, job):
    """As in a job of Slurm before 23.02, which sets no SLURM_JOB_END_TIME."""
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    if job:
        monkeypatch.setenv("SLURM_JOB_ID", job)
    assert not tracking_init(tracker=recorder, stop_before_s=5)(loops)(0.05)
    assert "stop_before_s=5 is ignored: the launcher names no time limit" in caplog.text
    assert "before, export SLURM_JOB_END_TIME in the batch script" in caplog.text


def test_a_rank_of_a_simulation_asks_itself(recorder):
    @tracking_init(tracker=recorder, run_mode="new", stop_before_s=5)
    def train() -> bool:
        if get_distributed_info().rank == 1:
            request_stop("enough")
        return should_stop()

    job = simulate(train, 1, 3)
    assert job.returned == (False, True, False)
    assert [run.summary.get("stop/reason") for run in job.runs] == [None, "enough", None]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_has_no_stop_and_its_signal_ends_it(recorder):
    @tracking_init(tracker=recorder)
    def train() -> int:
        assert not should_stop()
        request_stop()
        child = os.fork()
        if child == 0:
            if should_stop():
                os._exit(1)
            signal.raise_signal(signal.SIGUSR1)
            os._exit(2)
        assert should_stop()
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert train() == -signal.SIGUSR1

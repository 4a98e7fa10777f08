"""Tracked functions in forked children, and coroutines that outlive the function around them."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from support import jobs
from support.wandb_server import WandbServer

from flyteplugins_tracking import get_run, request_stop, should_stop, tracking_init
from flyteplugins_tracking.testing import RecordingTracker


def test_a_forked_child_has_no_run_and_ends_none(bare_environment):
    tracker = RecordingTracker()

    @tracking_init(tracker=tracker)
    def train():
        child = os.fork()
        if child == 0:
            os._exit(0 if get_run() is None else 1)
        _, status = os.waitpid(child, 0)
        return os.waitstatus_to_exitcode(status)

    assert train() == 0

    @tracking_init(tracker=tracker)
    def returns_in_the_child():
        return os.fork()

    child = returns_in_the_child()
    if child == 0:
        os._exit(len([run for run in tracker.runs[1:] if run.exit_codes]))
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert tracker.runs[1].exit_codes == (0,)


def test_a_child_that_is_forked_while_a_thread_opens_a_run_can_open_its_own():
    opening, forked = threading.Event(), threading.Event()

    class Slow(RecordingTracker):
        def open(self, request):
            opening.set()
            forked.wait(60)
            return super().open(request)

    @tracking_init(tracker=Slow(), run_mode="new")
    def train():
        return get_run()

    with ThreadPoolExecutor(1) as pool:
        trained = pool.submit(train)
        assert opening.wait(60)
        child = os.fork()
        if child == 0:
            signal.alarm(30)
            forked.set()
            os._exit(0 if train() is not None else 1)
        forked.set()
        _, status = os.waitpid(child, 0)
        assert trained.result() is not None
    assert os.waitstatus_to_exitcode(status) == 0


def test_a_function_that_outlives_the_one_around_it_has_an_open_run(tmp_path):
    """One that has joined goes on in the run, which ends as its opener has; a later one has a run of its own."""
    done = jobs.python(tmp_path, jobs.PROGRAMS / "async_outlives_caller.py")
    assert done.returncode == 0, done.output
    assert "GLOBAL None" in done.output
    rows = {(run.id == "outer", row["x"]) for run in done.runs for row in run.rows}
    assert rows == {(True, 0), (True, 1), (False, 2)}
    assert {(run.id == "outer", run.exit_code) for run in done.runs} == {(True, 1), (False, 0)}


@pytest.mark.full
def test_sigterm_ends_a_run_that_its_opener_has_left(tmp_path):
    with WandbServer() as server:
        done = jobs.python(tmp_path, jobs.PROGRAMS / "signal_runs.py", "joined_async", env=server.environment)
        run = server.run("outer")
    assert done.returncode == 143, done.output
    assert ([row["x"] for row in run.rows], run.exit_codes[-1], run.completed) == ([0, 1], 143, True)


def test_the_next_job_goes_on_in_the_run_of_one_that_was_stopped_and_not_of_one_that_returned(
    tmp_path, bare_environment
):
    @tracking_init(tracker=RecordingTracker(), run_file=tmp_path / "run.json")
    def train(is_stopped):
        if is_stopped:
            request_stop("the test")
        while is_stopped and not should_stop():
            time.sleep(0.01)

    train(True)
    train(False)
    paths = [path for path in tmp_path.glob("run.json*") if path.suffix != ".lock"]
    files = [json.loads(path.read_text()) for path in sorted(paths, key=lambda path: (len(path.name), path.name))]
    assert [file["has_ended"] for file in files] == [False, True]


def test_the_same_rank_of_two_jobs_with_one_id_writes_to_two_shared_runs(bare_environment):
    """Each thread is in a job of its own here. The primaries have locked the run, as other processes."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        bare_environment.setenv(name, value)

    @tracking_init(tracker=RecordingTracker(), id="same", run_mode="shared")
    def train(inside):
        return get_run().id, inside()

    with ThreadPoolExecutor(1) as other:
        first, (second, _) = train(lambda: other.submit(train, lambda: None).result())
    assert first == "same"
    assert second.startswith("same-")

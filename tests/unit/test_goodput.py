"""`goodput/*` in one process. Real jobs are in tests/jobs/test_goodput_jobs.py."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from support.waiting import wait_until

from flyteplugins_tracking import get_run, request_stop, should_stop, tracking_init
from flyteplugins_tracking._job.agreement import CallCounter
from flyteplugins_tracking._job.goodput import Attempt, Note, merged, metrics
from flyteplugins_tracking._runs import goodput
from flyteplugins_tracking._runs.goodput import Steps
from flyteplugins_tracking.testing import RecordingTracker
from flyteplugins_tracking.trackers.registry import find_tracker


@pytest.fixture
def directory(monkeypatch, tmp_path) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def recorder(bare_environment, directory) -> RecordingTracker:
    return RecordingTracker()


def notes(directory: Path) -> list[Path]:
    return list(directory.glob("*/goodput/*"))


def passed(step: int) -> None:
    should_stop(step)


def passed_later(step: int) -> None:
    should_stop()
    should_stop(step)


def logged_with_step(step: int) -> None:
    get_run().log({"loss": 1.0}, step=step)


def logged_with_column(step: int) -> None:
    get_run().log({"loss": 1.0, "step": -1, "trainer/global_step": step})


def logged_without_step(_: int) -> None:
    get_run().log({"loss": 1.0})


def logged_in_epochs(step: int) -> None:
    get_run().log({"loss": 1.0}, step=step)
    get_run().log({"accuracy": 1.0}, step=step // 5)


def passed_and_logged_in_epochs(step: int) -> None:
    should_stop(step)
    logged_in_epochs(step)


def train(first: int, last: int, fails: bool, make_step: Callable[[int], None]) -> None:
    for step in range(first, last + 1):
        time.sleep(0.02)
        make_step(step)
    if fails:
        raise ValueError("made to fail")


def three_attempts(recorder, make_step):
    """Make steps 0 to 9, then 5 to 9 from a checkpoint, and then 10 to 14; the first two attempts fail."""
    tracked = tracking_init(tracker=recorder, id="again")(train)
    with pytest.raises(ValueError, match="made to fail"):
        tracked(0, 9, True, make_step)
    with pytest.raises(ValueError, match="made to fail"):
        tracked(5, 9, True, make_step)
    tracked(10, 14, False, make_step)
    return recorder.runs[-1]


@pytest.mark.parametrize(
    "make_step",
    [passed, logged_with_step, logged_with_column, passed_and_logged_in_epochs],
    ids=lambda function: function.__name__,
)
def test_a_run_that_was_restarted_tells_its_goodput(recorder, directory, make_step):
    run = three_attempts(recorder, make_step)
    assert run.summary["goodput/attempts"] == 3
    assert 0 < run.summary["goodput/share"] < 1
    # The steps from 5 on: 5 of the 9 whose time is known.
    again_s, kept_s = run.summary["goodput/attempt_0/repeated_s"], run.summary["goodput/attempt_0/kept_s"]
    assert again_s / (again_s + kept_s) == pytest.approx(5 / 9)
    assert [run.summary[f"goodput/attempt_{number}/repeated_s"] for number in (1, 2)] == [0, 0]
    assert run.summary["goodput/restart_s"] > 0
    assert "3 attempts" in run.texts["goodput"]
    assert notes(directory) == []


def test_a_first_call_without_a_step_is_followed_by_others(recorder):
    run = three_attempts(recorder, passed_later)
    assert run.summary["goodput/attempts"] == 3
    assert "goodput/share" in run.summary


@pytest.mark.parametrize("make_step", [logged_without_step, logged_in_epochs], ids=lambda f: f.__name__)
def test_rows_that_do_not_tell_the_steps_tell_the_time_between_attempts(recorder, make_step):
    run = three_attempts(recorder, make_step)
    assert run.summary["goodput/attempts"] == 3
    assert run.summary["goodput/restart_s"] > 0
    assert not [key for key in run.summary if "share" in key or "repeated" in key or "kept" in key]
    assert "unknown" in run.texts["goodput"]


def test_a_run_that_has_ended_begins_anew(recorder, directory):
    three_attempts(recorder, logged_with_step)
    restart_s = recorder.runs[-1].summary["goodput/restart_s"]
    tracking_init(tracker=recorder, id="again")(train)(0, 3, False, logged_with_step)
    assert recorder.runs[-1].summary["goodput/restart_s"] == restart_s  # as it was


def test_an_attempt_that_has_nothing_left_to_do_tells_the_goodput_of_those_before(recorder, directory):
    tracked = tracking_init(tracker=recorder, id="again")(train)
    for first in (0, 5):
        with pytest.raises(ValueError, match="made to fail"):
            tracked(first, 9, True, logged_with_step)
    tracked(10, 9, False, logged_with_step)
    assert recorder.runs[-1].summary["goodput/attempts"] == 2
    assert notes(directory) == []


def test_a_run_with_one_attempt_tells_nothing(recorder, directory):
    tracking_init(tracker=recorder, id="once")(train)(0, 20, False, logged_with_step)
    (run,) = recorder.runs
    assert set(run.summary) == {"loss"}
    assert notes(directory) == []


def test_a_directory_that_cannot_be_written_costs_the_goodput_only(recorder, monkeypatch, directory, caplog):
    (directory / "a file").touch()
    monkeypatch.setattr("tempfile.tempdir", str(directory / "a file"))
    run = three_attempts(recorder, logged_with_step)
    assert len(run.rows) == 20
    assert "goodput/attempts" not in run.summary
    assert "run again: its next attempt will not know all steps of this one" in caplog.text


def test_both_of_two_runs_expect_another_attempt_after_a_stop(recorder, directory):
    other = RecordingTracker(find_tracker("mlflow"))

    @tracking_init(tracker=other, id="outer")
    @tracking_init(tracker=recorder, id="inner")
    def stopped(first: int, stops: bool) -> None:
        for step in range(first, first + 10):
            time.sleep(0.02)
            if stops and step == 8:
                request_stop("a reason")
            get_run("mlflow").log({"loss": 1.0}, step=step)
            get_run("recording").log({"loss": 1.0}, step=step)
            if should_stop():
                return

    stopped(0, stops=True)
    assert len(notes(directory)) == 2
    stopped(9, stops=False)
    for *_, run in (recorder.runs, other.runs):
        assert run.summary["goodput/attempts"] == 2
    assert notes(directory) == []


@pytest.mark.parametrize("restarts", [0, 1])
def test_after_a_good_end_of_one_rank_only_a_restart_of_the_job_is_another_attempt(
    recorder, directory, bare_environment, restarts
):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        bare_environment.setenv(name, value)
    bare_environment.setenv("TORCHELASTIC_RUN_ID", "a-job")
    tracked = tracking_init(tracker=recorder, id="again")(train)
    tracked(0, 9, False, logged_with_step)
    bare_environment.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
    tracked(10, 19, False, logged_with_step)
    assert recorder.runs[-1].summary.get("goodput/attempts") == (2 if restarts else None)


def test_a_job_that_ended_well_is_none_of_the_next_ones_attempts(recorder, directory, bare_environment):
    variables = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**variables, "TORCHELASTIC_RUN_ID": "a-job", "TORCHELASTIC_RESTART_COUNT": "0"}.items():
        bare_environment.setenv(name, value)
    tracked = tracking_init(tracker=recorder, id="again")(train)
    tracked(0, 9, False, logged_with_step)
    with pytest.raises(ValueError, match="made to fail"):
        tracked(0, -1, True, logged_with_step)  # before its first row
    bare_environment.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    tracked(0, 9, False, logged_with_step)
    assert "goodput/attempts" not in recorder.runs[-1].summary


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_notes_nothing_and_does_not_keep_the_parent_from_it(recorder, directory):
    @tracking_init(tracker=recorder, id="forks")
    def forking() -> None:
        run = get_run()
        children = []
        for step in range(40):
            run.log({"loss": 1.0}, step=step)
            time.sleep(0.02)
            if step % 5 == 0:
                child = os.fork()
                if child == 0:
                    run.log({"loss": 1.0}, step=1000)
                    time.sleep(5)
                    os._exit(0)
                children.append(child)
        wait_until(lambda: last_step(directory) >= 30)
        assert last_step(directory) < 1000
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)

    forking()


def last_step(directory: Path) -> float:
    for path in notes(directory):
        if path.suffix == ".json":
            return merged([path.read_text()], is_retry=False).attempts[-1].last_step or -1
    return -1


def test_a_slow_disk_does_not_stop_the_training(recorder, directory, monkeypatch):
    begins, may_end = threading.Event(), threading.Event()

    def slow(_: Any, __: str) -> None:
        begins.set()
        may_end.wait(60)

    monkeypatch.setattr(goodput.Attempts, "_write", slow)
    monkeypatch.setattr(goodput, "_PATIENCE_S", 0.1)

    @tracking_init(tracker=recorder, id="slow")
    def running() -> None:
        logged_with_step(0)
        assert begins.wait(60)
        for step in range(1, 100):
            logged_with_step(step)

    running()
    assert not may_end.is_set()
    may_end.set()
    assert len(recorder.runs[0].rows) == 100


def test_a_run_with_a_random_id_has_no_attempts(recorder, directory):
    @tracking_init(tracker=recorder)
    def running() -> None:
        logged_with_step(0)
        assert "flyteplugins_tracking.goodput" not in [thread.name for thread in threading.enumerate()]

    running()


def test_a_process_that_can_start_no_thread_has_its_run(recorder, directory, monkeypatch, caplog):
    def refused(thread: threading.Thread) -> None:
        if thread.name == "flyteplugins_tracking.goodput":
            raise RuntimeError("can't start new thread")
        start(thread)

    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", refused)
    tracking_init(tracker=recorder, id="threads")(train)(0, 3, False, logged_with_step)
    (run,) = recorder.runs
    assert (len(run.rows), run.exit_codes) == (4, (0,))
    assert "the run will not tell its goodput: can't start new thread" in caplog.text


def test_the_thread_ends_with_the_run(recorder, directory):
    tracking_init(tracker=recorder, id="ends")(train)(0, 3, False, logged_with_step)
    assert "flyteplugins_tracking.goodput" not in [thread.name for thread in threading.enumerate()]


def test_old_notes_are_removed(recorder, directory):
    tracked = tracking_init(tracker=recorder, id="fails")(train)
    with pytest.raises(ValueError, match="made to fail"):
        tracked(0, 3, True, logged_with_step)
    (note,) = notes(directory)
    for days, is_left in ((29, True), (31, False)):
        os.utime(note, (time.time() - days * 24 * 3600,) * 2)
        tracking_init(tracker=recorder, id="another")(train)(0, 3, False, logged_with_step)
        assert note.exists() is is_left


# What an attempt is


@pytest.fixture
def clock(monkeypatch) -> Iterator[list[float]]:
    """The time, which a test sets."""
    now = [1000.0]
    monkeypatch.setattr(goodput, "time", type("Clock", (), {"time": lambda: now[0], "monotonic": lambda: now[0]}))
    return now


def attempt_of(rows: list[tuple[float, Any]], clock: list[float]) -> Attempt | None:
    """The attempt of rows at these seconds, with these steps."""
    clock[0] = 1000.0
    steps = Steps("global_step")
    for at, step in rows:
        clock[0] = 1000.0 + at
        steps.row_logged({"loss": 1.0}, step)
    return steps.attempt


def test_an_attempt_lasts_from_its_first_to_its_last_step(clock):
    rows = [(0, None), (500, 0), (501, 1), (502, 2), (510, 2), (7200, None)]
    assert attempt_of(rows, clock) == Attempt(1000.0, 1500.0, 1502.0, 0, 2, 1.0)


def test_an_attempt_without_steps_lasts_from_its_first_to_its_last_row(clock):
    assert attempt_of([(1, None), (9, None)], clock) == Attempt(1000.0, 1001.0, 1009.0, None, None, None)
    assert attempt_of([(1, 7), (5, 8), (9, 3)], clock) == Attempt(1000.0, 1001.0, 1009.0, 0, 0, 0)
    assert Steps("global_step").attempt is None


def test_a_row_before_the_training_is_none_of_its_steps(clock):
    """As an evaluation logs it, before the trainer has loaded its checkpoint."""
    rows = [(0, 0), *((100.0 + step, step) for step in range(1001, 1011))]
    assert attempt_of(rows, clock) == Attempt(1000.0, 2101.0, 2110.0, 1001, 1010, 1.0)
    assert attempt_of([(0, 1), (50, 50), (100, 100), (150, 150)], clock).first_step == 1


def test_few_steps_have_no_gap(clock):
    assert attempt_of([(0, 4)], clock) == Attempt(1000.0, 1000.0, 1000.0, 4, 4, None)
    assert attempt_of([(0, 4), (1, 1000)], clock) == Attempt(1000.0, 1000.0, 1001.0, 4, 1000, None)


def test_a_clock_that_is_set_changes_no_attempt(clock, monkeypatch):
    steps = Steps("global_step")
    for step in range(3):
        steps.row_logged({}, step)
        clock[0] += 1
    monkeypatch.setattr(goodput.time, "time", lambda: 0.0)
    assert steps.attempt == Attempt(1000.0, 1000.0, 1002.0, 0, 2, 1.0)


def test_should_stop_takes_the_place_of_the_rows_from_its_first_step_on(clock):
    steps, calls = Steps("global_step"), CallCounter(math.inf, lambda _: False)
    steps.follow(calls)
    calls.next()
    steps.row_logged({}, 100)
    clock[0] += 500
    for step in range(7, 13):
        calls.next(step)
        if step % 5 == 2:
            steps.row_logged({}, 2000)
        clock[0] += 1
    assert steps.attempt == Attempt(1000.0, 1500.0, 1505.0, 7, 12, 1.0)
    clock[0] += 500
    steps.look()
    assert steps.attempt.ended_at == 1505.0


@pytest.mark.parametrize(
    ("step", "known"),
    [(3, 3), (3.5, 3.5), (float("nan"), None), (Fraction(10**400), None), ("3", None), (None, None), (object(), None)],
)
def test_a_step_is_a_number(step, known):
    steps = Steps("global_step")
    steps.row_logged({}, step)
    assert steps.attempt.last_step == known


@pytest.mark.parametrize("arguments", [(), (None,), ([1],), ({}, 1, True, "more")])
def test_wrong_arguments_of_log_are_left_to_the_tracker(arguments):
    Steps("global_step").row_logged(*arguments, step=2, unknown=1)


@pytest.mark.parametrize("kind", [dict, MappingProxyType])
def test_the_column_of_steps_is_the_users(kind):
    steps = Steps("iteration")
    steps.row_logged(kind({"iteration": 7, "train/global_step": 8}))
    assert steps.attempt.first_step == 7


def test_the_column_that_was_defined_comes_first():
    steps = Steps("iteration")
    steps.column_defined("epoch")
    steps.column_defined("train_step")
    steps.row_logged({"iteration": 7, "train_step": 9, "epoch": 1})
    assert steps.attempt.first_step == 9


def test_an_attempt_is_noted_more_and_more_rarely(clock):
    steps = Steps("global_step")
    assert steps.next_note_s == 0.1
    noted = []
    while clock[0] < 1400:
        steps.row_logged({}, len(noted))
        noted.append(clock[0] - 1000)
        clock[0] += steps.next_note_s
    gaps = [later - earlier for earlier, later in pairwise(noted)]
    assert (min(gaps), max(gaps)) == pytest.approx((0.1, 5.0))
    assert all(gap <= 0.1 * at + 1e-9 for gap, at in zip(gaps, noted, strict=False) if at > 1)
    assert len(noted) < 150


class Deleted:
    """As an array of JAX's that was given away."""

    def __eq__(self, _: object) -> bool:
        raise RuntimeError("Array has been deleted")

    __hash__ = None


def test_what_is_passed_may_be_anything_and_is_a_step_if_it_is_a_number(clock):
    steps, calls = Steps("global_step"), CallCounter(math.inf, lambda _: False)
    steps.follow(calls)
    for step in range(5):
        calls.next(Deleted())
        steps.row_logged({}, step)
        clock[0] += 1
    assert steps.attempt == Attempt(1000.0, 1000.0, 1004.0, 0, 4, 1.0)


def test_a_function_within_may_be_called_for_each_epoch(clock):
    steps = Steps("global_step")
    for epoch in range(5):
        calls = CallCounter(math.inf, lambda _: False)
        steps.follow(calls)
        for step in range(10 * epoch, 10 * epoch + 10):
            calls.next(step)
            if step % 10 == 0:
                steps.look()
            clock[0] += 1
    steps.look()
    assert steps.attempt.gap == pytest.approx(1.0, abs=0.1)
    assert (steps.attempt.first_step, steps.attempt.last_step) == (0, 49)


# What attempts come to


def attempt(began_at: float, seconds: float, first: float | None, last: float | None, gap: float | None = 1) -> Attempt:
    return Attempt(began_at, began_at, began_at + seconds, first, last, gap)


def shares(attempts: list[Attempt]) -> list[float]:
    """The share of its time that each attempt has kept."""
    values = metrics(attempts)
    return [values[f"goodput/attempt_{number}/kept_s"] / attempt.seconds for number, attempt in enumerate(attempts)]


def test_goodput_is_the_time_of_the_steps_that_no_later_attempt_makes_again():
    attempts = [attempt(0.0, 10.0, 0, 10), attempt(20.0, 10.0, 6, 16), attempt(35.0, 10.0, 17, 27)]
    values = metrics(attempts)
    assert values["goodput/share"] == pytest.approx((5 + 10 + 10) / 45)
    assert (values["goodput/restart_s"], values["goodput/repeated_s"]) == (15.0, 5.0)
    assert [values[f"goodput/attempt_{number}/kept_s"] for number in range(3)] == [5.0, 10.0, 10.0]
    assert metrics(attempts[:1]) == {}


@pytest.mark.parametrize(
    ("first", "second", "kept"),
    [
        (attempt(0, 950, 0.0, 0.95, 0.05), attempt(960, 1000, 0.9, 1.9, 0.05), 0.85 / 0.95),
        (attempt(0, 950, 0.05, 0.95, 0.05), attempt(960, 1000, 1.0, 1.9, 0.05), 1.0),
        (attempt(0, 450, 50, 500, 50), attempt(600, 500, 500, 1000, 50), 400 / 450),
        (attempt(0, 450, 50, 500, 50), attempt(600, 500, 550, 1000, 50), 1.0),
        (attempt(0, 10, 10, 20), attempt(11, 10, 0, 10), 0.0),
        (attempt(0, 10, 10, 20), attempt(11, 10, 10, 20), 0.0),
    ],
    ids=["epochs that overlap", "epochs", "a row again", "rows", "behind the start", "from the start"],
)
def test_the_steps_may_be_any_distance_apart(first, second, kept):
    assert shares([first, second]) == [pytest.approx(kept), 1.0]


def test_a_rollback_behind_an_earlier_attempt_keeps_nothing_of_that():
    values = metrics([attempt(0.0, 10.0, 10, 20), attempt(11.0, 10.0, 0, 10), attempt(22.0, 10.0, 11, 21)])
    assert [values[f"goodput/attempt_{number}/kept_s"] for number in range(3)] == [0.0, 10.0, 10.0]


def test_an_attempt_without_a_step_has_only_cost_time():
    values = metrics([attempt(0, 10, 0, 10), attempt(20, 5, None, None, None), attempt(30, 10, 11, 21)])
    assert values["goodput/restart_s"] == 10 + 5 + 5
    assert values["goodput/share"] == pytest.approx(20 / 40)


def test_an_attempt_with_few_steps_has_the_gap_of_the_others():
    crashed = attempt(20, 1, 5, 6, None)
    assert shares([attempt(0, 10, 0, 10), crashed]) == [pytest.approx(0.4), 1.0]
    assert shares([attempt(0, 10, 0, 10), crashed, attempt(30, 10, 7, 17)]) == [pytest.approx(0.4), 1.0, 1.0]
    one_each = metrics([attempt(0, 6, 0, 6), attempt(10, 0, 4, 4, None), attempt(20, 0, 4, 4, None)])
    assert (one_each["goodput/kept_s"], one_each["goodput/repeated_s"]) == (3.0, 3.0)
    assert shares([attempt(0, 5, 0, 5, None), attempt(20, 1, 5, 6, None)]) == [1.0, 1.0]  # nobody knows a gap


def test_a_row_before_the_training_alone_makes_no_step_again():
    assert shares([attempt(0, 10, 0, 10), attempt(20, 1, 0, 0, None)])[0] == 1.0


def test_an_attempt_whose_steps_went_down_makes_the_share_unknown():
    known, unknown = attempt(0, 10, 0, 10), attempt(20, 10, 0, 0, 0)
    values = metrics([known, unknown])
    assert all(
        math.isnan(values[f"goodput/{name}"])
        for name in ("share", "repeated_s", "attempt_0/kept_s", "attempt_1/kept_s")
    )
    assert values["goodput/restart_s"] == 10
    assert "goodput/share" not in metrics([unknown, unknown])


@pytest.mark.parametrize("behind_s", [1, 60])
def test_a_machine_whose_clock_is_behind_makes_no_share_above_one(behind_s):
    values = metrics([attempt(100, 10, 0, 10), attempt(110 - behind_s, 10, 11, 21)])
    assert (values["goodput/restart_s"], values["goodput/share"]) == (0.0, 1.0)


# What is kept of them


def test_two_notes_of_a_run_are_one_list_without_what_is_no_note():
    first, early, late, last = attempt(0, 5, 0, 1), attempt(10, 5, 0, 1), attempt(10, 8, 0, 2), attempt(20, 5, 0, 3)
    others = [None, "", "{", '[["text"]]', "[1]", "null", "[0,null,[[1]]]", "[0,0]", "[0,null,[[{},1,1,1,1,1]]]"]
    texts = [Note(0.0, None, [first, early]).to_text(), Note(0.0, None, [late, last]).to_text(), *others]
    assert merged(texts, is_retry=False) == Note(0.0, None, [first, late, last])


def test_an_attempt_whose_first_step_has_changed_is_one():
    early, late = Attempt(5.0, 6.0, 6.0, 0, 0, None), Attempt(5.0, 7.0, 9.0, 100, 150, 1.0)
    texts = [Note(0.0, None, [early]).to_text(), Note(0.0, None, [late]).to_text()]
    assert merged(texts, is_retry=True).attempts == [late]


def test_a_good_end_on_another_machine_is_the_end_here_too():
    before, at_end, after = attempt(0, 5, 0, 5), attempt(10, 5, 6, 9), attempt(100, 5, 0, 5)
    here, there = Note(0.0, None, [before]).to_text(), Note(0.0, 16.0, [before, at_end]).to_text()
    assert merged([here, there], is_retry=False) == Note(16.0, None, [])
    assert merged([here, there], is_retry=True) == Note(0.0, None, [before, at_end])
    anew = Note(16.0, None, [after]).to_text()
    assert merged([here, anew], is_retry=True) == Note(16.0, None, [after])


def test_a_note_has_the_smallest_gaps():
    text = Note(0.0, None, [attempt(1.7e9, 5.0, 0.00012345, 0.00015, 0.00002)]).to_text()
    assert merged([text], is_retry=True).attempts[0][3:] == (0.00012345, 0.00015, 0.00002)


def test_the_note_of_many_attempts_is_a_tag_of_mlflows():
    attempts = [attempt(1.7e9 + i / 3, 1e6 / 3, i * 1e8 / 3, i * 1e8 / 3 + 1, 1 / 3) for i in range(500)]
    text = Note(1.7e9 + 1 / 3, 1.7e9 + 1 / 3, attempts).to_text()
    assert len(text) < 5000
    assert json.loads(text)[2][-1][3] == pytest.approx(attempts[-1].first_step)

"""`goodput/*` in one process. Real jobs are in tests/jobs/test_goodput_jobs.py."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import pairwise
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

from flyteplugins_tracking import get_run, request_stop, should_stop, tracking_init
from flyteplugins_tracking._runs import goodput
from flyteplugins_tracking.testing import RecordingTracker
from flyteplugins_tracking.trackers.base import Handle, RunRequest
from flyteplugins_tracking.trackers.registry import find_tracker

# When steps are made: the second, and the step.
Steps = Sequence[tuple[float, Any]]
# 4 of the first attempt's steps are made again, in the 4 seconds from step 6 on; then 10 and 5 seconds are lost.
THREE_ATTEMPTS = (
    [(at, at) for at in range(11)],
    [(14 + step, step) for step in range(6, 17)],
    [(18 + step, step) for step in range(17, 28)],
)


class Clock:
    """The time, which a test sets."""

    now = 1000.0

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now - 500


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(goodput, "time", clock)
    return clock


@pytest.fixture
def recorder(bare_environment, clock) -> RecordingTracker:
    return RecordingTracker()


class SavingTracker(RecordingTracker):
    """A tracker that passes what is saved to a function, and that has saved a text before."""

    def __init__(self, save: Callable[[str], object], saved: Callable[[], str | None] = lambda: None) -> None:
        super().__init__()
        self._save, self._saved = save, saved

    def open(self, request: RunRequest) -> Handle:
        handle = super().open(request)
        vars(handle).update(save_state=self._save, saved_state=self._saved)
        return handle


def passed(step: Any) -> None:
    should_stop(step)


def passed_after_a_call_without(step: Any) -> None:
    should_stop()
    should_stop(step)


def logged_with_step(step: Any) -> None:
    get_run().log({"loss": 1.0}, step=step)


def logged_with_column(step: Any) -> None:
    get_run().log(MappingProxyType({"loss": 1.0, "step": -1, "iteration": step}))


def logged_without_step(step: Any) -> None:
    get_run().log({"loss": 1.0, "step": step, "trainer/global_step": step})


def logged_in_epochs(step: Any) -> None:
    get_run().log({"loss": 1.0}, step=step)
    get_run().log({"accuracy": 1.0}, step=step // 5)


def passed_and_logged_in_epochs(step: Any) -> None:
    should_stop(step)
    logged_in_epochs(step)


def make(steps: Steps, recorder: RecordingTracker, clock: Clock, **options: Any) -> Any:
    """Make an attempt of these steps, and return its run. `how` makes a step; `fails`: whether the attempt does."""
    how, fails = options.pop("how", logged_with_step), options.pop("fails", False)

    @tracking_init(tracker=recorder, **{"id": "again", "step_metric": "iteration", **options})
    def train() -> None:
        for at, step in steps:
            clock.now = 1000.0 + at
            how(step)
        if fails:
            raise ValueError("made to fail")

    if fails:
        with pytest.raises(ValueError, match="made to fail"):
            train()
    else:
        train()
    return recorder.runs[-1]


def make_all(attempts: Sequence[Steps], recorder: RecordingTracker, clock: Clock, **options: Any) -> Any:
    """Make attempts of which all but the last one fail."""
    for steps in attempts[:-1]:
        make(steps, recorder, clock, fails=True, **options)
    return make(attempts[-1], recorder, clock, **options)


def figures(run: Any) -> dict[str, Any]:
    """The run's goodput, without its prefix."""
    return {key.removeprefix("goodput/"): value for key, value in run.summary.items() if key.startswith("goodput/")}


@pytest.mark.parametrize(
    "how",
    [passed, passed_after_a_call_without, logged_with_step, logged_with_column, passed_and_logged_in_epochs],
    ids=lambda function: function.__name__,
)
def test_a_run_that_was_restarted_tells_its_goodput(recorder, clock, how):
    run = make_all(THREE_ATTEMPTS, recorder, clock, how=how)
    assert figures(run) == {
        "attempts": 3,
        "share": pytest.approx(26 / 45),
        "restart_s": 15,
        "kept_s": pytest.approx(26),
        "repeated_s": pytest.approx(4),
        **{"attempt_0/restart_s": 0, "attempt_1/restart_s": 10, "attempt_2/restart_s": 5},
        **{"attempt_0/kept_s": pytest.approx(6), "attempt_1/kept_s": 10, "attempt_2/kept_s": 10},
        **{"attempt_0/repeated_s": pytest.approx(4), "attempt_1/repeated_s": 0, "attempt_2/repeated_s": 0},
    }
    assert "goodput 58% in 3 attempts" in run.texts["goodput"]


@pytest.mark.parametrize("how", [logged_without_step, logged_in_epochs], ids=lambda function: function.__name__)
def test_rows_that_do_not_tell_the_steps_tell_the_time_between_attempts(recorder, clock, how):
    run = make_all(THREE_ATTEMPTS, recorder, clock, how=how)
    restarts = {"attempt_0/restart_s": 0, "attempt_1/restart_s": 10, "attempt_2/restart_s": 5}
    assert figures(run) == {"attempts": 3, "restart_s": 15, **restarts}
    assert "unknown" in run.texts["goodput"]


def test_one_attempt_that_does_not_tell_its_steps_makes_the_share_unknown(recorder, clock):
    make(THREE_ATTEMPTS[0], recorder, clock, fails=True)
    run = make(THREE_ATTEMPTS[1], recorder, clock, how=logged_without_step)
    assert set(figures(run)) == {"attempts", "restart_s", "attempt_0/restart_s", "attempt_1/restart_s"}


@pytest.mark.parametrize(
    ("attempts", "kept_s", "restart_s"),
    [
        ([[(0, 0.0), (95, 0.95)], [(100, 0.76), (200, 1.9)]], [76, 100], [0, 5]),
        ([[(0, 50), (450, 500)], [(600, 550), (1100, 1000)]], [450, 500], [0, 150]),
        ([[(0, 10), (10, 20)], [(11, 0), (21, 10)], [(22, 11), (32, 21)]], [0, 10, 10], [0, 1, 1]),
        ([[(0, 10), (10, 20)], [(11, 10), (21, 20)]], [0, 10], [0, 1]),
        ([[(0, 0), (10, 10)], [(20, 4)], [(30, 4), (40, 14)]], [4, 0, 10], [0, 10, 10]),
        ([[(0, 0), (10, 10)], [], [(30, 4), (40, 14)]], [4, 10], [0, 20]),
        ([[(0, None), (50, 0), (60, 10), (60, 10), (90, None)], [(100, 5), (110, 15)]], [5, 10], [0, 40]),
        ([[(0, 0), (10, 10)], [(5, 11), (15, 21)]], [10, 10], [0, 0]),
    ],
    ids=[
        "epochs that overlap",
        "sparse rows",
        "from behind the start",
        "from the start",
        "an attempt of one step",
        "an attempt that fails before its first row",
        "rows before and behind the steps",
        "a machine whose clock is behind",
    ],
)
def test_goodput_is_the_time_of_the_steps_that_no_later_attempt_makes_again(
    recorder, clock, attempts, kept_s, restart_s
):
    found = figures(make_all(attempts, recorder, clock))
    numbers = range(len(kept_s))
    assert [found[f"attempt_{number}/kept_s"] for number in numbers] == pytest.approx(kept_s)
    assert [found[f"attempt_{number}/restart_s"] for number in numbers] == pytest.approx(restart_s)
    assert found["share"] == pytest.approx(sum(kept_s) / (found["kept_s"] + found["repeated_s"] + sum(restart_s)))


def test_should_stop_takes_the_place_of_the_rows_from_its_first_step_on(recorder, clock):
    def both(step: int) -> None:
        if step != 100:
            should_stop(step)
        logged_with_step(100 if step < 10 else 2000)

    found = figures(make_all([[(0, 100), (500, 7), (510, 12)], [(520, 8), (530, 18)]], recorder, clock, how=both))
    assert (found["kept_s"], found["repeated_s"]) == pytest.approx((2 + 10, 8))


def test_a_clock_that_is_set_changes_no_attempt(recorder, clock):
    steps = [(at, at) for at in range(11)]
    make(steps, recorder, clock, fails=True)
    clock.time = lambda: 1020.0  # the monotonic clock is at 510, and not set

    def log_and_set(step: int) -> None:
        clock.time = lambda: 0.0
        logged_with_step(step)

    assert figures(make([(at, at) for at in range(10, 21)], recorder, clock, how=log_and_set))["restart_s"] == 10


class Deleted:
    """As an array of JAX's that was given away."""

    def __eq__(self, _: object) -> bool:
        raise RuntimeError("Array has been deleted")

    __hash__ = None


@pytest.mark.parametrize(
    ("step", "is_known"),
    [(3, True), (3.5, True), (float("nan"), False), (Fraction(10**400), False), ("3", False), (Deleted(), False)],
    ids=["int", "float", "NaN", "too large", "text", "an object"],
)
@pytest.mark.parametrize("how", [passed, logged_with_step], ids=lambda function: function.__name__)
def test_what_is_passed_may_be_anything_and_is_a_step_if_it_is_a_number(recorder, clock, how, step, is_known):
    def log(step: Any) -> None:
        logged_without_step(0)
        how(step)

    run = make_all([[(0, step), (10, step)], [(20, step)]], recorder, clock, how=log)
    assert ("share" in figures(run)) is is_known


@pytest.mark.parametrize("arguments", [(), (None,), ([1],), ({}, 1, True, "more")])
def test_wrong_arguments_of_log_are_left_to_the_tracker(arguments):
    goodput.Attempts("global_step").row_logged(*arguments, step=2, unknown=1)


def test_the_column_that_was_defined_has_the_steps(clock):
    attempts = goodput.Attempts("global_step")
    attempts.begin(SimpleNamespace(saved_state=lambda: "[false,[[990.0,995.0,0,5]]]", save_state=lambda _: None), True)
    attempts.column_defined("train_step")
    for at in range(10):
        clock.now = 1000.0 + at
        attempts.row_logged({"global_step": 0, "train_step": 3 + at})
    assert attempts.end(0)["goodput/repeated_s"] == pytest.approx(2)


# Which attempts a run has


def test_a_run_with_one_attempt_tells_nothing(recorder, clock):
    assert set(make(THREE_ATTEMPTS[0], recorder, clock).summary) == {"loss"}


def test_a_run_that_has_ended_well_begins_again(recorder, clock):
    found = figures(make_all(THREE_ATTEMPTS, recorder, clock))
    assert figures(make([(100, 0), (110, 10)], recorder, clock)) == found  # as they were
    make([(200, 0), (210, 10)], recorder, clock, fails=True)
    assert figures(make([(220, 10), (230, 20)], recorder, clock))["attempts"] == 2


def test_an_attempt_that_has_nothing_left_to_do_tells_the_goodput_of_those_before(recorder, clock):
    assert figures(make_all([*THREE_ATTEMPTS[:2], []], recorder, clock))["attempts"] == 2


def set_rank(environment: pytest.MonkeyPatch, restart_count: int) -> None:
    rank = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    launcher = {"TORCHELASTIC_RUN_ID": "a-job", "TORCHELASTIC_RESTART_COUNT": str(restart_count)}
    for name, value in {**rank, **launcher}.items():
        environment.setenv(name, value)


@pytest.mark.parametrize("restarts", [0, 1])
def test_after_a_good_end_of_one_rank_only_a_restart_of_the_job_is_another_attempt(
    recorder, clock, bare_environment, restarts
):
    set_rank(bare_environment, 0)
    make(THREE_ATTEMPTS[0], recorder, clock)
    set_rank(bare_environment, restarts)
    run = make(THREE_ATTEMPTS[1], recorder, clock)
    assert figures(run).get("attempts") == (2 if restarts else None)


def test_a_job_that_ended_well_is_none_of_the_next_ones_attempts(recorder, clock, bare_environment):
    set_rank(bare_environment, 0)
    make(THREE_ATTEMPTS[0], recorder, clock)
    make([], recorder, clock, fails=True)  # before its first row
    set_rank(bare_environment, 1)
    assert figures(make(THREE_ATTEMPTS[1], recorder, clock)) == {}


def test_both_of_two_runs_expect_another_attempt_after_a_stop(recorder, clock):
    other = RecordingTracker(find_tracker("mlflow"))

    @tracking_init(tracker=other, id="outer")
    @tracking_init(tracker=recorder, id="inner")
    def stopped(first: int, stops: bool) -> None:
        for step in range(first, first + 10):
            clock.now += 1
            if stops and step == 8:
                request_stop("a reason")
            get_run("mlflow").log({"loss": 1.0}, step=step)
            get_run("recording").log({"loss": 1.0}, step=step)
            if should_stop():
                return

    stopped(0, stops=True)
    stopped(9, stops=False)
    assert [figures(run)["attempts"] for tracker in (recorder, other) for run in tracker.runs] == [2, 2]


def test_a_run_with_a_random_id_has_no_attempts(bare_environment, clock):
    saved: list[str] = []
    make(THREE_ATTEMPTS[0], SavingTracker(saved.append), clock, id=None)
    assert saved == []


# What is saved of them


def test_an_attempt_that_is_killed_is_known_by_what_was_saved_last(bare_environment, clock):
    saved: list[str] = []
    make([(at, at) for at in range(1000)], SavingTracker(saved.append), clock)
    killed_with = saved[-2]  # the last one is of the end
    run = make([(1100, 900), (1200, 1000)], SavingTracker(saved.append, lambda: killed_with), clock)
    assert figures(run)["attempt_0/kept_s"] == pytest.approx(900)
    assert figures(run)["restart_s"] == pytest.approx(1100 - 999, abs=15)


def test_an_attempt_is_saved_more_and_more_rarely_without_a_thread(bare_environment, clock):
    saved_at: list[float] = []
    tracker = SavingTracker(lambda _: saved_at.append(clock.now - 1000))
    make([(at / 100, at) for at in range(30_000)], tracker, clock)
    distances = [later - earlier for earlier, later in pairwise(saved_at[:-1])]
    assert saved_at[0] == 0
    assert max(distances) == pytest.approx(15, abs=0.02)
    assert all(distance <= earlier + 0.02 for distance, earlier in zip(distances[1:], saved_at[1:], strict=False))
    assert len(saved_at) < 35


def test_a_signal_that_ends_the_run_saves_it_and_only_a_row_after_that_saves_it_again(clock):
    saved: list[str] = []
    attempts = goodput.Attempts("global_step")
    attempts.begin(SimpleNamespace(saved_state=lambda: "[false,[[990.0,995.0,0,5]]]", save_state=saved.append), False)
    for step in range(6, 10):  # a function that logs nothing
        clock.now += 1
        attempts.step_made(step)
    assert attempts.end(143)["goodput/attempts"] == 2
    count = len(saved)
    assert (attempts.end(0), len(saved)) == ({}, count)  # what is recorded with a run that has ended opens it again
    attempts.row_logged({"loss": 1.0})
    assert attempts.end(0)["goodput/attempts"] == 2
    assert json.loads(saved[-1])[0] is True


@pytest.mark.parametrize(
    "text", ["", "{", '[["text"]]', "[1]", "null", "[0,[[1]]]", "[0,0]", "[0,[[{},1,1,1]]]", '["ab","cd"]', 3, {}]
)
def test_what_somebody_else_has_saved_is_no_attempt(bare_environment, clock, caplog, text):
    run = make(THREE_ATTEMPTS[0], SavingTracker(lambda _: None, lambda: text), clock)
    assert figures(run) == {}
    assert caplog.text == ""


def test_a_service_that_cannot_save_or_tell_costs_the_goodput_only(bare_environment, clock, caplog):
    def fail(*_: Any) -> Any:
        raise OSError("no service")

    run = make(THREE_ATTEMPTS[0], SavingTracker(fail, fail), clock)
    assert (len(run.rows), run.exit_codes, figures(run)) == (11, (0,), {})
    assert caplog.text.count("run again: its next attempt will not know all steps of this one") == 1
    assert "the goodput of run again leaves out earlier attempts" in caplog.text


def test_many_attempts_fit_into_a_tag_of_mlflows(bare_environment, clock):
    saved: list[str] = []
    tracker = SavingTracker(saved.append, lambda: saved[-1] if saved else None)
    for number in range(60):
        at, step = number * 1e6 / 3, number * 1e8 / 3
        run = make([(at, step), (at + 1, step + 1)], tracker, clock, fails=number < 59)
    assert figures(run)["attempts"] == 50
    assert max(map(len, saved)) < 5000


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_saves_nothing(bare_environment, clock):
    read, write = os.pipe()
    tracker = SavingTracker(lambda text: os.write(write, f"{os.getpid()} {text}\n".encode()))

    def log_in_child(step: int) -> None:
        run = get_run()
        run.log({"loss": 1.0}, step=step)
        clock.now += 100
        child = os.fork()
        if child == 0:
            run.log({"loss": 1.0}, step=1000)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0

    make([(0, 0)], tracker, clock, how=log_in_child)
    os.close(write)
    with os.fdopen(read) as file:
        lines = file.read().splitlines()
    assert [int(line.split()[0]) for line in lines] == [os.getpid()] * 2  # with the first row, and at the end

"""The pulse: what follows from all ranks', how a step and a wait are measured, and who is silent."""

from __future__ import annotations

import threading
import time
from types import FrameType

import pytest
from support.waiting import wait_until

from flyteplugins_tracking import get_run, heartbeat, tracking_init
from flyteplugins_tracking._job import progress, pulse
from flyteplugins_tracking._job.board import Board, OwnStore, to_text
from flyteplugins_tracking._job.pulse import Pulse, SilenceWatch, StepClock, WaitMeter, is_waiting, metrics
from flyteplugins_tracking.testing import RecordingTracker

MIB = 2**20


# What follows from all ranks' pulses


def test_the_slowest_is_the_rank_that_the_others_wait_for_though_all_step_times_are_equal():
    pulses = {rank: Pulse(2.0, 0.9 if rank == 777 else 0.1, 100 * MIB) for rank in range(1024)}
    assert metrics(pulses) == {
        "ranks/step_time/median": 2.0,
        "ranks/step_time/max": 2.0,
        "ranks/own_time/median": pytest.approx(0.2),
        "ranks/own_time/max": pytest.approx(1.8),
        "ranks/slowest": 777,
        "ranks/memory/max": 100.0,
    }


@pytest.mark.parametrize(
    ("pulses", "shown"),
    [
        # Without collectives the longest step; a rank whose steps nobody counts is in step with the others.
        ([Pulse(1.0, 1.0), Pulse(2.0, 1.0), Pulse(1.0, 1.0)], {"ranks/slowest": 1}),
        ([Pulse(1.0, 0.2), Pulse(None, 0.9)], {"ranks/slowest": 1, "ranks/own_time/max": 0.9}),
        ([Pulse(own_share=0.2), Pulse(own_share=0.9), Pulse()], {"ranks/slowest": 1}),
        ([Pulse(cuda_memory=3 * MIB), Pulse(cuda_memory=MIB)], {"ranks/cuda_memory/max": 3.0}),
        ([], {}),
    ],
)
def test_the_slowest_is_who_is_known_to_wait_least_or_to_step_longest(pulses, shown):
    values = metrics(dict(enumerate(pulses)))
    assert shown.items() <= values.items()
    assert "ranks/step_time/max" in values or values == shown


def test_pulses_of_an_earlier_attempt_are_left_out():
    board = Board(OwnStore(), "pulse")
    for rank, put_at in ((0, 100.0), (2, 90.0)):
        board.put(str(rank), to_text(Pulse(put_at=put_at)))
    assert list(pulse.read(board, 3)) == [0, 2]
    assert pulse.read(board, 3, since=95.0) == {0: Pulse(put_at=100.0)}


def test_a_rank_is_silent_after_two_pulses_without_a_word_unless_its_function_has_ended():
    watch = SilenceWatch(4, 10.0, now=0.0)
    pulses = {0: Pulse(put_at=1.0), 1: Pulse(put_at=1.0), 2: Pulse(put_at=1.0, state="returned")}
    assert watch.silent(pulses, now=10.0) == []
    assert watch.silent({**pulses, 0: Pulse(put_at=2.0)}, now=20.0) == []
    assert watch.silent({**pulses, 0: Pulse(put_at=3.0)}, now=29.0) == [3]  # it has never come
    assert watch.silent({**pulses, 0: Pulse(put_at=4.0)}, now=40.0) == [1, 3]
    assert watch.silent({**pulses, 0: Pulse(put_at=5.0), 1: Pulse(put_at=41.0)}, now=50.0) == [3]


# How a rank measures its steps


def test_the_step_time_is_that_between_two_pulses_and_counts_while_a_step_goes_on():
    clock = StepClock()
    assert clock.step_s(0.0) is None
    # Seconds, the kind and the number of steps, and the step time then: without the time until the first step.
    for now, kind, count, step_s in (
        (0.0, "rows", 0, None),
        (5.0, "rows", 1, None),
        (6.0, "rows", 2, 1.0),
        (7.0, "rows", 3, 1.0),
        (7.5, "rows", 3, 1.0),
        (14.0, "rows", 3, 7.0),  # longer than a pulse
        (15.0, "rows", 4, 8.0),
        (19.0, "rows", 6, 2.0),
        (20.0, "optimizer", 5, 2.0),  # another kind begins again
        (21.0, "optimizer", 6, 1.0),
    ):
        clock.look(now, kind, count)
        assert clock.step_s(now) == step_s, now


@pytest.fixture
def counting():
    progress.reset_steps()
    yield
    progress.reset_steps()


def test_heartbeats_are_steps_until_an_optimizer_makes_some(counting):
    torch = pytest.importorskip("torch")
    heartbeat()
    heartbeat()
    assert progress.steps() == ("heartbeats", 2)
    parameter = torch.nn.Parameter(torch.ones(1))
    two = [torch.optim.SGD([parameter], lr=0.1) for _ in range(2)]
    stop = progress.count_optimizer_steps()
    assert stop is not None
    for optimizer in (*two, two[0]):
        optimizer.step()
    assert progress.steps() == ("optimizer", 2)
    stop()
    two[0].step()
    assert progress.steps() == ("optimizer", 2)


# How a rank measures its waiting


def test_the_share_is_that_of_the_looks_that_found_it_outside_of_collectives(monkeypatch):
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    meter = WaitMeter()
    assert meter.own_share() is None
    for number in range(1, 11):
        meter.look(float(number), 1.0, is_waiting=number > 2)
    assert meter.own_share() == pytest.approx(0.2)
    meter.look(20.0, 1.0, is_waiting=True)  # late because of the GIL: in the collective that has set it free
    assert meter.own_share() == pytest.approx(0.9)


def test_code_that_waits_is_known_by_its_file():
    packages = {"torch/distributed/c10d.py": True, "torch/autograd/graph.py": True, "torch/cuda/__init__.py": True}
    for file, expected in {**packages, "torch/nn/functional.py": False, "train.py": False}.items():
        frames: list[FrameType] = []
        exec(
            compile("import sys\nframes.append(sys._getframe())", f"/site-packages/{file}", "exec"), {"frames": frames}
        )
        assert is_waiting(frames[0]) is expected, file


# The row that takes the values


def test_the_pulse_joins_the_functions_own_rows(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    tracker, threads = RecordingTracker(), set(threading.enumerate())

    @tracking_init(tracker=tracker, pulse_s=0.05)
    def train() -> None:
        run, number = get_run(), 0

        def log() -> bool:
            nonlocal number
            heartbeat()
            run.log({"number": number}, step=10 * number)
            number += 1
            return "ranks/step_time/max" in run.summary

        wait_until(log)

    train()
    (run,) = tracker.runs
    assert [row.values["number"] for row in run.rows] == list(range(len(run.rows)))
    assert [row.step for row in run.rows] == [10 * number for number in range(len(run.rows))]
    assert run.summary["ranks/slowest"] == 0
    assert run.summary["ranks/silent"] == 0
    assert [one.name for one in set(threading.enumerate()) - threads if "flyteplugins" in one.name] == []
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_without_pulse_s_there_is_no_thread_and_no_hook():
    @tracking_init(tracker=RecordingTracker())
    def train() -> list[str]:
        return [thread.name for thread in threading.enumerate()]

    assert not [name for name in train() if "watch" in name]

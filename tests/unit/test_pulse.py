"""The pulse: what follows from all ranks', how a step and a wait are measured, and who is silent."""

from __future__ import annotations

import random
import threading
import time
from types import FrameType

import pytest
from support.waiting import wait_until

from flyteplugins_tracking import DistributedInfo, get_run, heartbeat, tracking_init
from flyteplugins_tracking._job import progress, pulse
from flyteplugins_tracking._job.board import Board, OwnStore, to_text
from flyteplugins_tracking._job.pulse import Pulse, SilenceWatch, StepClock, WaitMeter, is_waiting, metrics
from flyteplugins_tracking.testing import RecordingTracker
from flyteplugins_tracking.trackers.rows import NextRow

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


def test_without_collectives_the_slowest_has_the_longest_step():
    assert metrics({0: Pulse(1.0, 1.0), 1: Pulse(2.0, 1.0), 2: Pulse(1.0, 1.0)})["ranks/slowest"] == 1


def test_a_rank_whose_steps_nobody_counts_is_in_step_with_the_others():
    values = metrics({0: Pulse(1.0, 0.2), 1: Pulse(None, 0.9)})
    assert (values["ranks/slowest"], values["ranks/own_time/max"]) == (1, 0.9)


def test_if_nobody_counts_steps_the_slowest_waits_least():
    assert metrics({0: Pulse(own_share=0.2), 1: Pulse(own_share=0.9), 2: Pulse()}) == {"ranks/slowest": 1}


def test_what_no_rank_knows_is_left_out():
    assert metrics({}) == {}
    assert metrics({0: Pulse(cuda_memory=3 * MIB), 1: Pulse(cuda_memory=MIB)}) == {"ranks/cuda_memory/max": 3.0}


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


def test_the_step_time_is_that_between_two_pulses():
    clock = StepClock()
    for now, count in ((0.0, 0), (5.0, 1), (6.0, 2), (7.0, 3)):
        clock.look(now, "rows", count)
    assert clock.step_s(7.0) == 1.0  # without the time until the first step
    clock.look(11.0, "rows", 5)
    assert clock.step_s(11.0) == 2.0


def test_a_step_that_lasts_longer_than_a_pulse_counts_while_it_goes_on():
    clock = StepClock()
    for now, count in ((0.0, 0), (1.0, 1), (2.0, 2)):
        clock.look(now, "rows", count)
    assert clock.step_s(2.0) == 1.0
    clock.look(2.5, "rows", 2)
    assert clock.step_s(2.5) == 1.0
    clock.look(9.0, "rows", 2)
    assert clock.step_s(9.0) == 7.0
    clock.look(10.0, "rows", 3)
    assert clock.step_s(10.0) == 8.0


def test_another_kind_of_steps_begins_again():
    clock = StepClock()
    for now, kind, count in ((0.0, "rows", 1), (9.0, "rows", 2), (10.0, "optimizer", 5), (11.0, "optimizer", 6)):
        clock.look(now, kind, count)
    assert clock.step_s(11.0) == 1.0


def test_steps_are_unknown_before_the_second_one():
    clock = StepClock()
    clock.look(1.0, "rows", 1)
    assert clock.step_s(2.0) is None


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


def test_no_hook_is_added_beside_those_of_the_user(counting):
    pytest.importorskip("torch")
    from torch.optim.optimizer import register_optimizer_step_post_hook

    handle = register_optimizer_step_post_hook(lambda *_: None)
    try:
        assert progress.count_optimizer_steps() is None
    finally:
        handle.remove()


# How a rank measures its waiting


def test_the_share_is_that_of_the_looks_that_found_it_outside_of_collectives(monkeypatch):
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    meter = WaitMeter()
    assert meter.own_share() is None
    for number in range(1, 11):
        meter.look(float(number), 1.0, is_waiting=number > 2)
    assert meter.own_share() == pytest.approx(0.2)
    meter.look(11.0, 1.0, is_waiting=False)
    assert meter.own_share() == 1.0


def test_a_look_that_comes_late_because_of_the_gil_found_no_waiting(monkeypatch):
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    meter = WaitMeter()
    meter.look(10.0, 1.0, is_waiting=True)  # in the collective that has set the GIL free
    assert meter.own_share() == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("/site-packages/torch/distributed/distributed_c10d.py", True),
        ("/site-packages/torch/autograd/graph.py", True),
        ("/site-packages/torch/cuda/__init__.py", True),
        ("/site-packages/torch/nn/functional.py", False),
        ("/site-packages/torch/utils/data/dataloader.py", False),
        ("/work/train.py", False),
    ],
)
def test_code_that_waits_is_known_by_its_file(file, expected):
    frames: list[FrameType] = []
    exec(compile("import sys\nframes.append(sys._getframe())", file, "exec"), {"frames": frames})
    assert is_waiting(frames[0]) is expected


# The row that takes the values


def test_values_wait_for_the_next_row_in_the_place_of_those_that_waited():
    row = NextRow()
    assert not row.waiting
    row.add({"a": 1, "b": 1})  # a is of a node that is silent later: it gets no older than that
    row.add({"b": 2})
    assert row.waiting
    assert row.take() == {"b": 2}
    assert not row.waiting
    assert row.take() == {}


@pytest.fixture
def machine(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


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


INFO = DistributedInfo(0, 3, 0, 2, 0, 2, launcher="mpich")


def test_looks_come_at_random_so_that_they_do_not_keep_the_rhythm_of_the_steps(monkeypatch, machine):
    from flyteplugins_tracking._job.pulse import PulseDuty

    before = random.getstate()
    duty = PulseDuty(INFO, 15.0, None)
    waits_s = {duty.next_wait_s() for _ in range(50)}
    duty.end(has_failed=False)
    assert len(waits_s) > 10
    assert 0.125 <= min(waits_s) < max(waits_s) <= 0.375
    assert random.getstate() == before

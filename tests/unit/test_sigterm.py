"""Signals at each point of a run's life, in pytest's own process: wherever one comes, no run stays open."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import itertools
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
from support.waiting import wait_until

import flyteplugins_tracking
from flyteplugins_tracking import DistributedInfo, get_run, override_distributed_info, tracking_init
from flyteplugins_tracking._runs.call import Call
from flyteplugins_tracking._runs.calls import current
from flyteplugins_tracking._runs.calls import state as state_of_calls
from flyteplugins_tracking._runs.run import SIGTERM, end_open_runs
from flyteplugins_tracking._runs.sigterm import Sigterm
from flyteplugins_tracking._util.signals import _patience_s
from flyteplugins_tracking.testing import RecordingTracker
from flyteplugins_tracking.trackers.base import Handle, RunRequest, Tracker

WATCHED_FILES = (str(Path(flyteplugins_tracking.__file__).parent), contextlib.__file__, __file__)
# Runs of one id lock each other out, also those of other processes that run these tests.
PROJECT = f"tests-{os.getpid()}"
USED = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGUSR2)


class EndedRun(Handle):
    """Knows how often it was finished, and with what."""

    def __init__(self, run_id: str, in_finish: Callable[[], object]) -> None:
        self.id, self.run = run_id, self
        self.exit_codes: list[int] = []
        self.finished = 0  # how often `finish` was called
        self._in_finish = in_finish

    def finish(self, exit_code: int) -> None:
        self._in_finish()
        self.finished += 1
        self.exit_codes.append(exit_code)

    def end_early(self, exit_code: int) -> None:
        self.exit_codes.append(exit_code)


class EndsRecorder(Tracker):
    """Claims and signals stay the real ones, as they would not with the test kit's fixture."""

    name = title = "ends"

    def __init__(self, in_open: Callable[[], object] = bool, in_finish: Callable[[], object] = bool) -> None:
        self.runs: list[EndedRun] = []
        self._in_open, self._in_finish = in_open, in_finish

    def open(self, request: RunRequest) -> EndedRun:
        run = EndedRun(str(request.plan.run_id), self._in_finish)
        self.runs.append(run)
        self._in_open()
        return run


@pytest.fixture(autouse=True)
def in_a_process_of_its_own(monkeypatch) -> Iterator[list[Sigterm]]:
    """Have no handler for SIGTERM, and have the process go on: yields who would have ended it."""
    before, ends = {number: signal.getsignal(number) for number in USED}, []
    monkeypatch.setattr(Sigterm, "_exit_late", lambda listener: ends.append(listener))
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield ends
    for number, handler in before.items():
        signal.signal(number, handler)


@functools.cache
def is_watched_code(code: CodeType) -> bool:
    return code.co_filename.startswith(WATCHED_FILES)


def signalled_at(point: int, function: Callable[[], Any]) -> tuple[bool, BaseException | None]:
    """Call `function`, and send it a SIGTERM at this point. Returns whether it has that point, and what it raised.

    The points are the begins and ends of functions in the package, in contextlib and here. CPython runs signal handlers
    when a function begins, behind a call of a C function, and at a loop's next round.
    """
    points, has_point, raised = itertools.count(), False, None

    def at_event(frame: FrameType, event: str, _: Any) -> None:
        nonlocal has_point
        if is_watched_code(frame.f_code) and event != "c_call" and is_listening() and next(points) == point:
            has_point = True
            sys.setprofile(None)  # the rest runs at full speed
            signal.raise_signal(signal.SIGTERM)

    sys.setprofile(at_event)
    try:
        function()
    except BaseException as error:
        raised = error
    finally:
        sys.setprofile(None)
    return has_point, raised


def is_listening() -> bool:
    """Whether a signal that comes now finds our handler, and our thread."""
    return signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL and wakeup_fd() != -1


def wakeup_fd() -> int:
    number = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(number)
    return number


def state() -> tuple[Any, ...]:
    """What a function leaves as it was."""
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGURG, signal.SIGINT)]
    return handlers, wakeup_fd(), threading.active_count(), state_of_calls.open_runs(), current.get()


@pytest.mark.parametrize("stride", [10, pytest.param(1, marks=pytest.mark.wide)])
def test_wherever_the_signal_comes_each_run_is_ended_and_everything_is_as_before(stride):
    """In a run's opening and closing, between these and the function, in the function, and in one that it calls."""
    tracker = EndsRecorder()

    @tracking_init(tracker=tracker, project=PROJECT, id="inner", run_mode="new")
    def inner() -> None:
        pass

    @tracking_init(tracker=tracker, project=PROJECT, id="outer")
    def outer() -> None:
        inner()

    outer()  # loads what is loaded on first use
    before, statuses = state(), set()
    for point in itertools.count(step=stride):
        tracker.runs.clear()
        has_point, raised = signalled_at(point, outer)
        assert isinstance(raised, SystemExit) if has_point else raised is None, (point, raised)
        wait_until(lambda: threading.active_count() == before[2])  # a thread that has ended may still be counted
        assert state() == before, point
        assert tracker.runs, point
        assert all(run.finished == 1 for run in tracker.runs), point
        statuses |= {run.exit_codes[-1] for run in tracker.runs}
        if not has_point:
            break
        assert raised.code == 143, point
    assert point > 200
    assert statuses == {0, 143}


@pytest.mark.parametrize("answers", [True, False])
def test_a_signal_while_the_others_are_told_why_this_rank_fails_leaves_the_run_with_the_failure(monkeypatch, answers):
    """The notice waits for a host that is gone. The main thread answers meanwhile, or sits in a C call."""

    def tell(*_: object) -> None:
        if not answers:
            end_open_runs(60.0)  # as the thread does
        send()
        goes_on()

    tracker = EndsRecorder()

    @tracking_init(tracker=tracker, project=PROJECT, id="fails", run_mode="shared")
    def train() -> None:
        raise ValueError("the cause")

    monkeypatch.setattr("flyteplugins_tracking._job.failures.announce_failure", tell)
    monkeypatch.setitem(_patience_s, Call.__exit__.__code__, 0.1)
    before, rank = state(), DistributedInfo(rank=0, world_size=2, local_rank=0, worker_index=0, num_workers=1)
    with override_distributed_info(rank), pytest.raises(SystemExit) as raised:
        train()
    assert raised.value.code == 143
    assert tracker.runs[0].exit_codes == ([1] if answers else [1, 1])
    assert state() == before


def goes_on(until: Callable[[], object] = bool, seconds: float = 60) -> None:
    """What a function does after the signal: nothing else ends it for a minute."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not until():
        time.sleep(0.01)


def send(*_: object) -> None:
    signal.raise_signal(signal.SIGTERM)


class Dropped:
    """Objects with code of theirs where Python drops what is raised."""

    def __init__(self, callback: Callable[..., object]) -> None:
        self._callback = callback

    def __del__(self) -> None:
        self._callback()


def in_destructor() -> None:
    Dropped(send)


def in_a_block_that_catches_everything() -> None:
    with contextlib.suppress(BaseException):
        send()
        goes_on()


@pytest.mark.parametrize("drops", [in_destructor, in_a_block_that_catches_everything])
def test_an_exit_that_python_or_the_program_drops_waits_or_comes_once_more(drops, in_a_process_of_its_own, monkeypatch):
    """Else the function would train on for 25 s, and no `finally` block would run."""
    tracker, unwound = EndsRecorder(), []
    monkeypatch.setattr(sys, "unraisablehook", sys.__unraisablehook__)  # pytest's keeps what Python has dropped

    @tracking_init(tracker=tracker, project=PROJECT, id="dropped")
    def train() -> None:
        try:
            drops()
            goes_on()
        finally:
            unwound.append(get_run().exit_codes)

    try:
        with pytest.raises(SystemExit) as raised:
            train()
    finally:
        sys.setprofile(None)
    assert (raised.value.code, unwound, tracker.runs[0].exit_codes) == (143, [[143]], [143])
    assert tracker.runs[0].finished == 1
    assert in_a_process_of_its_own == [SIGTERM]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_finally_that_lasts_is_not_interrupted(is_async):
    """The exit is not dropped: it waits, in the function or in the loop that runs it, and functions are called."""
    tracker, done = EndsRecorder(), []

    @tracking_init(tracker=EndsRecorder(), project=PROJECT, id="last", run_mode="new")
    def evaluate() -> None:
        done.append("evaluated")

    @tracking_init(tracker=tracker, project=PROJECT, id="lasts")
    def train() -> None:
        try:
            send()
            goes_on()
        finally:
            goes_on(seconds=2.5)
            send()
            evaluate()

    @tracking_init(tracker=tracker, project=PROJECT, id="lasts")
    async def train_async() -> None:
        try:
            send()
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(2.5)
            evaluate()

    with pytest.raises(SystemExit):
        asyncio.run(train_async()) if is_async else train()
    gc.collect()  # asyncio tells here, and not in a later test, that nobody has awaited the function's end
    assert (done, tracker.runs[0].exit_codes) == (["evaluated"], [143])


def test_a_child_that_is_terminated_a_moment_before_this_process_makes_no_failure():
    """A launcher signals one process after the other: the end of a pipe to the child is seen first."""
    tracker = EndsRecorder()
    elsewhere = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM))

    @tracking_init(tracker=tracker, project=PROJECT, id="child")
    def train() -> None:
        elsewhere.start()
        raise EOFError

    with pytest.raises(SystemExit):
        train()
    elsewhere.join()
    assert tracker.runs[0].exit_codes == [143]


def test_a_signal_that_comes_just_before_a_wait_does_not_wait_for_its_end():
    """The program's handler is called when the main thread runs Python; a signal in another thread wakes nobody."""
    called = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: called.set())
    tracker = EndsRecorder()

    def send_elsewhere() -> None:
        time.sleep(0.2)
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

    @tracking_init(tracker=tracker, project=PROJECT, id="waits")
    def train() -> bool:
        threading.Thread(target=send_elsewhere).start()
        return called.wait(30)

    assert train()
    assert tracker.runs[0].exit_codes == [143]


@pytest.mark.parametrize("is_put_back", [False, True])
def test_a_handler_that_calls_ours_decides_how_the_function_ends(is_put_back):
    """Lightning's does: its loop then ends all ranks behind the same batch, with a checkpoint. It may put ours back."""
    told, tracker = [], EndsRecorder()

    @tracking_init(tracker=tracker, project=PROJECT, id="chained")
    def train() -> None:
        chained: Any = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, lambda *received: (told.append(received[0]), chained(*received)))
        send()  # unwinds nothing
        goes_on(seconds=1.5)
        told.append("returns")
        if is_put_back:
            signal.signal(signal.SIGTERM, chained)

    if is_put_back:  # the signal would have ended the process
        with pytest.raises(SystemExit):
            train()
    else:
        train()
    assert (told, tracker.runs[0].exit_codes) == ([signal.SIGTERM, "returns"], [143])


# Handlers of the program's, which raise in the main thread


class HandledError(Exception):
    """What a DataLoader's handler for SIGCHLD raises."""


def raises(*_: object) -> None:
    raise HandledError


@pytest.mark.parametrize(
    ("where", "sent", "error", "exit_codes", "finished"),
    [
        ("open", [signal.SIGCHLD], HandledError, [1], 1),
        ("open", [signal.SIGINT], KeyboardInterrupt, [130], 1),
        ("finish", [signal.SIGCHLD], HandledError, [0], 1),
        ("finish", [signal.SIGINT], KeyboardInterrupt, [0], 1),
        ("finish", [signal.SIGINT, signal.SIGINT], KeyboardInterrupt, [], 0),
        ("open", [signal.SIGCHLD, signal.SIGTERM], SystemExit, [143], 1),
        ("finish", [signal.SIGCHLD, signal.SIGTERM], SystemExit, [0], 1),
    ],
    ids=str,
)
def test_a_workers_end_and_ctrl_c_wait_for_a_run_that_is_opened_or_closed(where, sent, error, exit_codes, finished):
    """A second Ctrl-C does not. After a SIGTERM no handler takes the place of the exit."""

    def send_all() -> None:
        for number in sent:
            signal.raise_signal(number)
        for _ in range(100):
            time.sleep(0.001)

    tracker = EndsRecorder(**{f"in_{where}": send_all})

    @tracking_init(tracker=tracker, project=PROJECT, id="handled")
    def train() -> None:
        assert where == "finish", "it is not called"

    signal.signal(signal.SIGCHLD, raises)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(error):
        train()
    (run,) = tracker.runs
    assert (run.exit_codes, run.finished) == (exit_codes, finished)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert (signal.getsignal(signal.SIGCHLD) is raises) == (signal.SIGTERM not in sent)


def test_ctrl_c_bounds_the_end_in_which_it_comes():
    seen = []

    def press() -> None:
        signal.raise_signal(signal.SIGINT)
        wait_until(lambda: SIGTERM.interrupted_at is not None)
        seen.append(SIGTERM.interrupted_at)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        tracking_init(tracker=EndsRecorder(in_finish=press), project=PROJECT)(lambda: None)()
    assert seen


# Threads


@pytest.mark.parametrize("kind", ["ignored", "blocked", "no loop"])
def test_no_handler_is_installed_if_the_main_thread_cannot_run_it(kind):
    """Nor by an installation that comes too late."""
    recorder, seen = RecordingTracker(), []

    @tracking_init(tracker=recorder)
    def train() -> None:
        seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=train)

    async def main() -> None:
        thread.start()
        while thread.is_alive():
            thread.join() if kind == "blocked" else await asyncio.sleep(0.01)
        await asyncio.sleep(0)
        seen.append(signal.getsignal(signal.SIGTERM))

    before = signal.SIG_IGN if kind == "ignored" else signal.SIG_DFL
    signal.signal(signal.SIGTERM, before)
    if kind == "no loop":
        thread.start()
        thread.join()
    else:
        asyncio.run(main())
    assert set(seen) == {before}
    assert wakeup_fd() == -1
    assert [run.exit_codes for run in recorder.runs] == [(0,)]


def test_other_signals_reach_the_loop_meanwhile():
    got = threading.Event()

    @tracking_init(tracker=RecordingTracker())
    def train() -> None:
        os.kill(os.getpid(), signal.SIGUSR2)
        assert got.wait(60)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for number, handler in ((signal.SIGTERM, print), (signal.SIGUSR2, got.set)):
            loop.add_signal_handler(number, handler)
        await loop.run_in_executor(None, train)

    asyncio.run(main())


def test_a_process_with_thousands_of_open_files_is_listened_in():
    """`select` does not take a file of a number above 1023."""
    tracker, limits = EndsRecorder(), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(limits[1], 4096), limits[1]))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        with pytest.raises(SystemExit):
            tracking_init(tracker=tracker, project=PROJECT, id="files")(send)()
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert tracker.runs[0].exit_codes == [143]

"""SIGTERM at each point of a run's life: wherever it finds the main thread, no run stays open."""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
from support.waiting import wait_until

import flyteplugins_tracking
from flyteplugins_tracking import get_run, tracking_init
from flyteplugins_tracking._runs.call import current
from flyteplugins_tracking._runs.call import state as state_of_calls
from flyteplugins_tracking._runs.sigterm import MainThreadListener, is_installed
from flyteplugins_tracking.trackers.base import Handle, RunRequest, Tracker

WATCHED_FILES = (str(Path(flyteplugins_tracking.__file__).parent), contextlib.__file__, __file__)


class EndedRun(Handle):
    """Knows how often it was finished, and with what."""

    def __init__(self, run_id: str) -> None:
        self.id, self.run = run_id, self
        self.exit_codes: list[int] = []
        self.finished = 0  # how often `finish` was called

    def finish(self, exit_code: int) -> None:
        self.finished += 1
        self.exit_codes.append(exit_code)

    def end_early(self, exit_code: int) -> None:
        self.exit_codes.append(exit_code)


class EndsRecorder(Tracker):
    """Claims and signals stay the real ones, as they would not with the test kit's fixture."""

    name = title = "ends"

    def __init__(self) -> None:
        self.runs: list[EndedRun] = []

    def open(self, request: RunRequest) -> EndedRun:
        run = EndedRun(str(request.plan.run_id))
        self.runs.append(run)
        return run


@functools.cache
def is_watched_code(code: CodeType) -> bool:
    return code.co_filename.startswith(WATCHED_FILES)


def signalled_at(
    point: int,
    function: Callable[[], Any],
    send: Callable[[], object] = lambda: signal.raise_signal(signal.SIGTERM),
    counts: Callable[[str], object] = lambda event: event != "c_call" and is_installed(),
) -> tuple[bool, BaseException | None]:
    """Call `function`, and send it a SIGTERM at this point. Returns whether it has that point, and what it raised.

    The points are the begins and ends of functions in the package, in contextlib and here, where `counts(event)` holds.
    CPython runs signal handlers when a function begins, behind a call of a C function, and at a loop's next round.
    """
    points, has_point, raised = itertools.count(), False, None

    def at_event(frame: FrameType, event: str, _: Any) -> None:
        nonlocal has_point
        if is_watched_code(frame.f_code) and counts(event) and next(points) == point:
            has_point = True
            sys.setprofile(None)  # the rest runs at full speed
            send()

    sys.setprofile(at_event)
    try:
        function()
    except BaseException as error:
        raised = error
    finally:
        sys.setprofile(None)
    return has_point, raised


def state() -> tuple[Any, ...]:
    """What a function leaves as it was."""
    wakeup = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup)
    return signal.getsignal(signal.SIGTERM), wakeup, threading.active_count(), state_of_calls.open_runs(), current.get()


def exit_with_5(*_: Any) -> None:
    raise SystemExit(5)


def give_other_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the frames of the package show names of modules that it does not have, as after a move."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "flyteplugins_tracking":
            monkeypatch.setitem(vars(module), "__name__", f"moved_{abs(hash(name))}")


@pytest.mark.parametrize(
    ("handler", "status", "is_moved", "stride"),
    [
        (signal.SIG_DFL, 143, False, 10),
        pytest.param(signal.SIG_DFL, 143, False, 1, marks=pytest.mark.wide),
        pytest.param(exit_with_5, 5, True, 1, marks=pytest.mark.wide),
    ],
    ids=["no handler, every tenth point", "no handler", "a handler that raises, modules moved"],
)
def test_wherever_the_signal_comes_each_run_is_ended_and_everything_is_as_before(
    monkeypatch, handler, status, is_moved, stride
):
    """In a run's opening and closing, between these and the function, in the function, and in one that it calls."""
    ends, ignored = [], []
    monkeypatch.setattr(MainThreadListener, "_exit_in_the_end", lambda watcher: ends.append(watcher))
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: ignored.append(unraisable.exc_type))
    tracker, own = EndsRecorder(), signal.getsignal(signal.SIGTERM)

    @tracking_init(tracker=tracker, project="tests", id="inner", run_mode="new")
    def inner() -> None:
        pass

    @tracking_init(tracker=tracker, project="tests", id="outer")
    def outer() -> None:
        inner()

    try:
        signal.signal(signal.SIGTERM, handler)
        outer()  # loads what is loaded on first use
        if is_moved:
            give_other_names(monkeypatch)
        before, statuses = state(), set()
        for point in itertools.count(step=stride):
            for each in (tracker.runs, ends, ignored):
                each.clear()
            has_point, raised = signalled_at(point, outer)
            if has_point and raised is None and ignored == [SystemExit]:
                # Python ignores what is raised in a destructor. If nobody has a handler, our thread ends the process.
                wait_until(lambda: len(ends) == (handler is signal.SIG_DFL))
                continue
            assert (None if raised is None else type(raised), has_point) in [(SystemExit, True), (None, False)], raised
            wait_until(lambda: threading.active_count() == before[2])  # a thread that has ended may still be counted
            assert state() == before, point
            assert tracker.runs, point
            assert all(run.finished == 1 for run in tracker.runs), point
            statuses |= {run.exit_codes[-1] for run in tracker.runs}
            if not has_point:
                break
            assert raised.code == status, point
    finally:
        signal.signal(signal.SIGTERM, own)
    assert point > 200
    assert statuses == {0, 143}


class HandledError(Exception):
    """What a handler of the program raises."""


class Handlers:
    """A program's handlers for three signals: two raise, as a DataLoader's for SIGCHLD, and one sets a flag."""

    signals = (signal.SIGALRM, signal.SIGCHLD, signal.SIGUSR1)

    def __init__(self) -> None:
        self.called: list[int] = []

    def __enter__(self) -> Handlers:
        self._before = {number: signal.signal(number, self.handle) for number in self.signals}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def handle(self, signum: int, _: FrameType | None) -> None:
        self.called.append(signum)
        if signum != signal.SIGUSR1:
            raise HandledError(signum)

    def are_installed(self) -> bool:
        return all(signal.getsignal(number) == self.handle for number in self.signals)


@pytest.mark.parametrize(
    ("sent", "stride"),
    [
        ((signal.SIGCHLD,), 10),
        pytest.param((signal.SIGCHLD,), 1, marks=pytest.mark.wide),
        pytest.param((signal.SIGUSR1,), 3, marks=pytest.mark.wide),
        pytest.param(Handlers.signals, 1, marks=pytest.mark.wide),
    ],
    ids=lambda value: "+".join(number.name for number in value) if isinstance(value, tuple) else f"each {value}",
)
def test_wherever_a_signal_of_the_programs_own_comes_its_handler_runs_once_and_the_run_is_ended(sent, stride):
    """Several signals come together, as to the whole group: each handler that raises takes one more `__exit__`."""
    if stride == 1:
        importlib.import_module("flytekit")  # a call has more to ask where it is loaded
    tracker = EndsRecorder()
    statuses: set[int] = set()

    @tracking_init(tracker=tracker, project="tests", id="handled")
    def train() -> None:
        pass

    def send() -> None:
        """Have all of them pending before the first handler runs: this thread does, which waits for the sender."""
        signal.pthread_sigmask(signal.SIG_BLOCK, sent)
        for number in sent:
            signal.pthread_kill(threading.main_thread().ident or 0, number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, sent)

    train()  # loads what is loaded on first use
    before = state()
    for point in itertools.count(step=stride):
        tracker.runs.clear()
        handlers = Handlers()
        with handlers:
            try:
                has_point, raised = signalled_at(point, train, send, counts=("call", "c_return").__contains__)
            except HandledError as error:  # the second of them, behind the function
                has_point, raised = True, error
            for _ in sent:
                with contextlib.suppress(HandledError):
                    signal.pthread_sigmask(signal.SIG_BLOCK, [])  # CPython calls the handlers that it still has to
            assert handlers.are_installed(), point
        if not has_point:
            break
        assert sorted(handlers.called) == sorted(sent), point
        assert isinstance(raised, HandledError) == (sent != (signal.SIGUSR1,)), (point, raised)
        wait_until(lambda: threading.active_count() == before[2])
        assert state() == before, point
        assert all(run.finished == 1 for run in tracker.runs), point
        statuses |= {run.exit_codes[-1] for run in tracker.runs}
    assert point > 100
    assert statuses == ({0} if sent == (signal.SIGUSR1,) else {0, 1})


def test_a_signal_in_the_callback_of_a_weak_reference_takes_effect_behind_it(monkeypatch):
    """Python ignores exceptions in these callbacks: the end of a thread could hide the signal."""
    monkeypatch.setattr(MainThreadListener, "_exit_in_the_end", lambda _: None)
    tracker, own = EndsRecorder(), signal.getsignal(signal.SIGTERM)
    group: weakref.WeakSet[Any] = weakref.WeakSet()

    class Value:
        pass

    def in_callback(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_name == "_remove" and is_installed():
            sys.setprofile(None)
            signal.raise_signal(signal.SIGTERM)

    @tracking_init(tracker=tracker, project="tests", id="callback")
    def train() -> None:
        group.add(Value())  # it is freed, and removed from the group, when this line ends
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            time.sleep(0.01)

    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        sys.setprofile(in_callback)
        with pytest.raises(SystemExit) as raised:
            train()
    finally:
        sys.setprofile(None)
        signal.signal(signal.SIGTERM, own)
    assert raised.value.code == 143
    assert tracker.runs[0].exit_codes == [143]


def test_without_a_thread_to_be_had_the_function_is_called_without_a_run(monkeypatch, caplog):
    """As in a container whose limit of processes is reached: watching for SIGTERM takes a thread."""
    tracker, called = EndsRecorder(), []

    @tracking_init(tracker=tracker, project="tests", id="no-thread")
    def train() -> str:
        called.append(get_run())
        return "result"

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    before = state()
    monkeypatch.setattr(threading.Thread, "start", start)
    assert train() == "result"
    monkeypatch.undo()
    assert called == [None]
    assert tracker.runs == []
    assert "ends: the function is called without a run: can't start new thread" in caplog.text
    assert state() == before
    assert train() == "result"
    assert called[1] is tracker.runs[0]

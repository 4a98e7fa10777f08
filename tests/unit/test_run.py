"""A run from its opening to its end: what is done in which order, what is undone, and who shares it."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest

from flyteplugins_tracking import TrackerNotInstalledError, get_run, tracking_init
from flyteplugins_tracking._runs.calls import current, state
from flyteplugins_tracking._runs.context import ProcessContext, World, override
from flyteplugins_tracking._runs.run import end_open_runs
from flyteplugins_tracking._util.lock import RunLock
from flyteplugins_tracking._util.record import replace
from flyteplugins_tracking.trackers.base import Handle, RunRequest, Tracker

ID = "a-run"


class Steps(list[Any]):
    """What was done, in its order."""


class Run(Handle):
    id = ID

    def __init__(self, steps: Steps) -> None:
        self.run, self.steps = self, steps

    def await_writers(self, exit_code: int) -> None:
        self.steps.append(f"await writers {exit_code}")

    def record_event(self, name: str, values: Mapping[str, Any], text: str) -> None:
        self.steps.append(f"event {name}")

    def finish(self, exit_code: int) -> None:
        self.steps.append(f"finish {exit_code}" if is_locked() else "finish without the lock")

    def end_early(self, exit_code: int) -> None:
        self.steps.append(f"end early {exit_code}")

    def unsent(self) -> list[str]:
        return ["directory"]


class Service(Tracker):
    name = title = "steps"

    def __init__(self, steps: Steps, opens: bool = True) -> None:
        self.steps, self.opens = steps, opens

    def open(self, request: RunRequest) -> Run:
        self.steps.append("open" if is_locked() else "open without the lock")
        if not self.opens:
            raise ValueError("made to fail")
        return Run(self.steps)


class Platform(ProcessContext):
    """A task with a storage, whose children continue its run."""

    can_persist = True
    steps: Steps
    propagates: bool = True

    @contextmanager
    def _propagated(self) -> Iterator[None]:
        self.steps.append("propagate")
        yield
        self.steps.append("propagate no more")

    def propagate_run(self, tracker: Tracker, run: Any) -> AbstractContextManager[None]:
        if not self.propagates:
            raise ValueError("made to fail")
        return self._propagated()

    def persist(self, directory: str) -> str:
        self.steps.append(f"persist {directory}" + " with the lock" * is_locked())
        return "s3://bucket"


def is_locked() -> bool:
    """Whether a process or thread has the run's lock."""
    lock = RunLock.acquire(f"steps/None/{ID}")
    if lock is None:
        return True
    lock.release()
    return False


def nothing_is_open() -> bool:
    handler = signal.getsignal(signal.SIGTERM)
    return (state.calls, state.runs, current.get(), handler, is_locked()) == ([], [], None, signal.SIG_DFL, False)


def world_of(platform: Platform) -> World:
    world = World()
    world.adapted = lambda asked: replace(asked, context=platform)
    return world


@pytest.fixture
def steps(bare_environment):
    return Steps()


@pytest.fixture
def platform(steps):
    with override(world_of(Platform(steps=steps))):
        yield


def test_a_run_is_opened_and_closed_in_this_order(steps, platform):
    tracking_init(tracker=Service(steps), id=ID)(lambda: steps.append("function"))()
    assert steps == [
        "open",
        "propagate",
        "function",
        "propagate no more",
        "await writers 0",
        "finish 0",
        "persist directory",
    ]
    assert nothing_is_open()


def test_unsent_files_are_kept_if_a_signal_ends_the_run_of_a_function_that_never_returns(steps, platform):
    """As in a collective: the process ends with `os._exit`, and the function's end never comes."""
    ended = tracking_init(tracker=Service(steps), id=ID)(lambda: end_open_runs(60) or list(steps))()
    assert ended == ["open", "propagate", "end early 143", "persist directory with the lock"]


def test_an_error_is_kept_with_the_run_before_its_end(steps):
    with pytest.raises(ZeroDivisionError):
        tracking_init(tracker=Service(steps), id=ID)(lambda: 1 / 0)()
    assert steps == ["open", "await writers 1", "event failure", "finish 1"]
    assert nothing_is_open()


def test_a_tracker_that_cannot_open_leaves_nothing_open(steps):
    with pytest.raises(ValueError, match="made to fail"):
        tracking_init(tracker=Service(steps, opens=False), id=ID)(lambda: None)()
    assert steps == ["open"]
    assert nothing_is_open()


@pytest.mark.parametrize(("package", "error"), [("a_client", TrackerNotInstalledError), ("json", ValueError)])
def test_an_error_at_the_import_of_a_client_is_told_as_such(steps, monkeypatch, tmp_path, package, error):
    (tmp_path / "a_client.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    tracker = Service(steps, opens=False)
    tracker.package = package
    with pytest.raises(error, match=r"^a_client cannot be imported: ValueError: made to fail\. See|^made to fail$"):
        tracking_init(tracker=tracker)(lambda: None)()


def test_a_run_that_cannot_be_propagated_is_closed_as_failed(steps):
    function = tracking_init(tracker=Service(steps), id=ID)(lambda: steps.append("function"))
    world = world_of(Platform(steps=steps, propagates=False, can_persist=False))
    with override(world), pytest.raises(ValueError, match="made to fail"):
        function()
    assert steps[:4] == ["open", "await writers 1", "event failure", "finish 1"]
    assert "function" not in steps
    assert nothing_is_open()


@pytest.mark.parametrize("step", ["propagate no more", "await writers", "event", "finish"])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("ends", [True, False])
def test_the_end_goes_on_whatever_a_step_raises(bare_environment, step, error, ends):
    """The run is asked to end, if the step before has not been interrupted; and nothing stays open in any case."""

    class Raising(Steps):
        def append(self, done: str) -> None:
            super().append(done)
            if done.startswith(step):
                raise error(f"of {step}")

    raising = Raising()
    with override(world_of(Platform(steps=raising))), contextlib.suppress(ZeroDivisionError, error):
        tracking_init(tracker=Service(raising), id=ID)(lambda: None if ends else 1 / 0)()
    assert nothing_is_open()
    is_cut_short = error is not ValueError and raising[-1].startswith(("await writers", "event"))
    assert sum(done.startswith("finish") for done in raising) == (0 if is_cut_short else 1)


def test_the_last_call_of_a_run_closes_it_with_the_status_of_its_opener(steps, caplog):
    """The opener fails while a thread that it has started still uses the run."""
    joined, may_end = threading.Event(), threading.Event()
    service = Service(steps)

    @tracking_init(tracker=service, id=ID)
    def inner() -> None:
        joined.set()
        assert may_end.wait(60)
        steps.append(f"inner in {get_run().id}")

    @tracking_init(tracker=service, id=ID)
    def outer() -> None:
        import contextvars

        thread = threading.Thread(target=contextvars.copy_context().run, args=(inner,))
        threads.append(thread)
        thread.start()
        assert joined.wait(60)
        raise SystemExit(3)

    threads: list[threading.Thread] = []
    with caplog.at_level(logging.CRITICAL), pytest.raises(SystemExit):
        outer()
    steps.append("outer has ended")
    may_end.set()
    threads[0].join(60)
    assert steps == [
        "open",
        "outer has ended",
        "inner in a-run",
        "await writers 3",
        "event failure",
        "finish 3",
    ]
    assert nothing_is_open()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_that_leaves_the_function_ends_nothing(steps):
    @tracking_init(tracker=Service(steps), id=ID)
    def train() -> int:
        return os.fork()

    pid = train()
    if pid == 0:
        os._exit(0 if steps == ["open"] and (state.calls, get_run()) == ([], None) else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert steps == ["open", "await writers 0", "finish 0"]
    assert nothing_is_open()

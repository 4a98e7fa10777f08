"""What a forked child has of its parent's objects."""

from __future__ import annotations

import importlib
import logging
import os
import pkgutil
import threading
from collections.abc import Callable

import pytest

import flyteplugins_tracking
from flyteplugins_tracking._util.fork import PerProcess, register

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


class State(PerProcess):
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.open: list[int] = []


def in_child(holds: Callable[[], bool]) -> bool:
    """Whether `holds()` in a forked child."""
    pid = os.fork()
    if pid == 0:
        os._exit(0 if holds() else 1)
    return os.waitpid(pid, 0)[1] == 0


class Broken(PerProcess):
    def after_fork_in_child(self) -> None:
        raise OSError("made to fail")


def test_a_child_starts_with_an_empty_state_whose_lock_is_free_whatever_fails_in_others(caplog):
    broken, state = register(Broken()), register(State())
    state.open.append(1)
    with state.lock, caplog.at_level(logging.CRITICAL):  # as by a thread that the child does not have
        assert in_child(lambda: state.open == [] and state.lock.acquire(timeout=10))
    assert state.open == [1]
    assert broken is not None


def test_a_lock_of_a_module_is_in_an_object_that_a_child_renews():
    """Another thread may hold it when the process forks: then the child would wait for it forever."""
    locks = (type(threading.Lock()), type(threading.RLock()), threading.Condition, threading.Event)
    found = []
    for each in pkgutil.walk_packages(flyteplugins_tracking.__path__, "flyteplugins_tracking."):
        if each.name.endswith("__main__"):
            continue
        for name, value in vars(importlib.import_module(each.name)).items():
            is_own = type(value).__module__.startswith("flyteplugins_tracking") and not isinstance(value, PerProcess)
            parts = value if isinstance(value, tuple) else vars(value).values() if is_own else ()
            if any(isinstance(part, locks) for part in [value, *parts]):
                found.append(f"{each.name}.{name}")
    assert found == []

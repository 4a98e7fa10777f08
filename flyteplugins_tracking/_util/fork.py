"""Forks: the one rule for what a child must not keep of its parent.

A forked child has a copy of each object of its parent. A lock may be held in it forever, by a thread that only the
parent has. An open run, a file or a connection is still the parent's. Elastic, DataLoaders and `multiprocessing` fork.
So:

1. A module keeps the state of its process (locks, what is open, caches) in the attributes of one object:
   `_state = register(_State())`, with a class that inherits from `PerProcess`. A child calls its `__init__` again.
2. A live object that holds something of the system (a file, a socket, a signal handler) inherits from `PerProcess` too.
   Its `__init__` ends with `register(self)`, and its `after_fork_in_child` lets go of the copy.
3. An object that the child may still call, such as a run, notes in `after_fork_in_child` that it is the parent's.

What a child shares with its parent stays outside of such objects: the arguments of a call, for instance.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import os
import threading
from typing import TypeVar
from weakref import WeakValueDictionary

from flyteplugins_tracking._util.signals import critical_section

logger = logging.getLogger(__name__)

P = TypeVar("P", bound="PerProcess")


class PerProcess:
    """An object that belongs to one process, and that a forked child renews."""

    def before_fork(self) -> None:
        """Prepare a fork. Called in the thread that forks."""

    def after_fork_in_parent(self) -> None:
        """Undo `before_fork`. Called in the thread that has forked."""

    def after_fork_in_child(self) -> None:
        """Start again with nothing of the parent's."""
        self.__init__()  # type: ignore[misc]


class OwnLock(PerProcess):
    """A reentrant lock of a module, which a forked child finds free."""

    def __init__(self) -> None:
        self.lock = threading.RLock()


_numbers = itertools.count()
_registered: WeakValueDictionary[int, PerProcess] = WeakValueDictionary()


def register(owned: P) -> P:
    """Have the methods of an object called at each later fork, as long as the object lives, and return the object."""
    _registered[next(_numbers)] = owned
    return owned


@critical_section(math.inf)  # Python drops what is raised in a hook
def _call_all(name: str) -> None:
    # `valuerefs` copies the references in one step: another thread may register an object meanwhile.
    for reference in _registered.valuerefs():
        owned = reference()
        try:
            if owned is not None:
                getattr(owned, name)()
        except Exception:
            logger.warning("%r is not prepared for a fork", owned, exc_info=True)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=functools.partial(_call_all, "before_fork"),
        after_in_parent=functools.partial(_call_all, "after_fork_in_parent"),
        after_in_child=functools.partial(_call_all, "after_fork_in_child"),
    )

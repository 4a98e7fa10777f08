"""The processes that a rank starts: they inherit its variables, and are not that rank.

A launcher sets its variables for a rank, which usually has them from its start. A process that is born with them, and
whose parent is the rank, is a child: it has a run of its own, and never the rank's. One that sets its variables itself,
as the workers of Elastic, `notebook_launcher` and `mp.spawn` do, is a rank.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import zlib
from collections.abc import Mapping
from typing import Any

from flyteplugins_tracking._util import proc
from flyteplugins_tracking._util.fork import PerProcess, register
from flyteplugins_tracking._util.modules import initialised_distributed

# "{pid}-{digest}-{base id}": the process that has called a decorated function as a rank, the variables by which it is
# one, and the base id that it has agreed on, if it has one. Programs that it starts inherit it.
MARK = "FLYTE_TRACKING_RANK"
# In the command line of a process that another Python process has started to run its functions; `multiprocess` is a
# package with the same code.
_STARTED_BY_PYTHON = (  # not compiled: few processes need it
    r"from multiprocess\w*\.(spawn|forkserver) import |--multiprocessing-fork$|[\w.]*\bloky\.backend\.|ray::"
)
_MULTIPROCESSING = ("multiprocessing.process", "multiprocess.process")
# For a system without /proc.
_at_import = dict(os.environ)
# Where this process was started, as far as that is known: Hydra and others go to another directory before the call.
DIRECTORY = proc.directory(os.getpid())


class _Fork:
    """The state of the parent when it forked this process.

    Attributes:
        variables: Its environment.
        group: Its default process group; None for none.
        parent_is_child: Whether it was itself forked, or started by multiprocessing.
    """

    def __init__(self) -> None:
        self.variables: Mapping[str, str] = proc.environment()
        self.group = default_group()
        self.parent_is_child = _birth.fork is not None or _multiprocessing_parent() is not None


class _Birth(PerProcess):
    """How this process has begun: by this fork, or None."""

    fork: _Fork | None = None

    def after_fork_in_child(self) -> None:
        self.fork = _Fork()


_birth = register(_Birth())


def is_forked() -> bool:
    """Return whether this process was forked after this library had been imported."""
    return _birth.fork is not None


def is_program() -> bool:
    """Return whether this process was started as a program: multiprocessing has not made it, and it is no fork."""
    return _birth.fork is None and _multiprocessing_parent() is None


def variables_at_birth() -> Mapping[str, str]:
    """Return the environment that this process got from its parent."""
    return _initial_variables() if _birth.fork is None else _birth.fork.variables


def has_inherited_group() -> bool:
    """Return whether the default process group is the one of the process that has forked this one.

    Its connections are the parent's: nothing may be sent through them here.
    """
    fork = _birth.fork
    return fork is not None and fork.group is not None and fork.group is default_group()


def default_group() -> Any:
    """Return the process group of all ranks, if the user's code has initialised one; else None."""
    dist = initialised_distributed()
    return dist and dist.group.WORLD


def is_child_of_rank(variables: Mapping[str, str]) -> bool:
    """Return whether a rank has started this process, which has its variables from that rank.

    Args:
        variables: The variables by which this process looks like a rank, with their values.
    """
    born = variables_at_birth()
    if not variables or not has(born, variables):
        return False  # set in this process, as by Elastic's workers
    if _is_below_marked(variables):
        return True
    if _birth.fork is not None:
        # A forked process shows the environment that its parent was started with.
        return _birth.fork.parent_is_child or has(_initial_variables(), variables)
    parent = _multiprocessing_parent()
    if parent is None:
        return False  # a launcher's, or one of a shell or of a program between the launcher and the rank
    return has(proc.variables_at_start(parent), variables) or _is_started_by_python(parent)


def mark(variables: Mapping[str, str], base_id: str | None = None) -> None:
    """Let the programs that this process starts know that it is a rank, by these variables, and its base id."""
    if variables:
        os.environ[MARK] = "-".join([str(os.getpid()), _digest(variables), *([] if base_id is None else [base_id])])


def marked_base_id(env: Mapping[str, str]) -> str | None:
    """Return the base id of the rank that has started this process; None if it has told none."""
    parts = env.get(MARK, "").split("-", 2)
    return parts[2] if len(parts) == 3 else None


def _is_below_marked(variables: Mapping[str, str]) -> bool:
    pid, digest, *_ = [*os.environ.get(MARK, "").split("-", 2), ""]
    return digest == _digest(variables) and pid != str(os.getpid()) and pid in map(str, proc.lineage())


def _digest(variables: Mapping[str, str]) -> str:
    # Only this one is another for each start of a torchrun, whose run id may be constant.
    values = [*sorted(variables.items()), os.environ.get("TORCHELASTIC_ERROR_FILE")]
    return f"{zlib.crc32(repr(values).encode()):08x}"


def has(environment: Mapping[str, str], variables: Mapping[str, str]) -> bool:
    """Return whether an environment has these variables, with these values."""
    return all(environment.get(name) == value for name, value in variables.items())


@functools.cache  # a forked process shows what its parent was started with
def _initial_variables() -> Mapping[str, str]:
    return proc.variables_at_start(os.getpid()) or _at_import


def _multiprocessing_parent() -> int | None:
    """Return the process whose `multiprocessing.Process` this one is; None if it is not one."""
    modules = [sys.modules[name] for name in _MULTIPROCESSING if name in sys.modules]
    parents: list[Any] = [module.parent_process() for module in modules]
    return next((parent.pid for parent in parents if parent is not None), None)


def _is_started_by_python(pid: int) -> bool:
    """Return whether multiprocessing has started or forked `pid`, so that its variables were set inside it.

    True if it has ended: a parent that only starts ranks waits for them.
    """
    command = proc.command_line(pid)
    if not command[0] or any(re.match(_STARTED_BY_PYTHON, word) for word in command):
        return True
    return "python" in os.path.basename(command[0]) and command == proc.command_line(proc.parent(pid))

"""Why a rank has failed, as values: how an exception becomes a text for other ranks and services."""

from __future__ import annotations

import re
import socket
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from flyteplugins_tracking._util.modules import is_own
from flyteplugins_tracking._util.secrets import masked

_LAST_LINES = 50
_LONGEST_LINE = 1000
# A line is also cut before its keys are masked, which takes a second for a few megabytes: far behind `_LONGEST_LINE`,
# so that no half of a key is left.
_LONGEST_UNMASKED = 10 * _LONGEST_LINE
# What a collective raises on a rank whose peer has gone: gloo, NCCL, torch's stores, MPI and sockets.
_LOST_PEER = re.compile(
    r"connection (?:was likely )?(?:closed|reset|refused)|broken pipe|socket (?:closed|timeout)|failed to recv|"
    r"nccl|gloo|watchdog|remote process (?:exited|has exited)|pair closure|timed out waiting|wait timeout|peer",
    re.IGNORECASE,
)
# Code that waits for other ranks. In `backward`, DDP and FSDP reduce gradients.
COLLECTIVES = re.compile(r"[/\\](?:torch[/\\](?:distributed|autograd)|horovod|mpi4py|deepspeed[/\\]comm)[/\\]")
_TORCH_ERRORS = {"DistError", "DistBackendError", "DistNetworkError", "DistStoreError"}
_SYSTEM_ERRORS = {
    *("RuntimeError", "OSError", "TimeoutError", "ConnectionError", "ConnectionResetError", "ConnectionRefusedError"),
    *("ConnectionAbortedError", "BrokenPipeError"),
}
# The keys of a verdict in the run's summary.
FAILURE_KEYS = ("failure/rank", "failure/host", "failure/type", "failure/message")


@dataclass(frozen=True)
class Failure:
    """A rank that has failed.

    Attributes:
        rank: The rank, in its job.
        type: The exception's type, with its module unless it is built in; or the signal's name.
        message: The exception's text, without keys.
        exit_code: The status of the process: 1 for an exception, 128+n if signal n ended it.
        traceback: The last 50 lines of the traceback, without keys; empty if the process ended without a word.
        is_secondary: Whether the rank has only lost another one: a collective was cut off.
        host: The host's name.
        failed_at: When, in seconds since the epoch, by the clock of the host.
    """

    rank: int
    type: str
    message: str
    exit_code: int
    traceback: str = ""
    is_secondary: bool = False
    host: str = field(default_factory=socket.gethostname)
    failed_at: float = field(default_factory=time.time)

    @classmethod
    def of_error(cls, error: BaseException, rank: int, exit_code: int) -> Failure:
        """Return the failure of this process, whose function has raised `error`.

        A framework that prints an exception and exits with a number, as Hydra does, has failed of that exception.
        """
        if isinstance(error, SystemExit) and isinstance(error.code, int) and isinstance(error.__context__, Exception):
            error = error.__context__
        stack = "".join(traceback.format_exception(type(error), error, _of_user(error.__traceback__)))
        kind = type(error)
        prefix = "" if kind.__module__ in ("builtins", "__main__", "__mp_main__") else f"{kind.__module__}."
        return cls(
            rank=rank,
            type=prefix + kind.__qualname__,
            message=clean_message(_text_of(error)),
            exit_code=exit_code,
            traceback=clean_traceback(stack),
            is_secondary=is_secondary(error),
        )

    def __str__(self) -> str:
        what = [self.type, self.message] if self.traceback else [self.message]
        return ": ".join([f"rank {self.rank} on {self.host}", *(str(word) for word in what if word)])


def clean_message(text: str) -> str:
    """Return an exception's text without keys, not too long, and in valid UTF-8: services refuse anything else."""
    return _valid(masked(text[:_LONGEST_UNMASKED])[:_LONGEST_LINE])


def clean_traceback(text: str) -> str:
    """Return the last lines of a traceback, as `clean_message`: the exception's text is among them."""
    lines = [line[:_LONGEST_UNMASKED] for line in text.splitlines()[-_LAST_LINES:]]
    return _valid("\n".join(line[:_LONGEST_LINE] for line in masked("\n".join(lines)).splitlines()))


def _valid(text: str) -> str:
    """Return a string that UTF-8 can encode: the name of a file may hold bytes that it cannot."""
    return text.encode(errors="backslashreplace").decode()


def _text_of(error: BaseException) -> str:
    """Return the exception's text as Python's traceback has it, even if its `__str__` raises."""
    try:
        return str(error)
    except Exception:
        return "<exception str() failed>"


def _of_user(frames: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames of this package that it begins with."""
    while frames is not None and frames.tb_next and is_own(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    return frames


def is_secondary(error: BaseException) -> bool:
    """Whether an exception only says that another rank has gone, or that a collective was cut off."""
    names = {kind.__name__ for kind in type(error).__mro__}
    if names & _TORCH_ERRORS:
        return True
    return bool(
        names & _SYSTEM_ERRORS
        and _LOST_PEER.search(_text_of(error)[:_LONGEST_UNMASKED])
        and any(COLLECTIVES.search(frame.filename) for frame in traceback.extract_tb(error.__traceback__))
    )


def first_cause(failures: Sequence[Failure]) -> Failure | None:
    """Return the failure that ended the job: the first that is not secondary; if all are, the first."""
    return next((failure for failure in failures if not failure.is_secondary), failures[0] if failures else None)


@dataclass(frozen=True)
class Verdict:
    """Why a job has failed.

    Attributes:
        cause: The first failure.
        others: The number of other ranks that have failed, and not because the first one has.
    """

    cause: Failure
    others: int

    @property
    def summary(self) -> Mapping[str, Any]:
        """The values for the run's summary."""
        cause = self.cause
        return dict(zip(FAILURE_KEYS, (cause.rank, cause.host, cause.type, cause.message), strict=True))

    @property
    def text(self) -> str:
        """The failure and its traceback, as one block."""
        return f"{self}\n{self.cause.traceback}".rstrip()

    def __str__(self) -> str:
        ranks = "rank" if self.others == 1 else "ranks"
        followers = f" ({self.others} other {ranks} failed too)" if self.others else ""
        return f"{self.cause}{followers}"

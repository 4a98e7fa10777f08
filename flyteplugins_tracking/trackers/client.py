"""The base for trackers whose ranks each write to the run with a client of their own.

A tracker implements two methods, `write` and `end`, and perhaps `resume`. This module decides when they are called.
"""

from __future__ import annotations

import functools
import inspect
import logging
import secrets
import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, NoReturn

from flyteplugins_tracking._util.checks import is_given
from flyteplugins_tracking._util.modules import replace_function
from flyteplugins_tracking._util.plain import plain_config
from flyteplugins_tracking._util.proc import INTERRUPTED, TERMINATED
from flyteplugins_tracking._util.signals import critical_section
from flyteplugins_tracking._util.warn_once import WarnOnce
from flyteplugins_tracking.errors import TrackerUnavailableError, TrackingError
from flyteplugins_tracking.trackers.barrier import WriterBarrier
from flyteplugins_tracking.trackers.base import Handle, RunRequest
from flyteplugins_tracking.trackers.config import OWN, ROLES, own_values
from flyteplugins_tracking.trackers.ending import EndLimit
from flyteplugins_tracking.trackers.gate import Gate
from flyteplugins_tracking.trackers.outbox import AwayError, RejectedError
from flyteplugins_tracking.trackers.registry import open_waiting
from flyteplugins_tracking.trackers.rows import MetricSanitizer, NextRow

logger = logging.getLogger(__name__)

# The column of an attempt's number: of its first row, or after a rollback of each of its rows.
RESTART_COUNT = "restart_count"
# How long a signal waits for a run whose opening another one has interrupted, in seconds: its end has less.
_PATIENCE_S = 30.0
# How much of the time for a run's end has passed when a signal interrupts its opening, and is left for the process's.
_PASSED_S = 6.0

# The functions that `join_calls` has put in the place of a client's.
_joining: set[Callable[..., Any]] = set()

Status = Literal["finished", "failed", "killed"]


class Run:
    """The object that `get_run` returns if the service's client has no run object.

    Attributes:
        id: The run's id.
    """

    def __init__(self, handle: ClientHandle) -> None:
        self.id = handle.id
        self._handle = handle

    def log(self, data: Mapping[str, Any], step: int | None = None) -> None:
        """Log a row at `step`: a mapping of keys to values."""
        self._handle.log(data, step)

    def finish(self, exit_code: Any = None, *_: Any, **__: Any) -> None:
        """End nothing: the run ends when the decorated function does. See `ClientHandle.tell_end`."""
        self._handle.tell_end(exit_code)

    def __reduce__(self) -> Any:
        refuse_to_pickle()


class ClientHandle(Handle):
    """An open run that this process writes to, alone or beside other ranks.

    `write`, `end` and `resume` are called one at a time, never by two threads at the same time.

    Attributes:
        request: The decorator's request for this run.
        ends_run: Whether `end` sends the run's status to the service. It is True on the primary rank of the job that
            owns the run, and in the command `send` for the last attempt of a run.
        vendors_keys: How the keys of the config begin that the service's client sets itself.
        warn_once: Warns once about each subject.
    """

    vendors_keys: tuple[str, ...] = ()

    def __init__(
        self,
        request: RunRequest,
        title: str,
        values: MetricSanitizer | None = None,
        gate: Gate | None = None,
        barrier: WriterBarrier | None = None,
    ) -> None:
        """Initialize the handle of a run that is open.

        Args:
            request: The decorator's request for this run.
            title: The service's name in messages.
            values: Makes rows of logged values.
            gate: The run's gate, if several threads may call the client at a time.
            barrier: Where the primary waits for the other ranks, if this process has entered it.
        """
        self.id = request.plan.run_id or new_id()
        self.run: Any = Run(self)
        self.request = request
        self.ends_run = request.plan.ends_run
        self._title = title
        self._values = values or MetricSanitizer(title, prefix_of(request))
        self._barrier = barrier or WriterBarrier.of_ranks(request, title)
        self._gate = gate or Gate(title, self.id, one_at_a_time=True)
        self._ended_with: int | None = None  # the status that `end` has got
        self._late = threading.RLock()  # held while something is logged to a run that a signal has ended
        self._waiting: deque[Callable[[], object]] = deque()  # what was logged while it ended
        self._is_late = False  # whether something was logged since, or is kept because the service's process has died
        self._next_row = NextRow()
        self._last_step: Any = None  # the last `step=` of a row
        self.warn_once = WarnOnce(logger)
        self._restart_count = request.restart_count if request.plan.primary else 0
        self._told_status: int | None = None  # that of the function's own first end of the run, which ends nothing

    @abstractmethod
    def write(self, row: Mapping[str, Any], step: Any, **kwargs: Any) -> None:
        """Log a row, without waiting for the service, and without raising if the service does not answer."""

    @abstractmethod
    def end(self, exit_code: int) -> None:
        """Send the rows that are left, while the `end_limit` lasts. Then send the run's status if `ends_run`."""

    def end_limit(self) -> EndLimit:
        """Return the limit of an end that begins now: while data moves, and after SIGTERM as `kill_after_s` says."""
        return EndLimit(self._title, self.id, self.request.config, self.request.sigterm)

    def resume(self) -> None:
        """Get ready for more rows: a signal has ended the run, and the function still logs. `end` is called again."""

    def log(self, data: Mapping[str, Any], step: Any = None, **kwargs: Any) -> None:
        """Log a row: the `log` of the run object. An outage of the service neither raises nor blocks.

        Raises:
            TypeError: `data` is not a mapping of strings to values.
        """
        if self._gate.state == "finished" and self._gate.refuses():
            return
        self.request.sigterm.before_row()
        row = self._make_row(data)
        if self._next_row.waiting and isinstance(row, dict):
            row = {**self._next_row.take(), **row}
        self._gate.call(self._write, self._write_late, row, step, kwargs)

    def _make_row(self, data: Any) -> Any:
        """Return a row as the service takes it."""
        return self._values.clean(data)

    def _write_late(self, *row: Any) -> None:
        self._act_late(lambda: self._write(*row))

    def pass_on(self, action: Callable[[], object]) -> None:
        """Call `action`, which writes to the run. If the function has ended, do not."""
        self._gate.call(action, lambda: self._act_late(action))

    def _act_late(self, action: Callable[[], object]) -> None:
        """Write to a run that a signal has ended; or when the end is over."""
        with self._late:
            self._waiting.append(action)
            if self._gate.state != "ending":
                self._act_waiting()

    def _act_waiting(self) -> None:
        with self._late:
            if self._waiting and not self._is_late:
                self._is_late = True
                self.resume()
            while self._waiting:
                self._waiting.popleft()()

    def tell_end(self, exit_code: Any = None) -> None:
        """Take a call that would end the run, as `finish(1)`. Its status is the run's if the function then returns.

        The first call counts.
        """
        if self._told_status is None:
            self._told_status = exit_code if isinstance(exit_code, int) else 0

    def describe(self, call: str, given: Mapping[str, Any], placed: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the config of a call adds to the run. The call, as `trackio.init`, returns the open run.

        Warn once about what has no effect: values that the decorator has set to others, and arguments that differ from
        the run's, which are `placed`. The call of the primary rank describes the run.
        """
        config = self.request.config.config
        known = config if isinstance(config, Mapping) else {}
        if not self.request.plan.primary:
            return {}
        if self._told_status is not None and self.id not in (given.get("id"), given.get("run_id")):
            text = (
                "%s: %s() opens no other run after the end of one: it returns run %s again, which has the rows of "
                "both. For a run each, decorate the function that has one with tracking_init, without a run around it"
            )
            self.warn_once("another", text, self._title, call, self.id)
        values = plain_config(given.get("config") or None)
        new = {
            key: value for key, value in values.items() if key not in known and not key.startswith(self.vendors_keys)
        }
        kept = [f"config[{key!r}]" for key in values if key not in new and known.get(key) != values[key]]
        others = {name: value for name, value in given.items() if name in placed and is_given(value)}
        kept += [f"{name}={value!r}" for name, value in others.items() if value != placed[name]]
        if kept:
            text = (
                "%s: %s() in a decorated function returns the function's run %s, and adds what tracking_init does not "
                "set. Without effect: %s. Pass these to tracking_init, or as options of the command `run`"
            )
            self.warn_once(call, text, self._title, call, self.id, ", ".join(kept))
        return new

    def add_to_next_row(self, values: Mapping[str, Any]) -> None:
        self._next_row.add(values)

    @property
    def last_step(self) -> Any:
        """The step of the last row; None if there is none, or if only the service knows it."""
        return self._last_step

    def await_writers(self, exit_code: int) -> None:
        missing = self._barrier.wait(self.end_limit()) if self._barrier is not None and exit_code == 0 else ()
        if missing:
            text = (
                "%s: run %s ends now. The primary rank's function returned %s ago, and these writers have not sent all "
                "their rows: %s. Pass a longer kill_after_s to wait for them."
            )
            logger.warning(text, self._title, self.id, self.request.config.finish_limit, ", ".join(missing))

    def finish(self, exit_code: int) -> None:
        try:
            self._gate.end(lambda: self._end(exit_code), lambda: self._end_again(exit_code), is_last=True)
        finally:
            if self._barrier is not None:
                self._barrier.leave()

    def end_early(self, exit_code: int) -> None:
        self._gate.end(lambda: self._end(exit_code), lambda: self._end_again(exit_code, is_last=False))

    def _end(self, exit_code: int) -> None:
        self._ended_with = exit_code or self._told_status or 0
        self._before_end(self._ended_with)
        self.end(self._ended_with)

    def _before_end(self, exit_code: int) -> None:  # noqa: ARG002 W&B's runs with several writers need it
        """Log what is told at the end of a run."""
        if self._next_row.waiting:  # for a next row that does not come
            self._write(self._next_row.take(), self.last_step, {})

    def _end_again(self, exit_code: int, *, is_last: bool = True) -> None:  # noqa: ARG002 as W&B's may not have ended
        """Send what was logged since a signal has ended the run, if the function has ended. Its status stays."""
        self._act_waiting()
        if is_last and self._is_late and self._ended_with is not None:
            self.end(self._ended_with)

    def _write(self, row: Mapping[str, Any], step: Any, kwargs: Mapping[str, Any]) -> None:
        if step is not None:
            self._last_step = step
        if self._restart_count:  # once: a column that tells the attempts apart costs each service a value
            row, self._restart_count = {**row, RESTART_COUNT: self._restart_count}, 0
        try:
            self.write(row, step, **kwargs)
        except Exception:
            self._gate.warn("could not be logged to. A row is lost")


def refuse_to_pickle() -> NoReturn:
    """Refuse to pickle a run.

    Raises:
        TypeError: Always.
    """
    raise TypeError(
        "a run cannot be pickled, since it belongs to the process that opened it: pass values of it to the other "
        "process, or call get_run() there"
    )


def prefix_of(request: RunRequest) -> str:
    """Return the prefix of the keys in this rank's rows: see `role` and `rank_prefix`."""
    if request.plan.role is not None:
        return f"{request.plan.role}/"
    is_shared = request.config.run_mode == "shared" and request.config.rank_prefix
    return f"rank_{request.info.rank if request.info else 0}/" if is_shared else ""


def degrades(request: RunRequest, error: TrackerUnavailableError) -> bool:
    """Whether the run is logged to local files because of this error."""
    return request.config.if_unavailable == "degrade" and error.is_outage


def run_config(request: RunRequest) -> dict[str, Any]:
    """Return the run's config, for the primary rank to pass: the user's config, and the run's metadata.

    That of a role is below its name. The owner's says that the run has roles.
    """
    config, role, roles = request.config.config, request.plan.role, request.config.roles
    values = {**request.run_metadata, **(config if isinstance(config, Mapping) else {})}
    own = {**own_values(request.run_metadata), **({} if roles is None else {ROLES: list(roles)})}
    if own:
        values[OWN] = own
    return values if role is None else {role: values}


def join_calls(original: Callable[..., Any], join: Callable[[Mapping[str, Any]], Any]) -> None:
    """Have a client's function return the run with which `join` answers to its arguments, if that is not None.

    Such a function opens a run, and a script calls it in a decorated function. It is replaced once.
    """
    if original in _joining:
        return
    signature = inspect.signature(original)
    # That of a wrapper of another package, as Pluto's, takes all arguments so.
    others = [name for name, one in signature.parameters.items() if one.kind is one.VAR_KEYWORD]

    @functools.wraps(original)
    def joining(*args: Any, **kwargs: Any) -> Any:
        given = dict(signature.bind(*args, **kwargs).arguments)
        for name in others:
            given.update(given.pop(name, {}))
        run = join(given)
        return original(*args, **kwargs) if run is None else run

    _joining.add(joining)
    replace_function(original, joining)


def left_of_opening(tracker: str, given: Mapping[str, Any], names: Mapping[str, str]) -> Mapping[str, Any]:
    """Have a call of the script open the run that waits for it. Return what is left for the run that is open.

    Args:
        tracker: The tracker's name.
        given: The call's arguments.
        names: Those that say how the run is opened, with their names as arguments of `tracking_init`.
    """
    asked = {names[name]: value for name, value in given.items() if name in names}
    return {name: given[name] for name in given.keys() - names} if open_waiting(tracker, asked) else given


def dies_with_pod(request: RunRequest) -> bool:
    """Whether files in the working directory are lost with this machine: it is a pod of Flyte's."""
    return "flyte" in own_values(request.run_metadata)


def new_id() -> str:
    """Return a random id, for a run whose id no other rank needs."""
    return f"run-{secrets.token_hex(4)}"


def status_of(exit_code: int) -> Status:
    """Return how a run with this exit code has ended: SIGINT and SIGTERM kill it."""
    if exit_code == 0:
        return "finished"
    return "killed" if exit_code in (INTERRUPTED, TERMINATED) else "failed"


# How to do without a service that is away: see `TrackerUnavailableError`.
LOCAL_FILES = "log to local files with if_unavailable='degrade'"
# What the warning of a run in files says too where `dies_with_pod`.
LOST_WITH_POD = (
    " The disk of this pod goes with the pod. What is left when the function ends is copied to Flyte's storage. If the "
    "pod is killed, it is lost, unless that directory is on a volume that is kept."
)


@contextmanager
def ended_if_interrupted(request: RunRequest, end: Callable[[int, float], object]) -> Iterator[None]:
    """End the run that the body opens if a signal interrupts that, or anything else that is not the service's answer.

    The run may be at the service already, and the vendor would end it as a success when the process ends.

    Args:
        request: The decorator's request for this run.
        end: Ends what there is of the run: with a status, within a number of seconds.
    """
    try:
        yield
    except (TrackingError, AwayError, RejectedError):
        raise
    except BaseException as error:
        _end_interrupted(request, error, end)
        raise


@critical_section(_PATIENCE_S)
def _end_interrupted(request: RunRequest, error: BaseException, end: Callable[[int, float], object]) -> None:
    exit_code = INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
    try:
        end(
            TERMINATED if request.sigterm.terminated else exit_code,
            max(1.0, request.config.finish_timeout_s - _PASSED_S),
        )
    except Exception:
        logger.warning("%s: the run that was being opened could not be ended", request.plan.run_id, exc_info=True)


def missing_key_error(title: str, fixes: str, alternative: str = "") -> TrackerUnavailableError:
    """Return the error for a process without an API key.

    Args:
        title: The service's name.
        fixes: The service's own ways to give a key, as a part of a sentence: "Run `x login`, set X_API_KEY".
        alternative: How to do without the service, as another part of a sentence.
    """
    return TrackerUnavailableError(
        f"{title}: there is no API key for this process. {fixes}, or pass secret= to tracking_init (under flytekit, "
        "secret_requests= to the task too).",
        alternative,
        is_outage=False,
    )

"""The outbox of a run in one process: what was logged, and the service may lack. The queue is a journal on the disk.

`put` returns when the operating system has the line. A thread hands the lines to the tracker's sink until that has
taken them, those of earlier attempts first. Meanwhile they are in memory too, up to a limit, so that a full disk costs
no line that the service takes in time. What a long outage leaves beyond that, the next attempt sends, or `send`.
The rows of W&B do not come here: see `wandb.outbox`.
"""

from __future__ import annotations

import logging
import os
import shlex
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, TypeVar

from flyteplugins_tracking._util.fork import PerProcess, register
from flyteplugins_tracking._util.text import without_credentials
from flyteplugins_tracking._util.warn_once import WarnOnce
from flyteplugins_tracking.errors import TrackerUnavailableError
from flyteplugins_tracking.trackers.ending import EndLimit
from flyteplugins_tracking.trackers.journal import Entry, Journal, Line, StoredJournal, encode, lines_of

logger = logging.getLogger(__name__)

T = TypeVar("T")

# The name of the thread that sends.
THREAD = "flyteplugins_tracking.outbox"
# How long a line waits for more lines, in seconds, and how many are sent together.
_WAIT_S = 0.5
_MOST_AT_ONCE = 1000
# How much of what waits is in memory, and what Python takes beside each line.
MEMORY_BYTES, _ENTRY_BYTES = 256_000_000, 150
# The pauses between tries, in seconds. They are short at the end, which must notice that an outage is over.
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S, _LAST_PAUSE_S = 0.5, 8.0, 1.0
# The pauses between tries to open a run, or to find it, in seconds: each is twice as long as the one before.
_FIRST_POLL_S, _LONGEST_POLL_S = 0.25, 16.0
# How many lines in a row the service may reject before it gets no more of a batch.
_MOST_REJECTED = 5
# The HTTP statuses below 500 that pass: a quota that has to be paid for, a time-out, too early, too many requests.
_PASSING = frozenset({402, 408, 425, 429})
# The ports of Pluto's servers on a host of its own, by the settings that are their addresses.
_PLUTO = {"url_app": 3000, "url_api": 3001, "url_ingest": 3003, "url_py": 3004}
# The arguments and settings that are the address of a server, with the variables that are too.
_SERVERS = {
    "tracking_uri": "MLFLOW_TRACKING_URI",
    "server_url": "TRACKIO_SERVER_URL",
    **{name: f"PLUTO_{name.upper()}" for name in _PLUTO},
}


def may_pass(status: int) -> bool:
    """Whether an HTTP status is of an outage, and not a refusal: the server's trouble, too many requests, a full quota.

    All trackers ask this function: see `TrackerUnavailableError.is_outage`.
    """
    return status >= 500 or status in _PASSING


class AwayError(Exception):
    """The service cannot be used now. It may be usable later.

    Attributes:
        fix: What the user can check, as sentences.
        is_outage: See `TrackerUnavailableError`.
    """

    fix = ""
    is_outage = True

    def __init__(self, text: str, *, is_outage: bool = True) -> None:
        super().__init__(text)
        if not is_outage:
            self.is_outage = False


class RejectedError(Exception):
    """The service will never take this.

    Attributes:
        fix: What the user can check, as sentences.
        is_outage: See `TrackerUnavailableError`.
    """

    fix = ""
    is_outage = False


def until(deadline: float, action: Callable[[], T]) -> T:
    """Call `action` until it returns a true value, at most until a time of `time.monotonic`. Returns its last value.

    The last call is at the deadline.

    Raises:
        AwayError: The last call's, at the deadline; or one that is no outage.
    """
    waits = pauses()
    while True:
        try:
            result = action()
            if result or time.monotonic() + _FIRST_POLL_S > deadline:
                return result
        except AwayError as error:
            if not error.is_outage or time.monotonic() + _FIRST_POLL_S > deadline:
                raise
        time.sleep(min(next(waits), deadline - time.monotonic()))


def pauses() -> Iterator[float]:
    """Yield the pauses between tries. In a minute there are ten tries: a service may have many jobs that wait."""
    pause_s = _FIRST_POLL_S
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, _LONGEST_POLL_S)


class Sink(Protocol):
    """A run that is open at its service: the part of the sending that each tracker writes."""

    def send(self, lines: Sequence[Line], timeout_s: float | None) -> None:
        """Have the service take these lines, in their order. It may have them, or a part of them, already.

        Args:
            lines: See `journal`. Each has an "id", which is the same if it is sent again.
            timeout_s: How long that may take; None if nobody waits for it.

        Raises:
            AwayError: The service does not take them now.
            RejectedError: It will never take them together.
        """


class Outbox(PerProcess):
    """Lines on their way to a sink. Without a sink, they stay in the journal.

    Attributes:
        rows: How many rows were put and not sent.
        rejected_rows: How many rows were given to a sink in vain, and are lost.
        directory: Where the journal is.
        is_full: Whether memory had no room for a line. From that one on, all stay in the journal.
    """

    def __init__(
        self,
        title: str,
        run_id: str,
        journal: Journal,
        sink: Sink | None,
        earlier: Iterable[StoredJournal] = (),
        before_removal: Callable[[StoredJournal], object] = lambda _: None,
    ) -> None:
        """Initialize the outbox. Its thread starts with the first line that there is to send.

        Args:
            title: The service's name in messages.
            run_id: The run's id in messages.
            journal: Where lines are kept.
            sink: Where they go.
            earlier: What goes there first. The journals are removed when the sink has taken it.
            before_removal: Called before that, with the journal.
        """
        self.rows = self.rejected_rows = 0
        self.directory, self.is_full = str(journal.directory), False
        self._title, self._run_id = title, run_id
        self._journal, self._sink, self._earlier = journal, sink, deque(earlier)
        self._before_removal = before_removal
        self._waiting: deque[Entry] = deque()
        self._bytes = 0  # of what waits
        self._changed = threading.Condition()  # reentrant, since a signal handler may log
        self._thread: threading.Thread | None = None
        self._limit: EndLimit | None = None  # until when `close` waits
        self._is_closed = False
        self._unkept_rows = 0
        self._is_parents = False
        self._warn_once = WarnOnce(logger)
        self._rejected = 0  # lines in a row
        register(self)
        if self._earlier and sink is not None:
            self._start()

    def after_fork_in_child(self) -> None:
        """Take nothing: the run is the parent's, and the lock may be held forever."""
        self._is_parents = True

    def put(self, line: Line) -> None:
        """Send a line, and keep it until it is sent. Does nothing in a forked child.

        Raises:
            TypeError: JSON cannot hold a value.
            ValueError: JSON cannot hold a value.
        """
        if self._is_parents:
            return
        data = encode(line)
        with self._changed:
            number = self._journal.add(data)
            self.rows += "row" in line
            self._unkept_rows += "row" in line and self._journal.is_closed
            if self._sink is None or self.is_full:
                return
            if self._bytes >= MEMORY_BYTES:
                self._leave_to_journal()
                return
            self._add(Entry(data, number))
            if self._thread is None:
                self._start()
            elif len(self._waiting) in (1, _MOST_AT_ONCE):
                self._changed.notify_all()

    @property
    def lost_rows(self) -> int:
        """How many rows were neither sent nor kept: the last ones."""
        return min(self.rows, self._unkept_rows)

    def close(self, limit: EndLimit, reserve_s: float = 0.0) -> bool:
        """Have everything sent until `reserve_s` seconds of the end are left. Later, nothing more is sent.

        Returns:
            Whether everything was sent.
        """
        with self._changed:
            if self._sink is not None:
                limit.left = lambda: f"{self.rows} rows" if self.rows else ""
                self._limit = limit
                self._changed.notify_all()
                limit.wait_for(self._changed, self._is_drained, reserve_s)
            self._is_closed = True
            self._changed.notify_all()
            return self._is_drained() and not self.is_full

    def wait(self, timeout_s: float) -> None:
        """Wait until what is in memory is sent, for `timeout_s` seconds at most."""
        with self._changed:
            self._changed.wait_for(self._is_drained, timeout_s)

    def keep(self) -> None:
        """Leave the journal to the next attempt, or to who sends it."""
        self._journal.close()

    def remove(self) -> None:
        """Remove the journal, and its directory and the one above if they are empty: the service has everything."""
        self._journal.remove()
        with suppress(OSError):
            os.rmdir(self.directory)
            os.rmdir(os.path.dirname(self.directory))

    def _is_drained(self) -> bool:
        return self._sink is not None and not self._earlier and not self._waiting

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name=THREAD, daemon=True)
        self._thread.start()

    def _add(self, entry: Entry) -> None:
        place = len(self._waiting)
        while place and self._waiting[place - 1].number > entry.number:  # a signal handler has put that one meanwhile
            place -= 1
        self._waiting.insert(place, entry)
        self._bytes += len(entry.data) + _ENTRY_BYTES

    def _leave_to_journal(self) -> None:
        self.is_full = True
        text = (
            "%s: run %s: %d MB wait for the service. What is logged from now on is in files in %s, and is not sent by "
        )
        text += "this attempt: its end says how to send it"
        logger.warning(text, self._title, self._run_id, MEMORY_BYTES // 1_000_000, self.directory)

    # In the thread

    def _run(self) -> None:
        while self._earlier:
            if not self._send_earlier(self._earlier[0]):
                return
            with self._changed:
                self._earlier.popleft()
                self._changed.notify_all()
        while batch := self._next_batch():
            lines = list(lines_of(self._journal.name, batch))
            if not self._deliver(lines):
                return
            with self._changed:
                for _ in batch:
                    self._bytes -= len(self._waiting.popleft().data) + _ENTRY_BYTES
                self.rows -= _rows(lines)
                # A run's end stays in the journal until the run has it: whoever sends that after a kill needs it.
                is_end = bool(lines) and "exit_code" in lines[-1]
                self._journal.acknowledge(batch[-1].number + 1 - is_end)
                self._changed.notify_all()

    def _send_earlier(self, journal: StoredJournal) -> bool:
        lines, rows, rejected_before = journal.lines(), 0, self.rejected_rows
        while batch := list(islice(lines, _MOST_AT_ONCE)):
            if not self._deliver(batch):
                return False
            rows += _rows(batch)
        rejected = self.rejected_rows - rejected_before
        self._before_removal(journal)
        journal.remove(is_bad=rejected > 0)
        if rows:
            text = "%s: run %s: sent %d rows again that an earlier attempt had logged and %s may lack, from %s%s"
            values = self._title, self._run_id, rows - rejected, self._title, journal.path.parent, but_for(rejected)
            logger.warning(text, *values)
        return True

    def _next_batch(self) -> list[Entry]:
        """Wait for the next lines to send. Returns none when the outbox is closed."""
        with self._changed:
            while not self._is_closed:
                if self._waiting:
                    self._changed.wait_for(
                        lambda: self._is_closed or self._limit or len(self._waiting) >= _MOST_AT_ONCE, _WAIT_S
                    )
                    return [] if self._is_closed else list(islice(self._waiting, _MOST_AT_ONCE))
                self._changed.notify_all()
                self._changed.wait()
        return []

    def _deliver(self, lines: Sequence[Line]) -> bool:
        """Send lines until they are taken, or lost. Returns False if the outbox is closed before that."""
        pause_s = 0.0
        while self._sink is not None and not self._is_closed:
            try:
                self._sink.send(lines, None if self._limit is None else self._limit.left_s)
                self._rejected = 0
            except AwayError as error:
                text = "%s: run %s: %s. Rows are kept, and sent when it answers"
                if not pause_s:
                    logger.warning(text, self._title, self._run_id, error)
                pause_s = min(max(_SHORTEST_PAUSE_S, 2 * pause_s), _LONGEST_PAUSE_S)
                self._pause(pause_s)
                continue
            except Exception as error:
                if len(lines) > 1:
                    return self._deliver_one_by_one(lines)
                self._rejected += 1
                self.rejected_rows += _rows(lines)
                what = ", ".join(lines[0].get("row") or [str(lines[0].get("call"))])
                text = "%s: run %s: %s is rejected, and lost: %s"
                is_unknown = not isinstance(error, RejectedError)
                self._warn_once(what, text, self._title, self._run_id, what, error, exc_info=is_unknown)
            if pause_s:
                logger.warning("%s: run %s: the service answers again", self._title, self._run_id)
            with self._changed:
                if self._limit is not None:
                    self._limit.moved()
                self._changed.notify_all()
            return True
        return False

    def _deliver_one_by_one(self, lines: Sequence[Line]) -> bool:
        self._rejected = 0
        for position, line in enumerate(lines):
            if not self._deliver([line]):
                return False
            if self._rejected == _MOST_REJECTED:
                text = "%s: run %s: %d more rows are not sent, and lost: the service has rejected all of the last ones"
                unsent = _rows(lines[position + 1 :])
                self.rejected_rows += unsent
                logger.warning(text, self._title, self._run_id, unsent)
                break
        return True

    def _pause(self, pause_s: float) -> None:
        with self._changed:
            if self._limit is None:
                self._changed.wait_for(lambda: self._limit is not None or self._is_closed, pause_s)
            else:
                self._changed.wait_for(lambda: self._is_closed, min(pause_s, _LAST_PAUSE_S))


def _rows(lines: Iterable[Line]) -> int:
    return sum("row" in line for line in lines)


def but_for(rejected_rows: int) -> str:
    """Return how a sentence goes on that something was sent."""
    text = f", but for {rejected_rows} rows that the service rejects: the files are kept as *.bad"
    return text if rejected_rows else ""


def how_to_send(directories: str | Sequence[str], arguments: Mapping[str, Any] | None = None) -> str:
    """Return the command, for a shell, that sends what a directory has and its service has not.

    Args:
        directories: The directory, or several.
        arguments: The run's arguments, if they may name servers: the command sets the variables of these.
    """
    servers = "".join(f"{_set(*server)} " for server in servers_in(arguments or {}).items())
    paths = [directories] if isinstance(directories, str) else directories
    return f"{servers}flyteplugins-tracking send {' '.join(map(shlex.quote, paths))}"


def servers_in(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Return the servers that a run's arguments name, by the variables that name them where the run is sent."""
    given = arguments.get("settings")
    settings = given if isinstance(given, Mapping) else {}
    host = settings.get("host")
    on_host = {name: f"http://{host}:{port}" for name, port in _PLUTO.items()} if host else {}
    named = {**settings, **arguments, **on_host}
    return {variable: str(named[name]) for name, variable in _SERVERS.items() if named.get(name)}


def servers_of(tracker: str) -> dict[str, str]:
    """Return the servers of a tracker that this process's variables name."""
    of_tracker = (variable for variable in _SERVERS.values() if variable.startswith(tracker.upper()))
    return {one: without_credentials(os.environ[one]) for one in of_tracker if os.environ.get(one)}


def require_server(directory: Path, variable: str, address: str, own: str | None) -> None:
    """Refuse to send the key of this process to a server that only the data names.

    Args:
        directory: The directory with the data.
        variable: The variable for such servers.
        address: The server that the data names.
        own: The server that this process is set up for.

    Raises:
        TrackerUnavailableError: It is another one.
    """
    if address.rstrip("/") != without_credentials(own or "").rstrip("/"):
        raise TrackerUnavailableError(
            f"{directory} is of the server {without_credentials(address)}, for which this process is not set up: it "
            f"gets no key of this process. If the server is right: export {_set(variable, address)}",
            is_outage=False,
        )


def _set(variable: str, address: str) -> str:
    return f"{variable}={shlex.quote(without_credentials(address))}"

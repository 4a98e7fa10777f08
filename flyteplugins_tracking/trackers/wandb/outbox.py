"""The rows of an open W&B run that the service may not have: kept in a journal, for a later attempt or `send`.

wandb-core sends every 15 s, and SIGKILL of its process keeps it from sending the rest. So each process that logs into a
run keeps its rows, and what it sets in the run, in a journal in the run's directory: see `attempts`. All that W&B's
client gives to wandb-core comes by here, and comes here alone when the run has ended, or wandb-core has died. If the
run was online, the journal is removed when the run has ended, since all has arrived then. The next attempt sends what
is left before the function's first row, and leaves it where it is until its own end: it has its steps, or its numbers.

A process that writes a run alone knows the steps of its rows. If its forked children or TensorBoard write too,
wandb-core gives the steps, and the run's file has them. If other clients write to the run, its rows have numbers: see
`roles`.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from binascii import b2a_base64
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from flyteplugins_tracking._util.lock import RunLock
from flyteplugins_tracking.trackers.base import RunRequest
from flyteplugins_tracking.trackers.config import OWNER
from flyteplugins_tracking.trackers.journal import Journal, encode
from flyteplugins_tracking.trackers.wandb import vendor
from flyteplugins_tracking.trackers.wandb.attempts import ARTIFACT, RECORD, SETTING, Attempt, Place

# The run's attribute that holds its `WandbOutbox`.
OUTBOX = "_flyteplugins_tracking_outbox"
# How many bits of a row's number are its count. A number has at most 53, as a float of JSON.
_COUNT_BITS, _RANDOM_BITS = 28, 25
# How often a row waits until wandb-core has got it, in seconds. One that the journal does not keep waits too.
_WAIT_S = 0.1


def label_of(request: RunRequest) -> str | None:
    """Return the name of a rank that shares its run with others; None for another writer, which is alone in its job."""
    return request.plan.label if request.config.run_mode == "shared" else None


def column_of(role: str | None) -> str:
    """Return the column with the numbers of a role's rows, or of the owner's. See `roles`."""
    return f"roles/{role or OWNER}/row"


def row_numbers() -> Iterator[int]:
    """Return the numbers of a process's rows. No other process has them."""
    return count(secrets.randbits(_RANDOM_BITS) << _COUNT_BITS)


def run_directory(run: Any) -> Path:
    """The directory of the run's `.wandb` file, which `flyteplugins_tracking send` takes."""
    return Path(str(run.dir)).parent


def directory_to_send(request: RunRequest, run: Any) -> str:
    """The directory that the printed command names: that of the run; if ranks share it, the one that has theirs."""
    own = run_directory(run)
    return str(own if label_of(request) is None else own.parent)


class WandbOutbox:
    """What an open run has logged and W&B may lack: its journal.

    Attributes:
        next_step: The step of the next row; None if other processes log into the run too.
        column: The column with the numbers of rows; None if they have none. See `roles`.
        numbers: The numbers for rows.
        kept_artifacts: The names of artifacts that `send` can send: this disk has copies of their files.
        unkept_rows: How many rows the journal lacks because of a full disk: what W&B has not got of them is lost.
        earlier: The directories of earlier attempts that this one has sent what they had left of, in their order.
        is_kept: Whether anything is kept.
        lock: What keeps other processes from sending what earlier attempts have left, until the run has ended; None if
            this process does not hold it.
        order: Held while a row gets its step and goes to wandb-core, and is kept. Reentrant: a signal handler may log.
    """

    next_step: int | None = None
    column: str | None = None
    unkept_rows = 0
    earlier: Sequence[Path] = ()
    is_kept = True
    lock: RunLock | None = None
    _is_late = False  # whether something was kept alone
    _keeper: int | None = None  # the thread whose records come here alone
    _is_row_open = False  # whether what is logged next, without a step, is put into the last row
    _waited_at = 0.0  # when a row has last waited

    def __init__(self, run: Any, has_one_writer: bool, **more: Any) -> None:
        """Keep what is logged from now on.

        Args:
            run: The open run, before its methods are guarded.
            has_one_writer: Whether no other process logs into the run.
            more: What else the readers of the journal need: values of JSON.
        """
        self.directory, self.place = run_directory(run), Place.of(run)
        self._is_offline, self.column = bool(run.offline), more.get("column")
        self.next_step = int(run.starting_step) if has_one_writer else None
        self._header = {"place": self.place, **more}
        self.numbers = row_numbers()
        self._begin()
        self._journal.make()
        self.kept_artifacts: set[str] = set()
        self.order: contextlib.AbstractContextManager[object] = threading.RLock()
        self._nowait = vendor.unawaited(run)
        vendor.on_records(run, self._publish, self._deliver)

    def _begin(self) -> None:
        # Journals are read in the order of their names: this one is behind the one before.
        name = f"rows-{time.monotonic_ns():020}-{secrets.token_hex(3)}"
        self._journal = Journal(self.directory, name, {**self._header, "step": self.next_step})

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Keep nothing in the body: earlier attempts have it."""
        journal, self._journal = self._journal, Journal.closed()
        try:
            yield
        finally:
            self._journal, self.unkept_rows = journal, 0
            journal.describe(step=self.next_step)

    def add_writer(self) -> None:
        """Note that wandb-core logs rows of TensorBoard too: the steps of this process's rows are not known then."""
        self.next_step = None
        self._journal.describe(step=None)

    @contextlib.contextmanager
    def alone(self, run: Any) -> Iterator[None]:
        """Keep what this thread logs to the run in the body, and give wandb-core nothing: it has ended, or has died.

        Only one thread is in a body.
        """
        if not self._is_late:
            vendor.take_late_calls(run, lambda: self._keeper == threading.get_ident())
            self._is_late = True
        before, self._keeper = self._keeper, threading.get_ident()
        try:
            yield
        finally:
            self._keeper = before

    def _publish(self, publish: Callable[..., object], record: Any, **more: Any) -> None:
        if self._keeper == threading.get_ident():
            self._keep(record, (*SETTING, "alert"))
        elif record.request.HasField("partial_history"):
            # One that waits finds out that wandb-core has died, and rows for a slow one do not fill the memory.
            now = time.monotonic()
            waits = now > self._waited_at + _WAIT_S or self._journal.is_closed
            self._waited_at = now if waits else self._waited_at
            with self.order:
                publish(record, **({} if waits else self._nowait))
                self.put(record.request.partial_history)
        else:  # without the lock: the client's own thread may print, which is a record too
            self._keep(record)  # first: a wandb-core that has died raises
            publish(record, **more)

    def _deliver(self, deliver: Callable[[Any], Any], record: Any) -> Any:
        """Give wandb-core a record that it answers. An artifact is kept before that."""
        self._keep(record)
        return None if self._keeper == threading.get_ident() else deliver(record)

    def _keep(self, record: Any, kinds: Sequence[str] = SETTING) -> None:
        if record.request.HasField("partial_history"):
            self.put(record.request.partial_history)
        elif record.request.HasField("log_artifact") or record.HasField("artifact"):  # the second if it is offline
            artifact = record.artifact if record.HasField("artifact") else record.request.log_artifact.artifact
            with contextlib.suppress(Exception):  # then a warning at the run's end says that it is not kept
                self._put_artifact(artifact.SerializeToString())
        elif any(record.HasField(kind) for kind in kinds):
            self._journal.add(record_of_kind(RECORD, record.SerializeToString()))

    def forget(self, keys: Iterable[str]) -> None:
        """Keep that the next row replaces what was set with these keys in the summary."""
        self._journal.add(record_of_kind(RECORD, vendor.removal_of(keys)))

    def put(self, row: Any) -> None:
        """Keep a row, or a part of one, that wandb-core has got."""
        step = row.step.num if row.HasField("step") else None  # that was given with it
        commit = row.action.flush if row.HasField("action") else None  # whether it was said that the row is complete
        if self.next_step is not None and step is not None:
            if step < self.next_step:
                return  # wandb-core drops it
            self.next_step = step
        known = step if self.next_step is None else self.next_step
        self._journal.add(record_of(row.SerializeToString(), known, step is not None))
        self.unkept_rows += self._journal.is_closed
        self._is_row_open = not (commit or (commit is None and step is None))
        if self.next_step is not None and not self._is_row_open:
            self.next_step += 1

    def keep_end(self, exit_code: int) -> None:
        """Keep the status with which the run is ended, and of what is logged after that: it may not be sent in time."""
        if self._is_row_open and self.next_step is not None:  # the end completes it
            self.next_step += 1
        self._is_row_open = False
        self._header = {**self._header, "exit_code": exit_code}
        self._journal.add(encode({"exit_code": exit_code}))

    def _put_artifact(self, data: bytes) -> None:
        self._journal.add(record_of_kind(ARTIFACT, data))
        one = vendor.KeptArtifact.of(data)
        if one.is_whole and not self._journal.is_closed:
            self.kept_artifacts.add(one.name)

    def close(self) -> None:
        """Leave the journal to the next opening, or to `send`. What is logged from now on is in another one."""
        self._journal.close()
        self._begin()

    def clear(self) -> None:
        """Remove what is kept: the run has ended, and the service has everything. If it is offline, `send` does."""
        self.close()
        for directory in () if self._is_offline else (self.directory, *self.earlier):
            Attempt.at(directory).mark_sent()
        if self.lock is not None:
            self.lock.release()


class NoOutbox(WandbOutbox):
    """The outbox of a run of which no attempt can send again what another one has logged. It keeps nothing."""

    is_kept = False

    def __init__(self) -> None:
        self._journal, self.kept_artifacts = Journal.closed(), set()
        self.order = contextlib.nullcontext()  # one object of all such runs, in forked children too
        self._header: dict[str, Any] = {}

    @contextlib.contextmanager
    def alone(self, run: Any) -> Iterator[None]:  # noqa: ARG002 as the others have it
        """Do nothing: what is logged to a run that has ended is lost."""
        yield

    def close(self) -> None:
        """Do nothing."""

    def clear(self) -> None:
        """Do nothing."""


_none = NoOutbox()


def open_outbox(request: RunRequest, run: Any, is_automatic: bool = False, found: vendor.Stored | None = None) -> None:
    """Give a run that was just opened its outbox. If other processes open it too, its rows have numbers, and no steps.

    Args:
        request: The decorator's request for the run.
        run: The run.
        is_automatic: Whether the next attempt that is online sends the rows of this one, which is offline.
        found: What W&B had of the run before it was opened.
    """
    has_others = request.has_other_writers
    keeps = run.offline or has_others or "resume_from" not in request.config.options
    if OUTBOX in vars(run) or not keeps or run.disabled:  # the first: another function has it open
        return
    more: dict[str, Any] = {}
    if has_others:
        since = 0 if found is None else found.last_step + 1
        more = {"column": column_of(request.plan.role), "label": label_of(request), "since": since}
    vars(run)[OUTBOX] = WandbOutbox(
        run,
        has_one_writer=not (has_others or vendor.syncs_tensorboard()),
        is_automatic=is_automatic,
        step_metric=request.config.step_metric,
        restart_count=request.restart_count,
        **more,
    )


def of(run: Any) -> WandbOutbox:
    """Return the outbox of an open run."""
    found: WandbOutbox = vars(run).get(OUTBOX, _none)
    return found


# Records of journals: `attempts` reads them


def record_of(row: bytes, step: int | None = None, is_placed: bool = False) -> bytes:
    """Return a row as a record of a journal.

    Args:
        row: The row, as W&B's client has serialized it, which takes a tenth of the time of JSON.
        step: Its step, if this process knows it.
        is_placed: Whether the function has given the step.
    """
    return b"%d %d %b" % (-1 if step is None else step, is_placed, b2a_base64(row, newline=False))


def record_of_kind(kind: bytes, data: bytes) -> bytes:
    """Return a serialized artifact (`ARTIFACT`), or record that sets something in a run (`RECORD`), as one."""
    return kind + b" " + b2a_base64(data, newline=False)

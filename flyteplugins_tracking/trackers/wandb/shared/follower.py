"""The handle of a rank that logs into the run of its node's leader."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, Literal

from flyteplugins_tracking.trackers.base import Handle, RunRequest
from flyteplugins_tracking.trackers.journal import Journal
from flyteplugins_tracking.trackers.node_group import NodeClient
from flyteplugins_tracking.trackers.wandb import outbox, vendor
from flyteplugins_tracking.trackers.wandb.run import HANDLE, guard
from flyteplugins_tracking.trackers.wandb.shared.common import make_config_read_only, rows_of, step_of

logger = logging.getLogger(__name__)

# How long `suspended` may be delayed by a wandb-core that is still reading.
_SUSPEND_S = 3.0
# How long a row waits for a run that a signal has ended to be open again, before it is held; and other calls.
_ROW_WAIT_S = 0.5
_CALL_WAIT_S = 10.0
# How long wandb-core may take to read what was written to it.
_FLUSH_S = 5.0


def attached(published: Mapping[str, Any]) -> tuple[Any, Any]:
    """Attach to the run that the leader has published. Returns the run and the connection to its wandb-core."""
    run, connection = vendor.attach(published["service"], published["run_id"])
    try:
        vendor.update_settings(run, published["settings"])
        vendor.set_config(run, published["config"])
    except BaseException:
        vendor.detach(run, connection)
        raise
    return run, connection


class FollowerHandle(Handle):
    """A W&B run that the leader of the node has opened. The leader has its files and its summary."""

    def __init__(self, run: Any, connection: Any, before: Any, request: RunRequest, client: NodeClient) -> None:
        """Make the run `wandb.run`, and subscribe to the leader's messages.

        Args:
            run: The attached run.
            connection: The connection to the leader's wandb-core.
            before: The earlier `wandb.run`.
            request: The decorator's request for this run.
            client: The connection to the leader.
        """
        self.run = run
        self._connection = connection
        self.id = run.id
        self._request = request
        self._client = client
        self._before = before
        self._pid = os.getpid()
        self._service = client.value["service"]
        self._unreachable = ""
        self._log = type(run).log
        self._rows = rows_of(request, lambda: self.run)
        self._state: Literal["open", "suspended", "gone"] = "open"
        self._changed = threading.Condition(threading.RLock())
        self._held: list[dict[str, Any]] = []  # the rows that are logged while the run is not open
        self._definitions: list[Callable[[], Any]] = []  # repeated after the run is opened again
        self._has_warned = self._has_left = False
        self._journal_in: str | None = None
        self._journal: Journal | None = None
        guard(run)
        self._take_over()
        self._keep_journal(client.value)
        client.subscribe(self._on_publish, self._on_suspend, self._on_disconnect)

    def finish(self, exit_code: int) -> None:  # noqa: ARG002 the leader's counts
        """Leave the run. The leader ends it."""
        self._rows.commit(self._log_row)
        with self._changed:
            if self._held and self._state == "suspended":
                self._request_run()
                timeout_s = self._request.config.finish_timeout_s  # the leader may take that long to end the run first
                self._changed.wait_for(lambda: not self._held or self._state == "gone", timeout_s)
            if self._held:
                self._warn_once()
            self._flush(min(self._request.config.finish_timeout_s, _FLUSH_S))
            self._has_left = True
        self._close_journal()
        self._client.leave()
        self._let_go()

    def finish_on_signal(self, exit_code: int) -> None:  # noqa: ARG002 the leader's counts
        """Return when the leader's wandb-core has this rank's rows."""
        self._flush(_FLUSH_S)

    def may_end(self) -> bool:
        """Whether the run's own `finish` may end it now: see `WandbHandle.may_end`."""
        return False

    def use(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call one of the run's methods. If the run was ended early, wait for the leader to open it again."""
        if os.getpid() != self._pid:  # a forked child: it attaches by itself
            with vendor.service_variable(self._service):
                return method(self.run, *args, **kwargs)
        self._request.watch.before_row()
        if method.__name__ == "log":
            return self._rows.log(self._log_row, *args, **kwargs)
        if method.__name__ == "define_metric":
            self._definitions.append(lambda: method(self.run, *args, **kwargs))
        return self._use_open(method, args, kwargs)

    def change(self, accessor: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Use a property or callback that can change the run."""
        if accessor.__name__ == "step":
            return step_of(lambda: accessor(self.run), self._rows) if self._state == "open" else self._rows.logged
        if os.getpid() != self._pid or not (args or kwargs):
            return accessor(self.run, *args, **kwargs)
        return self._use_open(accessor, args, kwargs)

    def keep_for_next_row(self, data: Mapping[str, Any]) -> None:
        """Add these values to this rank's next row."""
        self._rows.log(self._log_row, data, commit=False)

    def _log_row(self, row: dict[str, Any]) -> None:
        for is_last in (False, True):
            with self._changed:
                if self._state == "open" and self._try_log(row):
                    return
                if self._state == "gone":
                    self._keep_in_journal(row)
                    return
                if is_last or self._held:
                    self._held.append(dict(row))
                    return
                # The leader was told to end, so this process will be too: a row that is held may be lost with it.
                self._request_run()
                self._changed.wait_for(lambda: self._state != "suspended", _ROW_WAIT_S)
            self._request.watch.wait_for_user_handler()

    def _keep_in_journal(self, row: dict[str, Any]) -> None:
        """Keep a row that this attempt of the job cannot send. The next one does."""
        self._warn_once()
        if self._journal is not None:
            self._keep_rows(is_only=True)
            self._log(self.run, row)

    def _try_log(self, row: dict[str, Any]) -> bool:
        try:
            self._log(self.run, row)
        except vendor.service_gone(self.run):
            self._lose_service()
            return False
        return True

    def _use_open(self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for _ in range(2):
            if not self._await_open():
                break
            try:
                return method(self.run, *args, **kwargs)
            except vendor.service_gone(self.run):
                with self._changed:
                    self._lose_service()
        self._warn_once()
        return None

    def _await_open(self) -> bool:
        with self._changed:
            if self._state == "suspended":
                self._request_run()
                self._changed.wait_for(lambda: self._state != "suspended", _CALL_WAIT_S)
            return self._state == "open"

    def _request_run(self) -> None:
        self._client.request(self._unreachable)

    def _lose_service(self) -> None:
        """Suspend the run because wandb-core has died. Its leader has too, or starts another one on request."""
        self._unreachable, self._service = self._service, ""
        self._state = "suspended"

    def _warn_once(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "W&B: rank %d cannot log to run %s any more: local rank %d of its node, which writes the run, has "
                "ended it or was killed. What this rank logs from now on is lost, unless the job is restarted on this "
                "machine.",
                self._client.rank,
                self.id,
                self._request.node_leader,
            )

    def _flush(self, timeout_s: float) -> None:
        if self._state == "open":
            vendor.flush(self.run, timeout_s)

    def _take_over(self) -> None:
        vars(self.run)[HANDLE] = self
        vendor.report_changes(self.run)
        vendor.set_summary_reader(self.run, self._read_summary)
        make_config_read_only(self.run, self._request)
        vendor.set_global_run(self.run)

    def _read_summary(self) -> Any:
        return self._use_open(vendor.read_summary, (), {}) or {}

    def _let_go(self) -> None:
        run = self.run
        vendor.detach(run, self._connection)
        vendor.set_finished(run)
        del vars(run)[HANDLE]
        run.__class__ = type(run).__mro__[1]
        if sys.modules["wandb"].run is run:
            vendor.set_global_run(self._before)

    def _keep_journal(self, published: Mapping[str, Any]) -> None:
        """Keep this rank's rows beside the leader's, in the directory of the run."""
        if published["directory"] != self._journal_in:
            self._close_journal()
            self._journal_in = published["directory"]
            if self._journal_in is not None:
                self._journal = outbox.guest_journal(self._journal_in, published["place"], self._client.rank)
                self._keep_rows()

    def _keep_rows(self, is_only: bool = False) -> None:
        journal = self._journal
        assert journal is not None
        vendor.on_rows(self.run, lambda values, *_: journal.add(outbox.line_of(values)), is_only)

    def _close_journal(self) -> None:
        """Let others read it: a journal that is open is not sent."""
        if self._journal is not None:
            self._journal.close()

    # In the thread of the connection to the leader

    def _on_publish(self, published: Mapping[str, Any]) -> None:
        with self._changed:
            if self._has_left:
                return
            try:
                if published["service"] == self._unreachable:
                    return
                self._resume(published)
            except Exception:
                logger.warning(
                    "W&B: rank %d could not attach to run %s again: its rows are lost from now on",
                    self._client.rank,
                    self.id,
                    exc_info=True,
                )
                self._state = "gone"
            self._changed.notify_all()

    def _resume(self, published: Mapping[str, Any]) -> None:
        if published["service"] != self._service:
            self._reattach(published)
        self._keep_journal(published)
        if self._state == "suspended":
            for define in self._definitions:
                define()
        self._state = "open"
        held, self._held = self._held, []
        for row in held:
            self._log_row(row)

    def _reattach(self, published: Mapping[str, Any]) -> None:
        """Attach to the run in the leader's new wandb-core, in the object that the function holds."""
        run, connection = attached(published)
        vendor.detach(run, self._connection)
        self._connection, self._service, self._journal_in = connection, published["service"], None
        vendor.share_state(self.run, run)
        self._take_over()

    def _on_suspend(self) -> None:
        with self._changed:
            self._flush(_SUSPEND_S)
            if self._state == "open":
                self._state = "suspended"

    def _on_disconnect(self) -> None:
        with self._changed:
            self._state = "gone"
            held, self._held = self._held, []
            for row in held:
                self._keep_in_journal(row)
            self._changed.notify_all()

"""W&B runs that several ranks share: one process of each node, the leader, writes, and its followers attach to it.

The leader has called `wandb.init`, and so has a wandb-core. Its followers call `wandb.attach` and log into the same
stream. Who is who, and the messages: `trackers.node_group`.

```
leader (primary or local rank 0)       socket                 followers (the other ranks of the node)
NodeServer(name)                                              NodeClient.connect(name)
  |                                                             |  waits until the socket is there
  |<------------------- rank: 1 --------------------------------|
wandb.init                                                      |
  |-------------------- publish: run id, wandb-core ----------->|  wandb.attach
  |   (or reject: why) ---------------------------------------->|  run.log ... straight into the leader's wandb-core
  |                                                             |
  |== SIGTERM: the run ends early ==============================|
  |-------------------- suspend ------------------------------->|  holds its rows from now on
  |<------------------- read, suspended ------------------------|  wandb-core has read its rows
run.finish(143)                                                 |
  |<------------------- request: "" ----------------------------|  its function logs on, in `finally`
opens the run again                                             |
  |-------------------- publish: run id, new wandb-core ------->|  attaches again, and logs the rows that it held
  |                                                             |
  |== wandb-core dies ==========================================|
  |<------------------- request: the dead wandb-core -----------|  holds its rows
starts another, opens the run again                             |
  |-------------------- publish: run id, new wandb-core ------->|  attaches again
  |                                                             |
  |== the end ==================================================|
waits for its followers                                         |
  |<------------------- read -----------------------------------|  its function has returned: wandb-core has its rows
  |<------------------- hangs up -------------------------------|  or it was killed
run.finish(0)
```

A follower says before its next row that it writes. At the run's end, the leader removes the journals of its followers
only if all that have written have said `read` since.

If the leader is killed, its followers are disconnected. Their functions continue. Their rows go into their journals,
for the next attempt on this machine, with one warning. A run with leaders on several nodes is in W&B's own shared mode
on all of them: another kind of writer beside these would lose rows (https://github.com/wandb/wandb/issues/12269). The
primary waits for the other leaders through `trackers.barrier`.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from flyteplugins_tracking._util.handlers import HANDLERS
from flyteplugins_tracking._util.proc import INTERRUPTED, TERMINATED
from flyteplugins_tracking.errors import ConfigError, TrackerUnavailableError, TrackingError
from flyteplugins_tracking.trackers.barrier import WriterBarrier
from flyteplugins_tracking.trackers.base import Handle, RunRequest
from flyteplugins_tracking.trackers.client import prefix_of
from flyteplugins_tracking.trackers.ending import EndLimit
from flyteplugins_tracking.trackers.node_group import NodeClient, NodeError, NodePart, NodeServer, NodeServerExistsError
from flyteplugins_tracking.trackers.outbox import how_to_send
from flyteplugins_tracking.trackers.rows import OwnersKeys, RowBuffer
from flyteplugins_tracking.trackers.wandb import outbox, roles, vendor
from flyteplugins_tracking.trackers.wandb.open import is_disabled, open_degraded, open_in_this_process, reopen
from flyteplugins_tracking.trackers.wandb.run import Reopen, WandbHandle, update_config

logger = logging.getLogger(__name__)

# How long the followers of a leader that was signalled may take to end: they have been signalled with it.
_LEAVING_S = 3.0
# How long wandb-core may take to read what was written to it; and before `suspended` is sent.
_FLUSH_S, _SUSPEND_S = 5.0, 3.0
# How long a row waits for a run that a signal has ended to be open again, before it is held; and other calls.
_ROW_WAIT_S, _CALL_WAIT_S = 0.5, 10.0
# The run's settings that a follower needs.
_PUBLISHED_SETTINGS = (
    *("root_dir", "x_sync_dir_suffix", "base_url", "app_url_override", "entity", "project", "resumed"),
)


class SharedHandle(WandbHandle):
    """An open W&B run that this rank shares with others: its rows are kept apart from theirs."""

    is_shared = True

    def __init__(self, run: Any, before: Any, request: RunRequest, reopen: Reopen | None = None) -> None:
        role = request.plan.role
        step_metric = request.config.step_metric if role is None else f"{role}/step"
        next_step = None if role is None else vars(run).get(roles.NEXT_STEP, 0)
        self.prefix = prefix_of(request)
        self._rows = RowBuffer(step_metric, self.prefix, self._define_step, next_step)
        self._owners_keys = OwnersKeys("W&B", () if self.prefix else request.config.roles or ())
        self._column = outbox.of(run).column
        self._run_log, self._run_define = type(run).log, type(run).define_metric
        super().__init__(run, before, request, reopen)

    def log(self, method: Callable[..., Any], data: Any, *args: Any, **kwargs: Any) -> None:
        if os.getpid() == self._pid:
            self._owners_keys.check(data)
            self._rows.log(self._log_row, data, *args, **kwargs)
        else:
            super().log(method, self._prefixed(data), *args, **kwargs)

    def use(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if method.__name__ == "define_metric" and self._request.plan.role is not None:
            # Of the role's own columns: "*" would be the owner's too.
            names = {**dict(zip(("name", "step_metric"), args, strict=False)), **kwargs}
            named = {key: self._prefixed(names.pop(key)) for key in ("name", "step_metric") if key in names}
            return super().use(method, *[*named.values(), *args[2:]], **names)
        return super().use(method, *args, **kwargs)

    def define(self, *args: Any, **kwargs: Any) -> None:
        """Define columns by their names in the run."""
        super().use(self._run_define, *args, **kwargs)

    def change_summary(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._request.plan.role is None:
            return super().change_summary(method, *args, **kwargs)
        if method.__name__ == "keys":
            return list(dict.fromkeys(key.removeprefix(self.prefix) for key in super().change_summary(method)))
        name, *values = args or (kwargs.pop("key", None),)
        if method.__name__ in ("__getitem__", "get"):  # what this role has set, and else what is in the run's summary
            own, kind = self._prefixed(name), type(self.run.summary)
            is_own = own in super().change_summary(getattr(kind, "__wrapped__", kind).keys)
            return super().change_summary(method, own if is_own else name, *values, **kwargs)
        return super().change_summary(method, self._prefixed(name), *values, **kwargs)

    def _prefixed(self, name: Any) -> Any:
        """Return a name of the function's with the prefix of its keys, or a mapping of such names."""
        if isinstance(name, Mapping):
            return {self._prefixed(key): value for key, value in name.items()}
        return self.prefix + name if isinstance(name, str) and not name.startswith(("_", self.prefix or "_")) else name

    def record_event(self, name: str, values: Mapping[str, Any], text: str) -> None:
        super().record_event(name, {} if self._request.plan.role else values, text)
        if self._request.plan.role:  # a row is kept, even if W&B keeps one writer's summary only
            self._next_row.add(values)

    def change(self, accessor: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if accessor.__name__ != "step":
            return super().change(accessor, *args, **kwargs)
        try:
            step = super().change(accessor)
        except Exception:  # W&B's shared mode has none
            step = None
        return self._rows.logged if step is None else step

    def log_part(self, method: Callable[..., Any], data: Any, step: Any = None, commit: bool | None = None) -> None:
        """Keep what `watch` adds to the next row for this rank's own: wandb-core's may be another rank's."""
        if commit is False:
            self._rows.log(self._log_row, data, commit=False)
        else:
            method(self.run, data, step, commit)

    def await_writers(self, exit_code: int) -> None:  # noqa: ARG002 the leader's counts
        self._rows.commit(self._log_row)

    def _log_row(self, row: dict[str, Any]) -> Any:
        super().log(self._log_now, row if self._column is None else {**row, self._column: self._next_number()})

    def _next_number(self) -> int:
        return next(self._outbox.numbers)

    def _log_now(self, run: Any, row: Any, *_: Any) -> None:
        if self._request.plan.role is not None:
            self._outbox.keep_role_step(row.get(f"{self._request.plan.role}/step"))
        self._run_log(run, row)

    def _define_step(self) -> None:
        if self._request.plan.role is None:  # that of roles is defined
            self.run.define_metric("*", step_metric=self._request.config.step_metric)

    def change_config(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Let only the primary change the config. wandb's own keys begin with _."""
        request, (change, *value) = self._request, [*args, *kwargs.values()]
        if isinstance(change, str):
            changes: Mapping[str, Any] = {change: next(iter(value), None)}
        else:  # W&B takes parsed arguments too
            changes = change if isinstance(change, Mapping) else vars(change)
        is_wandbs = all(str(key).startswith("_") for key in changes)
        if request.plan.role is not None and not is_wandbs:
            section = dict(self.run.config).get(request.plan.role, {})
            section = {**changes, **section} if method.__name__ == "setdefaults" else {**section, **changes}
            self.change(update_config, {request.plan.role: section})
            return self._show_own_config()
        if request.plan.primary or is_wandbs:
            return super().change_config(method, *args, **kwargs)
        if request.info is not None:
            raise ConfigError(
                f"rank {request.info.rank} cannot change the config of its shared run, which is the primary's: change "
                f"it on {request.primary_name}, or pass config= to tracking_init"
            )
        # A task that continues its caller's run must not fail because of a change of the config.
        text = (
            "W&B: run %s belongs to the task that has called this one: this task's changes of its config are not sent"
        )
        self.warn_once("config", f"{text}. Change it in the calling task.", self.id)
        return vendor.set_config(self.run, changes)

    def _show_own_config(self) -> None:
        """Show the function the config of its role at the top of `run.config`, over the owner's. It is not sent so."""
        role = self._request.plan.role
        if role is not None:
            section = dict(self.run.config).get(role, {})
            vendor.set_config(self.run, {key: value for key, value in section.items() if key != role})


class LeaderHandle(SharedHandle):
    """A shared run that this rank has opened: alone on its node, or for its followers."""

    def __init__(
        self,
        run: Any,
        before: Any,
        request: RunRequest,
        server: NodeServer | None = None,
        barrier: WriterBarrier | None = None,
    ) -> None:
        """Take over the run, take the config from the calling task, and publish the run to the followers.

        Args:
            run: The open run.
            before: The earlier `wandb.run`.
            request: The decorator's request for this run.
            server: The connections to the followers; None without followers.
            barrier: Where the writers of other nodes are waited for; None if the run has one writer.
        """
        self._server, self._barrier = server, barrier
        self._writer: roles.Writer | None = None  # if the run has roles, on the rank that speaks for its job
        super().__init__(run, before, request, reopen)
        self._take_callers_config()
        self._show_own_config()
        if request.config.has_roles and request.plan.primary and self.files is not None:
            self._writer = roles.Writer(self.run, request, self._log_own, self.define, lambda: self._rows.next_step)
        if server is not None:
            server.on_request = self._answer_request
            self._publish()

    def _log_own(self, row: Mapping[str, Any]) -> int:
        """Log a row of this library's, also while the run ends. Returns its number."""
        waiting, number = self._next_row.take() if self._request.plan.role else {}, self._next_number()
        outbox.log_kept(self._run_log, self.run, {**waiting, **row, str(self._column): number}, None, True)
        return number

    def _take_callers_config(self) -> None:
        if self._request.info is None and not self._request.plan.primary:
            vendor.set_config(self.run, self._request.config.config)

    def await_writers(self, exit_code: int) -> None:
        super().await_writers(exit_code)
        if self._server is not None:
            self._await_followers(self._server, exit_code)
        if self._barrier is not None and exit_code == 0:
            self._barrier.wait_for_run(self._request, "W&B")

    def finish(self, exit_code: int) -> None:
        try:
            super().finish(exit_code)
        finally:
            if self._barrier is not None:
                self._barrier.depart(self._request, "W&B", exit_code)
            if self._server is not None:
                self._server.close()
            has_writers_elsewhere = (
                NodePart.of(self._request).has_writers_elsewhere and not self._request.config.has_roles
            )
            if self._offline and has_writers_elsewhere and self._request.plan.primary and self._request.info:
                _log_merge_command(self.run)

    def unsent(self) -> Sequence[str]:
        left = roles.left_rows(self.run)
        return [*super().unsent(), *(() if left is None else left.unsent)]

    def _await_followers(self, server: NodeServer, exit_code: int) -> None:
        """Wait for the followers, but not if this rank's function has raised: theirs may wait for this rank."""
        watch, timeout_s, ranks = self._request.watch, self._request.config.finish_timeout_s, []
        if exit_code == 0:
            ranks = server.wait(timeout_s, until=lambda: watch.terminated)
        if exit_code in (TERMINATED, INTERRUPTED) or watch.terminated:
            server.wait(min(_LEAVING_S, timeout_s))
        elif ranks or (server.missing and exit_code == 0):
            logger.warning(
                "W&B: run %s ends now, %s after the function of its node's local rank %d has "
                "returned. What these ranks log from now on is lost: %s. Number of ranks of the node that have not "
                "called the function: %d.",
                self.id,
                self._request.config.finish_limit,
                self._request.node_leader,
                ", ".join(map(str, ranks)) or "none",
                server.missing,
            )

    def _end_limit(self) -> EndLimit:
        limit = super()._end_limit()
        if self._barrier is not None:
            limit.on_move = self._barrier.tell_moving
        return limit

    def _end(self, exit_code: int) -> None:
        if self._server is not None:
            self._server.suspend()
            self._lacks_rows = bool(self._server.unread)  # what is read later comes after the run's end
        if (left := roles.left_rows(self.run)) is not None:
            watch, is_stopped = self._request.watch, exit_code in (TERMINATED, INTERRUPTED)
            left.finish(self._request.config.finish_timeout_s, until=lambda: is_stopped or watch.terminated)
        if self._writer is not None:
            self._writer.end(exit_code)
        super()._end(exit_code)
        if self._writer is not None and not self._timed_out:
            self._writer.after_end(exit_code)

    def _adopt(self, reopened: Any) -> None:
        super()._adopt(reopened)
        self._take_callers_config()
        self._show_own_config()
        if self._writer is not None:
            self._writer.opened()
        if self._server is not None:
            self._server.forget_unread()  # the outbox has sent what their journals had
        self._publish()

    def _answer_request(self, unreachable: str) -> None:
        """Open the run again if it was ended early, and publish it: a follower logs to it.

        Args:
            unreachable: The address of the wandb-core that the follower cannot reach; empty if it has not tried.
        """
        self._request.watch.wait_for_user_handler(any_thread=True)
        opening = self._gate.openings  # this rank may notice the death too, and open the run meanwhile
        try:
            if unreachable and unreachable == vendor.service_address() and vendor.has_service_died():
                self._gate.mark_dead(ConnectionResetError(), opening)
            if self._gate.open_again():
                self._publish()
        except Exception:
            logger.warning(
                "W&B: run %s could not be opened again for the other ranks of its node", self.id, exc_info=True
            )

    def _publish(self) -> None:
        if self._server is not None:
            self._server.publish(_published(self.run))


class FollowerHandle(SharedHandle):
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
        self._client, self._connection = client, connection
        self._service, self._unreachable = client.value["service"], ""  # the addresses of wandb-cores
        self._changed = threading.Condition()
        self._published: Mapping[str, Any] | None = None  # a run to attach to
        self._is_gone = self._has_asked = False
        # Whether a row was written since wandb-core was last asked, and whether the leader knows of unread ones.
        self._has_written = self._has_told = False
        self._patience_s = _ROW_WAIT_S
        self._of_owner = client.value
        self._journal, self._numbers = outbox.guest_journal(client.value, client.rank)
        super().__init__(run, before, request)
        self._column = client.value["column"]
        self._keep_rows()
        client.subscribe(self._on_publish, self._on_suspend, self._on_disconnect)

    @property
    def files(self) -> str | None:
        return None

    def unsent(self) -> Sequence[str]:
        return ()

    def finish(self, exit_code: int) -> None:  # noqa: ARG002 the leader's counts
        """Leave the run. The leader ends it."""
        self._rows.commit(self._log_row)
        limit_s = self._request.config.finish_timeout_s
        self._patience_s, self._has_asked = limit_s, False  # the leader may take the same time to end the run first
        self._gate.finish(lambda: self._flush(limit_s))
        self._journal.close()  # one that is open is not read
        self._client.leave()
        if not self._has_told:  # otherwise wandb-core goes on reading until this process ends
            vendor.detach(self.run, self._connection)
        vendor.set_finished(self.run)
        self._let_go()

    def end_early(self, exit_code: int) -> None:  # noqa: ARG002 the leader's counts
        """Return when the leader's wandb-core has this rank's rows."""
        self._flush(_FLUSH_S)

    def end_by_user(self, *_: Any, **__: Any) -> None:
        """Do nothing: the leader ends the run."""

    def use(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if os.getpid() == self._pid:
            if self._gate.state == "ended":
                self._client.request(self._unreachable)
                with self._changed:
                    self._changed.wait_for(lambda: self._is_gone or self._published is not None, _CALL_WAIT_S)
            if self._is_gone:
                self._warn_of_end()
                return None
        return super().use(method, *args, **kwargs)

    def _use_in_child(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with vendor.in_service(self._service):
            return super()._use_in_child(method, *args, **kwargs)

    def _log_now(self, run: Any, row: Any, *_: Any) -> None:
        if self._is_gone:  # this attempt of the job cannot send it: the next one does
            self._warn_of_end()
            if not outbox.keep_rows(run, self._keep, is_only=True):
                return
        with self._changed:
            self._has_written = True
            if not self._has_told:
                self._has_told = True
                self._client.tell_read(False)
        super()._log_now(run, row)

    def _keep(self, row: bytes, *_: Any) -> None:
        self._journal.add(outbox.record_of(row))

    def _on_death(self, error: BaseException) -> None:  # noqa: ARG002 the leader tells it
        self._unreachable, self._service = self._service, ""

    def _reopen(self) -> bool:
        """Attach to the run that the leader has opened again. Returns whether it has: the row is held otherwise."""
        if not self._has_asked:
            self._has_asked = True
            # The leader was told to end, so this process will be too: a row that is held may be lost with it.
            self._client.request(self._unreachable)
            with self._changed:
                self._changed.wait_for(lambda: self._published is not None or self._is_gone, self._patience_s)
        published, self._published = self._published, None
        if published is not None:
            self._attach(published)
        return published is not None or self._is_gone

    def _attach(self, published: Mapping[str, Any]) -> None:
        """Attach to the run in the leader's wandb-core, in the object that the function holds."""
        if published["service"] != self._service:
            run, connection = attached(published)
            vendor.detach(self.run, self._connection)
            self._connection, self._service = connection, published["service"]
            vendor.share_state(self.run, run)
            self._take_over()
        self._has_asked = self._has_told = False
        self._begin_journal(published)
        self._keep_rows()
        for define in self._definitions:
            define()

    def _how_to_send_all(self) -> str:
        return ""

    def _flush(self, timeout_s: float) -> None:
        """Wait until wandb-core has read this rank's rows, and tell the leader if it has."""
        if self._is_gone:
            return
        self._has_written = False
        is_read = vendor.flush(self.run, timeout_s) and not self._gate.has_callers
        with self._changed:
            if is_read and self._has_told and not self._has_written:
                self._has_told = False
                self._client.tell_read(True)

    def _begin_journal(self, of_owner: Mapping[str, Any]) -> None:
        self._journal.close()
        self._of_owner = of_owner
        self._journal, self._numbers = outbox.guest_journal(of_owner, self._client.rank)

    def _next_number(self) -> int:
        return next(self._numbers)

    def _keep_rows(self) -> None:
        """Keep this rank's rows beside the leader's, in the directory of the run."""
        if not self._journal.is_closed:
            outbox.keep_rows(self.run, self._keep)
            vendor.on_artifacts(self.run, lambda data: self._journal.add(outbox.record_of_artifact(data)))

    def _warn_of_end(self) -> None:
        self.warn_once(
            "gone",
            "W&B: rank %d cannot log to run %s any more: local rank %d of its node, which writes the run, has ended it "
            "or was killed. What this rank logs from now on is lost, unless the job is restarted on this machine.",
            self._client.rank,
            self.id,
            self._request.node_leader,
        )

    # In the thread of the connection to the leader

    def _on_publish(self, published: Mapping[str, Any]) -> None:
        is_used = published["service"] == self._service and self._gate.state == "open"
        if published["service"] == self._unreachable or is_used:
            return
        opening = self._gate.openings
        with self._changed:
            self._published = published
            self._changed.notify_all()
        self._gate.mark_dead(ConnectionResetError(), opening)  # unless a row that waits for this opens the run
        if self._published is not None:  # or this thread would wait for itself
            self._gate.open_again()

    def _on_suspend(self) -> None:
        self._published = None
        if self._gate.state == "open":  # or a row that waits for this thread keeps the gate
            self._gate.end_early(lambda: self._flush(_SUSPEND_S))
        self._begin_journal(self._of_owner)  # the leader removes what this one has: a row may be logged later

    def _on_disconnect(self) -> None:
        with self._changed:
            self._is_gone = True
            self._changed.notify_all()
        if self._gate.state == "ended":
            self._gate.open_again()


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


def _published(run: Any) -> dict[str, Any]:
    """Return the values with which a follower attaches. A disabled run has none."""
    if getattr(run, "disabled", False):
        return {"is_disabled": True}
    settings = {name: getattr(run.settings, name, None) for name in _PUBLISHED_SETTINGS}
    return {
        "is_disabled": False,
        "service": vendor.service_address(),
        "run_id": run.id,
        "settings": {name: value for name, value in settings.items() if value is not None},
        "config": json.loads(json.dumps(dict(run.config), default=str)),
        **outbox.of(run).for_guests(),
    }


def _log_merge_command(run: Any) -> None:
    """Log the command that sends the directories of all nodes, one after the other in the order of their start."""
    logger.warning(
        "W&B: run %s was logged offline, by each node into its own directory. Copy these to one machine, and send them "
        "all with: %s",
        run.id,
        f"{how_to_send(os.path.dirname(os.path.dirname(run.dir)))}/offline-run-*-{shlex.quote(run.id)}*",
    )


# Opening


def open_shared(request: RunRequest) -> Handle:
    """Open this rank's part of a shared run: as the leader of its node, as its follower, or alone.

    Raises:
        TrackerUnavailableError: The run cannot be opened, or not be attached to.
    """
    part = NodePart.of(request)
    if part.name == "leader":
        return _open_as_leader(request)
    if part.name == "single":
        return _open(request)
    if is_disabled(request):
        with suppress(TrackerUnavailableError):
            _connect(request).leave()  # the leader waits for its followers
        return _open_disabled(request)
    try:
        return _open_as_follower(request)
    except TrackerUnavailableError as unavailable:
        error = unavailable
    return _open(request, lambda request: open_degraded(request, error))


def _open_as_leader(request: RunRequest) -> Handle:
    ranks = request.info.local_world_size if request.info else None
    try:
        server = NodeServer(_node_name(request), on_request=lambda _: None, expected=(ranks or 1) - 1)
    except NodeServerExistsError:  # a process that this rank has started has the variables of the rank itself
        return _open(request)
    except NodeError as error:
        text = f"W&B: the ranks of this node cannot share a run: {error}."
        raise TrackerUnavailableError(text, is_outage=False) from error
    try:
        return _open(request, server=server)
    except BaseException as error:
        server.reject(str(error) if isinstance(error, TrackingError) else type(error).__name__)
        server.close()
        raise


def _open(
    request: RunRequest, open_it: Callable[[RunRequest], Any] = open_in_this_process, server: NodeServer | None = None
) -> Handle:
    before = vendor.global_run()
    barrier = _writer_barrier(request)
    run = open_it(request)
    if barrier is not None:
        vendor.set_resumed(run, barrier.is_retry)
    return LeaderHandle(run, before, request, server, barrier)


def _open_as_follower(request: RunRequest) -> Handle:
    """Attach to the leader's run. If W&B is disabled for the leader, open a disabled run.

    Raises:
        TrackerUnavailableError: The leader has opened no run, or it cannot be attached to.
    """
    before, client = vendor.global_run(), _connect(request)
    try:
        if not client.value["is_disabled"]:
            return FollowerHandle(*attached(client.value), before, request, client)
    except BaseException as error:
        client.leave()
        vendor.set_global_run(before)
        HANDLERS.raise_errors()
        if not isinstance(error, Exception):
            raise
        raise TrackerUnavailableError(
            f"W&B: rank {client.rank} could not attach to run {client.value['run_id']}, which local rank "
            f"{request.node_leader} of its node has opened: {error or type(error).__name__}"
        ) from error
    client.leave()
    return _open_disabled(request)


def _open_disabled(request: RunRequest) -> Handle:
    before = vendor.global_run()
    return LeaderHandle(vendor.init(mode="disabled"), before, request)


def _connect(request: RunRequest) -> NodeClient:
    info, config = request.info, request.config
    assert info is not None
    try:
        return NodeClient.connect(_node_name(request), info.rank, request.deadline, config.init_timeout_s)
    except NodeError as error:
        raise TrackerUnavailableError(
            f"W&B: rank {info.rank} waited for run {request.planned_run_id}, which local rank {request.node_leader} of "
            f"worker {info.worker_index} opens for its node: {error}. Call the decorated function on every rank "
            f"of the node; or pass a longer init_timeout_s than {config.init_timeout_s:g}.",
            is_outage=False,  # of which the leader would tell: it goes offline, and its followers with it
        ) from error


def _node_name(request: RunRequest) -> str:
    """The name under which the leader listens on its node.

    It differs for another job with the same run id, and for an earlier attempt of this job that is still ending.
    """
    info = request.info
    assert info is not None
    run = (request.config.project, request.planned_run_id, info.worker_index)
    address = (os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT"))
    return json.dumps(["wandb", *run, info.launcher, info.job_id, info.restart_count, *address])


def _writer_barrier(request: RunRequest) -> WriterBarrier | None:
    """Enter the barrier of the leaders, or of the ranks whose node is unknown. None if the run has one writer."""
    info = request.info
    if not NodePart.of(request).has_writers_elsewhere or (info is not None and request.config.run_mode != "shared"):
        return None
    kind, count = ("rank", 0) if info is None else ("rank", info.world_size)
    if info is not None and info.worker_index is not None:
        kind, count = "worker", info.num_workers or 1
    others = [f"{kind}-{index}" for index in range(count)]
    return WriterBarrier.entered(request, "W&B", request.plan.label or "", others)

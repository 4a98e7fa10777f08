"""The handle of a rank that has opened a shared run: alone on its node, or as the leader of its followers."""

from __future__ import annotations

import json
import logging
import os
import shlex
from collections.abc import Callable, Mapping
from typing import Any

from flyteplugins_tracking._util.proc import INTERRUPTED, TERMINATED
from flyteplugins_tracking.trackers.barrier import WriterBarrier
from flyteplugins_tracking.trackers.base import RunRequest
from flyteplugins_tracking.trackers.node_group import NodeRole, NodeServer
from flyteplugins_tracking.trackers.outbox import how_to_send
from flyteplugins_tracking.trackers.wandb import outbox, vendor
from flyteplugins_tracking.trackers.wandb.run import WandbHandle
from flyteplugins_tracking.trackers.wandb.shared.common import make_config_read_only, rows_of, step_of

logger = logging.getLogger(__name__)

# How long the followers of a leader that was signalled may take to end: they have been signalled with it.
_LEAVING_S = 3.0
# The run's settings that a follower needs.
_PUBLISHED_SETTINGS = (
    "root_dir",
    "x_sync_dir_suffix",
    "base_url",
    "app_url_override",
    "entity",
    "project",
    "resumed",
)


class LeaderServer(NodeServer):
    """A server that listens before the run is open, and so before its handle can answer requests."""

    def __init__(self, name: str, expected: int) -> None:
        self.answer_request: Callable[[str], None] = lambda _: None
        super().__init__(name, on_request=lambda text: self.answer_request(text), expected=expected)


class SharedHandle(WandbHandle):
    """An open W&B run that this rank shares with others."""

    def __init__(
        self,
        run: Any,
        before: Any,
        request: RunRequest,
        reopen: Callable[[Any, bool], Any],
        server: LeaderServer | None = None,
        barrier: WriterBarrier | None = None,
    ) -> None:
        """Take over the run. Call `start` before use.

        Args:
            run: The open run.
            before: The earlier `wandb.run`.
            request: The decorator's request for this run.
            reopen: See `WandbHandle`.
            server: The connections to the followers; None without followers.
            barrier: Where the writers of other nodes are waited for; None if the run has one writer.
        """
        self._log = type(run).log
        self._rows = rows_of(request, lambda: self.run)
        self._server = server
        self._barrier = barrier
        self._has_left = self._has_warned = False
        super().__init__(run, before, request, reopen)
        self._role = NodeRole.of(request)

    def start(self) -> None:
        """Protect the config, and publish the run to the followers."""
        self._restrict_config()
        if self._server is not None:
            self._server.answer_request = self._answer_request
            self._publish()

    def use(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if method.__name__ == "log":
            return self._rows.log(self._log_row, *args, **kwargs)
        return super().use(method, *args, **kwargs)

    def change(self, accessor: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if accessor.__name__ == "step":
            return step_of(lambda: super(SharedHandle, self).change(accessor), self._rows)
        return super().change(accessor, *args, **kwargs)

    def await_writers(self, exit_code: int) -> None:
        self._rows.commit(self._log_row)
        if self._server is not None:
            self._await_followers(self._server, exit_code)
        if self._barrier is not None and exit_code == 0:
            self._barrier.wait_for_run(self._request, "W&B")

    def finish(self, exit_code: int) -> None:
        with self._lock:
            self._has_left = True
        try:
            super().finish(exit_code)
        finally:
            if self._barrier is not None:
                self._barrier.leave()
                if exit_code == 0:
                    self._barrier.stay(self._request.config.finish_timeout_s, self._request.watch)
            if self._server is not None:
                self._server.close()
            if self._offline and self._role.has_peers and self._request.plan.primary and self._request.info:
                _log_merge_command(self.run)

    def keep_for_next_row(self, data: Mapping[str, Any]) -> None:
        """Add these values to this rank's next row."""
        self._rows.log(self._log_row, data, commit=False)

    def _log_row(self, row: Mapping[str, Any]) -> Any:
        return super().use(self._log, row)

    def _await_followers(self, server: LeaderServer, exit_code: int) -> None:
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

    def _finish_run(self, exit_code: int, stays_global: bool = False) -> None:
        if self._server is not None:
            self._server.suspend()
        super()._finish_run(exit_code, stays_global)

    def _adopt(self, reopened: Any) -> None:
        super()._adopt(reopened)
        self._restrict_config()
        self._publish()

    def _answer_request(self, unreachable: str) -> None:
        """Open the run again if it was ended early, and publish it: a follower logs to it.

        Args:
            unreachable: The address of the wandb-core that the follower cannot reach; empty if it has not tried.
        """
        self._request.watch.wait_for_user_handler(any_thread=True)
        try:
            with self._lock:
                if self._has_left:
                    return
                if unreachable == vendor.service_address() and vendor.has_service_died():
                    self._notice_death(ConnectionResetError(), self._openings)
                self._reopen()
                if not self._lost:
                    self._publish()
        except Exception:
            logger.warning(
                "W&B: run %s could not be opened again for the other ranks of its node", self.id, exc_info=True
            )

    def _publish(self) -> None:
        if self._server is not None:
            self._server.publish(_published(self.run))

    def _restrict_config(self) -> None:
        """Let only the primary change the config."""
        if self._request.plan.primary:
            return
        if self._request.info is None:
            vendor.set_config(self.run, self._request.config.config)  # the calling task's
            vendor.on_config_change(self.run, self._warn_of_change)
        else:
            make_config_read_only(self.run, self._request)

    def _warn_of_change(self, *_: Any, **__: Any) -> None:
        """Warn once. A task that continues its caller's run must not fail because of a change of the config."""
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "W&B: run %s belongs to the task that has called this one: this task's changes of its config are not "
                "sent. Change it in the calling task.",
                self.id,
            )


def _published(run: Any) -> dict[str, Any]:
    """Return the values with which a follower attaches. A disabled run has none."""
    if getattr(run, "disabled", False):
        return {"is_disabled": True}
    return {
        "is_disabled": False,
        "service": vendor.service_address(),
        "run_id": run.id,
        "settings": vendor.settings_of(run, _PUBLISHED_SETTINGS),
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

"""W&B runs that several ranks share: one process of each node writes, and its neighbours attach to it.

The process that has called `wandb.init` owns a wandb-core; another process of the node that knows where that listens
can `wandb.attach` to the run, and logs into the same stream. Where a run has writers on several nodes, they all are in
W&B's own shared mode: a default writer beside them loses rows (https://github.com/wandb/wandb/issues/12269).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import logging
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from flyteplugins_tracking._config.config import TrackingConfig
from flyteplugins_tracking.trackers.base import RunRequest
from flyteplugins_tracking.errors import ConfigError, TrackerUnavailableError, TrackingError
from flyteplugins_tracking.trackers.peers.node import Guest, HandoverError, Host, HostExistsError
from flyteplugins_tracking.signals import INTERRUPTED, TERMINATED
from flyteplugins_tracking.trackers.peers.role import Place
from flyteplugins_tracking.trackers.rows import Rows
from flyteplugins_tracking.trackers.wandb.run import (
    HANDLE,
    WandbHandle,
    global_run,
    guard,
    guard_changes,
    make_global,
    service_gone,
    unset_global,
    without_reports,
)
from flyteplugins_tracking.trackers.peers.writers import Writers
from flyteplugins_tracking.trackers.base import Handle

logger = logging.getLogger(__name__)

# How long the neighbours of a terminated writer have to leave too: they have been signalled with it.
_LEAVING_S = 3.0
# How long a row waits for a run that a signal has ended to be open again, before it is held; and other calls.
_ANSWER_S = 0.5
_REOPENING_S = 10.0
# How soon attaching is tried again.
_RETRY_S = 0.5
# How long a wandb-core may take to have read what was written to it.
_FLUSH_S = 5.0
_KEPT_SETTINGS = ("root_dir", "x_sync_dir_suffix", "base_url", "app_url_override", "entity", "project", "resumed")


def open_for_neighbours(
    request: RunRequest, open_own: Callable[[], Any], reopen: Callable[[Any, bool], Any]
) -> SharedHandle:
    """Open the run here, and let the neighbours come, who wait for it from now on.

    Raises:
        TrackerUnavailableError: They cannot reach it.
    """
    try:
        host = _Host(_name(request), expected=_neighbours(request))
    except HostExistsError:  # a process that this rank has started looks like the rank itself
        return open_alone(request, open_own, reopen)
    except HandoverError as error:
        raise TrackerUnavailableError(f"W&B: the ranks of this node cannot share a run: {error}.") from error
    try:
        return _open(request, open_own, reopen, host)
    except BaseException as error:
        host.refuse(str(error) if isinstance(error, TrackingError) else type(error).__name__)
        host.close()
        raise


def open_alone(request: RunRequest, open_own: Callable[[], Any], reopen: Callable[[Any, bool], Any]) -> SharedHandle:
    """Open the run here, for this rank."""
    return _open(request, open_own, reopen, None)


def _open(
    request: RunRequest, open_own: Callable[[], Any], reopen: Callable[[Any, bool], Any], host: _Host | None
) -> SharedHandle:
    before = global_run()
    nodes = _nodes(request)
    return SharedHandle(open_own(), before, request, reopen, host, nodes)


def attach(request: RunRequest, is_disabled: bool) -> GuestHandle | SharedHandle:
    """Attach to the run that a neighbour opens; unless W&B `is_disabled` for this rank, or for the neighbour.

    Raises:
        TrackerUnavailableError: It is not there, or has opened none.
    """
    before, failure = global_run(), None
    while True:
        try:
            guest = _join(request)
        except TrackerUnavailableError as error:
            raise failure or error from error.__cause__
        if is_disabled or guest.value["is_disabled"]:
            guest.leave()
            wandb: Any = importlib.import_module("wandb")
            return SharedHandle(wandb.init(mode="disabled"), before, request, lambda *_: None)
        try:
            return GuestHandle(*_attached(guest.value), before, request, guest)
        except BaseException as error:
            # It may be that its wandb-core has died, and that it starts another one when it hears of that.
            guest.ask(guest.value["service"])
            guest.leave(comes_back=True)
            _restore_global(before)
            if not isinstance(error, Exception):
                raise
            failure = TrackerUnavailableError(
                f"W&B: rank {guest.rank} could not attach to run {guest.value['run_id']}, which local rank 0 of its "
                f"node has opened: {error or type(error).__name__}"
            )
            if time.monotonic() > request.deadline:
                raise failure from error
        time.sleep(_RETRY_S)


def _join(request: RunRequest) -> Guest:
    info, config = request.info, request.config
    assert info is not None
    try:
        return Guest.join(_name(request), info.rank, request.deadline, config.init_timeout_s)
    except HandoverError as error:
        raise TrackerUnavailableError(
            f"W&B: rank {info.rank} waited for run {request.known_id}, which local rank 0 of worker "
            f"{info.worker_index} opens for its node: {error}. Call the decorated function on every rank of the node; "
            f"or pass a longer init_timeout_s than {config.init_timeout_s:g}."
        ) from error


def _attached(offer: Mapping[str, Any]) -> tuple[Any, Any]:
    """The host's run in this process, and the connection to its wandb-core.

    This process's own runs, now and later, have a wandb-core of their own: the host's ends when the host does.
    """
    wandb: Any = importlib.import_module("wandb")
    from wandb.sdk import wandb_setup

    setup = wandb_setup.singleton()
    own, setup._connection = setup._connection, None
    try:
        with _told(offer["service"]), without_reports():
            run = wandb.attach(offer["run_id"])
    finally:
        connection, setup._connection = setup._connection, own
    try:
        run._settings.update_from_dict(offer["settings"])
        run._config._update(offer["config"], allow_val_change=True, ignore_locked=True)
    except BaseException:
        _close(run, connection)
        raise
    return run, connection


@contextlib.contextmanager
def _told(service: str) -> Iterator[None]:
    """Have W&B find this service. For a moment: a child of this process would take it for its own."""
    own = os.environ.get("WANDB_SERVICE")
    os.environ["WANDB_SERVICE"] = service
    try:
        yield
    finally:
        if own is None:
            del os.environ["WANDB_SERVICE"]
        else:
            os.environ["WANDB_SERVICE"] = own


def _restore_global(before: Any) -> None:
    make_global(before) if before is not None else unset_global()


def _close(run: Any, connection: Any) -> None:
    """Give back what an attached run has in this process, which W&B leaves to the process's end."""
    with contextlib.suppress(Exception):
        run._wl.remove_active_run(run)
        run._unregister_telemetry_import_hooks(run.id)
        connection._finalizer.close()
        connection._asyncer.run(connection._client.close)


class SharedHandle(WandbHandle):
    """An open W&B run, which this rank shares with others."""

    def __init__(
        self,
        run: Any,
        before: Any,
        request: RunRequest,
        reopen: Callable[[Any, bool], Any],
        host: _Host | None = None,
        nodes: Writers | None = None,
    ) -> None:
        self._log = type(run).log
        self._rows = _rows(request.config, request.info, lambda: self.run)
        self._host = host
        self._nodes = nodes
        self._has_left = self._has_kept = False
        super().__init__(run, before, request, reopen)
        self._place = Place.of(request)
        if nodes is not None:
            run._settings.resumed = nodes.is_retry or (run.resumed and run._starting_step > 0)
        self._restrict()
        if host is not None:
            host.asked = self._asked
            self._offer()

    def call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """See `WandbHandle.call`."""
        if method.__name__ == "log":
            return self._rows.log(self._row, *args, **kwargs)
        return super().call(method, *args, **kwargs)

    def change(self, accessor: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """See `WandbHandle.change`."""
        if accessor.__name__ == "step":
            return _step(lambda: super(SharedHandle, self).change(accessor), self._rows)
        return super().change(accessor, *args, **kwargs)

    def finish(self, exit_code: int) -> None:
        """See `Handle.finish`."""
        self._rows.commit(self._row)
        if self._host is not None:
            self._await_guests(self._host, exit_code)
        if self._nodes is not None and exit_code == 0:
            self._nodes.wait()
        if self._request.watch.terminated:  # since another rank has failed, perhaps: the job has not succeeded
            exit_code = TERMINATED
        with self._lock:
            self._has_left = True
        try:
            super().finish(exit_code)
        finally:
            if self._nodes is not None:
                self._nodes.leave()
            if self._host is not None:
                self._host.close()
            if self._offline and self._place.has_peers and self._request.plan.primary and self._request.info:
                _tell_how_to_merge(self.run)

    def keep_for_next_row(self, data: Mapping[str, Any]) -> None:
        """Have these values in this rank's next row."""
        self._rows.log(self._row, data, commit=False)

    def _row(self, row: Mapping[str, Any]) -> Any:
        return super().call(self._log, row)

    def _await_guests(self, host: _Host, exit_code: int) -> None:
        """Where this function has raised, theirs may wait for it for ever."""
        watch, timeout_s, ranks = self._request.watch, self._request.config.finish_timeout_s, []
        if exit_code == 0:
            ranks = host.wait(timeout_s, until=lambda: watch.terminated)
        if exit_code in (TERMINATED, INTERRUPTED) or watch.terminated:
            host.wait(min(_LEAVING_S, timeout_s))
        elif ranks or (host.missing and exit_code == 0):
            logger.warning(
                "W&B: run %s ends, finish_timeout_s=%g after the function of its writer has returned. What these ranks "
                "log from now on is lost: %s. Ranks of the node that have not called the function: %d.",
                self.id,
                timeout_s,
                ", ".join(map(str, ranks)) or "none",
                host.missing,
            )

    def _end(self, exit_code: int, stays_global: bool = False) -> None:
        if self._host is not None:
            self._host.pause()
        super()._end(exit_code, stays_global)

    def _adopt(self, reopened: Any) -> None:
        super()._adopt(reopened)
        self._restrict()
        self._offer()

    def _asked(self, unreachable: str) -> None:
        """A neighbour logs to the run that was ended early, or cannot reach the wandb-core that was `unreachable`."""
        self._request.watch.await_handler(any_thread=True)
        try:
            with self._lock:
                if self._has_left:
                    return
                if unreachable == _service() and _has_died():
                    self._notice_death(ConnectionResetError(), self._openings)
                self._reopen()
                if not self._lost:
                    self._offer()
        except Exception:
            logger.warning("W&B: run %s could not be opened again for its other ranks", self.id, exc_info=True)

    def _offer(self) -> None:
        if self._host is not None:
            self._host.offer(_offer(self.run))

    def _restrict(self) -> None:
        """Only the primary changes the config."""
        if self._request.plan.primary or self._request.config.allow_config:
            return
        if self._request.info is None:
            given = self._request.config.config
            self.run._config._update(given, allow_val_change=True, ignore_locked=True)  # the parent's
            self.run.config._set_callback(self._keep_change)
        else:
            _refuse_changes(self.run, self._request)

    def _keep_change(self, *_: Any, **__: Any) -> None:
        """A task that goes on in another's run, as it would in a process with it: this is no reason to fail it."""
        if not self._has_kept:
            self._has_kept = True
            logger.warning(
                "W&B: run %s is the calling task's: what this task changes in the config of its parent's run is not "
                "sent. Change it in the task that has opened the run; or pass allow_config=True, and it takes the "
                "place of the parent's.",
                self.id,
            )


class GuestHandle(Handle):
    """A W&B run that a neighbour has opened, who has its files and its summary."""

    def __init__(self, run: Any, connection: Any, before: Any, request: RunRequest, guest: Guest) -> None:
        """`connection` is the one to the host's wandb-core; `before` was `wandb.run`."""
        self.run = run
        self._connection = connection
        self.id = run.id
        self._request = request
        self._guest = guest
        self._before = before
        self._pid = os.getpid()
        self._service = guest.value["service"]
        self._unreachable = ""
        self._log = type(run).log
        self._rows = _rows(request.config, request.info, lambda: self.run)
        self._state: Literal["open", "paused", "gone"] = "open"
        self._changed = threading.Condition(threading.RLock())
        self._held: list[dict[str, Any]] = []  # what is logged while the run is not open
        self._definitions: list[Callable[[], Any]] = []  # what a run that is opened again must be told again
        self._is_told = self._has_left = False
        guard(run)
        self._dress()
        guest.listen(offered=self._offered, paused=self._paused, gone=self._gone)

    def finish(self, exit_code: int) -> None:  # noqa: ARG002 the host's decides
        """See `Handle.finish`. The run goes on, and its host ends it."""
        self._rows.commit(self._row)
        with self._changed:
            if self._held and self._state == "paused":
                self._ask()
                until = self._request.config.finish_timeout_s  # which the host may take to end it first
                self._changed.wait_for(lambda: not self._held or self._state == "gone", until)
            if self._held:
                self._tell()
            self._flush(min(self._request.config.finish_timeout_s, _FLUSH_S))
            self._has_left = True
        self._guest.leave()
        self._undress()

    def end_early(self, exit_code: int) -> None:  # noqa: ARG002 the host's decides
        """See `Handle.end_early`. What this rank has logged is to reach it."""
        self._flush(_FLUSH_S)

    def may_end(self) -> bool:
        """See `WandbHandle.may_end`."""
        return False

    def call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """See `WandbHandle.call`."""
        if os.getpid() != self._pid:  # a forked child, which attaches by itself
            with _told(self._service):
                return method(self.run, *args, **kwargs)
        self._request.watch.renew()
        if method.__name__ == "log":
            return self._rows.log(self._row, *args, **kwargs)
        if method.__name__ == "define_metric":
            self._definitions.append(lambda: method(self.run, *args, **kwargs))
        return self._use(method, args, kwargs)

    def change(self, accessor: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """See `WandbHandle.change`."""
        if accessor.__name__ == "step":
            return _step(lambda: accessor(self.run), self._rows) if self._state == "open" else self._rows.logged
        if os.getpid() != self._pid or not (args or kwargs):
            return accessor(self.run, *args, **kwargs)
        return self._use(accessor, args, kwargs)

    def keep_for_next_row(self, data: Mapping[str, Any]) -> None:
        """Have these values in this rank's next row."""
        self._rows.log(self._row, data, commit=False)

    def _row(self, row: dict[str, Any]) -> None:
        for is_last in (False, True):
            with self._changed:
                if self._state == "open":
                    try:
                        self._log(self.run, row)
                        return
                    except service_gone():
                        self._lose_service()
                if self._state == "gone":
                    self._tell()
                    return
                if is_last or self._held:
                    self._held.append(dict(row))
                    return
                # The writer has been told to end, so that this process will be: a row that is held may be lost with it.
                self._ask()
                self._changed.wait_for(lambda: self._state != "paused", _ANSWER_S)
            self._request.watch.await_handler()

    def _use(self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for _ in range(2):
            if not self._await_open():
                break
            try:
                return method(self.run, *args, **kwargs)
            except service_gone():
                with self._changed:
                    self._lose_service()
        self._tell()
        return None

    def _await_open(self) -> bool:
        with self._changed:
            if self._state == "paused":
                self._ask()
                self._changed.wait_for(lambda: self._state != "paused", _REOPENING_S)
            return self._state == "open"

    def _ask(self) -> None:
        self._guest.ask(self._unreachable)

    def _lose_service(self) -> None:
        """wandb-core has died; its owner has too, or will start another one when asked."""
        self._unreachable, self._service = self._service, ""
        self._state = "paused"

    def _tell(self) -> None:
        """Once: it is said in a training's loop."""
        if not self._is_told:
            self._is_told = True
            logger.warning(
                "W&B: rank %d cannot log to run %s any more: local rank 0 of its node, which writes the run, has ended "
                "it or was killed. What this rank logs from now on is lost.",
                self._guest.rank,
                self.id,
            )

    def _flush(self, timeout_s: float) -> None:
        """Return when wandb-core has read what was logged: it answers in the order in which it reads."""
        if self._state == "open":
            with contextlib.suppress(Exception):
                self.run._interface.deliver_get_summary().wait_or(timeout=timeout_s)

    def _dress(self) -> None:
        vars(self.run)[HANDLE] = self
        guard_changes(self.run)
        with contextlib.suppress(AttributeError):  # else it would wait for an answer for a minute
            object.__setattr__(self.run.summary, "_get_current_summary_callback", self._summary)
        if not self._request.config.allow_config:
            _refuse_changes(self.run, self._request)
        make_global(self.run)

    def _summary(self) -> Any:
        return self._use(type(self.run)._summary_get_current_summary_callback, (), {}) or {}

    def _undress(self) -> None:
        run = self.run
        _close(run, self._connection)
        run._is_finished = True
        del vars(run)[HANDLE]
        run.__class__ = type(run).__mro__[1]
        if sys.modules["wandb"].run is run:
            _restore_global(self._before)

    # In the hand-over's thread

    def _offered(self, offer: Mapping[str, Any]) -> None:
        with self._changed:
            if self._has_left:
                return
            try:
                if offer["service"] == self._unreachable:
                    return
                if offer["service"] != self._service:
                    self._reattach(offer)
                if self._state == "paused":
                    for define in self._definitions:
                        define()
                self._state = "open"
                held, self._held = self._held, []
                for row in held:
                    self._row(row)
            except Exception:
                logger.warning("W&B: a rank could not attach to run %s again", self.id, exc_info=True)
                self._state = "gone"
            self._changed.notify_all()

    def _reattach(self, offer: Mapping[str, Any]) -> None:
        """Be another run object, that of the host's new wandb-core."""
        run, connection = _attached(offer)
        _close(run, self._connection)
        self._connection, self._service = connection, offer["service"]
        self.run.__dict__ = run.__dict__
        run._wl.add_active_run(self.run)
        self._dress()

    def _paused(self) -> None:
        with self._changed:
            self._flush(_LEAVING_S)
            if self._state == "open":
                self._state = "paused"

    def _gone(self) -> None:
        with self._changed:
            self._state = "gone"
            self._changed.notify_all()


class _Host(Host):
    """A host that is there before what it hands over."""

    def __init__(self, name: str, expected: int) -> None:
        self.asked: Callable[[str], None] = lambda _: None
        super().__init__(name, ask=lambda question: self.asked(question), expected=expected)


def _name(request: RunRequest) -> str:
    """What host and guests call each other by.

    Another job with the same id has another name, and an earlier attempt of this one that is still ending.
    """
    info = request.info
    assert info is not None
    run = (request.config.project, request.known_id, info.worker_index)
    attempt = (
        info.launcher,
        info.job_id,
        info.restart_count,
        os.environ.get("MASTER_ADDR"),
        os.environ.get("MASTER_PORT"),
    )
    return json.dumps(["wandb", *run, *attempt])


def _nodes(request: RunRequest) -> Writers | None:
    """The writers on other nodes; None where the run has none."""
    if not Place.of(request).has_peers:
        return None
    info = request.info
    kind, count = ("rank", 1) if info is None else ("rank", info.world_size)
    if info is not None and info.worker_index is not None:
        kind, count = "worker", info.num_workers or 1
    others = [f"{kind}-{index}" for index in range(1, count)]
    return Writers(request, "W&B", request.plan.label or "", others)


def _neighbours(request: RunRequest) -> int:
    ranks = request.info.local_world_size if request.info else None
    return (ranks or 1) - 1


def _offer(run: Any) -> dict[str, Any]:
    """What a neighbour needs to attach. A disabled run has nothing to attach to."""
    if getattr(run, "disabled", False):
        return {"is_disabled": True}
    settings = {name: getattr(run._settings, name, None) for name in _KEPT_SETTINGS}
    return {
        "is_disabled": False,
        "service": _service(),
        "run_id": run.id,
        "settings": {name: value for name, value in settings.items() if value is not None},
        "config": json.loads(json.dumps(dict(run.config), default=str)),
    }


def _service() -> str:
    """Where this process's wandb-core listens."""
    from wandb.sdk import wandb_setup

    process = getattr(wandb_setup.singleton()._connection, "_proc", None)
    return str(process.token.env_value) if process is not None else os.environ.get("WANDB_SERVICE", "")


def _has_died(timeout_s: float = 1.0) -> bool:
    """Whether this process's wandb-core has ended. Its connections end a moment before it does."""
    from wandb.sdk import wandb_setup

    process = wandb_setup.singleton()._connection._proc._process
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout_s)
    return process.poll() is not None


def _rows(config: TrackingConfig, info: Any, run: Callable[[], Any]) -> Rows:
    prefix = f"rank_{info.rank if info else 0}/" if config.rank_prefix else ""
    return Rows(config.step_metric, prefix, lambda: run().define_metric("*", step_metric=config.step_metric))


def _step(read: Callable[[], Any], rows: Rows) -> Any:
    """The run's step; W&B's shared mode has none, and there it is how many rows this rank has logged."""
    try:
        return read()
    except Exception:
        return rows.logged


def _refuse_changes(run: Any, request: RunRequest) -> None:
    rank = request.info.rank if request.info else 0
    kind: Any = type(run._config)
    object.__setattr__(run._config, "__class__", _refusing(kind, rank))


@functools.cache
def _refusing(kind: Any, rank: int) -> Any:
    """A `wandb.Config` that is read on this rank, and changed on the primary."""

    def refuse(*_: Any, **__: Any) -> None:
        raise ConfigError(
            f"rank {rank} cannot change the config of its shared run, which is the primary's: change it on rank 0 "
            "(local rank 0 with rank_scope='worker'), pass config= to tracking_init, or allow_config=True"
        )

    def unless_vendors_own(name: str) -> Any:
        def changed(config: Any, *args: Any, **kwargs: Any) -> Any:
            what = next(iter([*args, *kwargs.values()]), None)
            keys = what if isinstance(what, Mapping) else [what]
            own = getattr(kind, name) if all(str(key).startswith("_") for key in keys) else refuse
            return own(config, *args, **kwargs)

        return changed

    members = {name: unless_vendors_own(name) for name in ("__setitem__", "__setattr__", "update", "setdefaults")}
    members.update(dict.fromkeys(("update_locked", "merge_locked"), refuse))
    return type(kind.__name__, (kind,), members)


def _tell_how_to_merge(run: Any) -> None:
    """Each node has written a directory: to be sent one after the other, in the order of their start, as they sort."""
    directories = os.path.join(shlex.quote(os.path.dirname(os.path.dirname(run.dir))), "offline-run-*")
    logger.warning(
        "W&B: run %s was logged offline, by each node into a directory of its own. Bring them together, and send them "
        "all with: wandb sync %s-%s*",
        run.id,
        directories,
        shlex.quote(run.id),
    )

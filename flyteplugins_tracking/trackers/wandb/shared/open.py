"""Whether this rank opens the shared run or attaches to its leader's, and what happens if it cannot."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from typing import Any

from flyteplugins_tracking.errors import TrackerUnavailableError, TrackingError
from flyteplugins_tracking.trackers.base import Handle, RunRequest
from flyteplugins_tracking.trackers.node_group import NodeClient, NodeError, NodeRole, NodeServerExistsError
from flyteplugins_tracking.trackers.wandb import vendor
from flyteplugins_tracking.trackers.wandb.shared.common import node_name, writer_barrier
from flyteplugins_tracking.trackers.wandb.shared.follower import FollowerHandle, attached
from flyteplugins_tracking.trackers.wandb.shared.leader import LeaderServer, SharedHandle

Open = Callable[[], Any]
Reopen = Callable[[Any, bool], Any]

# How long to wait before attaching again.
_RETRY_S = 0.5


def open_shared(
    request: RunRequest,
    open_own: Open,
    open_degraded: Callable[[TrackerUnavailableError], Any],
    reopen: Reopen,
    is_disabled: Callable[[], bool],
) -> Handle:
    """Open this rank's part of a shared run.

    Args:
        request: The decorator's request for this run.
        open_own: Opens the run in this process.
        open_degraded: Opens a run offline because of this error, or raises it.
        reopen: Opens a run again: see `WandbHandle`.
        is_disabled: Whether W&B is disabled for this rank.

    Raises:
        TrackerUnavailableError: The run cannot be opened, or not be attached to.
    """
    role = NodeRole.of(request)
    if role.name == "leader":
        return _open_as_leader(request, open_own, reopen)
    if role.name == "single":
        return _open_single(request, open_own, reopen)
    disabled = is_disabled()
    try:
        return _attach(request, disabled)
    except TrackerUnavailableError as unavailable:
        if disabled:
            return _open_single(request, open_own, reopen)
        error = unavailable
    return _open_single(request, lambda: open_degraded(error), reopen)


def _open_as_leader(request: RunRequest, open_own: Open, reopen: Reopen) -> SharedHandle:
    ranks = request.info.local_world_size if request.info else None
    try:
        server = LeaderServer(node_name(request), expected=(ranks or 1) - 1)
    except NodeServerExistsError:  # a process that this rank has started has the variables of the rank itself
        return _open_single(request, open_own, reopen)
    except NodeError as error:
        raise TrackerUnavailableError(f"W&B: the ranks of this node cannot share a run: {error}.") from error
    try:
        return _open(request, open_own, reopen, server)
    except BaseException as error:
        server.reject(str(error) if isinstance(error, TrackingError) else type(error).__name__)
        server.close()
        raise


def _open_single(request: RunRequest, open_own: Open, reopen: Reopen) -> SharedHandle:
    return _open(request, open_own, reopen, None)


def _open(request: RunRequest, open_own: Open, reopen: Reopen, server: LeaderServer | None) -> SharedHandle:
    before = vendor.global_run()
    barrier = writer_barrier(request)
    handle = SharedHandle(open_own(), before, request, reopen, server, barrier)
    if barrier is not None:
        vendor.set_resumed(handle.run, barrier.is_retry)
    handle.start()
    return handle


def _attach(request: RunRequest, is_disabled: bool) -> Handle:
    """Attach to the leader's run. If W&B is disabled for this rank or for the leader, open a disabled run.

    Raises:
        TrackerUnavailableError: The leader has opened no run, or it cannot be attached to.
    """
    before, failure = vendor.global_run(), None
    while True:
        try:
            client = _connect(request)
        except TrackerUnavailableError as error:
            raise failure or error from error.__cause__
        if is_disabled or client.value["is_disabled"]:
            client.leave()
            return _open_disabled(request, before)
        try:
            return FollowerHandle(*attached(client.value), before, request, client)
        except BaseException as error:
            failure = _give_up(request, client, before, error)
            if time.monotonic() > request.deadline:
                raise failure from error
        time.sleep(_RETRY_S)


def _give_up(request: RunRequest, client: NodeClient, before: Any, error: BaseException) -> TrackerUnavailableError:
    """Leave the leader for now, and return the error to raise if this was the last attempt."""
    # The leader's wandb-core may have died. When the leader learns of that, it starts another one.
    client.request(client.value["service"])
    client.leave(will_return=True)
    vendor.set_global_run(before)
    if not isinstance(error, Exception):
        raise error
    return TrackerUnavailableError(
        f"W&B: rank {client.rank} could not attach to run {client.value['run_id']}, which local rank "
        f"{request.node_leader} of its node has opened: {error or type(error).__name__}"
    )


def _connect(request: RunRequest) -> NodeClient:
    info, config = request.info, request.config
    assert info is not None
    try:
        return NodeClient.connect(node_name(request), info.rank, request.deadline, config.init_timeout_s)
    except NodeError as error:
        raise TrackerUnavailableError(
            f"W&B: rank {info.rank} waited for run {request.planned_run_id}, which local rank {request.node_leader} of "
            f"worker {info.worker_index} opens for its node: {error}. Call the decorated function on every rank "
            f"of the node; or pass a longer init_timeout_s than {config.init_timeout_s:g}."
        ) from error


def _open_disabled(request: RunRequest, before: Any) -> SharedHandle:
    wandb: Any = importlib.import_module("wandb")
    handle = SharedHandle(wandb.init(mode="disabled"), before, request, lambda *_: None)
    handle.start()
    return handle

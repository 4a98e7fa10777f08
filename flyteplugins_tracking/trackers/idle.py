"""Ranks without a run: what their functions open in a client does nothing. The first row is told, since it is lost."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from flyteplugins_tracking._rank.info import DistributedInfo
from flyteplugins_tracking._rank.plan import RankScope, position, primary_rank_of
from flyteplugins_tracking._util.fork import PerProcess, register
from flyteplugins_tracking._util.modules import when_loaded
from flyteplugins_tracking.trackers.config import TrackingConfig
from flyteplugins_tracking.trackers.registry import join_clients_calls

if TYPE_CHECKING:
    from flyteplugins_tracking._job.board import Board

logger = logging.getLogger(__name__)
# How long the job's store may take to answer: training waits.
_STORE_TIMEOUT = timedelta(seconds=3)


class _Idle(PerProcess):
    """The functions without a run in this process, by tracker.

    Attributes:
        functions: How many run.
        latest: The rank of the latest one, its scope, and who has the run: (rank 7's info, "global", "rank 0") for
            example; (None, "global", "") where tracking is switched off.
        told: The trackers whose lost rows are told.
    """

    def __init__(self) -> None:
        self.functions = Counter[str]()
        self.latest: dict[str, tuple[DistributedInfo | None, RankScope, str]] = {}
        self.told = set[str]()


_idle = register(_Idle())


def keep_idle(tracker: str, config: TrackingConfig, info: DistributedInfo | None) -> Callable[[], object]:
    """Have what a function opens in the tracker's client do nothing from now on. Returns what undoes that."""
    owner = ""
    if info is not None:
        primary = primary_rank_of(info, config.run_mode, config.rank_scope, config.primary_rank)
        owner = f"{'local ' * (config.rank_scope == 'worker')}rank {primary}"
    _idle.latest[tracker] = (info, config.rank_scope, owner)
    _idle.functions[tracker] += 1
    forget = when_loaded(tracker, lambda: join_clients_calls(tracker))

    def undo() -> None:
        forget()
        _idle.functions[tracker] -= 1

    return undo


def is_idle(tracker: str) -> bool:
    """Whether a function of this process has no run with the tracker."""
    return _idle.functions[tracker] > 0


def tell_row(tracker: str, title: str) -> None:
    """Say once that a row is lost, since perhaps this is the rank that logs. The rank that has the run reads it too."""
    info, scope, owner = _idle.latest.get(tracker, (None, "global", ""))  # none in a forked child
    if info is None or tracker in _idle.told:
        return
    _idle.told.add(tracker)
    number = position(info, scope)
    logger.warning(
        "%s: rank %d logs to a run that does nothing, and what it logs is lost: %s has the run. To log from this rank, "
        "pass primary_rank=%s to tracking_init (--primary-rank of the command); for a run of each rank, "
        "run_mode='new'%s",
        title,
        info.rank,
        owner,
        number,
        ", or reinit='create_new' to wandb.init" if tracker == "wandb" else "",
    )
    with suppress(RuntimeError):  # the store does not answer
        board = _board(tracker, info, scope)
        if board is not None:
            board.put("rank", str(number))


def rank_that_lost_rows(tracker: str, info: DistributedInfo, scope: RankScope) -> str | None:
    """Return the rank that has logged to a run that does nothing, if one has told so; with "worker", the local rank."""
    with suppress(RuntimeError):
        board = _board(tracker, info, scope)
        return None if board is None else board.get("rank")
    return None


def _board(tracker: str, info: DistributedInfo, scope: RankScope) -> Board | None:
    from flyteplugins_tracking._job.board import job_board  # few ranks need it

    worker = "" if scope == "global" else info.worker_index
    return job_board(info, os.environ, f"lost/{tracker}/{worker}/{info.restart_count}", _STORE_TIMEOUT)


class IdleRun:
    """A run that does nothing: it takes all calls, and tells its first row."""

    def __init__(self, tracker: str, title: str, **attributes: Any) -> None:
        vars(self).update(attributes, log=lambda *_, **__: tell_row(tracker, title))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None

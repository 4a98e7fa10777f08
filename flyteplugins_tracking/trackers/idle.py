"""Ranks without a run: what their functions open in a client does nothing. The first row is told, since it is lost."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from flyteplugins_tracking._rank.info import DistributedInfo
from flyteplugins_tracking._rank.plan import RankScope, position
from flyteplugins_tracking._util import threads
from flyteplugins_tracking._util.fork import PerProcess, register
from flyteplugins_tracking._util.modules import when_loaded
from flyteplugins_tracking.trackers.config import TrackingConfig
from flyteplugins_tracking.trackers.registry import join_clients_calls

if TYPE_CHECKING:
    from flyteplugins_tracking._job.board import Board

logger = logging.getLogger(__name__)
T = TypeVar("T")
# The id of a run that does nothing.
IDLE = "no-run"
# How long the job's store may take to answer: training waits.
_STORE_S = 3.0
# The rank of the latest function without a run, its scope, and who has the run, by tracker: (rank 7's info, "global",
# "rank 0") for example; (None, "global", "") where tracking is switched off. A forked child knows it too.
_latest: dict[str, tuple[DistributedInfo | None, RankScope, str]] = {}


class _Idle(PerProcess):
    """The functions without a run in this process, by tracker.

    Attributes:
        functions: How many run.
        undo: What undoes, when the last one has ended, what they have opened in the client.
        told: The trackers whose lost rows are told.
    """

    def __init__(self) -> None:
        self.functions = Counter[str]()
        self.undo: dict[str, list[Callable[[], object]]] = {}
        self.told = set[str]()


_idle = register(_Idle())


def keep_idle(tracker: str, config: TrackingConfig, info: DistributedInfo | None) -> Callable[[], object]:
    """Have what a function opens in the tracker's client do nothing from now on. Returns what undoes that."""
    owner = ""
    if info is not None:
        owner = f"{'local ' * (config.rank_scope == 'worker')}rank {config.primary_rank}"
    _latest[tracker] = (info, config.rank_scope, owner)
    _idle.functions[tracker] += 1
    forget = when_loaded(tracker, lambda: join_clients_calls(tracker))

    def undo() -> None:
        forget()
        _idle.functions[tracker] -= 1
        if not is_idle(tracker):
            for undo_one in reversed(_idle.undo.pop(tracker, [])):
                undo_one()

    return undo


def undo_later(tracker: str, undo: Callable[[], object]) -> None:
    """Undo something in the tracker's client when no function without a run is left."""
    _idle.undo.setdefault(tracker, []).append(undo)


def is_idle(tracker: str) -> bool:
    """Whether a function of this process has no run with the tracker."""
    return _idle.functions[tracker] > 0


def tell_row(tracker: str, title: str) -> None:
    """Say once that a row is lost, since perhaps this is the rank that logs. The rank that has the run reads it too."""
    info, scope, owner = _latest.get(tracker, (None, "global", ""))
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
    if is_idle(tracker):  # not in a forked child
        _at_board(tracker, info, scope, lambda board: board.put("rank", str(number)))


def rank_that_lost_rows(tracker: str, info: DistributedInfo, scope: RankScope) -> str | None:
    """Return the rank that has logged to a run that does nothing, if one has told so; with "worker", the local rank."""
    return _at_board(tracker, info, scope, lambda board: board.get("rank"))


def _at_board(tracker: str, info: DistributedInfo, scope: RankScope, action: Callable[[Board], T]) -> T | None:
    """Do something at the job's board, if it answers: a store that has stopped may keep its callers for ever."""
    from flyteplugins_tracking._job.board import job_board  # few ranks need it

    def act() -> T | None:
        worker = "" if scope == "global" else info.worker_index
        board = job_board(info, os.environ, f"lost/{tracker}/{worker}/{info.restart_count}")
        return None if board is None else action(board)

    with suppress(RuntimeError, TimeoutError):
        return threads.call_within(_STORE_S, act)
    return None


class IdleRun:
    """A run that does nothing: it takes all calls, and tells its first row."""

    def __init__(self, tracker: str, title: str, **attributes: Any) -> None:
        vars(self).update(attributes, log=lambda *_, **__: tell_row(tracker, title))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None

"""Who gets which run: `plan()`, a pure function. It alone derives the ids and groups of a job's runs from the base id.

Six places outside of it change an id. The first four keep two runs from getting the same one:

- `_runs/identity.py`, `identity_of`: the second call in one process has the base id `{base}-2`, and so on.
- `_runs/identity.py`, `_beside`: a process that a rank has started has `{base}-{random}`, or a random id.
- `_runs/opening.py`, `_lock_run`: if another process or thread of the machine has the run open, this one is
  `{id}-{random}`.
- `trackers/wandb/open.py`, `_with_another_id`: if a run continues offline while wandb-core still holds its id, because
  other runs are open in the process, it is `{id}-{random}`.
- `trackers/pluto/__init__.py`, `_with_usable_id`: an id that Pluto would take for one of its server's is `run-{id}`.
- Where the plan has None, the tracker makes an id: W&B's client, or `trackers/client.py`, `new_id`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

from flyteplugins_tracking._rank.info import DistributedInfo, iter_ranks
from flyteplugins_tracking._util.record import Record
from flyteplugins_tracking.errors import ConfigError, TopologyError

RunMode = Literal["auto", "shared", "new"]
"""Which ranks of the scope have a run: only the primary, all in one run, or each its own."""
RankScope = Literal["global", "worker"]
"""The scope of a run: the whole job, or each worker (= node)."""
PrimaryRank = int | Callable[[DistributedInfo], int]
"""The scope's primary: a rank of the job, or a local rank of each worker. Negative numbers count from the end."""
RUN_MODES: tuple[RunMode, ...] = get_args(RunMode)
RANK_SCOPES: tuple[RankScope, ...] = get_args(RankScope)


class RunPlan(Record):
    """The run of one rank, if it has one.

    Attributes:
        opens: Whether this rank has a run.
        run_id: The run's id. None if this rank has no run, or if the tracker shall make a random id.
        group: The group that the run belongs to, if any.
        primary: Whether this rank speaks for its job in the run: it passes the config, and says why the job fails. One
            rank of each run is primary.
        label: This rank's name among the writers of its run, for instance "rank-3". None outside a distributed job.
        writers: How many ranks write to the run; 0 if this rank has no run. None if the launcher does not set it.
        first: Whether this rank prints and shows what concerns the whole job: it is the primary of the job's first
            run.
        role: The name under which this job joins the run of another one; None in a run of its own.
    """

    opens: bool
    run_id: str | None = None
    group: str | None = None
    primary: bool = False
    label: str | None = None
    writers: int | None = 0
    first: bool = False
    role: str | None = None

    @property
    def ends_run(self) -> bool:
        """Whether the run ends when this rank ends. One rank of each run does that: the owner's, if it has roles."""
        return self.primary and self.role is None


class NodeRequest(NamedTuple):
    """The workers (= nodes) that a task requests, before they exist.

    Attributes:
        min_nodes: The lowest number of nodes.
        max_nodes: The highest number of nodes. It differs from `min_nodes` for an elastic job.
        nproc_per_node: The number of processes on each node.
    """

    min_nodes: int
    max_nodes: int
    nproc_per_node: int


class Page(NamedTuple):
    """A page of the tracker that shows a run or a group of runs.

    Attributes:
        kind: Whether it is the page of a run or of a group.
        id: The run's id, or the group's.
        worker_index: The worker that it belongs to; None if it belongs to the whole job.
    """

    kind: Literal["run", "group"]
    id: str
    worker_index: int | None = None


def primary_rank_of(
    info: DistributedInfo | None, run_mode: RunMode, rank_scope: RankScope, primary_rank: PrimaryRank
) -> int:
    """Return the primary's number in the scope of the rank `info`: its rank, or with "worker" its local rank.

    Without a job, and with "new", where each rank has its own run, `primary_rank` has no effect: this returns 0, and
    does not call it.

    Raises:
        ConfigError: `primary_rank` is a callable that returns anything but an int.
        TopologyError: The scope does not have this rank.
    """
    if info is not None:
        _require_worker(info, rank_scope)
    if info is None or run_mode == "new":
        return 0
    number = primary_rank(info) if callable(primary_rank) else primary_rank
    if isinstance(number, bool) or not isinstance(number, int):
        raise ConfigError(
            f"primary_rank={primary_rank!r} returned {number!r} on rank {info.rank}: it must return the primary's rank "
            "as an int, the same on every rank"
        )
    if number == 0:  # every scope has it, even if its size is unknown
        return 0
    size = _scope_size(info, rank_scope)
    if size is None or not -size <= number < size:
        raise _no_such_rank(info, rank_scope, number, size)
    return number % size


def opens_run(
    info: DistributedInfo | None, run_mode: RunMode, rank_scope: RankScope, primary_rank: PrimaryRank = 0
) -> bool:
    """Return whether the rank `info` has a run. No run id is needed for that.

    Raises:
        TopologyError: As `plan`.
        ConfigError: As `plan`.
    """
    primary = primary_rank_of(info, run_mode, rank_scope, primary_rank)
    return info is None or run_mode != "auto" or position(info, rank_scope) == primary


def plan(
    info: DistributedInfo | None,
    run_mode: RunMode,
    rank_scope: RankScope,
    base_id: str | None,
    parent_id: str | None = None,
    primary_rank: PrimaryRank = 0,
    role: str | None = None,
) -> RunPlan:
    """Return the plan of the rank `info`. It depends on the arguments alone.

    The suffix of an id depends on the requested scope, never on the current world size: an elastic job that shrinks to
    one node keeps its ids.

    Args:
        info: The rank; None outside a distributed job.
        run_mode: "auto": the scope's primary has the run. "shared": all ranks of the scope have the same run. "new":
            every rank has its own.
        rank_scope: "global": the scope is the job. "worker": it is a worker (= node).
        base_id: The id that all ranks of the job agree on. None if the tracker shall make a random id.
        parent_id: The run of the calling task, if it has one. A task without workers of its own continues that run,
            unless `run_mode` is "new". The calling task ends it.
        primary_rank: The scope's primary: a rank of the job or, with "worker", a local rank of each worker; or a
            callable that returns it. Negative numbers count from the end of the scope. No effect with "new". The ids
            do not depend on it.
        role: The name under which the job joins the run `base_id` of another job, or else `parent_id`.

    Raises:
        TopologyError: `rank_scope` is "worker", and the launcher does not set which worker this is. Or the scope does
            not have the rank `primary_rank`.
        ConfigError: `primary_rank` is a callable that returns anything but an int.
    """
    if role is not None:
        base_id, parent_id = base_id or parent_id, None
    if info is None and parent_id is not None and run_mode != "new":
        return RunPlan(opens=True, run_id=parent_id, writers=None, first=True)
    if info is None:
        return RunPlan(opens=True, run_id=base_id, primary=True, label=role, writers=1, first=True, role=role)
    primary_rank = primary_rank_of(info, run_mode, rank_scope, primary_rank)
    if not opens_run(info, run_mode, rank_scope, primary_rank):
        return RunPlan(opens=False)
    is_primary = run_mode == "new" or position(info, rank_scope) == primary_rank
    is_in_first_scope = rank_scope == "global" or info.worker_index == 0
    suffix, group_suffix = _suffixes(info, run_mode, rank_scope)
    return RunPlan(
        opens=True,
        run_id=_with_suffix(base_id, suffix),
        group=None if group_suffix is None else _with_suffix(base_id, group_suffix),
        primary=is_primary,
        label=_label(info, run_mode, role),
        writers=1 if run_mode != "shared" else info.world_size if rank_scope == "global" else info.local_world_size,
        first=info.rank == 0 if run_mode == "new" else is_primary and is_in_first_scope,
        role=role,
    )


def pages(
    workers: NodeRequest | None,
    run_mode: RunMode,
    rank_scope: RankScope,
    base_id: str,
    parent_id: str | None = None,
) -> tuple[Page, ...]:
    """Return the pages that links to a job lead to: of the runs and groups of `plan`, for every size of the job.

    Args:
        workers: None for a task without workers of its own.
        run_mode: As for `plan`.
        rank_scope: As for `plan`.
        base_id: As for `plan`.
        parent_id: As for `plan`.
    """
    if workers is None:
        return (Page("run", plan(None, run_mode, rank_scope, base_id, parent_id).run_id or ""),)
    count = 1 if rank_scope == "global" else workers.min_nodes
    first_ranks = itertools.islice(iter_ranks([1] * workers.max_nodes), count)  # no page depends on the others
    plans = [plan(info, run_mode, rank_scope, base_id) for info in first_ranks]
    if rank_scope == "worker" and workers.min_nodes != workers.max_nodes and run_mode != "new":
        return (Page("group", plans[0].group or ""),)  # the number of workers is not known yet
    is_new, is_of_job = run_mode == "new", rank_scope == "global"
    return tuple(
        Page(
            "group" if is_new else "run", (first.group if is_new else first.run_id) or "", None if is_of_job else index
        )
        for index, first in enumerate(plans)
    )


def needs_shared_id(info: DistributedInfo | None, run_mode: RunMode, rank_scope: RankScope) -> bool:
    """Return whether several ranks must know the same base id. False if only one rank, the primary, has a run."""
    if info is None or (run_mode == "auto" and info.num_workers == 1):
        return False
    return (run_mode, rank_scope) != ("auto", "global")


def position(info: DistributedInfo, rank_scope: RankScope) -> int | None:
    """Return the rank's number in its scope: its rank, or with "worker" its local rank."""
    return info.rank if rank_scope == "global" else info.local_rank


def _scope_size(info: DistributedInfo, rank_scope: RankScope) -> int | None:
    """Return the number of ranks in the scope; None if the launcher does not set it."""
    if rank_scope == "global":
        return info.world_size
    return info.world_size if info.num_workers == 1 else info.local_world_size


def _no_such_rank(info: DistributedInfo, rank_scope: RankScope, number: int, size: int | None) -> TopologyError:
    if size is None:
        return TopologyError(
            f"primary_rank={number} with rank_scope='worker', but {info.launcher} does not set how many ranks worker "
            f"{info.worker_index} has. Use primary_rank=0, start with torchrun or srun, or set LOCAL_WORLD_SIZE in "
            "each process."
        )
    if rank_scope == "worker":
        place, kind = f"worker {info.worker_index}, whose local ranks", "local rank of each worker"
    else:
        place, kind = "this job, whose ranks", "rank of the job"
    return TopologyError(
        f"primary_rank={number} is not in {place} are 0 to {size - 1}, or {-size} to -1 from the end. Pass a {kind}; "
        "-1 is the last one of every size."
    )


def _require_worker(info: DistributedInfo, rank_scope: RankScope) -> None:
    if rank_scope == "worker" and (info.worker_index is None or info.local_rank is None):
        raise TopologyError(
            f"rank_scope='worker', but {info.launcher} does not set the worker (node) and the local rank of rank "
            f"{info.rank}: worker_index={info.worker_index}, local_rank={info.local_rank}. Use rank_scope='global', "
            "start with torchrun or srun, or set NODE_RANK, LOCAL_RANK, RANK and WORLD_SIZE in each process."
        )


def _suffixes(info: DistributedInfo, run_mode: RunMode, rank_scope: RankScope) -> tuple[str, str | None]:
    """Return the suffixes of the base id for the run's id, such as "-rank-3", and for its group (None for no group)."""
    worker = f"-worker-{info.worker_index}"
    if run_mode == "new":
        return (f"{worker}-rank-{info.local_rank}", worker) if rank_scope == "worker" else (f"-rank-{info.rank}", "")
    return (worker, "") if rank_scope == "worker" else ("", None)


def _label(info: DistributedInfo, run_mode: RunMode, role: str | None) -> str:
    if run_mode == "shared":  # the only mode in which the ranks of a worker write to one run
        return f"{role}-rank-{info.rank}" if role else f"rank-{info.rank}"
    return role or (f"rank-{info.rank}" if info.worker_index is None else f"worker-{info.worker_index}")


def _with_suffix(base_id: str | None, suffix: str) -> str | None:
    return None if base_id is None else base_id + suffix

"""The plan: the table of modes and scopes, and properties that hold for every topology."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flyteplugins_tracking import DistributedInfo, RunPlan, TopologyError, plan

INFO = DistributedInfo(rank=5, world_size=8, local_rank=1, local_world_size=4, worker_index=1, num_workers=2)
FIRST = DistributedInfo(rank=4, world_size=8, local_rank=0, local_world_size=4, worker_index=1, num_workers=2)
MODES = st.sampled_from(["auto", "shared", "new"])
SCOPES = st.sampled_from(["global", "worker"])


def world(sizes: list[int]) -> list[DistributedInfo]:
    """Return every rank of a job whose workers have `sizes` processes."""
    places = [(worker, local) for worker, size in enumerate(sizes) for local in range(size)]
    return [
        DistributedInfo(
            rank=rank,
            world_size=len(places),
            local_rank=local,
            local_world_size=sizes[worker],
            worker_index=worker,
            num_workers=len(sizes),
        )
        for rank, (worker, local) in enumerate(places)
    ]


WORLDS = st.lists(st.integers(1, 9), min_size=1, max_size=9).map(world)


@pytest.mark.parametrize(
    ("info", "run_mode", "rank_scope", "expected"),
    [
        (INFO, "auto", "global", RunPlan(opens=False)),
        (INFO, "auto", "worker", RunPlan(opens=False)),
        (FIRST, "auto", "global", RunPlan(opens=False)),
        (FIRST, "auto", "worker", RunPlan(True, "b-worker-1", "b", True, "worker-1", 1)),
        (INFO, "shared", "global", RunPlan(True, "b", None, False, "worker-1", 8)),
        (INFO, "shared", "worker", RunPlan(True, "b-worker-1", "b", False, "worker-1", 4)),
        (FIRST, "shared", "worker", RunPlan(True, "b-worker-1", "b", True, "worker-1", 4)),
        (INFO, "new", "global", RunPlan(True, "b-rank-5", "b", True, "worker-1", 1)),
        (INFO, "new", "worker", RunPlan(True, "b-worker-1-rank-1", "b-worker-1", True, "worker-1", 1)),
    ],
)
def test_the_table(info, run_mode, rank_scope, expected):
    assert plan(info, run_mode, rank_scope, "b") == expected


def test_rank_0_has_the_run_of_the_job():
    first = world([2, 2])[0]
    assert plan(first, "auto", "global", "b") == RunPlan(True, "b", None, True, "worker-0", 1)


@pytest.mark.parametrize("run_mode", ["auto", "shared", "new"])
@pytest.mark.parametrize("rank_scope", ["global", "worker"])
def test_outside_of_a_job_there_is_one_run_with_the_base_id(run_mode, rank_scope):
    assert plan(None, run_mode, rank_scope, "b") == RunPlan(True, "b", None, True, None, 1)
    assert plan(None, run_mode, rank_scope, None).run_id is None


def test_a_job_that_shrinks_to_one_process_keeps_its_ids():
    (alone,) = world([1])
    assert plan(alone, "auto", "worker", "b").run_id == "b-worker-0"
    assert plan(alone, "new", "global", "b").run_id == "b-rank-0"


@pytest.mark.parametrize("run_mode", ["auto", "shared", "new"])
def test_worker_scope_without_a_known_worker_is_refused(run_mode):
    unknown = DistributedInfo(rank=3, world_size=4, local_rank=1, local_world_size=2, launcher="openmpi")
    with pytest.raises(TopologyError, match=r"rank_scope='worker', but openmpi does not set .* rank 3: "):
        plan(unknown, run_mode, "worker", "b")


@given(WORLDS, MODES, SCOPES)
def test_every_run_has_one_primary(ranks, run_mode, rank_scope):
    plans = [plan(info, run_mode, rank_scope, "b") for info in ranks]
    primaries = Counter(p.run_id for p in plans if p.primary)
    assert primaries == {p.run_id: 1 for p in plans if p.opens}


@given(WORLDS)
def test_auto_global_opens_one_run_on_rank_0(ranks):
    assert [info.rank for info in ranks if plan(info, "auto", "global", "b").opens] == [0]


@given(WORLDS, SCOPES)
def test_new_gives_every_rank_its_own_id(ranks, rank_scope):
    assert len({plan(info, "new", rank_scope, "b").run_id for info in ranks}) == len(ranks)


@given(WORLDS, MODES)
def test_worker_scope_never_shares_an_id_between_workers(ranks, run_mode):
    owners: dict[str | None, set[int | None]] = {}
    for info in ranks:
        p = plan(info, run_mode, "worker", "b")
        if p.opens:
            owners.setdefault(p.run_id, set()).add(info.worker_index)
    assert all(len(workers) == 1 for workers in owners.values())
    assert len(set().union(*owners.values())) == ranks[-1].num_workers


@given(WORLDS, MODES, SCOPES)
def test_writers_is_how_many_ranks_have_the_run(ranks, run_mode, rank_scope):
    plans = [plan(info, run_mode, rank_scope, "b") for info in ranks]
    having = Counter(p.run_id for p in plans if p.opens)
    assert all(p.writers == having[p.run_id] for p in plans if p.opens)

"""The plan: the table of modes and scopes, and properties that hold for every topology."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flyteplugins_tracking import ConfigError, DistributedInfo, RunPlan, TopologyError, plan
from flyteplugins_tracking._rank.plan import needs_shared_id

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
        (INFO, "shared", "global", RunPlan(True, "b", None, False, "rank-5", 8)),
        (INFO, "shared", "worker", RunPlan(True, "b-worker-1", "b", False, "rank-5", 4)),
        (FIRST, "shared", "worker", RunPlan(True, "b-worker-1", "b", True, "rank-4", 4)),
        (INFO, "new", "global", RunPlan(True, "b-rank-5", "b", True, "worker-1", 1)),
        (INFO, "new", "worker", RunPlan(True, "b-worker-1-rank-1", "b-worker-1", True, "worker-1", 1)),
    ],
)
def test_the_table(info, run_mode, rank_scope, expected):
    assert plan(info, run_mode, rank_scope, "b") == expected


def test_rank_0_has_the_run_of_the_job():
    first = world([2, 2])[0]
    assert plan(first, "auto", "global", "b") == RunPlan(True, "b", None, True, "worker-0", 1, True)


@pytest.mark.parametrize("run_mode", ["auto", "shared", "new"])
@pytest.mark.parametrize("rank_scope", ["global", "worker"])
def test_outside_of_a_job_there_is_one_run_with_the_base_id(run_mode, rank_scope):
    assert plan(None, run_mode, rank_scope, "b") == RunPlan(True, "b", None, True, None, 1, True)
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


def last(info: DistributedInfo) -> int:
    return info.world_size - 1


def last_local(info: DistributedInfo) -> int:
    return (info.local_world_size or 1) - 1


@pytest.mark.parametrize(
    ("primary_rank", "primary"),
    [(0, 0), (2, 2), (-1, 3), (-4, 0), (last, 3), (lambda _: -2, 2)],
    ids=["0", "2", "-1", "-4", "last", "callable"],
)
@pytest.mark.parametrize("run_mode", ["auto", "shared"])
def test_the_primary_of_the_job_is_the_rank_that_is_asked_for(run_mode, primary_rank, primary):
    plans = [plan(info, run_mode, "global", "b", primary_rank=primary_rank) for info in world([2, 2])]
    assert [rank for rank, p in enumerate(plans) if p.primary] == [primary]
    assert [rank for rank, p in enumerate(plans) if p.first] == [primary]
    assert [rank for rank, p in enumerate(plans) if p.opens] == ([primary] if run_mode == "auto" else [0, 1, 2, 3])


@pytest.mark.parametrize(
    ("primary_rank", "primaries"),
    [(0, [0, 3]), (1, [1, 4]), (-1, [2, 4]), (last_local, [2, 4])],
    ids=["0", "1", "-1", "last"],
)
@pytest.mark.parametrize("run_mode", ["auto", "shared"])
def test_the_primary_of_a_worker_is_a_local_rank(run_mode, primary_rank, primaries):
    plans = [plan(info, run_mode, "worker", "b", primary_rank=primary_rank) for info in world([3, 2])]
    assert [rank for rank, p in enumerate(plans) if p.primary] == primaries
    assert [rank for rank, p in enumerate(plans) if p.first] == primaries[:1]
    assert [rank for rank, p in enumerate(plans) if p.opens] == (primaries if run_mode == "auto" else [*range(5)])


@pytest.mark.parametrize("rank_scope", ["global", "worker"])
@pytest.mark.parametrize("primary_rank", [1, -1, 99, lambda _: 1 / 0], ids=["1", "-1", "99", "callable"])
def test_in_new_and_outside_of_a_job_the_primary_rank_changes_nothing(rank_scope, primary_rank):
    for info, run_mode in [*((info, "new") for info in world([2, 2])), (None, "auto"), (None, "shared")]:
        changed = plan(info, run_mode, rank_scope, "b", primary_rank=primary_rank)
        assert changed == plan(info, run_mode, rank_scope, "b")


@pytest.mark.parametrize("run_mode", ["auto", "shared"])
@pytest.mark.parametrize("number", [4, -5])
def test_a_primary_that_the_job_does_not_have_is_refused_on_every_rank(run_mode, number):
    for info in world([2, 2]):
        for primary_rank in (number, lambda _: number):
            with pytest.raises(
                TopologyError, match=rf"primary_rank={number} is not in this job, whose ranks are 0 to 3"
            ):
                plan(info, run_mode, "global", "b", primary_rank=primary_rank)


@pytest.mark.parametrize("run_mode", ["auto", "shared"])
@pytest.mark.parametrize("number", [2, -3])
def test_a_primary_that_a_worker_does_not_have_is_refused_there(run_mode, number):
    first, *_, last_rank = world([3, 2])
    plan(first, run_mode, "worker", "b", primary_rank=number)
    with pytest.raises(TopologyError, match=rf"primary_rank={number} is not in worker 1, whose local ranks are 0 to 1"):
        plan(last_rank, run_mode, "worker", "b", primary_rank=number)


def test_the_last_rank_follows_the_size_of_the_job_and_keeps_the_id():
    for sizes in ([2], [2, 2], [4, 4, 4], [1]):
        plans = [plan(info, "auto", "global", "b", primary_rank=-1) for info in world(sizes)]
        assert [p.run_id for p in plans] == [None] * (sum(sizes) - 1) + ["b"]


def test_a_local_rank_other_than_0_needs_the_number_of_local_ranks():
    unknown = DistributedInfo(rank=1, world_size=4, local_rank=1, worker_index=0, launcher="env")
    assert plan(unknown, "shared", "worker", "b").opens
    with pytest.raises(TopologyError, match=r"env does not set how many ranks worker 0 has.*LOCAL_WORLD_SIZE"):
        plan(unknown, "shared", "worker", "b", primary_rank=-1)


@pytest.mark.parametrize("value", [None, "3", 3.0, True])
def test_a_callable_must_return_an_int(value):
    with pytest.raises(
        ConfigError, match=rf"returned {value!r} on rank 5: it must return the primary's rank as an int"
    ):
        plan(INFO, "auto", "global", "b", primary_rank=lambda _: value)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9), MODES, SCOPES, st.data())
def test_every_run_has_one_primary(sizes, run_mode, rank_scope, data):
    size = sum(sizes) if rank_scope == "global" else min(sizes)
    primary_rank = data.draw(st.integers(-size, size - 1))
    ranks = world(sizes)
    plans = [plan(info, run_mode, rank_scope, "b", primary_rank=primary_rank) for info in ranks]
    primaries = Counter(p.run_id for p in plans if p.primary)
    assert primaries == {p.run_id: 1 for p in plans if p.opens}
    assert [p.primary for p in plans if p.first] == [True]
    before = [plan(info, run_mode, rank_scope, "b") for info in ranks]
    assert {(p.run_id, p.group) for p in plans if p.opens} == {(p.run_id, p.group) for p in before if p.opens}


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


@given(ranks=WORLDS, run_mode=MODES, rank_scope=SCOPES)
def test_ranks_agree_on_an_id_if_and_only_if_several_have_a_run(ranks, run_mode, rank_scope):
    """One rank alone needs no agreement, for which DeepSpeed and Composer offer nothing before the process group."""
    planned = [plan(info, run_mode, rank_scope, "base") for info in ranks]
    runs = sum(one.opens for one in planned)
    is_asked = {needs_shared_id(info, run_mode, rank_scope) for info in ranks}
    assert len(is_asked) == 1
    if run_mode == "auto":
        assert is_asked == {runs > 1}
    else:
        assert is_asked == {True}

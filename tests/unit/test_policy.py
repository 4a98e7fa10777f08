"""The plan: the table of modes and scopes, and properties that hold for every topology."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flyteplugins_tracking import ConfigError, DistributedInfo, RunPlan, TopologyError, plan
from flyteplugins_tracking._rank.plan import RANK_SCOPES, RUN_MODES, needs_shared_id

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
        (world([2, 2])[0], "auto", "global", RunPlan(True, "b", None, True, "worker-0", 1, True)),
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


def test_outside_of_a_job_there_is_one_run_with_the_base_id_and_a_job_that_shrinks_keeps_its_ids():
    alone = RunPlan(True, "b", None, True, None, 1, True)
    for run_mode, rank_scope in itertools.product(RUN_MODES, RANK_SCOPES):
        assert plan(None, run_mode, rank_scope, "b") == alone
        assert plan(None, run_mode, rank_scope, None).run_id is None
    (shrunk,) = world([1])
    assert plan(shrunk, "auto", "worker", "b").run_id == "b-worker-0"
    assert plan(shrunk, "new", "global", "b").run_id == "b-rank-0"


@pytest.mark.parametrize("run_mode", ["auto", "shared", "new"])
def test_worker_scope_without_a_known_worker_is_refused(run_mode):
    unknown = DistributedInfo(rank=3, world_size=4, local_rank=1, local_world_size=2, launcher="openmpi")
    with pytest.raises(TopologyError, match=r"rank_scope='worker', but openmpi does not set .* rank 3: "):
        plan(unknown, run_mode, "worker", "b")


@pytest.mark.parametrize("run_mode", ["auto", "shared"])
@pytest.mark.parametrize(
    ("rank_scope", "primary_rank", "primaries"),
    [
        ("global", 2, [2]),
        ("global", -1, [4]),
        ("global", -5, [0]),
        ("global", lambda info: info.world_size - 2, [3]),
        ("worker", 0, [0, 3]),
        ("worker", 1, [1, 4]),
        ("worker", -1, [2, 4]),
        ("worker", lambda info: (info.local_world_size or 1) - 1, [2, 4]),
    ],
)
def test_the_primary_is_the_rank_of_the_job_or_of_the_worker_that_is_asked_for(
    run_mode, rank_scope, primary_rank, primaries
):
    plans = [plan(info, run_mode, rank_scope, "b", primary_rank=primary_rank) for info in world([3, 2])]
    assert [rank for rank, p in enumerate(plans) if p.primary] == primaries
    assert [rank for rank, p in enumerate(plans) if p.first] == primaries[:1]
    assert [rank for rank, p in enumerate(plans) if p.opens] == (primaries if run_mode == "auto" else [*range(5)])


@pytest.mark.parametrize("primary_rank", [1, -1, 99, lambda _: 1 / 0], ids=["1", "-1", "99", "callable"])
def test_in_new_and_outside_of_a_job_the_primary_rank_changes_nothing(primary_rank):
    for info, run_mode in [*((info, "new") for info in world([2, 2])), (None, "auto"), (None, "shared")]:
        for rank_scope in RANK_SCOPES:
            changed = plan(info, run_mode, rank_scope, "b", primary_rank=primary_rank)
            assert changed == plan(info, run_mode, rank_scope, "b")


@pytest.mark.parametrize("run_mode", ["auto", "shared"])
def test_a_primary_that_the_job_or_a_worker_does_not_have_is_refused_there(run_mode):
    first, *others = world([3, 2])
    for number in (5, -6):
        for info, primary_rank in itertools.product((first, *others), (number, lambda _, number=number: number)):
            with pytest.raises(TopologyError, match=rf"primary_rank={number} is not in this job, whose ranks are 0 to"):
                plan(info, run_mode, "global", "b", primary_rank=primary_rank)
    for number in (2, -3):
        plan(first, run_mode, "worker", "b", primary_rank=number)
        with pytest.raises(TopologyError, match=rf"={number} is not in worker 1, whose local ranks are 0 to 1"):
            plan(others[-1], run_mode, "worker", "b", primary_rank=number)
    for value in (None, "3", 3.0, True):
        with pytest.raises(
            ConfigError, match=rf"returned {value!r} on rank 5: it must return the primary's rank as an"
        ):
            plan(INFO, run_mode, "global", "b", primary_rank=lambda _, value=value: value)


def test_a_local_rank_other_than_0_needs_the_number_of_local_ranks():
    unknown = DistributedInfo(rank=1, world_size=4, local_rank=1, worker_index=0, launcher="env")
    assert plan(unknown, "shared", "worker", "b").opens
    with pytest.raises(TopologyError, match=r"env does not set how many ranks worker 0 has.*LOCAL_WORLD_SIZE"):
        plan(unknown, "shared", "worker", "b", primary_rank=-1)


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


@given(WORLDS, MODES, SCOPES)
def test_a_runs_writers_are_those_that_have_it_and_no_two_workers_or_in_new_no_two_ranks_share_one(
    ranks, run_mode, rank_scope
):
    having: dict[str | None, list[DistributedInfo]] = {}
    plans = [plan(info, run_mode, rank_scope, "b") for info in ranks]
    for info, p in zip(ranks, plans, strict=True):
        if p.opens:
            having.setdefault(p.run_id, []).append(info)
    assert all(p.writers == len(having[p.run_id]) for p in plans if p.opens)
    if run_mode == "new":
        assert len(having) == len(ranks)
    elif rank_scope == "worker":
        assert all(len({info.worker_index for info in infos}) == 1 for infos in having.values())
        assert len(having) == ranks[-1].num_workers
    else:
        assert [[info.rank for info in infos] for infos in having.values()] == (
            [[0]] if run_mode == "auto" else [[*range(len(ranks))]]
        )


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

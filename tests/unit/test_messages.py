"""What a user reads besides the runs: the frames of an error, warnings, and how to look at a run."""

from __future__ import annotations

import traceback

import pytest
from support.jobs import PACKAGE

from flyteplugins_tracking import DistributedInfo, TopologyError, override_distributed_info, tracking_init
from flyteplugins_tracking.trackers import Handle, RunRequest, Tracker


class ViewedRun(Handle):
    def __init__(self, run_id: str) -> None:
        self.id, self.run = run_id, object()

    def how_to_view(self) -> str:
        return f"view {self.id}"


class ViewedTracker(Tracker):
    name = title = "viewed"

    def open(self, request: RunRequest) -> ViewedRun:
        return ViewedRun(str(request.plan.run_id))


def rank(number: int) -> DistributedInfo:
    return DistributedInfo(
        rank=number, world_size=4, local_rank=number, local_world_size=4, worker_index=0, num_workers=1
    )


def train_on(rank_number: int, **arguments: object) -> None:
    @tracking_init(tracker=ViewedTracker(), project="tests", id="viewed", **arguments)
    def train() -> None:
        pass

    with override_distributed_info(rank(rank_number)):
        train()


def test_an_error_at_the_call_shows_the_users_frames_and_few_of_ours(monkeypatch):
    for name, value in {"RANK": "3", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)

    @tracking_init(project="tests")
    def train() -> None:
        pass

    with pytest.raises(TopologyError) as raised:
        train()
    assert str(raised.value).endswith("python -m flyteplugins_tracking")
    frames = traceback.extract_tb(raised.value.__traceback__)
    assert frames[0].name == "test_an_error_at_the_call_shows_the_users_frames_and_few_of_ours"
    own = [frame.name for frame in frames if frame.filename.startswith(str(PACKAGE))]
    assert own in (["tracked", "__enter__"], ["__call__", "tracked", "__enter__"])  # the latter with Flyte loaded


@pytest.mark.parametrize(
    ("run_mode", "ranks_that_print"), [("auto", [0]), ("shared", [0]), ("new", [0])], ids=["auto", "shared", "new"]
)
def test_the_first_primary_prints_how_to_look_at_the_run(capsys, run_mode, ranks_that_print):
    printed = []
    for number in range(4):
        train_on(number, run_mode=run_mode)
        if "view viewed" in capsys.readouterr().err:
            printed.append(number)
    assert printed == ranks_that_print


@pytest.mark.parametrize(("run_mode", "warnings"), [("auto", 1), ("new", 1), ("shared", 0)])
def test_a_rank_prefix_that_has_no_effect_is_reported_once(caplog, run_mode, warnings):
    for number in range(4):
        train_on(number, run_mode=run_mode, rank_prefix=True)
    assert caplog.text.count("rank_prefix=True is ignored") == warnings


@pytest.mark.parametrize(
    ("run_mode", "rewinds", "reason"),
    [
        ("auto", False, "the service cannot do that"),
        ("new", False, "the service cannot do that"),
        ("shared", True, "several ranks write to the run"),
        ("auto", True, None),
    ],
)
def test_a_rollback_that_cannot_be_rewound_is_reported_once(caplog, monkeypatch, run_mode, rewinds, reason):
    monkeypatch.setattr(ViewedTracker, "rewinds", rewinds)
    for number in range(4):
        train_on(number, run_mode=run_mode, rollback="rewind")
    assert caplog.text.count("rollback='rewind' is ignored") == (reason is not None)
    assert str(reason or "") in caplog.text

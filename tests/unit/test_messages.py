"""What a user reads besides the runs: the frames of an error, warnings, and how to look at a run."""

from __future__ import annotations

import shlex

import pytest
from support.away import Away, log

from flyteplugins_tracking import DistributedInfo, override_distributed_info, tracking_init
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


@pytest.mark.parametrize("run_mode", ["auto", "shared", "new"])
def test_the_first_primary_prints_how_to_look_at_the_run(capsys, run_mode):
    printed = []
    for number in range(4):
        train_on(number, run_mode=run_mode)
        if "view viewed" in capsys.readouterr().err:
            printed.append(number)
    assert printed == [0]


@pytest.mark.parametrize("is_silent", [False, True])
def test_the_last_lines_of_an_offline_run_say_how_to_send_it(bare_environment, tmp_path, capfd, is_silent):
    import wandb

    # Whatever W&B has read of the environment of an earlier test.
    bare_environment.setattr("wandb.errors.term._silent", is_silent)
    settings = wandb.Settings(mode="offline", silent=is_silent)
    place = tmp_path / "my logs"
    place.mkdir()

    @tracking_init(tracker="wandb", project="llm", id="local", dir=str(place), settings=settings)
    def train() -> None:
        pass

    train()
    lines = [line for line in capfd.readouterr().err.splitlines() if "flyteplugins-tracking send" in line]
    assert len(lines) == (not is_silent)
    for line in lines:
        (directory,) = (place / "wandb").glob("offline-run-*-local")
        assert shlex.split(line)[-1] == str(directory)


def test_a_run_in_files_says_how_to_send_it_with_a_command_for_a_shell_whatever_the_id_is(
    monkeypatch, tmp_path, caplog, capsys
):
    monkeypatch.setattr(Away, "name", "trackio")
    monkeypatch.chdir(tmp_path)
    run_id = "a b; touch c $(touch d) `e` 'f'"
    log(None, [], id=run_id)
    (message,) = [record.message for record in caplog.records if "flyteplugins-tracking send" in record.message]
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("trackio: to look at run a b;")]
    directory = str(tmp_path / "tracking-offline" / f"trackio-{run_id}")
    assert shlex.split(message.partition("Away answers: ")[2]) == ["flyteplugins-tracking", "send", directory]
    assert line.endswith(message.partition("Away answers: ")[2])


@pytest.mark.parametrize(("run_mode", "warnings"), [("auto", 1), ("new", 1), ("shared", 0)])
def test_a_rank_prefix_that_has_no_effect_is_reported_once(caplog, run_mode, warnings):
    for number in range(4):
        train_on(number, run_mode=run_mode, rank_prefix=True)
    assert caplog.text.count("rank_prefix=True is ignored") == warnings

"""The arguments of jobs that share a run, their plans and ids, and the numbers of their rows."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
from support import jobs

from flyteplugins_tracking import ConfigError, IdentityError, get_run, tracking_init
from flyteplugins_tracking._commands.watch import _name_of
from flyteplugins_tracking._rank.info import iter_ranks
from flyteplugins_tracking._rank.plan import RunPlan, plan
from flyteplugins_tracking.testing import simulate
from flyteplugins_tracking.testing.simulation import recording
from flyteplugins_tracking.trackers import Handle, Tracker
from flyteplugins_tracking.trackers.journal import Journal
from flyteplugins_tracking.trackers.rows import RowBuffer, RowPath
from flyteplugins_tracking.trackers.wandb import attempts, outbox
from flyteplugins_tracking.trackers.wandb.attempts import in_order, label_in
from flyteplugins_tracking.trackers.wandb.sender import Sender


class OneWriter(Tracker):
    """A third party's tracker that knows nothing of roles."""

    name = title = "one-writer"

    def open(self, request):
        return Handle()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"role": "a", "roles": ["b"]}, "pass one of the two"),
        ({"role": "rollout 0"}, "got 'rollout 0'"),
        ({"role": "0"}, "beginning with a letter"),
        ({"role": "owner"}, "'owner'"),
        ({"role": "nodes"}, "'nodes' of a role is taken"),
        ({"roles": ["tracking_init"]}, "'tracking_init' of a role is taken"),
        ({"role": "r" * 65}, "at most 64"),
        ({"roles": ["a/b"]}, "got 'a/b'"),
        ({"roles": ["a", "a"]}, "'a' twice"),
        ({"roles": "rollout-0"}, "a sequence of strings"),
        ({"role": ""}, "non-empty"),
        ({"role": "a", "run_mode": "shared"}, "run_mode='shared'"),
        ({"role": "a", "rank_scope": "worker"}, "rank_scope='worker'"),
        ({"roles": ["a"], "run_mode": "new"}, "one run for the job"),
        ({"roles": ["a"], "rank_scope": "worker"}, "one run for the job"),
        ({"roles": ["eval"], "config": {"eval": {"every": 10}}}, "the key 'eval'"),
        ({"role": "a", "tracker": OneWriter()}, "one-writer does not support role='a'"),
        ({"roles": ["a"], "tracker": OneWriter()}, "one-writer does not support roles=['a']"),
        *(
            (
                {"tracker": tracker, **argument},
                f"{title} does not support {shown}: jobs share a run with W&B only. Leave out roles= and role=; for a "
                "run each in one group, pass the same group= in all of these jobs, and an id= of its own in each",
            )
            for tracker, title in (("mlflow", "MLflow"), ("pluto", "Pluto"), ("trackio", "Trackio"))
            for argument, shown in (({"role": "a"}, "role='a'"), ({"roles": ["a"]}, "roles=['a']"))
        ),
        ({"role": "a", "config": "config.yaml"}, "a file"),
        ({"roles": ["a"], "resume": "must"}, "resume="),
    ],
)
def test_arguments_that_cannot_work_are_refused_at_decoration(arguments, text):
    with pytest.raises(ConfigError) as error:
        tracking_init(project="rl", **arguments)
    assert text in str(error.value)


def test_a_role_speaks_for_its_job_and_does_not_end_the_run():
    assert plan(None, "auto", "global", "b", role="eval") == RunPlan(
        True, "b", None, True, "eval", 1, True, role="eval"
    )
    plans = [plan(info, "auto", "global", "b", role="eval") for info in iter_ranks([2, 2])]
    assert [(one.opens, one.primary, one.ends_run) for one in plans] == [(True, True, False)] + [(False,) * 3] * 3
    assert (plans[0].run_id, plans[0].label) == ("b", "eval")
    plans = [plan(info, "shared", "global", "b", role="eval") for info in iter_ranks([2, 2])]
    assert [one.label for one in plans] == [f"eval-rank-{rank}" for rank in range(4)]


def test_a_role_joins_the_run_of_the_calling_task():
    joined = plan(None, "auto", "global", None, parent_id="parents", role="eval")
    assert (joined.run_id, joined.primary, joined.ends_run) == ("parents", True, False)


def test_a_role_without_an_id_is_refused_at_the_call(monkeypatch):
    for name in jobs.variables_of_launchers() | {"WANDB_RUN_ID"}:
        monkeypatch.delenv(name, raising=False)
    work = tracking_init(project="rl", role="eval")(lambda: None)
    with pytest.raises(IdentityError, match=r"role='eval' joins the run of another job.*WANDB_RUN_ID"):
        work()


def test_a_simulation_shows_a_role_beside_its_owner():
    @tracking_init(project="rl", id="r", roles=["eval"], config={"lr": 1})
    def train():
        if (run := get_run()) is not None:
            run.log({"loss": 1})

    @tracking_init(project="rl", id="r", role="eval", config={"split": "test"})
    def evaluate():
        run = get_run()
        run.config["more"] = 2
        run.log({"accuracy": 0.5}, step=3)
        raise SystemExit(3)

    with recording() as runs:
        train()
        with pytest.raises(SystemExit):
            evaluate()
        (run,) = runs
    assert [row.values for row in run.rows] == [{"loss": 1}, {"eval/accuracy": 0.5}]
    assert run.config == {"lr": 1, "tracking_init": {"roles": ["eval"]}, "eval": {"split": "test", "more": 2}}
    assert (run.exit_codes, run.status) == ((0,), "finished")
    assert (run.summary["roles/eval/state"], run.summary["roles/eval/exit_code"]) == ("failed", 3)
    assert run.summary["roles/eval/failure/type"] == "SystemExit"
    assert "SystemExit: 3" in run.texts["roles/eval/failure"]
    simulated = simulate(train, 1, 2)
    assert len(simulated.runs) == 1


def test_an_owner_that_logs_below_the_name_of_a_role_is_warned_once(caplog):
    gate = SimpleNamespace(refuses=lambda: False, call=lambda write, _: write())
    path, rows = RowPath("W&B", gate, lambda: None, dict, ["eval", "rollout-1"]), []
    for value in range(3):
        path.log({"loss": value, "eval": value, "rollout-10/loss": value}, rows.append, rows.append)
    assert caplog.messages == []
    for value in range(3):
        path.log({"loss": value, f"eval/loss-{value}": value}, rows.append, rows.append)
    (warning,) = caplog.messages
    assert "the owner of the run logs 'eval/loss-0', and its role 'eval' has keys below that name" in warning
    assert len(rows) == 6


def test_rows_without_a_step_are_counted_from_the_given_ones():
    rows = []
    buffer = RowBuffer("eval/step", "eval/", lambda: None, next_step=7)
    buffer.log(rows.append, {"x": 0})
    buffer.log(rows.append, {"x": 1}, step=20)
    buffer.log(rows.append, {"y": 2}, commit=False)
    buffer.log(rows.append, {"x": 2})
    buffer.log(rows.append, {"x": 3})
    assert [row["eval/step"] for row in rows] == [7, 20, 21, 22]
    assert rows[2] == {"eval/x": 2, "eval/y": 2, "eval/step": 21}


def test_a_row_of_a_role_that_has_the_column_step_gives_its_step_with_it():
    rows = []
    buffer = RowBuffer("eval/step", "eval/", lambda: None, next_step=0)
    for given in (100, np.int64(200), "at the end"):
        buffer.log(rows.append, {"x": 0, "step": given})
    buffer.log(rows.append, {"x": 0}, step=np.int64(300))
    buffer.log(rows.append, {"x": 0})
    assert [row["eval/step"] for row in rows] == [100, 200, "at the end", 300, 301]


def test_numbers_of_rows_differ_between_processes_and_are_exact_in_json():
    pytest.importorskip("wandb")
    taken = Counter(number for _ in range(20) for number in itertools.islice(outbox.row_numbers(), 3))
    assert max(taken.values()) == 1
    assert all(int(float(number)) == number and number < 2**53 for number in taken)


def test_the_primary_is_sent_behind_the_other_ranks_and_roles_behind_it(tmp_path):
    names = ["1-r", "2-r-rank-1", "3-r-rank-10", "4-r-eval", "5-r", "6-other"]
    directories = [tmp_path / f"offline-run-20260101_00000{name}" for name in names]
    for directory in directories:
        directory.mkdir()
        (directory / f"run-{'other' if 'other' in directory.name else 'r'}.wandb").touch()
    ordered = [path.name.partition("_00000")[2] for path in in_order(reversed(directories))]
    assert ordered == ["2-r-rank-1", "3-r-rank-10", "1-r", "5-r", "6-other", "4-r-eval"]


@pytest.mark.parametrize("run_id", ["r", "run"])
def test_a_directory_whose_name_was_taken_is_of_no_role(tmp_path, run_id):
    """W&B's client gives it a number. Its rows were sent beside those of the same run, and replaced some of them."""
    attempts = [tmp_path / f"offline-run-20260101_000001-{name}" for name in (run_id, f"{run_id}-1")]
    for directory in attempts:
        directory.mkdir()
        (directory / f"run-{run_id}.wandb").touch()
    assert [label_in(directory) for directory in attempts] == ["", ""]
    assert len({_name_of(directory) for directory in attempts}) == 1
    assert in_order(reversed(attempts)) == attempts


# Which of the rows that are left have arrived


class Disk:
    """Attempts of a role that were killed, each with a journal; and the numbers of the rows that W&B has, in order.

    A process has numbers of one thousand.
    """

    def __init__(self, directory: Path) -> None:
        self.directory, self.arrived, self.logged = directory, [], []
        self.place = attempts.Place("https://s", "e", "p", "r")

    def attempt(self, numbers: Sequence[int]) -> None:
        """Leave an attempt with these numbers of rows. A row has its number as its step."""
        folder = self.directory / f"run-202601{len(list(self.directory.iterdir())):02}_000000-r"
        folder.mkdir()
        header = {"place": self.place, "step": None, "column": "roles/a/row", "since": 0}
        journal = Journal(folder, "rows-0", header)
        for number in numbers:
            row = {"roles/a/row": _sent(number), "_timestamp": 1.0}
            journal.add(attempts.record_of(json.dumps(row).encode()))
            self.logged.append(number)
        journal.close()

    def lacking(self, page: int = 4) -> list[int]:
        """The numbers that are to be sent. `asked` is how many parts of those that have arrived were read."""
        self.asked = 0

        def parts(*_: object) -> Iterator[list[int]]:
            for end in range(len(self.arrived), 0, -page):
                self.asked += 1
                yield [_sent(number) for number in self.arrived[max(0, end - page) : end]]

        found = SimpleNamespace(rows=len(self.arrived), last_step=len(self.arrived) - 1, values_backwards=parts)
        sender = Sender(None, self.place, found, is_shared=True)
        sent = [row.values["roles/a/row"] for row in sender.lacking(sorted(self.directory.iterdir()))]
        return [1000 * (number >> outbox._COUNT_BITS) + number % 2**outbox._COUNT_BITS for number in sent]


def _sent(number: int) -> int:
    return (number // 1000) * 2**outbox._COUNT_BITS + number % 1000


@pytest.mark.parametrize("count", [0, 1, 500, 999, 1000])
def test_the_last_row_of_a_writer_that_has_arrived_tells_those_before_it(tmp_path, count):
    disk = Disk(tmp_path)
    disk.attempt(range(1000))
    disk.arrived = list(range(count))
    assert disk.lacking() == list(range(count, 1000))
    assert disk.asked == bool(count)


def test_rows_that_threads_have_logged_in_another_order_than_their_numbers_are_not_lost(tmp_path):
    disk = Disk(tmp_path)
    disk.attempt([0, 3, 1, 2, 5, 4])
    disk.arrived = [0, 3]
    assert disk.lacking() == [1, 2, 5, 4]
    disk.arrived = [0, 3, 1, 2, 5]
    assert disk.lacking(page=1) == [4]


def test_other_writers_rows_in_between_are_read_past(tmp_path):
    disk = Disk(tmp_path)
    disk.attempt(range(10))
    disk.arrived = [*range(7), *range(9000, 9020)]
    assert disk.lacking() == [7, 8, 9]


def test_rows_of_an_attempt_that_was_killed_while_it_sent_those_of_another_one_are_sent_once(tmp_path):
    """The second has sent three of the first one's five rows. W&B has them, but for the last one."""
    disk = Disk(tmp_path)
    disk.attempt(range(10))
    disk.attempt([5, 6, 7])
    disk.arrived = [0, 1, 2, 3, 4, 5, 6]
    assert disk.lacking() == [7, 8, 9]


def test_no_row_is_lost_or_sent_twice_after_any_kills(tmp_path):
    """Each attempt has two processes, whose rows arrive in the order of their journals, mixed; and is killed."""
    random = Random(5)
    for case in range(100):
        disk = Disk(tmp_path / str(case))
        disk.directory.mkdir()
        for attempt in range(random.randint(1, 4)):
            again = disk.lacking(random.randint(1, 9)) if disk.logged else []
            again = again[: random.randint(0, len(again))]
            own = [2000 * attempt + number for number in range(random.randint(1, 20))]
            first = [*again, *own]  # what earlier attempts have left comes before the function's first row
            second = [2000 * attempt + 1000 + number for number in range(random.randint(1, 20))]
            disk.attempt(first)
            disk.attempt(second)
            sent = first[: random.randint(0, len(first))], second[: random.randint(0, len(second))]
            disk.arrived += mixed(random, *sent)
        disk.arrived += disk.lacking(random.randint(1, 9))
        assert sorted(disk.arrived) == sorted(set(disk.logged)), case


def mixed(random: Random, *parts: Sequence[int]) -> list[int]:
    """All of the parts, each in its order."""
    turns = [number for number, part in enumerate(parts) for _ in part]
    random.shuffle(turns)
    each = [iter(part) for part in parts]
    return [next(each[turn]) for turn in turns]

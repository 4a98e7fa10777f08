"""The arguments of jobs that share a run, their plans and ids, and the numbers of their rows."""

from __future__ import annotations

import itertools
import threading
from collections import Counter

import numpy as np
import pytest

from flyteplugins_tracking import ConfigError, IdentityError, get_run, tracking_init
from flyteplugins_tracking._commands.watch import _name_of
from flyteplugins_tracking._rank.info import iter_ranks
from flyteplugins_tracking._rank.plan import RunPlan, plan
from flyteplugins_tracking.testing import simulate
from flyteplugins_tracking.testing.simulation import recording
from flyteplugins_tracking.trackers import Handle, Tracker
from flyteplugins_tracking.trackers.rows import NextRow, RowBuffer
from flyteplugins_tracking.trackers.wandb import outbox
from flyteplugins_tracking.trackers.wandb.attempts import in_order, label_in


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
        ({"roles": "rollout-0"}, "a sequence of strings"),
        ({"role": ""}, "non-empty"),
        ({"role": "a", "run_mode": "shared"}, "run_mode='shared'"),
        ({"role": "a", "rank_scope": "worker"}, "rank_scope='worker'"),
        ({"roles": ["a"], "run_mode": "new"}, "one run for the job"),
        ({"roles": ["a"], "rank_scope": "worker"}, "one run for the job"),
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
    joined = plan(None, "auto", "global", None, parent_id="parents", role="eval")
    assert (joined.run_id, joined.primary, joined.ends_run) == ("parents", True, False)
    plans = [plan(info, "shared", "global", "b", role="eval") for info in iter_ranks([2, 2])]
    assert [one.label for one in plans] == [f"eval-rank-{rank}" for rank in range(4)]


def test_a_role_without_an_id_is_refused_at_the_call(bare_environment):
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


def test_a_row_of_a_role_that_has_the_column_step_gives_its_step_with_it():
    rows = []
    buffer = RowBuffer("eval/step", "eval/", lambda: None, next_step=0)
    for given in (100, np.int64(200), "at the end"):
        buffer.log(rows.append, {"x": 0, "step": given})
    buffer.log(rows.append, {"x": 0}, step=np.int64(300))
    buffer.log(rows.append, {"x": 0})
    assert [row["eval/step"] for row in rows] == [100, 200, "at the end", 300, 301]


def test_values_of_two_threads_that_wait_for_a_row_are_both_in_it(monkeypatch):
    rows = []
    buffer = RowBuffer("global_step", "", lambda: None)
    other = threading.Thread(target=buffer.log, args=(rows.append, {"other": 2}), kwargs={"commit": False})
    take = NextRow.take

    def take_while_another_thread_logs(waiting):
        taken = take(waiting)
        if other.ident is None:
            other.start()
            other.join(0.1)
        return taken

    monkeypatch.setattr(NextRow, "take", take_while_another_thread_logs)
    buffer.log(rows.append, {"own": 1}, commit=False)
    other.join()
    buffer.commit(rows.append)
    assert rows == [{"own": 1, "other": 2}]


def test_numbers_of_rows_differ_between_processes_and_are_exact_in_json():
    pytest.importorskip("wandb")
    taken = Counter(number for _ in range(20) for number in itertools.islice(outbox.row_numbers(), 3))
    assert max(taken.values()) == 1
    assert all(int(float(number)) == number and number < 2**53 for number in taken)


def test_the_other_ranks_are_sent_behind_the_primary_and_roles_behind_them(tmp_path):
    names = ["1-r", "2-r-rank-1", "3-r-rank-10", "4-r-eval", "5-r", "6-other"]
    directories = [tmp_path / f"offline-run-20260101_00000{name}" for name in names]
    for directory in directories:
        directory.mkdir()
        (directory / f"run-{'other' if 'other' in directory.name else 'r'}.wandb").touch()
    ordered = [path.name.partition("_00000")[2] for path in in_order(reversed(directories))]
    assert ordered == ["1-r", "5-r", "6-other", "2-r-rank-1", "3-r-rank-10", "4-r-eval"]


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

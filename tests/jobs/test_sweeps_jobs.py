"""Sweeps: real agents of the real client, against the recording server."""

from __future__ import annotations

import json

import pytest
from support import flyte2_pods, jobs
from support.loopback import Fault
from support.wandb_server import WandbServer

WITHOUT_SERVICE = jobs.PROGRAMS / "sweep_without_service.py"


def seen(done: jobs.Done) -> list:
    """The values that a program has written as JSON, one a line. W&B's threads print between its own words."""
    return [json.loads(line) for line in (done.directory / "seen").read_text().splitlines()]


def values(run, column: str) -> list:
    return [row[column] for row in run.rows if column in row]


def trials(server: WandbServer) -> list:
    return [run for run in server.runs if run.sweep]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """`sweeps.py`, and what the server has of it."""
    with WandbServer() as server:
        done = jobs.python(tmp_path_factory.mktemp("plain"), jobs.PROGRAMS / "sweeps.py", env=server.environment)
        yield done, server


def test_each_trial_has_its_run_with_its_parameters_and_its_true_end(plain):
    done, server = plain
    sweep = server.sweeps[0]
    assert sweep.config == {"method": "grid", "name": "n", "parameters": {"x": {"values": [1, 2, 3, 4]}}}
    runs = [run for run in trials(server) if run.sweep == sweep.id]
    assert [run.id for run in runs] == sweep.run_ids
    assert [(run.entity, run.project, run.config["own"], run.config["x"]) for run in runs] == [
        ("e", "p", True, x) for x in (1, 2, 3, 4)
    ]
    assert [(run.exit_codes, values(run, "x")) for run in runs] == [
        ([0], [1, 1]),
        ([1], [2]),
        ([3], [3]),
        ([0], [4, 4]),
    ]
    assert sum(run.rows_overwritten + run.rows_after_completion for run in server.runs) == 0
    told = seen(done)
    assert told[0] == {"id": runs[0].id, "is_global": True, "sweep": sweep.id}
    assert told[1] == {"id": runs[3].id, "is_global": True, "sweep": sweep.id}
    assert told[2] == {"sweep": sweep.id, "in_thread": sweep.id, "is_global": True}


def test_the_run_around_an_agent_goes_on_after_it_and_has_its_true_end(plain):
    done, server = plain
    assert done.returncode == 7, done.output
    assert "wandb-core has died" not in done.output
    outer, fails = server.run("outer"), server.run("fails")
    assert values(outer, "outer") == ["before", "during the trial", "after"]
    assert (outer.sweep, outer.config, outer.summary["best"]) == (None, {"late": True}, 1)
    assert (outer.state, fails.state, fails.exit_codes[-1]) == ("finished", "failed", 7)
    assert values(fails, "outer") == ["before"]
    assert (fails.entity, fails.project) == ("e", "p2")


@pytest.mark.wide
def test_what_a_thread_logs_during_a_teardown_is_sent_when_the_function_ends(tmp_path):
    with WandbServer() as server:
        server.fault = Fault.slow(0.5)  # the teardown takes seconds
        done = jobs.python(tmp_path, jobs.PROGRAMS / "sweep_teardown_thread.py", env=server.environment)
        assert done.returncode == 0, done.output
        assert "wandb-core has died" not in done.output
        run = server.run("outer")
        assert values(run, "x") == [0, 1]
        assert (run.rows_after_completion, run.rows_overwritten, run.exit_codes) == (0, 0, [0, 0])


SEARCH = """
import wandb
def trial():
    with wandb.init(config={"x": -1}) as run:
        run.log({"x": run.config["x"]})
sweep = wandb.sweep({"method": "grid", "parameters": {"x": {"values": [1, 2]}}}, project="swept")
wandb.agent(sweep, trial, project="swept")
"""


@pytest.mark.full
def test_the_trials_of_a_script_under_the_command_run_are_those_of_the_client(tmp_path):
    (tmp_path / "search.py").write_text(SEARCH)
    with WandbServer() as server:
        done = jobs.python(tmp_path, "-m", "flyteplugins_tracking", "run", "search.py", env=server.environment)
        assert (done.returncode, "Traceback" in done.output) == (0, False), done.output
        assert [(run.sweep is not None, values(run, "x"), run.exit_codes) for run in server.runs] == [
            (True, [1], [0]),
            (True, [2], [0]),
        ]


def test_nothing_of_a_sweep_is_left_behind(plain):
    done, _ = plain
    left = next(told for told in seen(done) if "left" in told)
    assert set(left["left"].values()) == {None}
    assert (left["session"], left["end"]) == ([None, None], None)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("fault", "env", "message"),
    [
        (None, {"WANDB_API_KEY": ""}, "TrackerUnavailableError W&B: there is no API key for this process, and a sweep"),
        (Fault.mute(), {}, "TrackerUnavailableError W&B did not create the sweep: no answer in 2 s"),
        (Fault.status(400), {}, "TrackerUnavailableError W&B did not create the sweep: "),
    ],
)
def test_without_a_key_or_an_answer_there_is_an_error_in_time(tmp_path, fault, env, message):
    with WandbServer() as server:
        server.fault = fault
        done = jobs.python(tmp_path, WITHOUT_SERVICE, env={**server.environment, **env})
    assert message in done.output


def test_without_wandb_the_error_names_the_command(tmp_path):
    done = jobs.python(tmp_path, WITHOUT_SERVICE, "without-wandb")
    assert 'TrackerNotInstalledError pip install "flyteplugins-tracking[wandb]"' in done.output


@pytest.mark.wide
def test_under_wandbs_own_agent_a_torchrun_job_is_a_trial(tmp_path):
    """A run for each trial. All ranks have its parameters."""
    pytest.importorskip("torch")
    with WandbServer() as server:
        done = jobs.python(tmp_path, jobs.PROGRAMS / "sweep_ranks.py", env=server.environment)
        assert done.returncode == 0, done.output
        (sweep,), runs = server.sweeps, {run.id: run for run in server.runs}
    assert sorted(runs) == sorted(sweep.run_ids)
    for x, run_id in enumerate(sweep.run_ids, 1):
        told = [json.loads((tmp_path / f"{run_id}-{rank}.json").read_text()) for rank in range(2)]
        assert told == [[x, run_id, sweep.id], [x, None, sweep.id]]
        assert values(runs[run_id], "x") == [x]
    assert [runs[run_id].exit_codes[-1] for run_id in sweep.run_ids] == [0, 1]
    assert [runs[run_id].sweep for run_id in sweep.run_ids] == [sweep.id] * 2


def test_a_trial_that_its_agent_stops_is_not_preempted_and_one_that_ends_with_its_agent_is(tmp_path):
    """W&B starts a preempted trial again."""
    with WandbServer() as server:
        jobs.python(tmp_path, jobs.PROGRAMS / "sweep_stopped.py", env=server.environment)
        server.wait_for(lambda: all(run.exit_codes for run in server.runs))
        ends = {run.id: (run.exit_codes, run.state) for run in server.runs}
    assert ends == {"stopped": ([143], "failed"), "preempted": ([143], "preempted")}


@pytest.mark.full
@pytest.mark.parametrize(
    ("task", "where"), [("sweep_above", "local"), pytest.param("sweep_below", "pod", marks=pytest.mark.wide)]
)
def test_a_flyte_2_task_and_its_children_have_one_sweep(tmp_path, where, task):
    pytest.importorskip("flyte")
    with WandbServer() as server:
        start = flyte2_pods.local if where == "local" else flyte2_pods.run
        more = {} if where == "local" else {"children": True}
        ended = start(task, tmp_path, module="flyte2_sweeps", **more, **server.environment)
        assert ended.outputs, ended.output
        told = json.loads(ended.outputs[0])
        (sweep,), runs = server.sweeps, trials(server)
        outer = server.run(told["outer"])
    assert (told["own"], told["child"]) == (sweep.id, sweep.id)
    assert sweep.config["name"] == outer.id
    assert outer.id.startswith("r1-")
    assert [run.id for run in runs] == sweep.run_ids
    assert [(run.exit_codes, run.config["x"], values(run, "x")) for run in runs] == [([0], 1, [1]), ([0], 2, [4])]
    assert (values(outer, task), outer.state, outer.sweep) == (["before", "after"], "finished", None)


@pytest.mark.wide
def test_flytekit_tasks_have_their_sweep_and_their_run_in_either_order(tmp_path):
    pytest.importorskip("flytekit")
    with WandbServer() as server:
        # Imported, as for registration: flytekit does not serialize such tasks of `__main__`.
        done = jobs.python(
            tmp_path,
            *("-c", "import flyte_sweeps; flyte_sweeps.main()"),
            env={**server.environment, "PYTHONPATH": str(jobs.PROGRAMS)},
        )
        assert done.returncode == 0, done.output
        ids, configs = seen(done)
        assert ids == [sweep.id for sweep in server.sweeps]
        assert [(run.exit_codes, values(run, "x")) for run in trials(server)] == [([0], [1])] * 3
        for name in ("above", "below", "around"):
            assert (values(server.run(name), name), server.run(name).state) == (["before", "after"], "finished")
            assert configs[name]["wandb_id"] == name
    assert server.unknown_operations == []


@pytest.mark.full
def test_tracking_config_gives_the_place_and_the_decorator_goes_before_all(tmp_path):
    with WandbServer() as server:
        done = jobs.python(tmp_path, jobs.PROGRAMS / "sweep_config.py", env=server.environment)
        (sweep,) = server.sweeps
    assert seen(done) == [sweep.id]
    assert (sweep.entity, sweep.project, sweep.config["method"]) == ("e", "q", "grid")
    assert (sweep.config["description"], sweep.config["run_cap"]) == ("d", 2)

"""The test kit shows what the library does in a job, and nothing leaves the process."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import contextvars
import copy
import importlib
import os
import re
import socket
import sys
import threading
from argparse import Namespace
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.jobs import variables_of_launchers

from flyteplugins_tracking import (
    ConfigError,
    DistributedInfo,
    get_distributed_info,
    get_run,
    override_distributed_info,
    plan,
    tracking_init,
)
from flyteplugins_tracking._rank.plan import RANK_SCOPES, RUN_MODES
from flyteplugins_tracking._rank.topology import detect
from flyteplugins_tracking._runs.calls import state
from flyteplugins_tracking._runs.context import worlds
from flyteplugins_tracking._util.lock import RunLock
from flyteplugins_tracking.testing import RecordingTracker, pytest_plugin, recording, simulate

pytest_plugins = "pytester"

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "tests" / "programs"
PLUGIN = pytest_plugin.__name__
# Where the package is installed, pytest has loaded the plugin by its entry point.
LOADED = [] if any(entry.value == PLUGIN for entry in entry_points(group="pytest11")) else ["-p", PLUGIN]
# The variables of a launcher that starts pytest: the simulated job must not see them.
OUTER = {
    **{"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"},
    **{"GROUP_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "outer", "TORCHELASTIC_RESTART_COUNT": "7"},
    **{"MASTER_ADDR": "localhost", "MASTER_PORT": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"},
    **{"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_PROCID": "x", "SLURM_STEP_NUM_TASKS": "8"},
}


@pytest.fixture(autouse=True)
def nothing_leaves_and_nothing_stays(monkeypatch, tmp_path):
    """Check that a test leaves no file, no connection, and no change in the library or the environment."""
    monkeypatch.chdir(tmp_path)
    before, connect = environment(), socket.socket.connect
    earlier = threading.enumerate()  # a thread that another file's test has left may still look for its server

    def refuse(*arguments: Any) -> None:
        if threading.current_thread() not in earlier:
            pytest.fail("a connection was made")
        connect(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(socket.socket, "connect", refuse)
        patched.setattr(RunLock, "acquire", lambda *_, **__: pytest.fail("a run was locked on this machine"))
        yield
    assert list(tmp_path.iterdir()) == []
    assert (state.calls, len(worlds), get_run()) == ([], 1, None)
    monkeypatch.undo()
    assert environment() == before


def environment() -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in {*OUTER, *variables_of_launchers()}}


def log_rank() -> int:
    run, info = get_run(), get_distributed_info()
    if run is not None:
        run.log({"rank": 0 if info is None else info.rank})
    return 0 if info is None else info.rank


def tracked(**options) -> Callable[..., int]:
    return tracking_init(project="p", **options)(log_rank)


def raising_on(rank: int, error: BaseException, **options) -> Callable[..., int]:
    @tracking_init(project="p", **options)
    def train() -> int:
        if log_rank() == rank:
            raise error
        return get_distributed_info().rank

    return train


@pytest.mark.parametrize("sizes", [[4, 4], [1, 3, 2], [1]])
def test_each_rank_has_the_run_that_the_plan_says(sizes, monkeypatch):
    for name, value in OUTER.items():
        monkeypatch.setenv(name, value)
    infos = []
    simulate(tracking_init(lambda: infos.append(get_distributed_info() or detect({}))), nproc_per_node=sizes)
    infos.sort(key=lambda info: info.rank)
    assert [(i.worker_index, i.local_rank, i.local_world_size) for i in infos] == [
        (worker, local_rank, size) for worker, size in enumerate(sizes) for local_rank in range(size)
    ]
    for mode in RUN_MODES:
        for scope in RANK_SCOPES:
            job = simulate(tracked(run_mode=mode, rank_scope=scope), nproc_per_node=sizes)
            assert job.returned == tuple(range(sum(sizes)))
            plans = [plan(info, mode, scope, "simulated") for info in infos]
            assert set(job.runs.ids) == {planned.run_id for planned in plans if planned.opens}
            for run in job.runs:
                having = [rank for rank, planned in enumerate(plans) if planned.run_id == run.id]
                assert run.ranks == tuple(sorted(run.logged("rank"))) == tuple(having)
                assert [rank for rank in having if plans[rank].primary] == [run.primary]
                assert (run.group, run.status, run.tracker) == (plans[having[0]].group, "finished", "wandb")
                assert run.config["tracking_init"]["num_workers"] == len(sizes)
    assert os.environ.items() >= OUTER.items()  # they are back


@pytest.mark.parametrize(
    ("primary_rank", "primary"), [(2, 2), (-1, 5), (lambda info: info.world_size - 2, 4)], ids=["2", "-1", "callable"]
)
def test_the_primary_has_the_run_ends_it_and_gives_its_config(primary_rank, primary):
    auto = simulate(raising_on(0, ValueError(), primary_rank=primary_rank), nproc_per_node=[4, 2])
    assert [(run.ranks, run.primary, run.exit_codes) for run in auto.runs] == [((primary,), primary, (0,))]
    shared = raising_on(primary, SystemExit(3), primary_rank=primary_rank, run_mode="shared")
    job = simulate(shared, nproc_per_node=[4, 2])
    assert [(run.ranks, run.primary, run.exit_codes) for run in job.runs] == [((0, 1, 2, 3, 4, 5), primary, (3,))]
    assert [run.id for run in (*auto.runs, *job.runs)] == ["simulated"] * 2


def test_a_callable_is_asked_once_on_each_rank():
    asked: list[int] = []
    simulate(tracked(primary_rank=lambda info: asked.append(info.rank) or -1), 1, 3)
    assert sorted(asked) == [0, 1, 2]


def test_one_after_another_the_ranks_have_torchruns_variables(monkeypatch):
    for name, value in OUTER.items():
        monkeypatch.setenv(name, value)
    infos = []

    @tracking_init
    def train() -> None:
        info = contextvars.Context().run(detect, os.environ)  # without the simulation's override
        assert (info.launcher, info.restart_count) == ("torchelastic", 0)
        assert info["rank"] == get_distributed_info().rank
        assert {*info.keys()} == {*get_distributed_info().keys()}
        assert "MASTER_ADDR" not in os.environ
        infos.append(info)

    assert simulate(train, nproc_per_node=[4, 2]).failed == ()
    assert [(i.rank, i.local_rank, i.local_world_size, i.worker_index, i.num_workers) for i in infos] == [
        *((rank, rank, 4, 0, 2) for rank in range(4)),
        *((4 + rank, rank, 2, 1, 2) for rank in range(2)),
    ]


@pytest.mark.parametrize(
    ("error", "exit_code", "status"),
    [
        (ValueError("lost"), 1, "failed"),
        (SystemExit(3), 3, "failed"),
        (SystemExit(), 0, "finished"),
        (SystemExit(143), 143, "preempted"),
        (SystemExit(130), 130, "failed"),
    ],
)
def test_a_failing_rank_ends_its_run_as_its_process_would(error, exit_code, status):
    job = simulate(raising_on(3, error, run_mode="new"))
    assert job.ranks[3].error is error
    assert [result.rank for result in job.failed] == ([3] if exit_code else [])
    assert (job.ranks[3].exit_code, job.ranks[3].worker_index, job.ranks[4].exit_code) == (exit_code, 0, 0)
    assert [run.status for run in job.runs if run.ranks != (3,)] == ["finished"] * 7
    run = job.runs["simulated-rank-3"]
    assert (run.status, run.exit_code, run.logged("rank")) == (status, exit_code, (3,))
    if exit_code:
        with pytest.raises(type(error)):
            _ = job.returned
    else:
        assert job.returned == (0, 1, 2, None, 4, 5, 6, 7)
    for ends in (KeyboardInterrupt(), pytest.fail.Exception("in the function")):  # those of the test end the simulation
        with pytest.raises(type(ends)):
            simulate(raising_on(0, ends))


def test_a_run_that_was_stopped_has_the_status_that_its_tracker_shows():
    @tracking_init(project="p", run_mode="new", tracker="mlflow")
    def train() -> None:
        raise SystemExit((130, 143)[get_distributed_info().rank])

    job = simulate(train, num_workers=1, nproc_per_node=2)
    assert [run.status for run in job.runs] == ["killed"] * 2


def test_a_later_attempt_goes_on_with_the_recorded_run():
    @tracking_init(id="i")
    def train() -> None:
        info, run = get_distributed_info(), get_run()
        assert run.resumed == (info.restart_count > 0)
        run.log({"x": 1})
        if info.restart_count == 0:
            run.name = "mine"
            raise ValueError("lost")

    with recording() as runs:
        for restart_count, fails in enumerate((pytest.raises(ValueError, match="lost"), contextlib.nullcontext())):
            info = DistributedInfo(rank=0, world_size=2, restart_count=restart_count)
            with override_distributed_info(info), fails:
                train()
    (run,) = runs
    assert (run.attempts, run.exit_codes, run.status, run.name) == (2, (1, 0), "finished", "mine")
    assert [(row.attempt, row.rank) for row in run.rows] == [(0, 0), (1, 0)]
    assert run.config["tracking_init"]["restart_count"] == 1


def test_nested_stacked_and_repeated_functions_have_their_own_runs():
    @tracking_init(project="p")
    def inner(mode: str) -> str | None:
        return get_run() and get_run().id

    new = tracking_init(run_mode="new", id="own")(lambda: get_run().id)

    @tracking_init(tracker="mlflow", project="p")
    @tracking_init(project="p", id="one")
    def outer() -> list[str | None]:
        get_run("wandb") and get_run("wandb").log({"w": 1})
        get_run("mlflow") and get_run("mlflow").log({"m": 1})
        return [inner("joined"), new()]

    def main() -> list[str | None]:
        return [*outer(), inner("again"), inner("once more")]

    for _ in range(2):  # the second is as the first
        job = simulate(main, num_workers=1, nproc_per_node=2)
        assert job.returned[0] == ["one", "own-rank-0", "simulated-3", "simulated-4"]
        assert job.returned[1] == [None, "own-rank-1", None, None]
        assert job.runs.of("mlflow").ids == ("simulated",)
        assert (job.runs["one"].logged("w"), job.runs["simulated"].logged("m")) == ((1,), (1,))


def test_a_simulation_joins_nothing_around_it_and_is_among_what_is_recorded(monkeypatch):
    monkeypatch.setenv("WANDB_RUN_ID", "named")

    @tracking_init
    def outer() -> tuple[str, ...]:
        return simulate(tracked(id="inside")).runs.ids

    with recording() as runs:
        assert outer() == ("inside",)
        thread = threading.Thread(target=tracked(id="of-a-thread"))
        thread.start()
        thread.join()
        asyncio.run(asyncio.to_thread(outer))
        assert runs.ids == ("named", "of-a-thread", "inside", "inside")
        assert (runs[1].config, runs[1].ranks, runs[0].attempts) == ({}, (0,), 2)
        with pytest.raises(KeyError, match="2 runs have the id 'inside'"):
            runs["inside"]
        with pytest.raises(KeyError, match="no run has the id 'none'; the ids are named, of-a-thread"):
            runs["none"]


def test_what_a_training_calls_on_a_run_is_recorded():
    @tracking_init(project="p", tags=["a"], notes="n", config={"lr": 1}, entity="e")
    def train() -> None:
        run = get_run()
        run.log({"a": 1}, commit=False)
        run.log({"b": 2}, step=5)
        run.log_metric("c", 3, step=6)
        run.log_metrics({"d": 4})
        run.log_param("p", 1)
        run.config.update({"lr": 2}, allow_val_change=True)
        run.config.update(Namespace(batch=8))
        run.config.epochs = 3
        run.config.setdefaults({"epochs": 4, "seed": 5})
        run.summary["best"] = run.config.lr
        run.name, run.tags = "renamed", (*run.tags, "b")
        run.log_artifact("model", type="model").wait()
        with run as same, run.trace("step"):
            same.finish(exit_code=7)
        assert (run.id, run.url, run.config.as_dict()["seed"]) == (run.run_id, None, 5)
        assert not hasattr(run.config, "missing")
        run.log({"last": 9}, commit=False)

    run = simulate(train, distributed=False).runs[0]
    assert [(dict(row.values), row.step) for row in run.rows] == [
        ({"a": 1, "b": 2}, 5),
        ({"c": 3}, 6),
        ({"d": 4}, None),
        ({"last": 9}, None),
    ]
    assert run.config == {"lr": 2, "batch": 8, "p": 1, "epochs": 3, "seed": 5}
    assert run.summary == {"a": 1, "b": 2, "c": 3, "d": 4, "best": 2, "last": 9}
    assert (run.name, run.tags, run.notes, run.exit_code) == ("renamed", ("a", "b"), "n", 7)
    assert [(call.name, call.args) for call in run.calls] == [
        ("log_artifact", ("model",)),
        ("log_artifact().wait", ()),
        ("trace", ("step",)),
    ]


def test_what_the_training_changes_in_place_stays_in_its_rows_and_runs():
    @tracking_init(run_mode="new", config={"seen": []})
    def train() -> None:
        run, loss, nested = get_run(), np.zeros(1), {"loss": [np.zeros(())]}
        run.config["seen"].append(run.rank)
        for _ in range(2):
            loss += 1
            nested["loss"][0] += 1
            run.log({"loss": loss, "nested": nested, "curve": np.arange(2)})

    for _ in range(2):  # the second simulation finds nothing of the first
        job = simulate(train, num_workers=1, nproc_per_node=2)
        assert [run.config["seen"] for run in job.runs] == [[0], [1]]
    assert job.runs[0].logged("loss") == (1.0, 2.0)
    assert job.runs[0].logged("nested") == ({"loss": [1.0]}, {"loss": [2.0]})
    assert {type(value) for value in job.runs[0].logged("loss")} == {float}


def test_a_shared_run_of_wandb_has_its_rules():
    @tracking_init(run_mode="shared", rank_prefix=True, config={"lr": 1})
    def train() -> None:
        run = get_run()
        run.log({"loss": 1}, step=3)
        assert run.config["lr"] == run.config.lr == copy.deepcopy(run.config).as_dict()["lr"] == 1
        if run.rank == 2:
            run.config.pop("lr")
        run.config["seed"] = 2  # for the primary

    job = simulate(train, num_workers=1, nproc_per_node=3)
    assert [dict(row.values) for row in job.runs[0].rows] == [{f"rank_{r}/loss": 1, "global_step": 3} for r in range(3)]
    assert [type(result.error) for result in job.ranks] == [type(None), ConfigError, AttributeError]
    assert "change it on rank 0" in str(job.ranks[1].error)
    assert (job.runs[0].config["seed"], job.runs[0].config["lr"]) == (2, 1)
    of_mlflow = tracking_init(run_mode="shared", tracker="mlflow", rank_prefix=True)(lambda: get_run().log({"x": 1}, 3))
    assert dict(simulate(of_mlflow).runs[0].rows[0].values).keys() < {f"rank_{rank}/x" for rank in range(8)}


def test_what_is_logged_after_the_end_is_lost_with_a_warning(caplog):
    recorder = RecordingTracker()
    kept = []

    @tracking_init(tracker=recorder)
    def train() -> None:
        kept.append(get_run())
        with pytest.raises(TypeError, match="log\\(\\) takes a mapping"):
            kept[0].log("text")

    train()
    kept[0].log({"late": 1})
    assert (recorder.runs[0].rows, recorder.runs[0].status, len(recorder.runs)) == ((), "finished", 1)
    assert "is not open in this process: its function has ended" in caplog.text


def test_async_functions_run_also_where_a_loop_runs():
    @tracking_init
    async def train() -> int:
        await asyncio.sleep(0)
        return get_distributed_info().rank

    async def main() -> None:
        assert simulate(train).returned == tuple(range(8))

    asyncio.run(main())


def plain() -> None: ...


def raising() -> None:
    get_run().log({})


TRACKED = tracked()


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (TRACKED, {"num_workers": 0}, "num_workers must be an integer of at least 1, got 0"),
        (TRACKED, {"num_workers": True}, "num_workers must be an integer of at least 1, got True"),
        (TRACKED, {"nproc_per_node": -1}, "nproc_per_node must be an integer of at least 1, got -1"),
        (TRACKED, {"nproc_per_node": "4"}, "nproc_per_node must be an integer of at least 1, got '4'"),
        (TRACKED, {"nproc_per_node": [2, 0]}, r"nproc_per_node\[1\] must be an integer of at least 1, got 0"),
        (TRACKED, {"nproc_per_node": []}, "has 0 numbers for no workers: pass one for each"),
        (TRACKED, {"num_workers": 3, "nproc_per_node": [2, 2]}, "has 2 numbers for 3 workers: pass one for each"),
        (TRACKED, {"num_workers": 2, "distributed": False}, "num_workers=2 and distributed=False contradict"),
        (TRACKED, {"distributed": "no"}, "distributed must be True or False, got 'no'"),
        (TRACKED, {"max_restarts": 1}, "has no argument 'max_restarts': test one attempt at a time"),
        (TRACKED, {"failing": {0: OSError()}}, "has no argument 'failing': raise the error in the function"),
        (TRACKED, {"threads": True}, "has no argument 'threads': the ranks are called one after another"),
        (TRACKED, {"timeout_s": 1.0}, "has no argument 'timeout_s': the ranks do not wait for each other"),
        (TRACKED, {"nodes": 1}, "has no argument 'nodes': leave it out"),
        (plain, {}, "plain called no tracked function on any rank: put @tracking_init on it"),
        (raising, {}, "raising called no tracked function on any rank: put @tracking_init on it"),
        (3, {}, r"simulate\(\) needs a function or a Flyte task, got 3"),
        (RecordingTracker, {}, "needs a function or a Flyte task, got <class"),
    ],
)
def test_invalid_simulations_are_refused(function, arguments, message):
    with pytest.raises(ConfigError, match=message):
        simulate(function, **arguments)


def test_the_plugin_imports_nothing_but_pytest_and_is_declared():
    for node in ast.parse(Path(pytest_plugin.__file__).read_text()).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            assert {*names} <= {*sys.stdlib_module_names, "pytest", "collections.abc"}
    declared = (ROOT / "pyproject.toml").read_text().partition("[project.entry-points.pytest11]\n")[2]
    assert declared.startswith(f'flyteplugins_tracking = "{PLUGIN}"\n')


@pytest.fixture(scope="module")
def imported():
    """Import torch before `pytester`, which unloads later imports: torch crashes at a second import."""
    for name in ("flytekitplugins.kfpytorch", "flyteplugins.pytorch.task", "torch"):
        importlib.import_module(name)


@pytest.mark.usefixtures("imported")
def test_users_tests_pass_and_fail_under_pytest(pytester, monkeypatch):
    page = (ROOT / "docs" / "guides" / "test.md").read_text()
    blocks = re.findall(r"```python\n# (\w+\.py)\n(.+?)```", page, re.DOTALL)
    assert len(blocks) == page.count("```python") == 2
    for name, code in [*blocks, ("test_tasks.py", (PROGRAMS / "flyte_simulated.py").read_text())]:
        pytester.path.joinpath(name).write_text(code)
        monkeypatch.delitem(sys.modules, Path(name).stem, raising=False)  # one of this suite's may have that name
    result = pytester.runpytest_inprocess("-q", "-p", "no:cacheprovider", *LOADED)
    result.assert_outcomes(passed=3 + 2, failed=2)
    result.stdout.fnmatch_lines(["*assert 3 == 4*", "*ConfigError: run_mode='shared'*"])
    result.stdout.fnmatch_lines(
        ["FAILED test_tasks.py::test_that_fails -*", "FAILED test_tasks.py::test_that_fails_for_a_rank*"]
    )


def test_a_clients_own_opening_returns_the_recorded_run_and_opens_none(recorded_runs):
    wandb = pytest.importorskip("wandb")
    opening, others = wandb.init, []
    given = {"config": Namespace(lr=0.1, seed=3), "name": "inner", "notes": "by the script", "tags": "a"}

    @tracking_init(config={"lr": 0.2})
    def train():
        with wandb.init(**given) as run:
            run.log({"x": 1})
            run.config["late"] = True
        run.finish()
        if get_run() is None:
            run.config.update({"nowhere": 1})
            others.append(run)
        else:
            assert run is get_run()
        in_a_thread = threading.Thread(target=lambda: wandb.init(**given).log({"x": 2}))
        in_a_thread.start()
        in_a_thread.join()

    train()
    job = simulate(train, 1, 2)
    assert job.returned == (None, None)
    for run in (recorded_runs[0], job.runs[0]):
        config = {key: value for key, value in run.config.items() if key != "tracking_init"}
        assert config == {"lr": 0.2, "late": True, "seed": 3}
        assert (run.name, run.exit_code, run.logged("x", 0)[0]) == ("inner", 0, 1)
    assert (len(others), len(recorded_runs)) == (1, 2)
    assert wandb.init is opening

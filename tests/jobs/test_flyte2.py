"""Flyte 2: real pods with real Elastic workers and child tasks, local runs, and what arrived at the server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import flyte2_pods, jobs
from support.vendors import skip_where_lost
from support.wandb_server import WandbServer

from flyteplugins_tracking import ConfigError, tracking_config, tracking_init
from flyteplugins_tracking._runs.propagation import CONFIG, RUNS

MODULE, WORKERS = "flyte2_tracked", "flyte2_workers"
TASKS = jobs.PROGRAMS / f"{MODULE}.py"


@pytest.fixture(scope="module")
def server():
    with WandbServer() as server:
        yield server


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("pods")


@pytest.fixture
def pod(server, directory):
    """Run a task of `flyte2_tracked` as its pod, in an action of the task's name, so that its run is `r1-{task}`."""

    def run(task: str, **options: Any) -> flyte2_pods.Ended:
        return flyte2_pods.run(
            task, directory / task, **{"module": MODULE, "action": task, **server.environment, **options}
        )

    return run


@pytest.fixture
def tasks(monkeypatch):
    """The module of the tasks, in this process."""
    monkeypatch.syspath_prepend(str(jobs.PROGRAMS))
    import flyte2_tracked

    return flyte2_tracked


@pytest.fixture
def with_workers(tasks):
    """The module of the tasks with workers, in this process."""
    import flyte2_workers

    return flyte2_workers


def values(rows: list[dict[str, Any]], key: str) -> list[Any]:
    return [row[key] for row in rows if key in row]


def seen(directory: Path, tag: str) -> list[dict[str, Any]]:
    """The reports of a task's processes, by rank."""
    found = [json.loads(path.read_text()) for path in directory.glob(f"{tag}-*.json")]
    return sorted(found, key=lambda report: report["rank"] or 0)


# One process


@pytest.mark.parametrize(
    "task", ["plain", *(pytest.param(name, marks=pytest.mark.wide) for name in ("coroutine", "below"))]
)
def test_a_task_has_its_run_which_knows_the_action(pod, server, task):
    done = pod(task, _U_EP_OVERRIDE="dns:///acme.example.com", _U_INSECURE="false")
    assert done.outputs == [f"r1-{task}"], done.output
    run = server.run(f"r1-{task}")
    assert (run.exit_codes, values(run.rows, task), run.entity) == ([0], [0, 1, 2], "team")
    assert run.config["tracking_init"]["flyte"].items() >= {"run": "r1", "action": task, "attempt": 0}.items()
    page = f"https://acme.example.com/v2/domain/development/project/proj/runs/r1?i={task}"
    assert run.config["tracking_init"]["flyte"]["url"] == page
    assert run.config["tracking_init"]["restart_count"] == 0
    assert "the files did not become an output" not in done.output  # nobody has asked for that


@pytest.mark.full
def test_a_task_is_asked_to_stop_before_its_timeout(pod, server):
    done = pod("limited")
    assert done.outputs == ["r1-limited"], done.output
    run = server.run("r1-limited")
    assert (run.exit_codes, run.summary["stop/reason"]) == ([0], "time limit")


@pytest.mark.full
def test_a_task_that_raises_has_a_failed_run(pod, server):
    done = pod("fails")
    assert (done.error.code, done.error.message) == ("ValueError", "made to fail")
    assert server.run("r1-fails").exit_codes == [1]
    assert values(server.run("r1-fails").rows, "fails") == [0, 1, 2]


@pytest.mark.full
def test_a_task_that_exits_has_a_failed_run(pod, server):
    skip_where_lost("flyte", "sys.exit")
    assert pod("exits").returncode == 3
    assert server.run("r1-exits").exit_codes == [3]


def test_a_retry_continues_the_run(pod, server):
    first, second = pod("second_attempt"), pod("second_attempt", attempt=1)
    assert (first.error.message, second.outputs) == ("the first attempt fails", ["r1-second_attempt"])
    run = server.run("r1-second_attempt")
    assert (run.exit_codes, values(run.rows, "second_attempt")) == ([1, 0], [0, 1, 2, 0, 1, 2])
    assert (run.rows_overwritten, run.config["tracking_init"]["restart_count"]) == (0, 1)


@pytest.mark.wide
def test_functions_in_a_task_are_trainings_of_its_action(pod, server):
    done = pod("calls_functions")
    assert done.outputs == [["r1-calls_functions", "r1-calls_functions-2"]], done.output
    assert pod("calls_a_function").outputs == [["r1-calls_a_function"] * 2]
    assert values(server.run("r1-calls_a_function").rows, "inner") == [0, 1, 2]


# Parents and children


@pytest.mark.full
def test_children_continue_the_parents_run_or_have_their_own(pod, server):
    done = pod("parent", module=WORKERS, children=True)
    assert done.outputs is not None, done.output
    ids = json.loads(done.outputs[0])
    assert {ids[kind] for kind in ("parent", "plain", "shared", "through")} == {"r1-parent"}
    assert len({ids["parent"], ids["new"], ids["workers"]}) == 3
    run = server.run("r1-parent")
    assert (values(run.rows, "parent"), sorted(values(run.rows, "plain"))) == ([0, 1], [0, 0, 1, 1, 2, 2])
    assert values(run.rows, "shared") == [0, 1, 2]
    # The parent alone ends it, and says what it is.
    assert (run.exit_codes, run.rows_after_completion, run.config["tracking_init"]["flyte"]["action"]) == (
        [0],
        0,
        "parent",
    )
    for kind in ("new", "workers"):
        assert (server.run(ids[kind]).exit_codes, values(server.run(ids[kind]).rows, kind)) == ([0], [0, 1, 2])


@pytest.mark.wide
def test_a_blocks_arguments_reach_the_children_that_are_called_in_it(pod, server):
    done = pod("async_parent", children=True)
    assert done.outputs is not None, done.output
    ids = json.loads(done.outputs[0])
    assert ids["parent"] == ids["first"] == ids["second"] == "r1-async_parent"
    assert (server.run(ids["new"]).tags, server.run(ids["new"]).config["block"]) == (["block"], True)
    run = server.run("r1-async_parent")
    assert (run.tags, sorted(values(run.rows, "coroutine"))) == ([], [0, 0, 1, 1, 2, 2])


def test_children_in_local_mode_are_as_on_a_cluster(tmp_path):
    done = flyte2_pods.local("async_parent", tmp_path, module=MODULE)
    assert done.returncode == 0, done.output
    ids = json.loads(done.outputs[0])
    assert ids["first"] == ids["second"] == ids["parent"]
    assert ids["new"] != ids["parent"]
    assert {run.exit_code for run in done.runs} == {0}
    assert {run.id for run in done.runs} == set(ids.values())


@pytest.mark.wide
def test_shared_without_a_parent_is_refused(pod, server):
    done = pod("shared")
    assert "put tracking_init on that task too, or use run_mode='auto'" in done.error.message
    assert not [run for run in server.runs if run.id == "r1-shared"]


@pytest.mark.wide
def test_a_child_with_a_role_joins_the_parents_run_without_an_id(pod, server):
    done = pod("owner", children=True)
    assert done.outputs == ["r1-owner"], done.output
    run = server.run("r1-owner")
    assert (values(run.rows, "rollout-0/x"), values(run.rows, "loss")) == ([0, 1, 2], [1])
    assert (run.config["lr"], run.config["rollout-0"]["temperature"]) == (3, 1)
    assert (run.exit_codes, run.state, run.mixed_writers) == ([0], "finished", False)


@pytest.mark.wide
def test_a_child_that_changes_the_parents_config_gets_a_warning(pod, server):
    done = pod("parent_of_a_changer", children=True)
    assert done.error is None, done.output
    run = server.run("r1-parent_of_a_changer")
    assert (run.config["of"], "child" in run.config) == ("parent", False)
    assert "belongs to the task that has called this one: this task's changes of its config are not" in done.output
    # The other child reads it, and says nothing about a run that is not its own.
    assert json.loads(done.outputs[0]).items() >= {"of": "parent", "lr": 3}.items()
    assert (run.group, run.name, run.tags, run.job_type, run.notes) == ("parent", "parent", ["parent"], "", "")


@pytest.mark.wide
def test_a_child_logs_to_the_project_of_its_parents_run(server, tmp_path):
    before = len(server.runs)
    done = flyte2_pods.run("offline_parent", tmp_path, module=MODULE, children=True, **server.environment)
    assert done.outputs == ["r1-a0"], done.output
    assert len(server.runs) == before
    assert {run.id for run in done.runs if run.rows} == {"r1-a0"}
    with WandbServer() as theirs:
        parents = {"wandb": {"id": "r1-hosted", "project": "tests", "entity": "team", "host": server.url}}
        done = flyte2_pods.run(
            "plain", tmp_path, module=MODULE, context={RUNS: json.dumps(parents)}, **theirs.environment
        )
        assert (done.outputs, theirs.runs) == (["r1-hosted"], []), done.output
        theirs_say = {"WANDB_NAME": "evil", "WANDB_NOTES": "evil", "WANDB_TAGS": "evil", "WANDB_RUN_GROUP": "evil"}
        context = {RUNS: json.dumps(parents)}
        flyte2_pods.run(
            "plain", tmp_path, action="a1", module=MODULE, context=context, **theirs.environment, **theirs_say
        )
    run = server.run("r1-hosted")
    assert values(run.rows, "plain") == [0, 1, 2, 0, 1, 2]
    assert "evil" not in (run.name, run.notes, run.group, *run.tags)


@pytest.mark.full
def test_tasks_that_share_a_process_share_a_run_and_no_configuration(server, tmp_path):
    done = jobs.python(tmp_path, TASKS, env=server.environment)
    assert done.returncode == 0, done.output
    ids = json.loads(done.output.partition("RAN ")[2])
    assert ids == ["r1-elsewhere"] * 3 + ["r1-configured", "r1-beside"]
    run = server.run("r1-elsewhere")
    assert (sorted(values(run.rows, "plain")), run.exit_codes) == ([0, 0, 0, 1, 1, 1, 2, 2, 2], [])
    assert (server.run("r1-configured").project, server.run("r1-configured").tags) == ("configured", ["configured"])
    assert (server.run("r1-beside").project, server.run("r1-beside").tags) == ("uncategorized", [])


@pytest.mark.wide
def test_an_id_for_a_whole_run_is_the_first_tasks_alone(pod, server):
    done = pod("parent", module=WORKERS, action="identified", children=True, context=tracking_config(id="exp"))
    assert done.outputs is not None, done.output
    ids = json.loads(done.outputs[0])
    assert ids["parent"] == ids["plain"] == "exp"
    assert ids["new"].startswith("exp-")
    assert ids["workers"].startswith("exp-")
    assert len({ids["parent"], ids["new"], ids["workers"]}) == 3


# What a task leaves beside its outputs


@pytest.mark.full
def test_a_runs_files_are_an_output_of_a_trace(pod, directory):
    skip_where_lost("flyte", "download_logs")
    assert pod("downloaded", children=True).outputs == ["r1-downloaded"]
    (trace,) = [
        path for path in flyte2_pods.base(directory / "downloaded", "r1").iterdir() if path.name != "downloaded"
    ]
    (files,) = flyte2_pods.outputs_at(trace)
    assert {"wandb-summary.json", "config.yaml"} <= {path.name for path in Path(files).iterdir()}


@pytest.mark.wide
def test_files_that_cannot_be_an_output_do_not_fail_the_task(pod):
    done = pod("downloaded_workers", module=WORKERS)
    assert (done.error, done.output.count("download_logs=True is ignored: the training has 2 ranks")) == (None, 1)
    done = pod("downloaded")  # without a controller, which records traces
    assert (done.error, done.output.count("the files did not become an output of the task")) == (None, 1)


def test_offline_rows_outlive_the_pod(tmp_path):
    done = flyte2_pods.run("plain", tmp_path, module=MODULE)
    kept = [path for path in tmp_path.rglob("*.wandb") if "raw" in path.parts]
    assert len(kept) == 1, done.output
    assert f"flyteplugins-tracking send {kept[0].parent.name}" in done.output


# Workers


def test_the_first_rank_alone_has_a_run_and_imports_wandb(pod, server, directory):
    done = pod("workers", module=WORKERS)
    assert done.outputs == ["r1-workers"], done.output
    first, second = seen(directory / "workers", "workers")
    assert (first["run_id"], first["wandb"]) == ("r1-workers", True)
    assert (second["run_id"], second["wandb"]) == (None, False)
    run = server.run("r1-workers")
    assert (run.exit_codes, values(run.rows, "workers")) == ([0], [0, 1, 2])
    assert run.config["tracking_init"].items() >= {"world_size": 2, "launcher": "torchelastic"}.items()


@pytest.mark.wide
def test_restarted_workers_continue_the_run(pod, server):
    assert pod("restarted_workers", module=WORKERS).outputs == ["r1-restarted_workers"]
    run = server.run("r1-restarted_workers")
    assert (run.exit_codes, run.rows_overwritten) == ([1, 0], 0)
    assert values(run.rows, "restarted_workers") == [0, 1, 2, 0, 1, 2]


@pytest.mark.wide
def test_two_nodes_have_a_run_each_and_links_that_lead_there(server, directory, tasks, with_workers):
    for task, ids in [
        ("per_node", {f"r1-per_node-worker-{i}" for i in range(2)}),
        ("new_on_nodes", {f"r1-new_on_nodes-rank-{i}" for i in range(4)}),
    ]:
        done = flyte2_pods.nodes(task, directory / task, module=WORKERS, action=task, **server.environment)
        assert (done.returncode, done.error) == (0, None), done.output
        runs = [run for run in server.runs if run.id.startswith(f"r1-{task}")]
        assert {run.id for run in runs} == ids
        assert {(run.group, *run.exit_codes) for run in runs} == {(f"r1-{task}", 0)}
        context = tracking_config(entity="team")
        leads_to = {
            link.rpartition("/")[2] for link in tasks.links(getattr(with_workers, task), context, task).values()
        }
        assert leads_to == (ids if task == "per_node" else {"r1-new_on_nodes"})


# In this process


def test_the_task_stays_the_same_object_and_its_copies_are_tracked(tasks, with_workers):
    assert tasks.env.tasks["plain.plain"] is tasks.plain
    copy = with_workers.workers.override(retries=2)
    assert (copy.func, copy.links) == (with_workers.workers.func, with_workers.workers.links)
    assert tasks.links(copy) == {"Weights & Biases": "https://wandb.ai/team/tests/runs/r1-{{.actionName}}"}
    # Of 1 to 4 nodes: to the group.
    group = {"Weights & Biases": "https://wandb.ai/team/tests/groups/r1-a1"}
    assert tasks.links(with_workers.resized, action="a1") == group


def test_values_for_children_hold_any_config_and_no_password():
    from types import SimpleNamespace

    from flyteplugins_tracking.trackers.wandb import TRACKER

    settings = SimpleNamespace(base_url="http://user:secret@w.example/path")
    config = {"clip": float("inf"), "lr": 3, "nan": float("nan")}
    run = SimpleNamespace(id="r", project="p", entity="e", offline=False, settings=settings, config=config)
    passed_on = TRACKER.export_run(run)
    assert json.loads(json.dumps(passed_on, allow_nan=False)) == passed_on
    assert (passed_on["host"], passed_on["config"]) == (
        "http://w.example/path",
        {"clip": "Infinity", "lr": 3, "nan": "NaN"},
    )
    run.config = {"long": "x" * 20_000}
    assert TRACKER.export_run(run)["config"] is None


def test_existing_links_are_kept_and_each_tracker_adds_its_own(tasks):
    import flyte

    class Other:
        name, icon_uri = "other", ""

        def get_link(self, **_: Any) -> str:
            return "https://example.com"

    env = flyte.TaskEnvironment(name="linked")

    @tracking_init(project="second", entity="e", run_mode="new", id="second")
    @tracking_init(project="first", entity="e", id="first")
    @env.task(links=(Other(),))
    def linked(n: int) -> int:
        return n

    addresses = [link.get_link(**LINK) for link in linked.links]
    assert addresses == [
        "https://example.com",
        "https://wandb.ai/e/first/runs/first",
        "https://wandb.ai/e/second/runs/second",
    ]


MALFORMED = [
    {CONFIG: '{"tracker": "nothing"}'},
    {CONFIG: '{"run_mode": 3}'},
    {RUNS: '{"wandb": {"id": "r1-a0", "project": 5}}'},
]
LINK = {
    "run_name": "r1",
    "project": "p",
    "domain": "d",
    "context": {},
    "parent_action_name": "a0",
    "action_name": "{{.actionName}}",
    "pod_name": "{{.podName}}",
}


def test_a_link_follows_propagated_arguments_and_the_parents_run(tasks, with_workers, monkeypatch):
    given = tracking_config(project="2024", entity="e", host="https://wandb.example.com/")
    address = "https://wandb.example.com/e/2024/runs/r1-{{.actionName}}"
    assert tasks.links(tasks.bare, given) == {"Weights & Biases": address}
    parents = {RUNS: json.dumps({"wandb": {"id": "r1-a0", "project": "theirs", "entity": "e"}})}
    assert tasks.links(tasks.bare, parents) == {"Weights & Biases": "https://wandb.ai/e/theirs/runs/r1-a0"}
    assert tasks.links(tasks.shared, parents) == {"Weights & Biases": "https://wandb.ai/e/theirs/runs/r1-a0"}
    assert tasks.links(with_workers.workers, parents)["Weights & Biases"].endswith(
        "/team/tests/runs/r1-{{.actionName}}"
    )
    monkeypatch.setenv("WANDB_BASE_URL", "https://self.hosted")
    assert tasks.links(tasks.plain)["Weights & Biases"].startswith("https://self.hosted/team/tests/runs/")


def test_a_link_follows_the_environment_of_its_task():
    import flyte

    env = flyte.TaskEnvironment(name="variables", env_vars={**tracking_config(project="p", entity="e"), "OTHER": "x"})

    @tracking_init
    @env.task
    def task(n: int) -> int:
        return n

    assert task.links[0].get_link(**LINK) == "https://wandb.ai/e/p/runs/r1-{{.actionName}}"
    assert "OTHER" not in task.links[0].variables
    context = tracking_config(id="exp") | {RUNS: json.dumps({"mlflow": {"id": "r1-a0"}})}
    assert task.links[0].get_link(**{**LINK, "context": context}) == "https://wandb.ai/e/p/runs/exp-{{.actionName}}"


def test_a_link_without_project_and_entity_is_the_hosts_page_and_raises_nothing(tasks):
    for context in ({}, {CONFIG: "no json"}, {CONFIG: "[1]"}, {RUNS: '{"wandb": 1}'}, *MALFORMED):
        assert tasks.links(tasks.bare, context) == {"Weights & Biases": "https://wandb.ai"}, context


def test_what_cannot_work_is_refused_at_decoration():
    import flyte
    from flyteplugins.pytorch import Elastic

    elastic = flyte.TaskEnvironment(name="refused", plugin_config=Elastic(nnodes=1, nproc_per_node=2))
    with pytest.raises(ConfigError, match="is async and has workers of its own"):

        @tracking_init
        @elastic.task
        async def trains(n: int) -> int:
            return n

    with pytest.raises(ConfigError, match="has no argument 'projct'; did you mean 'project'"):
        tracking_init(projct="p")
    with pytest.raises(ConfigError, match="put tracking_init on the Python task"):
        tracking_init(elastic)

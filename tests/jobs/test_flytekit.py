"""Real Flyte 1 tasks: in this process, with Elastic workers, and as their pods run them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from support import flyte1_pods, jobs
from support.wandb_server import WandbServer

from flyteplugins_tracking import tracking_config

TASKS, WORKERS = jobs.PROGRAMS / "flyte_tasks.py", jobs.PROGRAMS / "flyte_workers.py"


def reports(directory: Path) -> dict[str, list[dict]]:
    """The reports of each task's processes, by task and rank."""
    found: dict[str, list[dict]] = {}
    for path in sorted(directory.glob("*.json")):
        seen = json.loads(path.read_text())
        found.setdefault(seen["tag"], []).append(seen)
    return {tag: sorted(seen, key=lambda report: report["rank"] or 0) for tag, seen in found.items()}


@pytest.fixture(scope="module")
def in_process(tmp_path_factory):
    """All tasks of one process."""
    return succeeded(jobs.python(tmp_path_factory.mktemp("in-process"), TASKS))


@pytest.fixture(scope="module")
def elastic(tmp_path_factory):
    """All tasks with workers, and one of them once more."""
    return succeeded(jobs.python(tmp_path_factory.mktemp("elastic"), WORKERS, "elastic"))


def succeeded(done: jobs.Done) -> jobs.Done:
    assert done.returncode == 0, done.output
    return done


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("task", "calls"),
    [
        ("below", 3),  # once, and twice in a map_task
        ("above", 3),
        ("inner_links", 1),
        ("async_below", 1),
        ("async_above", 1),
        ("cached", 1),
        ("dynamic", 1),
        ("pytorch_job", 1),
    ],
)
def test_each_kind_of_task_has_one_run_per_call(in_process, task, calls):
    opened = [report["run_id"] for report in reports(in_process.directory)[task]]
    assert len(set(opened)) == len(opened) == calls
    stored = {run.id: run for run in in_process.runs}
    for run_id in opened:
        assert [row["row"] for row in stored[run_id].rows] == [0, 1, 2]
        assert stored[run_id].exit_code == 0


@pytest.mark.wide
def test_elastic_workers_have_their_runs_and_the_others_none(elastic):
    seen = reports(elastic.directory)
    assert [report["run_id"] for report in seen["spawn_above"] if report["rank"] == 1] == [None]
    assert [report["run_id"] for report in seen["fork_below"] if report["rank"] == 1] == [None, None]
    for task in ("spawn_below", "fork_above"):
        assert len({report["run_id"] for report in seen[task]}) == 2
    stored = {run.id: run for run in elastic.runs}
    opened = [report["run_id"] for task in seen.values() for report in task if report["run_id"]]
    assert sorted(opened) == sorted(stored)
    for run in stored.values():
        assert run.exit_code == 0
        assert len(run.rows) == 3
        assert run.config["tracking_init"]["launcher"] == "torchelastic"


@pytest.mark.full
def test_two_local_executions_in_a_row_make_two_runs(elastic):
    opened = [report["run_id"] for report in reports(elastic.directory)["fork_below"] if report["run_id"]]
    assert len(set(opened)) == 2


def test_pyflyte_run(tmp_path):
    pyflyte = Path(sys.executable).with_name("pyflyte")
    done = jobs.run([pyflyte, "run", TASKS, "above", "--n", "1"], tmp_path)
    assert done.returncode == 0, done.output
    assert [run.exit_code for run in done.runs] == [0]


@pytest.mark.full
def test_a_pod_is_asked_to_stop_before_the_timeout_of_its_task(tmp_path):
    done = flyte1_pods.run("limited", tmp_path)
    (run,) = done.runs
    assert (run.exit_code, run.summary["stop/reason"]) == (0, "time limit"), done.output


def test_a_pod_runs_a_task_and_its_retry_goes_on_with_the_run(tmp_path):
    first, second = (flyte1_pods.run("below", tmp_path, attempt) for attempt in (0, 1))
    assert (tmp_path / "out" / "outputs.pb").exists(), first.output + second.output
    assert [run.id for run in second.runs] == ["f7c3a-n0", "f7c3a-n0"]
    assert [run.config["tracking_init"]["flyte"]["attempt"] for run in second.runs] == [0, 1]
    assert second.runs[0].config["tracking_init"]["flyte"] == {
        "execution": "f7c3a",
        "project": "proj",
        "domain": "development",
        "task": "flyte_tasks.below",
        "attempt": 0,
    }


@pytest.mark.full
def test_the_pods_of_an_elastic_job_agree(tmp_path):
    rendezvous = {"PET_NNODES": "2", "PET_RDZV_ENDPOINT": f"127.0.0.1:{jobs.free_port()}"}
    env = flyte1_pods.environment("on_two_nodes", FLYTE_EXECUTION_URL="http://flyte/x", **rendezvous)
    agents = [
        jobs.start(flyte1_pods.command("on_two_nodes", tmp_path, module="flyte_workers"), tmp_path, env)
        for _ in range(2)
    ]
    done = [jobs.finish(agent, tmp_path) for agent in agents]
    assert (tmp_path / "out" / "outputs.pb").exists(), done[0].output
    assert sorted(run.id for run in done[0].runs) == ["f7c3a-n0-worker-0", "f7c3a-n0-worker-1"]
    assert {run.group for run in done[0].runs} == {"f7c3a-n0"}
    assert {run.config["tracking_init"]["flyte"]["url"] for run in done[0].runs} == {"http://flyte/x"}
    assert [report["run_id"] is None for report in reports(tmp_path)["on_two_nodes"]].count(False) == 2


@pytest.mark.parametrize("task", ["spawn_above", pytest.param("fork_below", marks=pytest.mark.wide)])
def test_a_pod_with_elastic_workers(tmp_path, task):
    done = flyte1_pods.run(task, tmp_path, module="flyte_workers")
    assert (tmp_path / "out" / "outputs.pb").exists(), done.output
    assert [(run.id, run.exit_code) for run in done.runs] == [("f7c3a-n0", 0)]


@pytest.mark.full
def test_a_failing_pod_writes_its_error_and_a_failed_run(tmp_path):
    done = flyte1_pods.run("failing", tmp_path, module="flyte_workers")
    assert list((tmp_path / "out").glob("error*.pb")), done.output
    assert [(run.id, run.exit_code) for run in done.runs] == [("f7c3a-n0", 1)]


@pytest.mark.wide
def test_outputs_to_ignore_are_no_failure(tmp_path):
    done = flyte1_pods.run("ignored", tmp_path)
    assert [run.exit_code for run in done.runs] == [0], done.output


@pytest.mark.full
def test_pods_of_a_pytorch_job_are_ranks(tmp_path):
    shape = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
        "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    }
    for rank in ("0", "1"):
        done = flyte1_pods.run("pytorch_job", tmp_path, RANK=rank, **shape)
        assert done.returncode == 0, done.output
    assert sorted(run.id for run in done.runs) == ["f7c3a-n0-worker-0-rank-0", "f7c3a-n0-worker-1-rank-0"]


@pytest.mark.wide
def test_the_agent_of_a_pytorch_job_has_no_run(tmp_path):
    done = flyte1_pods.run("pytorch_job", tmp_path, RANK="1", WORLD_SIZE="16", PET_NPROC_PER_NODE="8")
    assert "RANK=1 is a node, not a process: PET_NPROC_PER_NODE=8" in done.output
    assert done.runs == []


def test_a_hashed_name_is_the_id_and_its_execution_the_group(tmp_path):
    done = flyte1_pods.run("below", tmp_path, name="fabc123d")
    assert [(run.id, run.group) for run in done.runs] == [("fabc123d", "f7c3a")], done.output


@pytest.mark.wide
def test_a_script_that_a_task_starts_does_not_count_as_the_task(tmp_path):
    """The script inherits the pod's variables. flytekit's context there has a random prefix in each process."""
    done = jobs.python(tmp_path, jobs.PROGRAMS / "flyte_imported.py", env=flyte1_pods.environment("below"))
    assert done.returncode == 0, done.output
    (run,) = done.runs
    assert not run.id.startswith("f7c3a")
    assert run.config["tracking_init"]["flyte"]["execution"] == "f7c3a"


@pytest.mark.wide
def test_map_task_elements_in_one_prefix_are_runs_of_their_own(tmp_path):
    for index in ("0", "1"):
        done = flyte1_pods.run(
            "below", tmp_path, BATCH_JOB_ARRAY_INDEX_VAR_NAME="FLYTE_K8S_ARRAY_INDEX", FLYTE_K8S_ARRAY_INDEX=index
        )
    assert [run.id for run in done.runs] == ["f7c3a-n0-0", "f7c3a-n0-1"], done.output


@pytest.mark.full
def test_a_missing_key_on_a_cluster_raises_and_opens_no_run(tmp_path):
    done = flyte1_pods.run("below", tmp_path, WANDB_MODE="online")
    assert "TrackerUnavailableError" in done.output
    assert "set WANDB_API_KEY, or pass secret=" in done.output
    assert list((tmp_path / "out").glob("error*.pb"))
    assert done.runs == []


def test_a_missing_secret_on_a_cluster_raises(tmp_path):
    done = flyte1_pods.run("with_secret", tmp_path, WANDB_MODE="online")
    assert "add secret_requests=[Secret(group='wandb', key='api_key')] to the task" in done.output
    assert done.runs == []


@pytest.fixture(scope="module")
def templates(tmp_path_factory):
    """The config of each task's serialized template, from a process that imports the tasks."""
    done = jobs.python(tmp_path_factory.mktemp("templates"), jobs.PROGRAMS / "flyte_templates.py")
    assert done.returncode == 0, done.output
    return json.loads(done.output.partition("TEMPLATES ")[2])


def test_a_serialized_task_brings_its_link(templates):
    link = {"wandb_host": "https://wandb.ai", "wandb_entity": "team", "wandb_project": "tests"}
    for task in ("below", "async_below", "above", "spawn_above"):
        assert {"link_type": "tracking-wandb", **link}.items() <= templates[task].items()
    assert {"link_type": "tracking-wandb-project", **link}.items() <= templates["spawn_below"].items()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("task", "link_type"),
    [
        ("links_per_worker", "tracking-wandb-worker-0,tracking-wandb-worker-1"),
        ("link_to_group", "tracking-wandb-group"),
        ("links_of_a_range", "tracking-wandb-group"),
    ],
)
def test_links_lead_to_the_runs_of_the_tasks_workers(templates, task, link_type):
    assert templates[task]["link_type"] == link_type


@pytest.mark.full
def test_the_files_of_a_run_are_kept(tmp_path):
    with WandbServer() as server:
        given = tracking_config(project="2024", entity="team", name="null")
        done = flyte1_pods.run("files_kept", tmp_path, **server.environment, **given)
        assert done.returncode == 0, done.output
        run = server.run(f"{flyte1_pods.EXECUTION}-{flyte1_pods.NODE}")
    assert (run.project, run.entity, run.name, run.exit_codes) == ("2024", "team", "null", [0])
    files = Path(done.output.partition("FlyteDirectory('")[2].partition("')")[0].removeprefix("file://"))
    assert "raw" in files.parts
    assert {"wandb-summary.json", "config.yaml"} <= {path.name for path in files.iterdir()}


@pytest.mark.full
def test_unsent_rows_of_all_ranks_outlive_the_pod(tmp_path):
    done = flyte1_pods.run("run_per_rank", tmp_path, module="flyte_workers")
    assert done.returncode == 0, done.output
    ids = [f"{flyte1_pods.EXECUTION}-{flyte1_pods.NODE}-rank-{rank}" for rank in range(2)]
    assert sorted(path.stem.removeprefix("run-") for path in (tmp_path / "raw").rglob("*.wandb")) == ids


@pytest.mark.full
def test_malformed_configuration_raises_and_opens_no_run(tmp_path):
    done = flyte1_pods.run("above", tmp_path, FLYTE_TRACKING_CONFIG="[1]")
    assert "the variable FLYTE_TRACKING_CONFIG must be a JSON object, got a list" in done.output
    assert done.runs == []


def test_a_link_without_entity_or_project_is_the_hosts_page(templates):
    host = {"link_type": "tracking-wandb-host", "wandb_host": "https://wandb.ai", "wandb_project": "tests"}
    assert templates["cached"] == host


def test_links_of_class_decorators_inside_are_kept(templates):
    assert templates["inner_links"] == {
        "link_type": "inner,tracking-wandb-id",
        "port": "1234",
        "wandb_host": "https://wandb.ai",
        "wandb_entity": "team",
        "wandb_project": "tests",
        "wandb_id": "chosen",
    }


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "how",
    [
        "pickle",
        pytest.param("cloudpickle", marks=pytest.mark.full),
        pytest.param("multiprocessing", marks=pytest.mark.full),
        "registered",
    ],
)
def test_a_plain_function_pickles_as_without_flytekit(tmp_path, how):
    """pickle takes it by name. cloudpickle takes it by value if it is of `__main__` or of a registered module."""
    done = jobs.python(tmp_path, jobs.PROGRAMS / "flyte_pickling.py", how)
    assert done.returncode == 0, done.output

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


# Of each task: how often it is called.
CALLS = {
    **{"below": 3, "above": 3},  # once, and twice in a map_task
    **dict.fromkeys(("inner_links", "async_below", "async_above", "cached", "dynamic", "pytorch_job"), 1),
}


def test_each_kind_of_task_has_one_run_per_call(tmp_path, subtests):
    done = jobs.python(tmp_path, TASKS)
    assert done.returncode == 0, done.output
    stored, seen = {run.id: run for run in done.runs}, reports(tmp_path)
    for task, calls in CALLS.items():
        with subtests.test(task):
            opened = [report["run_id"] for report in seen[task]]
            assert len(set(opened)) == len(opened) == calls
            for run_id in opened:
                assert [row["row"] for row in stored[run_id].rows] == [0, 1, 2]
                assert stored[run_id].exit_code == 0


@pytest.mark.wide
def test_elastic_workers_have_their_runs_and_the_others_none(tmp_path):
    """All tasks with workers, and one of them once more, which has another run then."""
    done = jobs.python(tmp_path, WORKERS)
    assert done.returncode == 0, done.output
    seen = reports(tmp_path)
    assert [report["run_id"] for report in seen["spawn_above"] if report["rank"] == 1] == [None]
    assert [report["run_id"] for report in seen["fork_below"] if report["rank"] == 1] == [None, None]
    for task in ("spawn_below", "fork_above"):
        assert len({report["run_id"] for report in seen[task]}) == 2
    opened = [report["run_id"] for task in seen.values() for report in task if report["run_id"]]
    assert sorted(opened) == sorted(run.id for run in done.runs)
    for run in done.runs:
        assert run.exit_code == 0
        assert len(run.rows) == 3
        assert run.config["tracking_init"]["launcher"] == "torchelastic"


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


@pytest.mark.full
def test_a_pod_with_elastic_workers(tmp_path):
    done = flyte1_pods.run("spawn_above", tmp_path, module="flyte_workers")
    assert (tmp_path / "out" / "outputs.pb").exists(), done.output
    assert [(run.id, run.exit_code) for run in done.runs] == [("f7c3a-n0", 0)]


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


def test_a_missing_secret_on_a_cluster_raises(tmp_path):
    done = flyte1_pods.run("with_secret", tmp_path, WANDB_MODE="online")
    assert "add secret_requests=[Secret(group='wandb', key='api_key')] to the task" in done.output
    assert done.runs == []


def test_a_serialized_task_brings_its_links(tmp_path):
    done = jobs.python(tmp_path, jobs.PROGRAMS / "flyte_templates.py")
    assert done.returncode == 0, done.output
    templates = json.loads(done.output.partition("TEMPLATES ")[2])
    run = dict.fromkeys(("below", "async_below", "above", "spawn_above"), "tracking-wandb")
    workers = {
        "spawn_below": "tracking-wandb-project",
        "links_per_worker": "tracking-wandb-worker-0,tracking-wandb-worker-1",
        "link_to_group": "tracking-wandb-group",
        "links_of_a_range": "tracking-wandb-group",
    }
    link = {"wandb_host": "https://wandb.ai", "wandb_entity": "team", "wandb_project": "tests"}
    for task, link_type in {**run, **workers}.items():
        assert {"link_type": link_type, **link}.items() <= templates[task].items(), task
    # Without an entity, the page of the host.
    host = {"link_type": "tracking-wandb-host", "wandb_host": "https://wandb.ai", "wandb_project": "tests"}
    assert templates["cached"] == host
    # The links of a class decorator inside are kept.
    kept = {"link_type": "inner,tracking-wandb-id", "port": "1234", "wandb_id": "chosen"}
    assert templates["inner_links"] == {**link, **kept}


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


def test_a_plain_function_pickles_as_without_flytekit(tmp_path):
    """pickle takes it by name. cloudpickle takes it by value if it is of `__main__` or of a registered module."""
    done = jobs.python(tmp_path, jobs.PROGRAMS / "flyte_pickling.py")
    assert done.returncode == 0, done.output

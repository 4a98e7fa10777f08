"""Programs that are written for the other plugins run with another import line."""

from __future__ import annotations

import importlib.metadata
import json
import re
import sys
from pathlib import Path

import pytest
from support import flyte1_pods, flyte2_pods, jobs
from support.wandb_server import KEY, WandbServer

from flyteplugins_tracking.compat import wandb as compat
from flyteplugins_tracking.compat.wandb import wandb_config

FLYTEKIT = jobs.PROGRAMS / "compat_flytekit.py"

TASKS = {"module": "compat_tasks"}


def seen(directory: Path, tag: str) -> list[dict]:
    """The reports of a task's processes, by rank."""
    return [json.loads(path.read_text()) for path in sorted(directory.glob(f"{tag}-*.json"))]


def test_the_import_needs_no_vendor(tmp_path):
    package = Path(compat.__file__).parents[2]
    code = f"import sys; sys.path.insert(0, {str(package)!r}); import flyteplugins_tracking.compat.wandb as w; print(w)"
    done = jobs.run([sys.executable, "-I", "-S", "-c", code], tmp_path)
    assert done.returncode == 0, done.output


@pytest.mark.full
def test_flytekit_programs_have_their_runs_without_a_cluster_and_its_secret(tmp_path):
    done = jobs.python(tmp_path, FLYTEKIT, "all")
    assert done.returncode == 0, done.output
    stored = {run.id: run.exit_code for run in done.runs}  # the others have directories of their own
    (below,), (above,) = seen(tmp_path, "below"), seen(tmp_path, "above")
    assert stored == {below["id"]: 0, "chosen": 0}
    assert above["id"] == "chosen"
    assert not (tmp_path / "secret-was-read").exists()  # offline, nobody needs it
    (sync,), (coroutine,) = seen(tmp_path, "in_a_directory"), seen(tmp_path, "async_in_a_directory")
    assert {Path(report["dir"]).parents[2].name for report in (sync, coroutine)} == {"given", "async"}
    # A directory is downloaded where there is a run.
    first, second = seen(tmp_path, "lazily")
    assert Path(first["dir"]).parents[2].name == "downloaded-0"
    assert second["id"] is None
    assert not (tmp_path / "downloaded-1").exists()


def test_api_host_is_the_server_and_the_secret_its_key(tmp_path):
    with WandbServer() as server:
        env = {"THE_KEY": KEY, "THE_SERVER": server.url, "WANDB_MODE": "online"}
        done = jobs.python(tmp_path, FLYTEKIT, "server", env=env)
        assert done.returncode == 0, done.output
        run = server.run("there")
    assert (run.entity, run.project, run.exit_codes, len(run.rows)) == ("team", "tests", [0], 1)


def test_on_a_cluster_a_secret_that_is_not_there_is_an_error(tmp_path):
    done = flyte1_pods.run("below", tmp_path, module="compat_flytekit", WANDB_MODE="online")
    assert "add secret_requests=" in done.output


def test_the_context_reaches_children_and_the_decorator_goes_before_it(tmp_path):
    context = wandb_config(project="my-project", tags=["experiment-1"], run_mode="auto")
    done = flyte2_pods.local("parent", tmp_path, context=context, **TASKS)
    assert done.outputs is not None, done.output
    own, joined, independent = json.loads(done.outputs[0])
    assert own[1:] == ["my-project", ["experiment-1"], ["my-project", ["experiment-1"], "auto"]]
    assert joined == own  # the child goes on in its parent's run
    assert independent[0] != own[0]
    assert independent[1:] == ["override-project", ["decorated"], ["override-project", ["overridden"], "auto"]]
    assert sorted(len(run.rows) for run in done.runs) == [0, 2]


@pytest.mark.full
def test_download_logs_makes_the_files_an_output(tmp_path):
    done = flyte2_pods.run("logged", tmp_path, children=True, **TASKS)
    assert done.outputs == [1], done.output
    (trace,) = [path for path in flyte2_pods.base(tmp_path, "r1").iterdir() if path.name != "a0"]
    assert trace.is_dir()


@pytest.mark.wide
def test_logs_are_downloaded_in_and_outside_of_tasks(tmp_path):
    with WandbServer() as server:
        script = jobs.python(tmp_path / "script", jobs.PROGRAMS / "compat_tasks.py", env=server.environment)
        pod = flyte2_pods.run("downloads", tmp_path / "pod", children=True, **TASKS, **server.environment)
        stored = server.run("r").files
    assert script.returncode == 0, script.output
    (report,) = seen(tmp_path / "script", "downloads")
    assert report["none"] == [
        "no W&B run is open: pass run_id=..., or call this in a task with @wandb_init",
        "NoneType",
    ]
    assert report["no sweep"][0].startswith("no W&B sweep is open")
    for kind in ("run", "sweep"):
        message, cause = report[f"unknown {kind}"]
        assert message.startswith(f"W&B did not return the {kind} 'e/p/nobody'")
        assert cause == "CommError"
    assert "summary.json" in report["open"]
    assert "metrics_history.json" not in report["open"]
    assert set(report["directory"]) == set(stored) | {"summary.json", "metrics_history.json"}
    after = tmp_path / "script" / "after"
    assert json.loads((after / "summary.json").read_text())["nested"] == {"y": 599}
    assert [row["x"] for row in json.loads((after / "metrics_history.json").read_text())] == list(range(600))
    assert pod.outputs is not None, pod.output
    rows = json.loads((Path(pod.outputs[0].removeprefix("file://")) / "metrics_history.json").read_text())
    assert [row["n"] for row in rows] == [1]


@pytest.mark.full
def test_a_sweep_runs_its_trials(tmp_path):
    with WandbServer() as server:
        done = jobs.python(tmp_path, jobs.PROGRAMS / "compat_sweep.py", env=server.environment)
        assert done.returncode == 0, done.output
        (sweep,) = server.sweeps
        trials = [run for run in server.runs if run.sweep == sweep.id]
    assert (sweep.entity, sweep.project) == ("e", "p")
    assert [[row["loss"] for row in trial.rows] for trial in trials] == [[1], [2]]
    assert [trial.exit_codes for trial in trials] == [[0], [0]]
    histories = [json.loads((tmp_path / "trials" / trial.id / "metrics_history.json").read_text()) for trial in trials]
    assert [[row["loss"] for row in rows] for rows in histories] == [[1], [2]]


def peers_blocks() -> list[str]:
    """The Python blocks of its README, with our import line."""
    try:
        found = importlib.metadata.metadata("flyteplugins-wandb")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("flyteplugins-wandb is not installed: pip install flyteplugins-wandb, whose README this runs")
    # Which of the two has it differs with the finder that another library may have installed.
    description = found.get("Description") or str(found.get_payload())
    blocks = re.findall(r"```python\n(.+?)```", description, re.DOTALL)
    assert len(blocks) > 10
    return [block.replace("flyteplugins.wandb", "flyteplugins_tracking.compat.wandb") for block in blocks]


@pytest.mark.full
def test_the_blocks_of_the_peers_readme_run(tmp_path):
    blocks = [block for block in peers_blocks() if "wandb_sweep" not in block]
    with WandbServer() as server:
        done = jobs.python(tmp_path, jobs.PROGRAMS / "compat_readme.py", json.dumps(blocks), env=server.environment)
    assert done.returncode == 0, done.output
    tasks = json.loads(done.output.partition("TASKS ")[2].splitlines()[0])
    assert len(tasks) >= 11
    tracked = sum(len(names) for names in tasks)
    assert tracked >= 9
    assert [run.exit_codes for run in server.runs] == [[0]] * len(server.runs)
    assert len(server.runs) >= tracked
    assert ("my-team", "my-project") in {(run.entity, run.project) for run in server.runs}

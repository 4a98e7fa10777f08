"""The launchers of Accelerate, Fabric, DeepSpeed and Spark, and `mp.spawn`: rank 0 of the engine alone has the run."""

from __future__ import annotations

import base64
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from engine_jobs import need
from support import jobs
from support.wandb_server import WandbServer

pytestmark = pytest.mark.full

RANKS = str(jobs.PROGRAMS / "started_ranks.py")
# With --cpu it would start one process, or mpirun. The processes use the CPU without it.
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2"]


def trained(directory: Path, server: WandbServer, *commands: list[str]) -> tuple[list[jobs.Done], list[dict[str, Any]]]:
    """Run the commands at once. Returns them as they have ended, and what each rank has seen, by the engine's rank."""
    env = {**server.environment, "PYSPARK_PYTHON": sys.executable}
    started = [jobs.start(command, directory, env, cold=True) for command in commands]
    done = [jobs.finish(process, directory, timeout_s=200) for process in started]
    return done, [json.loads(path.read_text()) for path in sorted(directory.glob("seen-*.json"))]


def python(how: str) -> list[str]:
    return [sys.executable, RANKS, how, str(jobs.free_port())]


@pytest.mark.parametrize(
    ("how", "package", "launcher"),
    [
        pytest.param("debug", "accelerate", "process_group", marks=pytest.mark.wide),
        pytest.param("notebook", "accelerate", "torchelastic", marks=pytest.mark.wide),
        pytest.param("fabric", "lightning", "lightning", marks=pytest.mark.wide),
        ("spark", "pyspark", "torchelastic"),
        pytest.param("spawn", "torch", "env", marks=pytest.mark.wide),
        pytest.param("spawn_group_outside", "torch", "process_group", marks=pytest.mark.wide),
    ],
)
def test_rank_0_of_the_engine_alone_has_the_run(tmp_path, how, package, launcher):
    need(package)
    with WandbServer() as server:
        (done,), seen = trained(tmp_path, server, python(how))
        assert done.returncode == 0, done.output
        check(server, seen, launcher)


def check(server: WandbServer, seen: list[dict[str, Any]], launcher: str) -> None:
    assert [one["truth"] for one in seen] == [[0, 2], [1, 2]]
    assert [[one["info"]["rank"], one["info"]["world_size"]] for one in seen] == [[0, 2], [1, 2]]
    assert {one["info"]["launcher"] for one in seen} == {launcher}
    (run,) = server.runs
    assert [one["id"] for one in seen] == [run.id, None]
    assert ([(row["rank"], row["step"]) for row in run.rows], run.exit_codes) == ([(0, 0), (0, 1), (0, 2)], [0])


@pytest.mark.wide
def test_accelerate_launch_on_two_machines(tmp_path):
    need("accelerate")
    with WandbServer() as server:
        place = ["--num_machines=2", "--main_process_ip=127.0.0.1", f"--main_process_port={jobs.free_port()}"]
        commands = [[*ACCELERATE, *place, f"--machine_rank={index}", RANKS, "accelerate"] for index in range(2)]
        done, seen = trained(tmp_path, server, *commands)
        assert [one.returncode for one in done] == [0, 0], [one.output for one in done]
        check(server, seen, "torchelastic")
        assert [one["info"]["worker_index"] for one in seen] == [0, 1]


def deepspeed(*arguments: str) -> list[str]:
    """DeepSpeed's launcher of one node: `deepspeed` itself asks for GPUs."""
    world = base64.urlsafe_b64encode(json.dumps({"localhost": [0, 1]}).encode()).decode()
    place = ["--node_rank=0", "--master_addr=127.0.0.1", f"--master_port={jobs.free_port()}", f"--world_info={world}"]
    return [sys.executable, "-m", "deepspeed.launcher.launch", *place, *arguments]


def test_deepspeeds_launcher_with_a_run_for_each_worker_before_there_is_a_group(tmp_path):
    need("deepspeed")
    with WandbServer() as server:
        (done,), seen = trained(tmp_path, server, deepspeed("--no_local_rank", RANKS, "deepspeed"))
        assert done.returncode == 0, done.output
        check(server, seen, "env")


def test_when_a_peer_fails_under_deepspeeds_launcher_every_row_is_sent_and_the_failure_told(tmp_path):
    """It sends SIGTERM to wandb-core, and then to the rank."""
    need("deepspeed")
    with WandbServer() as server:
        (done,), _ = trained(tmp_path, server, deepspeed("--no_local_rank", RANKS, "deepspeed_peer_fails"))
        assert done.returncode != 0
        (run,) = server.runs
        assert (run.exit_codes, run.state) == ([1], "failed"), done.output
        assert run.summary["failure/rank"] == 1
        logged = int((tmp_path / "logged").read_text())
        assert [row["x"] for row in run.rows][: logged + 1] == list(range(logged + 1))


def test_the_doctor_as_a_module_of_deepspeeds_launcher(tmp_path):
    need("deepspeed")
    done = jobs.run(deepspeed("--module", "flyteplugins_tracking", "--offline"), tmp_path, {"WANDB_API_KEY": "0" * 40})
    assert done.returncode == 0, done.output
    assert "usage:" not in done.output


@pytest.mark.wide
def test_of_two_processes_with_the_same_rank_the_second_gets_a_run_of_its_own_and_a_warning(tmp_path):
    with WandbServer() as server:
        (done,), seen = trained(tmp_path, server, python("spawn_same"))
        assert done.returncode == 0, done.output
        first, second = sorted([one["id"] for one in seen], key=len)
        assert first == "same"
        assert re.fullmatch("same-[0-9a-f]{6}", second)
        assert {run.id: [row["pid"] for row in run.rows] for run in server.runs} == {
            one["id"]: [one["pid"]] for one in seen
        }
        assert f"run same is open in another process or thread: this one is {second}" in done.output


@pytest.mark.wide
def test_a_group_that_the_function_makes_itself_is_warned_of(tmp_path):
    with WandbServer() as server:
        (done,), _ = trained(tmp_path, server, python("spawn_group_inside"))
        assert done.returncode == 0, done.output
        assert len(server.runs) == 2
        assert done.output.count("the function has connected 2 ranks, of which this is rank 1") == 1

"""The examples run, each under its own launcher, and what they log arrives."""

from __future__ import annotations

import ast
import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
import torch
import yaml
from support import jobs
from support.waiting import wait_for_file, wait_until
from support.wandb_server import WandbServer
from wandb_files import read_runs

EXAMPLES = Path(__file__).parents[2] / "examples"
README = EXAMPLES.parent / "README.md"
TRAIN = EXAMPLES / "quickstart" / "train.py"
PATH = {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}


def example(directory: Path, name: str, processes: int, *arguments: str, **env: str) -> jobs.Done:
    done = jobs.run(
        [*jobs.torchrun("--standalone", f"--nproc-per-node={processes}"), EXAMPLES / name, *arguments], directory, env
    )
    assert done.returncode == 0, done.output
    return done


@pytest.fixture(scope="module")
def server() -> Iterator[WandbServer]:
    with WandbServer() as running:
        yield running


def test_single_logger_has_one_run(tmp_path, server):
    example(tmp_path, "single_logger.py", 2, WANDB_RUN_ID="single", **server.environment)
    run = server.run("single")
    assert (run.project, run.state, len(run.rows)) == ("examples", "finished", 20)
    assert run.rows[-1]["loss"] < run.rows[0]["loss"]
    assert run.config["distributed"]["world_size"] == 2


@pytest.mark.full
def test_per_worker_has_a_run_on_each_of_two_nodes(tmp_path):
    rendezvous = f"--rdzv-endpoint=127.0.0.1:{jobs.free_port()}"
    command = jobs.torchrun("--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d", rendezvous)
    done = together(tmp_path, [({}, [*command, str(EXAMPLES / "per_worker.py")])] * 2)
    runs = sorted(done.runs, key=lambda run: run.id)
    assert [run.id for run in runs] == [f"{runs[0].group}-worker-{worker}" for worker in (0, 1)]
    assert [(run.config["worker"], len(run.rows), run.exit_code) for run in runs] == [(0, 10, 0), (1, 10, 0)]
    assert {run.group for run in runs} == {runs[0].group}


@pytest.mark.full
def test_run_per_rank_has_a_run_of_each_rank_with_its_learning_rate(tmp_path):
    done = example(tmp_path, "run_per_rank.py", 2)
    runs = sorted(done.runs, key=lambda run: run.id)
    assert [run.id for run in runs] == [f"{runs[0].group}-rank-{rank}" for rank in range(2)]
    assert [(run.config["lr"], len(run.rows), run.exit_code) for run in runs] == [
        (0.03, 20, 0),
        (0.1, 20, 0),
    ]


@pytest.mark.full
def test_shared_metrics_has_one_run_of_all_ranks_and_a_plot_of_them(tmp_path):
    done = example(tmp_path, "shared_metrics.py", 2)
    (run,) = done.runs
    logged = [(key, row["global_step"]) for row in run.rows for key in row if key.endswith("/loss")]
    assert sorted(logged) == [(f"rank_{rank}/loss", step) for rank in range(2) for step in range(20)]
    plotted = jobs.python(tmp_path, EXAMPLES / "shared_metrics.py", "plot")
    assert f"ranks.png: rank_0/loss, rank_1/loss of run {run.id}" in plotted.output
    assert (tmp_path / "ranks.png").read_bytes().startswith(b"\x89PNG")


def test_an_evaluation_calls_heartbeat_on_every_rank(tmp_path):
    done = example(tmp_path, "hang_timeout.py", 2)
    (run,) = done.runs
    assert [row["epoch"] for row in run.rows] == [0, 1, 2]
    assert "no progress" not in done.output


@pytest.mark.full
def test_the_pulse_names_the_rank_that_loads_its_data_slowly(tmp_path):
    (run,) = example(tmp_path, "pulse.py", 2, "0.5").runs
    assert len(run.rows) == 20
    assert run.summary["ranks/slowest"] == 1
    assert all("loss" in row for row in run.rows)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "package", "checkpoint"),
    [
        ("checkpoints.py", "torch", "checkpoint.pt"),
        ("stopping_hf_trainer.py", "transformers", "output/checkpoint-*/trainer_state.json"),
        ("stopping_accelerate.py", "accelerate", "checkpoint/model.safetensors"),
        ("stopping_lightning.py", "lightning", "last.ckpt"),
    ],
)
def test_a_time_limit_stops_both_ranks_with_a_checkpoint(tmp_path, name, package, checkpoint):
    pytest.importorskip(package)
    soon = str(int(time.time()) + 600)  # the examples stop ten minutes before it
    done = example(tmp_path, name, 2, SLURM_JOB_END_TIME=soon)
    (run,) = done.runs
    assert (run.exit_code, run.summary["stop/reason"]) == (0, "time limit")
    assert 0 < run.summary["stop/step"] < 100_000
    assert len(list(tmp_path.glob(checkpoint))) == 1


@pytest.mark.full
def test_checkpoints_go_on_with_run_and_training_when_a_rank_is_killed(tmp_path, server):
    """The node gets no SIGTERM: what counts is what is saved every 100 steps."""
    env = {**server.environment, "WANDB_RUN_ID": "elastic", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    job = jobs.start(checkpoints(tmp_path, 1500, options=["--max-restarts=1"]), tmp_path, env)
    wait_for_file(tmp_path / "checkpoint.pt", job)
    rank(job.pid, 1).send_signal(signal.SIGKILL)
    done = jobs.finish(job, tmp_path)
    assert done.returncode == 0, done.output
    run = server.run("elastic")
    steps = [int(row["train_step"]) for row in run.rows]
    second = next(at for at, (one, other) in enumerate(pairwise(steps), start=1) if other <= one)
    assert steps[:second] == list(range(second))
    assert steps[second:] == list(range(steps[second], 1500))
    assert steps[second] % 100 == 0
    assert 100 <= steps[second] <= second
    assert (run.exit_codes[-1], run.state, run.rows_overwritten) == (0, "finished", 0)
    assert [other.id for other in server.runs].count("elastic") == 1


@pytest.mark.parametrize(
    ("argument", "mode"),
    [
        ("", "offline"),
        ("", "disabled"),
        pytest.param('run_mode="shared"', "offline", marks=pytest.mark.full),
        pytest.param('run_mode="new"', "offline", marks=pytest.mark.full),
        pytest.param("primary_rank=-1", "offline", marks=pytest.mark.full),
    ],
)
def test_rank_0_alone_saves_the_checkpoint_whoever_has_a_run(tmp_path, argument, mode):
    """And the next job continues from it: its first step is the one after the last that was saved."""
    env = {"WANDB_MODE": mode}
    for steps, saved, last in ((250, ["0 100", "0 200"], 200), (320, ["0 300"], 300)):
        done = jobs.run(checkpoints(tmp_path, steps, argument), tmp_path, env)
        assert done.returncode == 0, done.output
        assert re.findall("saved by (.+)", done.output) == saved, done.output
        assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["step"] == last
    with_rows = [[row["train_step"] for row in run.rows] for run in done.runs if run.rows]
    ranks = {'run_mode="shared"': 2, 'run_mode="new"': 2}.get(argument, 1) if mode == "offline" else 0
    trained = sorted([*range(250), *range(200, 320)] * ranks)
    assert sorted(step for steps in with_rows for step in steps) == trained


def test_fsdp_has_one_run_with_the_statistics_of_all_ranks(tmp_path):
    (run,) = example(tmp_path, "fsdp.py", 2).runs
    assert (run.exit_code, len(run.rows)) == (0, 20)
    assert {"loss/mean", "norm/max", "rank_0/loss", "rank_1/loss"} <= run.rows[0].keys()
    assert run.rows[-1]["loss/mean"] < run.rows[0]["loss/mean"]


@pytest.mark.full
def test_an_evaluation_logs_to_the_run_of_its_training(tmp_path):
    (run,) = example(tmp_path, "evaluation.py", 2).runs
    assert ["test/error/max" in row for row in run.rows] == ([False] * 10 + [True]) * 3


@pytest.mark.full
def test_an_evaluation_by_itself_has_a_run(tmp_path):
    (run,) = jobs.python(tmp_path, EXAMPLES / "evaluation.py", "evaluate").runs
    assert (run.exit_code, len(run.rows)) == (0, 1)


@pytest.mark.full
def test_a_preempted_training_continues_where_it_stopped(tmp_path):
    """A SIGTERM before a rank has called `should_stop()` interrupts it: so the test waits for some rows."""
    env = {"WANDB_RUN_ID": "preempted"}
    job = jobs.start(checkpoints(tmp_path, 10_000), tmp_path, env)
    wait_until(lambda: any(run.rows[4:] for run in read_runs(tmp_path / "wandb")), job)
    job.send_signal(signal.SIGTERM)
    preempted = jobs.finish(job, tmp_path)
    (stopped,) = preempted.runs
    assert (stopped.exit_code, stopped.summary["stop/reason"]) == (143, "SIGTERM"), preempted.output
    steps = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["step"] + 20
    continued = jobs.run(checkpoints(tmp_path, steps), tmp_path, env)
    assert continued.returncode == 0, continued.output
    assert [(run.id, run.exit_code) for run in continued.runs] == [("preempted", 143), ("preempted", 0)]
    assert [row["train_step"] for run in continued.runs for row in run.rows] == list(range(steps))


def checkpoints(directory: Path, steps: int, argument: str = "", options: Sequence[str] = ()) -> list[str]:
    """The command of `checkpoints.py` with so many steps and one more argument. It prints who saves, and what."""
    code, changes = (
        (EXAMPLES / "checkpoints.py").read_text(),
        {
            "10_000": str(steps),
            'tracking_init(project="examples"': f'tracking_init({argument}{", " * bool(argument)}project="examples"',
            "torch.save(state": 'print("saved by", info.rank, state["step"], flush=True), torch.save(state',
        },
    )
    for old, new in changes.items():
        assert code.count(old) == 1, old
        code = code.replace(old, new)
    (directory / "checkpoints.py").write_text(code)
    return [*jobs.torchrun("--standalone", "--nproc-per-node=2", *options), str(directory / "checkpoints.py")]


def rank(agent: int, number: int) -> psutil.Process:
    (found,) = (child for child in psutil.Process(agent).children() if child.environ().get("RANK") == str(number))
    return found


def test_the_quickstart_is_the_readmes(tmp_path):
    (written,) = re.findall(r"```python\n(# train\.py\n.+?)```", README.read_text(), re.DOTALL)
    tree = ast.parse(TRAIN.read_text())
    assert [ast.unparse(node) for node in tree.body[1:]] == [ast.unparse(node) for node in ast.parse(written).body]


@pytest.mark.parametrize(
    ("name", "package"), [pytest.param("flyte1.py", "flytekit", marks=pytest.mark.full), ("flyte2.py", "flyte")]
)
def test_the_quickstarts_of_flyte_have_one_run(tmp_path, name, package):
    pytest.importorskip(package)
    done = jobs.python(tmp_path, EXAMPLES / "quickstart" / name)
    assert done.returncode == 0, done.output
    assert "last loss: 0.1" in done.output
    (run,) = done.runs
    assert (run.project, run.exit_code, len(run.rows)) == ("llm", 0, 10)
    # Flyte 2 starts no workers in local mode.
    assert run.config.get("distributed", {}).get("world_size") == (2 if name == "flyte1.py" else None)


def together(directory: Path, commands: list[tuple[Mapping[str, str], list[str]]]) -> jobs.Done:
    """Run them beside each other, as several nodes do. All end well."""
    running = [jobs.start(command, directory, {**PATH, **env}) for env, command in commands]
    done = [jobs.finish(job, directory) for job in running]
    assert [one.returncode for one in done] == [0] * len(done), "\n".join(one.output for one in done)
    return done[0]


def assert_one_run(done: jobs.Done, launcher: str) -> None:
    """Check for the one run of the quickstart on 2 nodes with 2 processes each."""
    (run,) = done.runs
    assert (run.exit_code, len(run.rows)) == (0, 10)
    shape = {"world_size": 4, "num_workers": 2, "local_world_size": 2, "launcher": launcher}
    assert run.config["distributed"] == shape


def test_the_pods_of_the_pytorchjob_have_one_run(tmp_path):
    """The pods get what the Training Operator sets: the node's number as RANK, the number of pods as WORLD_SIZE."""
    manifest = yaml.safe_load((EXAMPLES / "kubernetes" / "pytorchjob.yaml").read_text())
    replicas, port = manifest["spec"]["pytorchReplicaSpecs"], str(jobs.free_port())
    pods = [replica for replica in replicas.values() for _ in range(replica["replicas"])]
    (tmp_path / "train.py").write_text(TRAIN.read_text())
    commands = []
    for node, pod in enumerate(pods):
        (container,) = pod["template"]["spec"]["containers"]
        env = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "WORLD_SIZE": str(len(pods) * int(manifest["spec"]["nprocPerNode"])),
            "RANK": str(node),
            "PET_NODE_RANK": str(node),
            "PET_NNODES": str(len(pods)),
            "PET_NPROC_PER_NODE": manifest["spec"]["nprocPerNode"],
        }
        commands.append((env, [*container["command"], *container["args"]]))
    assert_one_run(together(tmp_path, commands), "torchelastic")


@pytest.mark.full
def test_the_pods_of_the_konduktor_task_have_one_run(tmp_path):
    task = yaml.safe_load((EXAMPLES / "konduktor" / "task.yaml").read_text())
    nodes, (_, gpus) = task["num_nodes"], task["resources"]["accelerators"].split(":")
    (tmp_path / "train.py").write_text(TRAIN.read_text())
    shape = {"NUM_NODES": str(nodes), "NUM_GPUS_PER_NODE": gpus, "KONDUKTOR_JOB_NAME": "train-1234"}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(jobs.free_port()), "WORKSPACE": str(tmp_path)}
    pods = [
        ({**shape, **place, **task["envs"], "RANK": str(node)}, ["bash", "-c", task["run"]]) for node in range(nodes)
    ]
    assert_one_run(together(tmp_path, pods), "torchelastic")


def test_the_tasks_of_the_slurm_script_have_one_run(tmp_path):
    """`sbatch` and `srun` are replaced by what they set. `tests/slurm` runs the script on a real Slurm."""
    srun = (jobs.PROGRAMS / "srun.sh").read_text()
    for name, code in {"srun": srun, "scontrol": "#!/bin/sh\nprintf 'node-0\\nnode-1\\n'\n"}.items():
        (tmp_path / name).write_text(code)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "train.py").write_text(TRAIN.read_text())
    script = (EXAMPLES / "slurm" / "train.sbatch").read_text()
    assert {"#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=2"} <= set(script.splitlines())
    env = {
        "PATH": f"{tmp_path}{os.pathsep}{PATH['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURM_CLUSTER_NAME": "here",
        "SLURM_JOB_NODELIST": "node-[0-1]",
    }
    done = jobs.run(["bash", "-eu", EXAMPLES / "slurm" / "train.sbatch"], tmp_path, env)
    assert done.returncode == 0, done.output
    assert_one_run(done, "slurm")
    assert done.runs[0].id == "slurm-here-7-0"

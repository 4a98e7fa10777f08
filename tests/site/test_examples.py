"""The examples run, each under its own launcher, and what they log arrives."""

from __future__ import annotations

import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
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


def loaded(path: Path) -> dict[str, Any]:
    import torch

    return dict(torch.load(path, weights_only=True))


def skip_without(package: str) -> None:
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


@pytest.fixture(scope="module")
def server() -> Iterator[WandbServer]:
    with WandbServer() as running:
        yield running


def test_a_moved_script_has_one_run_with_its_arguments_and_rank_0_saves(tmp_path, server):
    example(tmp_path, "move.py", 2, "--lr", "0.1", WANDB_RUN_ID="single", **server.environment)
    run = server.run("single")
    assert (run.project, run.state, len(run.rows)) == ("llm", "finished", 20)
    assert [row["_step"] for row in run.rows] == list(range(20))
    assert all(row["loss"] > 0 for row in run.rows)  # the weights are random at the start, so that it need not fall
    assert run.config["tracking_init"]["world_size"] == 2
    assert (run.config["lr"], run.config["steps"]) == (0.1, 20)
    assert loaded(tmp_path / "model.pt").keys() == {"weight", "bias"}


def test_a_script_without_a_function_has_a_run(tmp_path):
    (tmp_path / "script.py").write_text(
        "import sys\nfrom flyteplugins_tracking import get_run\n"
        "run = get_run()\nif run is not None:\n    run.log({'arguments': len(sys.argv)})\n"
    )
    (run,) = example(tmp_path, "tracked.py", 2, "script.py", "--lr", "0.1").runs
    assert (run.project, run.exit_code, [row["arguments"] for row in run.rows]) == ("llm", 0, [3])


@pytest.mark.full
def test_modes_has_a_run_on_each_of_two_nodes(tmp_path):
    rendezvous = f"--rdzv-endpoint=127.0.0.1:{jobs.free_port()}"
    command = jobs.torchrun("--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d", rendezvous)
    done = together(tmp_path, [({}, [*command, str(EXAMPLES / "modes.py"), "auto", "worker"])] * 2)
    runs = sorted(done.runs, key=lambda run: run.id)
    assert [run.id for run in runs] == [f"{runs[0].group}-worker-{worker}" for worker in (0, 1)]
    assert [(run.rows[0].keys() & {"rank_0/loss", "rank_2/loss"}, len(run.rows), run.exit_code) for run in runs] == [
        ({"rank_0/loss"}, 10, 0),
        ({"rank_2/loss"}, 10, 0),
    ]
    assert {run.group for run in runs} == {runs[0].group}


@pytest.mark.full
def test_modes_has_one_run_of_all_ranks(tmp_path):
    runs = example(tmp_path, "modes.py", 2, "shared").runs  # a directory for each rank
    assert len({run.id for run in runs}) == 1
    logged = [(key, row["global_step"]) for run in runs for row in run.rows for key in row if key.endswith("/loss")]
    assert sorted(logged) == [(f"rank_{rank}/loss", step) for rank in range(2) for step in range(10)]


@pytest.mark.wide
def test_the_slow_rank_is_named_and_an_evaluation_is_no_hang(tmp_path):
    done = example(tmp_path, "slow_rank.py", 2, "0.5")
    (run,) = done.runs
    assert len(run.rows) == 20
    slowest = Counter(row["ranks/slowest"] for row in run.rows if "ranks/slowest" in row)
    assert slowest.most_common(1)[0][0] == 1, slowest  # on a busy machine, rank 0 may be in one window
    assert all("loss" in row for row in run.rows)
    assert "no progress" not in done.output


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "package", "checkpoint"),
    [
        ("checkpoints.py", "torch", "checkpoint.pt"),
        pytest.param("hf_trainer.py", "transformers", "output/checkpoint-*/trainer_state.json", marks=pytest.mark.wide),
        pytest.param("accelerate_training.py", "accelerate", "checkpoint/model.safetensors", marks=pytest.mark.wide),
        pytest.param("lightning_ddp.py", "lightning", "last.ckpt", marks=pytest.mark.wide),
    ],
)
def test_a_time_limit_stops_both_ranks_with_a_checkpoint(tmp_path, name, package, checkpoint):
    skip_without(package)
    soon = str(int(time.time()) + 600)  # they stop ten minutes before it
    code = (EXAMPLES / name).read_text()
    for few in ('"max_steps": 4', '"max_steps": 2', "train(steps=4)"):
        code = code.replace(few, re.sub(r"\d+", "100_000", few))
    (tmp_path / name).write_text(code)
    env = {"SLURM_JOB_END_TIME": soon, "FLYTE_TRACKING_CONFIG": '{"stop_before_s": 600}'}
    done = example(tmp_path, str(tmp_path / name), 2, **env)
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
    # The second attempt begins at its checkpoint, which may be the first one's last step.
    second = next((at for at, (one, other) in enumerate(pairwise(steps), start=1) if other <= one), 100)
    assert steps[:second] == list(range(second))
    assert steps[second:] == list(range(steps[second], 1500))
    assert steps[second] % 100 == 0
    assert 100 <= steps[second] <= second
    assert (run.exit_codes[-1], run.state, run.rows_overwritten) == (0, "finished", 0)
    assert [other.id for other in server.runs].count("elastic") == 1


@pytest.mark.sampled_full(1)
@pytest.mark.full
@pytest.mark.parametrize("argument", ["", 'run_mode="shared"', "primary_rank=-1"])
def test_rank_0_alone_saves_the_checkpoint_whoever_has_a_run(tmp_path, argument):
    """And the next job continues from it: its first step is the one after the last that was saved."""
    for steps, saved, last in ((250, ["0 100", "0 200"], 200), (320, ["0 300"], 300)):
        done = jobs.run(checkpoints(tmp_path, steps, argument), tmp_path)
        assert done.returncode == 0, done.output
        assert re.findall("saved by (.+)", done.output) == saved, done.output
        assert loaded(tmp_path / "checkpoint.pt")["step"] == last
    with_rows = [[row["train_step"] for row in run.rows] for run in done.runs if run.rows]
    ranks = 2 if "shared" in argument else 1
    trained = sorted([*range(250), *range(200, 320)] * ranks)
    assert sorted(step for steps in with_rows for step in steps) == trained


@pytest.mark.full
def test_fsdp_has_one_run_with_the_values_of_all_ranks(tmp_path):
    (run,) = example(tmp_path, "fsdp.py", 2).runs
    assert (run.exit_code, len(run.rows)) == (0, 20)
    assert all(row["norm/mean"] == row["rank_0/norm"] == row["rank_1/norm"] > 0 for row in run.rows)
    assert all(2 * row["loss/mean"] == row["rank_0/loss"] + row["rank_1/loss"] for row in run.rows)
    assert run.rows[-1]["loss/mean"] < run.rows[0]["loss/mean"]


@pytest.mark.wide
def test_an_evaluation_logs_to_the_run_of_its_training_or_by_itself_to_one_of_its_own(tmp_path):
    (run,) = example(tmp_path, "evaluation.py", 2).runs
    assert ["test/error" in row for row in run.rows] == ([False] * 10 + [True]) * 3
    (run,) = jobs.python(tmp_path / "alone", EXAMPLES / "evaluation.py", "evaluate").runs
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
    steps = loaded(tmp_path / "checkpoint.pt")["step"] + 20
    continued = jobs.run(checkpoints(tmp_path, steps), tmp_path, env)
    assert continued.returncode == 0, continued.output
    assert [(run.id, run.exit_code) for run in continued.runs] == [("preempted", 143), ("preempted", 0)]
    assert [row["train_step"] for run in continued.runs for row in run.rows] == list(range(steps))


def checkpoints(directory: Path, steps: int, argument: str = "", options: Sequence[str] = ()) -> list[str]:
    """The command of `checkpoints.py` with so many steps and one more argument. It prints who saves, and what."""
    code = (EXAMPLES / "checkpoints.py").read_text()
    changes = {
        "10_000": str(steps),
        'tracking_init(project="examples"': f'tracking_init({argument}{", " * bool(argument)}project="examples"',
        "torch.save(state": 'print("saved by", info.rank, state["step"], flush=True), torch.save(state',
    }
    for old, new in changes.items():
        assert code.count(old) == 1, old
        code = code.replace(old, new)
    (directory / "checkpoints.py").write_text(code)
    return [*jobs.torchrun("--standalone", "--nproc-per-node=2", *options), str(directory / "checkpoints.py")]


def rank(agent: int, number: int) -> psutil.Process:
    (found,) = (child for child in psutil.Process(agent).children() if child.environ().get("RANK") == str(number))
    return found


def test_the_quickstart_is_the_readmes():
    (written,) = re.findall(r"```python\n# train\.py\n(.+?)```", README.read_text(), re.DOTALL)
    assert TRAIN.read_text().partition("\n")[2] == written


@pytest.mark.parametrize(
    ("name", "package"), [pytest.param("flyte1.py", "flytekit", marks=pytest.mark.wide), ("flyte2.py", "flyte")]
)
def test_the_quickstarts_of_flyte_have_one_run(tmp_path, name, package):
    skip_without(package)
    done = jobs.python(tmp_path, EXAMPLES / "quickstart" / name)
    assert done.returncode == 0, done.output
    assert "last loss: 0.1" in done.output
    (run,) = done.runs
    assert (run.project, run.exit_code, len(run.rows)) == ("llm", 0, 10)
    # Flyte 2 starts no workers in local mode.
    assert run.config.get("tracking_init", {}).get("world_size") == (2 if name == "flyte1.py" else None)


def together(directory: Path, commands: list[tuple[Mapping[str, str], list[str]]]) -> jobs.Done:
    """Run them beside each other, as several nodes do. All end well."""
    running = [jobs.start(command, directory, {**PATH, **env}) for env, command in commands]
    done = [jobs.finish(job, directory) for job in running]
    assert [one.returncode for one in done] == [0] * len(done), "\n".join(one.output for one in done)
    return done[0]


def replaced(directory: Path, **programs: str) -> dict[str, str]:
    """Put these programs there, and return the PATH on which they are the first."""
    for name, code in programs.items():
        (directory / name).write_text(code)
        (directory / name).chmod(0o755)
    return {"PATH": f"{directory}{os.pathsep}{PATH['PATH']}"}


def assert_one_run(done: jobs.Done, launcher: str) -> None:
    """Check for the one run of the quickstart on 2 nodes with 2 processes each."""
    (run,) = done.runs
    assert (run.exit_code, len(run.rows)) == (0, 10)
    shape = {"world_size": 4, "num_workers": 2, "local_world_size": 2, "launcher": launcher}
    assert run.config["tracking_init"].items() >= shape.items()


@pytest.mark.wide
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


@pytest.mark.wide
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


@pytest.mark.full
def test_the_tasks_of_the_slurm_script_have_one_run(tmp_path):
    """`sbatch` and `srun` are replaced by what they set. `tests/slurm` runs the script on a real Slurm."""
    srun = (jobs.PROGRAMS / "srun.sh").read_text()
    path = replaced(tmp_path, srun=srun, scontrol="#!/bin/sh\nprintf 'node-0\\nnode-1\\n'\n")
    (tmp_path / "train.py").write_text(TRAIN.read_text())
    script = (EXAMPLES / "slurm" / "train.sbatch").read_text()
    assert {"#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=2"} <= set(script.splitlines())
    job = secrets.token_hex(4)  # starts are counted by job
    env = {**path, "SLURM_JOB_ID": job, "SLURM_CLUSTER_NAME": "here", "SLURM_JOB_NODELIST": "node-[0-1]"}
    done = jobs.run(["bash", "-eu", EXAMPLES / "slurm" / "train.sbatch"], tmp_path, env)
    assert done.returncode == 0, done.output
    assert_one_run(done, "slurm")
    assert done.runs[0].id == f"slurm-here-{job}-0-train"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("slurm/*.sbatch")), ids=lambda path: path.name)
def test_a_batch_script_is_one_for_bash(path):
    assert subprocess.run(["bash", "-n", path]).returncode == 0


@pytest.mark.parametrize(
    ("left_s", "exit_code", "preempted_at", "is_requeued"),
    [
        (500, 0, "None", True),
        (3600, 0, "None", False),
        (500, 1, "None", False),
        (3600, 1, "2026-11-26T21:18:04", True),
        (3600, 1, "2026-11-25T21:18:04", False),  # in an earlier attempt
    ],
)
def test_a_job_is_requeued_that_has_stopped_for_its_time_limit_or_a_preemption(
    tmp_path, left_s, exit_code, preempted_at, is_requeued
):
    """`srun` and `scontrol` are replaced: no torchrun is started."""
    ends_at = time.strftime("%FT%T", time.localtime(time.time() + left_s))
    scontrol = f"""#!/bin/sh
case "$1 $2" in
    "show job") echo "   StartTime=2026-11-26T20:18:03 EndTime={ends_at} Deadline=N/A"
                echo "   PreemptEligibleTime=2026-11-26T21:18:03 PreemptTime={preempted_at}";;
    "show hostnames") echo node-0;;
    requeue*) echo $2 >> {tmp_path}/requeued;;
esac
"""
    path = replaced(tmp_path, srun=f"#!/bin/sh\necho $@\nexit {exit_code}\n", scontrol=scontrol)
    env = {**path, "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node-[0-1]", "SLURM_NNODES": "2"}
    done = jobs.run(["bash", "-u", EXAMPLES / "slurm" / "preempted.sbatch"], tmp_path, env)
    assert done.returncode == exit_code
    assert "torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=node-0:29500" in done.output
    assert (tmp_path / "requeued").exists() == is_requeued


def test_three_processes_log_to_one_run(tmp_path, server):
    """Those that join wait for the trainer."""
    roles = {"rollout-0": ("rollout-0/reward", 10), "eval": ("eval/accuracy", 1), "trainer": ("loss", 20)}
    started = [
        jobs.start([sys.executable, EXAMPLES / "roles.py", role], tmp_path, server.environment) for role in roles
    ]
    assert [jobs.finish(one, tmp_path).returncode for one in started] == [0, 0, 0]
    run = server.run("grpo-42")
    assert (run.state, run.config["lr"], run.config["rollout-0"]) == ("finished", 1e-5, {"temperature": 0.7})
    assert {key: sum(key in row for row in run.rows) for key, _ in roles.values()} == dict(roles.values())


@pytest.mark.wide
def test_all_roles_of_one_srun_log_to_one_run(tmp_path, server):
    job = {"SLURM_JOB_ID": secrets.token_hex(4), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "3", "SLURM_NTASKS": "3"}
    started = [
        jobs.start(
            [sys.executable, EXAMPLES / "roles_in_srun.py"],
            tmp_path,
            {**server.environment, **job, "SLURM_PROCID": str(task), "RL_RUN": "in-srun"},
        )
        for task in range(3)
    ]
    assert [jobs.finish(one, tmp_path).returncode for one in started] == [0, 0, 0]
    run = server.run("in-srun")
    found = {key: row[key] for row in run.rows for key in ("task", "rollout-0/task", "eval/task") if key in row}
    assert (run.state, found) == ("finished", {"task": 0, "rollout-0/task": 1, "eval/task": 2})


def test_the_script_for_a_hang_tells_the_rank_of_each_process(tmp_path):
    """With a py-spy that only names the process."""
    path = replaced(tmp_path, **{"py-spy": '#!/bin/sh\necho "Process $3"\n'})
    (tmp_path / "train.py").write_text("input()")
    with subprocess.Popen([sys.executable, tmp_path / "train.py"], stdin=subprocess.PIPE, env={"RANK": "3"}) as rank:
        wait_until(lambda: b"train.py" in Path(f"/proc/{rank.pid}/cmdline").read_bytes())
        done = jobs.run(["sh", EXAMPLES / "where.sh"], tmp_path, path)
        rank.communicate(b"\n")
    assert f"RANK=3\nProcess {rank.pid}\n" in done.output


def test_the_files_for_a_login_node_start_a_watcher(tmp_path):
    """The line of a crontab, and the unit of systemd, on a directory without runs, with their end when all is sent."""
    folder = EXAMPLES / "login_node"
    *_, runs, line = (folder / "crontab").read_text().splitlines()
    cron = (
        line.split(None, 5)[5].replace("~/.lock", str(tmp_path / "lock")).replace("$RUNS", runs.removeprefix("RUNS="))
    )
    unit = re.findall(r"^ExecStart=(.+)$", (folder / "tracking.service").read_text(), re.MULTILINE)[0]
    for line in (cron, f"{unit.replace('%h/venv/bin/', '')} --until-done"):
        command = re.sub(r" /\S*llm\b", f" {tmp_path}", line)
        program = f"{shlex.quote(sys.executable)} -m flyteplugins_tracking"
        done = jobs.run(["sh", "-c", command.replace("flyteplugins-tracking", program)], tmp_path)
        assert done.returncode == 0, line
        assert f"{tmp_path} has no rows, and nothing to send" in done.output, line


@pytest.mark.full
def test_the_clean_up_removes_old_runs_that_were_sent(tmp_path, server):
    env = {**server.environment, **PATH, "WANDB_CACHE_DIR": str(tmp_path / "cache")}
    for _ in range(2):
        assert jobs.run([sys.executable, TRAIN], tmp_path, {**env, "WANDB_MODE": "offline"}).returncode == 0
    old, new = sorted((tmp_path / "wandb").glob("offline-run-*"))
    (file,) = old.glob("run-*.wandb")
    logs = tmp_path / "cache" / "wandb" / "logs"
    (log,) = list(logs.glob("core-*"))[:1]
    for path in (file, log):
        os.utime(path, (time.time() - 2 * 86400,) * 2)
    done = jobs.run(["sh", EXAMPLES / "clean.sh"], tmp_path, env)
    assert (done.returncode, old.exists(), new.exists(), log.exists()) == (0, False, True, False), done.output
    assert list(logs.glob("core-*"))  # those of today
    assert [len(server.run(path.name.rpartition("-")[2]).rows) for path in (old, new)] == [10, 10]

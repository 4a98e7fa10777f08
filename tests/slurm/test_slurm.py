"""Real Slurm jobs: batch shells, steps, interactive steps, torchrun in a step, requeues."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.jobs import free_port
from wandb_files import StoredRun, read_runs

from slurm.cluster import INSTALL, REQUEUE_EXIT, Cluster, Job, missing_programs, start_cluster, wait_for

_MISSING = missing_programs()
pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(bool(_MISSING), reason=f"{', '.join(_MISSING)} not installed: {INSTALL}"),
]

EXAMPLES = Path(__file__).parents[2] / "examples"
PROGRAMS = Path(__file__).parents[1] / "programs"
FOUR = 4
# For each mode and scope, what the ids of the four runs, or of the one, end with; and their group.
MODES = {
    ("auto", "global"): ([""], None),
    ("auto", "worker"): (["-worker-0"], ""),
    ("new", "global"): ([f"-rank-{rank}" for rank in range(FOUR)], ""),
    ("new", "worker"): ([f"-worker-0-rank-{rank}" for rank in range(FOUR)], "-worker-0"),
}


@dataclass(frozen=True)
class Place:
    """A directory where trainings store what they log and say what they saw, on one cluster."""

    cluster: Cluster
    directory: Path

    @property
    def env(self) -> dict[str, str]:
        return {
            "OMP_NUM_THREADS": "1",
            "WANDB_MODE": "offline",
            "WANDB_DIR": str(self.directory),
            "WANDB_SILENT": "true",
            "TRAIN_DIR": str(self.directory),
            "PYTHONPATH": str(EXAMPLES.parent),  # the package of this checkout
        }

    @property
    def output(self) -> str:
        path = self.directory / "output.txt"
        return path.read_text() if path.exists() else ""

    def runs(self, prefix: str = "") -> list[StoredRun]:
        """The stored runs whose ids start with `prefix`."""
        return [run for run in read_runs(self.directory) if run.id.startswith(prefix)]

    def reports(self, **like: Any) -> list[dict[str, Any]]:
        """What the processes saw, in the order of their ranks; of those with these values."""
        reports = [json.loads(path.read_text()) for path in self.directory.glob("*.json")]
        found = [report for report in reports if like.items() <= report.items()]
        return sorted(found, key=lambda report: report["info"]["rank"] if report["info"] else 0)

    def submit(self, script: str, *options: str) -> int:
        path = self.directory / "output.txt"
        return self.cluster.submit(script, *options, output=path, env=self.env, workdir=self.directory)

    def submit_example(self, name: str, *options: str) -> int:
        """Submit a batch script in this directory that starts torchrun, 2 processes a node. Returns the job's id."""
        path = os.pathsep.join([str(Path(sys.executable).parent), self.cluster.environment["PATH"]])
        env = {**self.env, "PATH": path, "GPUS_PER_NODE": "2", "MASTER_PORT": str(free_port())}
        files = (f"--chdir={self.directory}", f"--output={self.directory / 'output.txt'}")
        return int(self.cluster.run("sbatch", "--parsable", *files, *options, self.directory / name, env=env).strip())

    def batch(self, script: str, *options: str) -> tuple[int, Job]:
        """Run a batch script to its end; the job's id and end."""
        job_id = self.submit(script, *options)
        return job_id, self.cluster.wait(job_id)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with start_cluster(nodes=3) as running:
        yield running


@pytest.fixture
def place(cluster: Cluster, tmp_path: Path) -> Place:
    return Place(cluster, tmp_path)


def train(**settings: Any) -> str:
    """The shell command that runs `train.py`: see there."""
    return shlex.join([sys.executable, str(Path(__file__).with_name("train.py")), json.dumps(settings)])


def test_the_tasks_of_each_step_of_a_job_get_the_runs_of_their_mode_and_scope(place: Place) -> None:
    commands = [f"srun {train(tracking={'run_mode': mode, 'rank_scope': scope})}" for mode, scope in MODES]
    job_id, job = place.batch("\n".join(commands), "--nodes=1", f"--ntasks={FOUR}")
    assert job.state == "COMPLETED", place.output
    assert len(place.runs()) == 10
    shape = {"world_size": FOUR, "num_workers": 1, "local_world_size": FOUR, "launcher": "slurm", "restart_count": 0}
    for step, (suffixes, group) in enumerate(MODES.values()):
        base = f"slurm-{place.cluster.name}-{job_id}-{step}-train"
        runs = sorted(place.runs(base), key=lambda run: run.id)
        assert [run.id for run in runs] == [base + suffix for suffix in suffixes]
        assert {run.group for run in runs} == {"" if group is None else base + group}
        for run in runs:
            assert (run.project, run.exit_code, [row["row"] for row in run.rows]) == ("p", 0, [0, 1, 2])
            assert run.config["tracking_init"] == shape

        reports = place.reports(step=str(step))
        places = [(report["info"]["rank"], report["info"]["local_rank"]) for report in reports]
        assert places == [(rank, rank) for rank in range(FOUR)]
        assert {(report["info"]["worker_index"], report["info"]["job_id"]) for report in reports} == {(0, str(job_id))}
        opened = [report["run_id"] for report in reports if report["run_id"] is not None]
        assert sorted(opened) == [run.id for run in runs]
        # The others load no tracker.
        assert [report["wandb_loaded"] for report in reports] == [report["run_id"] is not None for report in reports]


def test_the_examples_script_has_one_run_on_two_nodes(place: Place) -> None:
    (place.directory / "train.py").write_text((EXAMPLES / "quickstart" / "train.py").read_text())
    options = ["--wait", f"--chdir={place.directory}", f"--output={place.directory / 'output.txt'}"]
    env = {**place.env, "PATH": os.pathsep.join([str(Path(sys.executable).parent), place.cluster.environment["PATH"]])}
    place.cluster.run("sbatch", *options, EXAMPLES / "slurm" / "train.sbatch", env=env, timeout_s=120)
    (run,) = place.runs()
    assert (run.exit_code, len(run.rows)) == (0, 10)
    assert (run.config["tracking_init"]["num_workers"], run.config["tracking_init"]["world_size"]) == (2, 4)


def test_uneven_nodes_have_a_run_each_per_worker(place: Place) -> None:
    tasks = ["--distribution=arbitrary", f"--nodelist={','.join(place.cluster.nodes[i] for i in (0, 0, 1, 1, 2))}"]
    command = shlex.join(["srun", "--nodes=3", "--ntasks=5", *tasks])
    place.cluster.run("bash", "-c", f"{command} {train(tracking={'rank_scope': 'worker'})}", env=place.env)
    reports = place.reports()
    assert {report["slurm"]["SLURM_STEP_TASKS_PER_NODE"] for report in reports} == {"2(x2),1"}
    infos = [report["info"] for report in reports]
    assert [(info["worker_index"], info["local_rank"], info["local_world_size"]) for info in infos] == [
        (0, 0, 2),
        (0, 1, 2),
        (1, 0, 2),
        (1, 1, 2),
        (2, 0, 1),
    ]
    base = f"slurm-{place.cluster.name}-{reports[0]['job']}-0-train"
    runs = sorted(place.runs(), key=lambda run: run.id)
    assert [run.id for run in runs] == [f"{base}-worker-{worker}" for worker in range(3)]
    assert {run.group for run in runs} == {base}
    assert [run.config["tracking_init"]["local_world_size"] for run in runs] == [2, 2, 1]
    assert {run.config["tracking_init"]["num_workers"] for run in runs} == {3}


def test_the_components_of_a_heterogeneous_job_are_one_world(place: Place) -> None:
    _, job = place.batch(
        f"srun --het-group=0,1 {train(tracking={'rank_scope': 'worker'})}",
        *("--nodes=1", "--ntasks=1", ":", "--nodes=1", "--ntasks=2"),
    )
    assert job.state == "COMPLETED", place.output
    infos = [report["info"] for report in place.reports()]
    assert [(info["rank"], info["world_size"], info["worker_index"]) for info in infos] == [
        (0, 3, 0),
        (1, 3, 1),
        (2, 3, 1),
    ]
    assert len({info["job_id"] for info in infos}) == 1
    assert len({run.group for run in place.runs()}) == 1
    assert [run.id.rpartition("-worker-")[2] for run in sorted(place.runs(), key=lambda run: run.id)] == ["0", "1"]


def test_a_batch_shell_is_one_process_whatever_the_tasks_of_its_job(place: Place) -> None:
    _, job = place.batch(train(), "--nodes=1", f"--ntasks={FOUR}")
    assert job.state == "COMPLETED", place.output
    assert_one_process(place)


def test_a_step_of_one_task_is_one_process(place: Place) -> None:
    command = f"srun --nodes=1 --ntasks=1 {train()}"
    place.cluster.run("salloc", "--nodes=1", f"--ntasks={FOUR}", "bash", "-c", command, env=place.env)
    assert_one_process(place)
    assert place.reports()[0]["slurm"]["SLURM_STEP_NUM_TASKS"] == "1"


def test_an_interactive_step_is_one_process_and_the_steps_started_in_it_are_not(place: Place) -> None:
    shell = f"{train()}\nsrun {train()}\n"
    place.cluster.run("salloc", "--nodes=1", "--ntasks=2", stdin=shell, env=place.env)
    (interactive,) = [report for report in place.reports() if report["slurm"]["SLURM_STEP_NUM_TASKS"] == "1"]
    assert interactive["slurm"]["SLURM_NTASKS"] == "2"
    assert interactive["info"] is None
    ranks = place.reports(step="0")
    assert [report["info"]["rank"] for report in ranks] == [0, 1]
    base = f"slurm-{place.cluster.name}-{interactive['job']}-0-train"
    assert sorted(run.id for run in place.runs()) == sorted([interactive["run_id"], base])
    assert interactive["run_id"].startswith(f"slurm-{place.cluster.name}-{interactive['job']}-")


def without_digest(run_id: str) -> str:
    """Return the id of the run of a torchrun on one node without the digest of its program's arguments."""
    name, dash, digest = run_id.rpartition("-")
    assert dash, run_id
    assert re.fullmatch(r"[0-9a-f]{6}", digest), run_id
    return name


def torchrun(*options: str, **settings: Any) -> str:
    """The shell command that runs `train.py` under torchrun, with 2 processes on each node."""
    module = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", *options]
    return f"{shlex.join(module)} {train(**settings).removeprefix(sys.executable)}"


def across_nodes(nodes: int, rdzv_id: str = "job") -> list[str]:
    """The options of a torchrun that spans several nodes."""
    return [
        *(f"--nnodes={nodes}", f"--rdzv-id={rdzv_id}"),
        *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}"),
    ]


@pytest.mark.parametrize("nodes", [1, 2])
def test_torchrun_in_a_step_tells_the_ranks_and_slurm_names_the_run(place: Place, nodes: int) -> None:
    job_id, job = place.batch(
        f"srun {torchrun(*across_nodes(nodes))}", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"
    )
    assert job.state == "COMPLETED", place.output
    infos = [report["info"] for report in place.reports(job=str(job_id))]
    assert [info["launcher"] for info in infos] == ["torchelastic"] * 2 * nodes
    assert [info["rank"] for info in infos] == list(range(2 * nodes))
    assert {(info["world_size"], info["local_world_size"], info["num_workers"]) for info in infos} == {
        (2 * nodes, 2, nodes)
    }
    (run,) = place.runs()
    base = without_digest(run.id) if nodes == 1 else run.id
    assert base == f"slurm-{place.cluster.name}-{job_id}-0-train"
    assert (run.config["tracking_init"]["launcher"], run.exit_code, len(run.rows)) == ("torchelastic", 0, 3)


# Trainings that one job starts, and what their ids end with. The last one hangs in the first attempt.
SEVERAL = {
    "one after the other in a step": ("srun --ntasks=1 bash -c {both}", ["0-train", "0-train"]),
    "steps beside each other": (
        "srun --overlap --ntasks=1 {first} &\nsleep 2\nsrun --overlap --ntasks=1 {last}\nwait",
        ["0-train", "1-train"],
    ),
    "beside each other in the batch script": (
        "trap 'kill $(jobs -p)' TERM\n{first} &\nsleep 1\n{last} &\nwait\nwait",
        ["batch-train", "batch-train"],
    ),
}


@pytest.mark.parametrize("how", SEVERAL)
def test_trainings_that_a_job_starts_with_torchrun_are_the_same_runs_after_a_requeue(place: Place, how: str) -> None:
    script, names = SEVERAL[how]
    first = torchrun("--standalone", rows=100, tracking={"config": {"which": "first"}})
    last = torchrun(
        "--standalone", rows=1000, tracking={"config": {"which": "last"}}, first_end={"0": "hang", "1": "hang"}
    )
    both = shlex.quote(f"{first}; {last}")
    job_id = place.submit(script.format(first=first, last=last, both=both), "--requeue", "--nodes=1", "--ntasks=2")
    wait_for(lambda: sorted(bool(run.rows) for run in place.runs()) == [True, True], "stored rows of both", 120)
    place.cluster.run("scontrol", "requeue", str(job_id))
    assert place.cluster.wait(job_id, restarts=1, timeout_s=240).state == "COMPLETED", place.output
    attempts = {"first": 100, "last": 1000}
    for which, name in zip(attempts, names, strict=True):
        runs = [run for run in place.runs() if run.config["which"] == which]
        assert len({run.id for run in runs}) == 1
        assert without_digest(runs[0].id) == f"slurm-{place.cluster.name}-{job_id}-{name}"
        assert sorted(run.config["tracking_init"]["restart_count"] for run in runs) == [0, 1]
        assert [len(run.rows) for run in runs if run.config["tracking_init"]["restart_count"]] == [attempts[which]]
    assert len({run.id for run in place.runs()}) == 2


def test_two_trainings_with_one_command_are_the_same_two_runs_after_a_requeue(place: Place) -> None:
    train_twice = "\n".join([torchrun("--standalone")] * 2)
    job_id = place.submit(
        f"{train_twice}\n[ $SLURM_RESTART_COUNT ] || exit {REQUEUE_EXIT}", "--requeue", "--nodes=1", "--ntasks=1"
    )
    assert place.cluster.wait(job_id, restarts=1, timeout_s=240).state == "COMPLETED", place.output
    base = min(run.id for run in place.runs())
    assert without_digest(base) == f"slurm-{place.cluster.name}-{job_id}-batch-train"
    attempts = sorted((run.id, run.config["tracking_init"]["restart_count"]) for run in place.runs())
    assert attempts == [(base, 0), (base, 1), (f"{base}.2", 0), (f"{base}.2", 1)]


def test_a_torchrun_in_each_task_of_a_step_has_a_run_of_its_own(place: Place) -> None:
    job_id, job = place.batch(f"srun {torchrun('--standalone')}", "--nodes=1", "--ntasks=2")
    assert job.state == "COMPLETED", place.output
    base = f"slurm-{place.cluster.name}-{job_id}-0"
    assert sorted(without_digest(run.id) for run in place.runs()) == [f"{base}.task0-train", f"{base}.task1-train"]


def test_each_element_of_a_job_array_has_a_run_of_its_own(place: Place) -> None:
    place.submit(f"srun {torchrun('--standalone')}", "--array=1-2", "--nodes=1", "--ntasks=1")
    wait_for(lambda: [run.exit_code for run in place.runs()] == [0, 0], "two runs that have ended", 120)
    jobs = {report["job"] for report in place.reports()}
    assert len(jobs) == 2
    assert {without_digest(run.id) for run in place.runs()} == {
        f"slurm-{place.cluster.name}-{job}-0-train" for job in jobs
    }


def test_a_time_limit_and_a_requeue_keep_the_run_of_a_torchrun_over_two_nodes(place: Place) -> None:
    settings = {"rows": 1000, "first_end": dict.fromkeys("0123", "hang")}
    options = ["--requeue", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--time=1"]
    job_id = place.submit(f"srun {torchrun(*across_nodes(2), **settings)}", *options)
    assert place.cluster.wait(job_id, timeout_s=240).state == "TIMEOUT", place.output
    place.cluster.run("scontrol", "requeue", str(job_id))
    wait_for(lambda: place.cluster.job(job_id).restarts == 1, "the requeue", 60)
    assert place.cluster.wait(job_id, restarts=1, timeout_s=240).state == "COMPLETED", place.output
    assert_two_attempts(place, [f"slurm-{place.cluster.name}-{job_id}-0-train"], rows=1000)


def test_a_requeued_job_goes_on_with_the_same_runs(place: Place) -> None:
    settings = {"tracking": {"run_mode": "new"}, "rows": 1000, "first_end": {"0": "hang", "1": "hang"}}
    job_id = place.submit(f"srun {train(**settings)}", "--requeue", "--nodes=1", "--ntasks=2")
    wait_for(lambda: [bool(run.rows) for run in place.runs()] == [True, True], "stored rows of both ranks", 60)
    place.cluster.run("scontrol", "requeue", str(job_id))
    assert place.cluster.wait(job_id, restarts=1).state == "COMPLETED", place.output
    assert_two_attempts(
        place, [f"slurm-{place.cluster.name}-{job_id}-0-train-rank-{rank}" for rank in (0, 1)], rows=1000
    )
    # scontrol's SIGTERM. Where it reaches wandb-core too, nobody is left to note the end; the rows are there.
    assert {run.exit_code for run in place.runs() if run.config["tracking_init"]["restart_count"] == 0} <= {None, 143}


def test_a_requeued_program_by_itself_goes_on_with_its_run(place: Place) -> None:
    job_id = place.submit(train(rows=1000, first_end={"0": "hang"}), "--requeue", "--nodes=1", "--ntasks=1")
    wait_for(lambda: [bool(run.rows) for run in place.runs()] == [True], "stored rows", 60)
    place.cluster.run("scontrol", "requeue", str(job_id))
    assert place.cluster.wait(job_id, restarts=1).state == "COMPLETED", place.output
    first, second = sorted(place.runs(), key=lambda run: "tracking_init" in run.config)
    assert first.id == second.id
    assert second.config["tracking_init"] == {"restart_count": 1}
    # It has those too that the first one could not store any more.
    assert sum(row["attempt"] == 1 for row in second.rows) == 1000


def test_the_example_for_preemption_requeues_itself_before_the_time_limit_until_the_training_is_done(
    place: Place,
) -> None:
    """With a limit of a minute, of which the last 40 s are for the checkpoint."""
    steps, numbers = 3000, {"600": "40", "10_000": "3000", "loss.backward()": "loss.backward(), time.sleep(0.01)"}
    for name in ("checkpoints.py", "slurm/preempted.sbatch"):
        text = (EXAMPLES / name).read_text().replace("$first_node", "127.0.0.1").replace("import os", "import os, time")
        for old, new in numbers.items():
            text = text.replace(old, new)
        (place.directory / Path(name).name).write_text(text)
    job_id = place.submit_example("preempted.sbatch", "--nodes=1", "--time=1")
    wait_for(lambda: max(counted(place), default=0) >= steps - 1, "the last step", 300)
    wait_for(lambda: place.cluster.job(job_id).state == "COMPLETED", "the job's end", 120)
    (run_id,) = {run.id for run in place.runs()}
    assert without_digest(run_id) == f"slurm-{place.cluster.name}-{job_id}-0-checkpoints"
    assert sorted(set(counted(place))) == list(range(steps))
    attempts = {run.config["tracking_init"]["restart_count"]: run.exit_code for run in place.runs()}
    assert len(attempts) > 1
    assert set(attempts.values()) == {0}, place.output


def counted(place: Place) -> list[int]:
    return [row["train_step"] for run in place.runs() for row in run.rows if "train_step" in row]


def test_a_job_that_fails_and_is_requeued_goes_on_with_the_same_run(place: Place) -> None:
    step = f"srun {train(first_end={'0': 'raise'})} || exit {REQUEUE_EXIT}"
    job_id = place.submit(step, "--requeue", "--nodes=1", "--ntasks=2")
    assert place.cluster.wait(job_id, restarts=1).state == "COMPLETED", place.output
    assert_two_attempts(place, [f"slurm-{place.cluster.name}-{job_id}-0-train"])
    assert [run.exit_code for run in place.runs() if run.config["tracking_init"]["restart_count"] == 0] == [1]


@pytest.mark.parametrize(("run_mode", "codes"), [("auto", [1]), ("new", [1, 0])])
def test_a_task_that_raises_fails_its_run_and_its_step(place: Place, run_mode: str, codes: list[int]) -> None:
    settings = {"tracking": {"run_mode": run_mode}, "first_end": {"0": "raise"}}
    _, job = place.batch(f"srun {train(**settings)}", "--nodes=1", "--ntasks=2")
    assert (job.state, job.exit_code) == ("FAILED", 1)
    assert "ValueError: made to fail" in place.output
    runs = sorted(place.runs(), key=lambda run: run.id)
    assert [run.exit_code for run in runs] == codes
    assert [len(run.rows) for run in runs] == [3] * len(codes)


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("raise", (1, 1, "exit")),  # the tasks have no common store
        ("exit 7", (7, 1, "exit")),
        ("kill", (137, 1, "SIGKILL")),
    ],
)
def test_the_run_tells_which_task_of_its_step_has_failed(
    place: Place, how: str, expected: tuple[int, int, str]
) -> None:
    program = PROGRAMS / "failing_ranks.py"
    command = shlex.join([sys.executable, str(program), json.dumps({"how": {"1": how}})])
    _, job = place.batch(f"srun --kill-on-bad-exit=1 {command}", "--nodes=1", "--ntasks=3")
    assert job.state == "FAILED", place.output
    (run,) = place.runs()
    found = (run.exit_code, run.summary.get("failure/rank"), run.summary.get("failure/type"))
    assert found == expected, place.output


def test_the_run_of_a_cancelled_job_is_preempted_by_nobodys_fault(place: Place) -> None:
    program = PROGRAMS / "failing_ranks.py"
    command = shlex.join([sys.executable, str(program), json.dumps({"how": {}, "fail_attempts": 1})])
    job_id = place.submit(f"srun {command}", "--nodes=1", "--ntasks=3")
    wait_for(lambda: len(list(place.directory.glob("entered-*"))) == 3, "all tasks", 60)
    place.cluster.run("scancel", "--signal=TERM", str(job_id))
    assert place.cluster.wait(job_id).state in ("FAILED", "CANCELLED", "COMPLETED"), place.output
    (run,) = place.runs()
    assert (run.exit_code, "failure/rank" in run.summary) == (143, False), place.output


def assert_one_process(place: Place) -> None:
    (report,) = place.reports()
    assert report["info"] is None
    (run,) = place.runs()
    assert run.id == report["run_id"]
    assert run.id.startswith(f"slurm-{place.cluster.name}-{report['job']}-")
    assert run.group == ""
    assert "tracking_init" not in run.config
    assert (run.exit_code, len(run.rows)) == (0, 3)


def assert_two_attempts(place: Place, ids: list[str], rows: int = 3) -> None:
    """Each run was opened twice; the second time says so, logged all its rows and ended well."""
    runs = sorted(place.runs(), key=lambda run: (run.config["tracking_init"]["restart_count"], run.id))
    assert [(run.config["tracking_init"]["restart_count"], run.id) for run in runs] == [
        (n, run_id) for n in (0, 1) for run_id in ids
    ]
    for run in runs:
        assert {row["attempt"] for row in run.rows} == {run.config["tracking_init"]["restart_count"]}
    for run in runs[len(ids) :]:
        assert (len(run.rows), run.exit_code) == (rows, 0)

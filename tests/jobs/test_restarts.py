"""What starts a job again, without any id: one run, with every row; and what must never be one run."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, cast

import pytest
from support import jobs
from support.backends import BACKENDS, Backend
from support.users import NOBODY, needs_root
from support.waiting import wait_until

PROGRAM = jobs.PROGRAMS / "restarted.py"
ROWS = 20
TRACKERS = ("wandb", "mlflow", "trackio", "pluto")


@dataclass(frozen=True)
class Attempt:
    """One start of a job: a process for each list of words and variables.

    Attributes:
        processes: The variables of each process that is started beside the others.
        launcher: The words before the program.
        settings: What the program gets in a variable, beside what it always gets: a restart keeps the arguments.
        succeeds: Whether each process ends with 0.
    """

    processes: Sequence[Mapping[str, str]] = ({},)
    launcher: Sequence[str] = (sys.executable,)
    settings: Mapping[str, Any] = field(default_factory=dict)
    succeeds: bool = True


@dataclass(frozen=True)
class Restart:
    """A kind of restart.

    Attributes:
        attempts: The starts of the job, in their order.
        tracking: The arguments of the decorator.
        ids: Where they are known, the ids of the runs, as patterns of a shell: they have digests of the arguments.
        writers: The ranks that log, by the number of their run.
    """

    attempts: Sequence[Attempt]
    tracking: Mapping[str, Any] = field(default_factory=dict)
    ids: Sequence[str] = ()
    writers: Sequence[Sequence[int]] = ((0,),)


# How an id ends that is cut.
DIGEST = "[0-9a-f]" * 8
# All ranks have logged all rows by then.
KILLED = {"end": "kill", "before_s": 2}


def torchrun(*options: str) -> list[str]:
    return jobs.torchrun("--standalone", "--nproc-per-node=2", "--monitor-interval=0.1", *options)


def killed_then_again(**more: Any) -> list[Attempt]:
    """Two starts, of which the first one is killed."""
    return [Attempt(settings=KILLED, succeeds=False, **more), Attempt(**more)]


def in_slurm(job: str, restarts: int, **more: str) -> dict[str, str]:
    """The variables of a batch script of Slurm, and of its steps."""
    node = {"SLURM_CLUSTER_NAME": "c", "SLURM_JOB_ID": job, "SLURMD_NODENAME": "n"}
    return {**node, "SLURM_RESTART_COUNT": str(restarts), **more}


def slurm_tasks(job: str, restarts: int) -> list[dict[str, str]]:
    return [
        in_slurm(
            job,
            restarts,
            SLURM_STEP_ID="0",
            SLURM_PROCID=str(rank),
            SLURM_LOCALID=str(rank),
            SLURM_NODEID="0",
            SLURM_STEP_NUM_TASKS="2",
            SLURM_STEP_NUM_NODES="1",
            SLURM_STEP_TASKS_PER_NODE="2",
        )
        for rank in range(2)
    ]


def with_ranks(tasks: list[dict[str, str]]) -> list[dict[str, str]]:
    return [
        {**task, "RANK": task["SLURM_PROCID"], "WORLD_SIZE": "2", "LOCAL_RANK": task["SLURM_LOCALID"]} for task in tasks
    ]


def managed(seconds: str, job: str) -> dict[str, str]:
    """SkyPilot's name of a managed job, which has the time of its launch."""
    return {"SKYPILOT_TASK_ID": f"sky-managed-2026-09-17-15-26-{seconds}-123456_train_{job}-0"}


def pods(**variables: str) -> list[dict[str, str]]:
    """The variables of two pods with one process each."""
    return [{name: value.format(node) for name, value in variables.items()} for node in range(2)]


def restarts(job: str) -> dict[str, Restart]:
    """The kinds of restart, of a job with a name that no other test has."""
    first, second = in_slurm(job, 0), in_slurm(job, 1)
    sky = pods(SKYPILOT_NODE_RANK="{}", SKYPILOT_NUM_NODES="2", SKYPILOT_TASK_ID=f"sky-managed-{{}}_train_{job}-0")
    return {
        "torchrun, its ranks after an exception": Restart(
            [Attempt(launcher=torchrun("--max-restarts=1"), settings={"end": "raise", "raises": 1, "before_s": 2})]
        ),
        "torchrun, its ranks after SIGKILL of rank 0": Restart(
            [Attempt(launcher=torchrun("--max-restarts=1"), settings={**KILLED, "kills": [0]})]
        ),
        "torchrun in a batch job, a requeue": Restart(
            [
                Attempt([first], torchrun(), KILLED, succeeds=False),
                Attempt([second], torchrun()),
            ],
            ids=[f"slurm-c-{job}-batch-restar-{DIGEST}"],
        ),
        "torchrun in a batch job, a requeue, a run for each rank": Restart(
            [
                Attempt([first], torchrun(), KILLED, succeeds=False),
                Attempt([second], torchrun()),
            ],
            {"run_mode": "new"},
            [f"slurm-c-{job}-batch-restar-{DIGEST}-rank-{rank}" for rank in range(2)],
            [[0], [1]],
        ),
        "srun, a requeue": Restart(
            [Attempt(slurm_tasks(job, 0), settings=KILLED, succeeds=False), Attempt(slurm_tasks(job, 1))],
            ids=[f"slurm-c-{job}-0-restarted"],
        ),
        "torchrun in a managed job of SkyPilot, a recovery": Restart(
            [
                Attempt([managed("33", job)], torchrun(), KILLED, succeeds=False),
                Attempt([managed("59", job)], torchrun()),
            ],
            ids=[f"sky-managed-train_{job}-0-{DIGEST}"],
        ),
        "a process on each node of SkyPilot, a recovery": Restart(
            [
                Attempt(
                    [{**one, "SKYPILOT_TASK_ID": managed(at, job)["SKYPILOT_TASK_ID"]} for one in sky],
                    settings=KILLED if at == "33" else {},
                    succeeds=at != "33",
                )
                for at in ("33", "59")
            ],
            ids=[f"sky-managed-train_{job}-0-restarted"],
        ),
        "a process in each pod of konduktor": Restart(
            [
                Attempt(
                    pods(KONDUKTOR_JOB_NAME=job, RANK="{}", NUM_NODES="2", RESTART_ATTEMPT=attempt),
                    settings=KILLED if attempt == "0" else {},
                    succeeds=attempt == "1",
                )
                for attempt in ("0", "1")
            ],
            ids=[f"{job}-restarted"],
        ),
        "torchrun on a host of SageMaker, after a spot interruption": Restart(
            killed_then_again(
                processes=[{"SM_HOSTS": '["algo-0"]', "SM_CURRENT_HOST": "algo-0", "TRAINING_JOB_NAME": job}],
                launcher=torchrun(),
            ),
            ids=[f"{job}-restarted-{'[0-9a-f]' * 6}"],
        ),
        "a program by itself in a batch job, a requeue": Restart(
            [
                Attempt([first], settings=KILLED, succeeds=False),
                Attempt([second]),
            ]
        ),
        "a program by itself in a managed job of SkyPilot, a recovery": Restart(
            [
                Attempt([managed("33", job)], settings=KILLED, succeeds=False),
                Attempt([managed("59", job)]),
            ]
        ),
        "mp.spawn in a batch job, a requeue": Restart(
            [
                Attempt([first], settings={**KILLED, "spawns": 2}, succeeds=False),
                Attempt([second], settings={"spawns": 2}),
            ],
            ids=[f"slurm-c-{job}-batch-restar-{DIGEST}"],
        ),
        "srun with RANK and WORLD_SIZE from Slurm's variables, a requeue": Restart(
            [
                Attempt(with_ranks(slurm_tasks(job, 0)), settings=KILLED, succeeds=False),
                Attempt(with_ranks(slurm_tasks(job, 1))),
            ],
            ids=[f"slurm-c-{job}-0-restarted"],
        ),
        "a new process with run_file": Restart(killed_then_again(), {"run_file": "ckpt/run.json"}),
        "a new torchrun with run_file": Restart(killed_then_again(launcher=torchrun()), {"run_file": "run.json"}),
        "a new torchrun with run_file, a run for each rank": Restart(
            killed_then_again(launcher=torchrun()), {"run_file": "run.json", "run_mode": "new"}, writers=[[0], [1]]
        ),
        "a new Slurm job with run_file, after a stop with a checkpoint": Restart(
            [
                Attempt([in_slurm(job, 0)], torchrun(), {"end": "stop"}),
                Attempt([in_slurm(f"{job}-next", 0)], torchrun()),
            ],
            {"run_file": "run.json"},
            [f"slurm-c-{job}-batch-restar-{DIGEST}"],
        ),
    }


# Whose launcher, platform or file another kind has.
WIDE = {
    "torchrun in a batch job, a requeue, a run for each rank",
    "mp.spawn in a batch job, a requeue",
    "a process in each pod of konduktor",
    "torchrun in a managed job of SkyPilot, a recovery",
    "two jobs of Slurm",
    "two files",
    "torchrun, its ranks after SIGKILL of rank 0",
    "torchrun on a host of SageMaker, after a spot interruption",
    "srun with RANK and WORLD_SIZE from Slurm's variables, a requeue",
    "a program by itself in a batch job, a requeue",
    "a process on each node of SkyPilot, a recovery",
    "a program by itself in a managed job of SkyPilot, a recovery",
    "a new torchrun with run_file, a run for each rank",
    "two starts of a program by itself in a batch script",
    "two starts of torchrun in a batch script",
    "two managed jobs of SkyPilot with one name",
    "two programs by themselves at the same time",
    "a torchrun in each of two tasks of a step",
    "two folds with mp.spawn in a program",
    "two starts in the tasks of a step",
}


def with_a_tracker_each(kinds: Sequence[str], default: Sequence[str]) -> pytest.MarkDecorator:
    """Run each kind with one tracker, in turn; those of the default tier with W&B."""
    others = {kind: TRACKERS[number % len(TRACKERS)] for number, kind in enumerate(kinds)}
    params = [pytest.param("wandb", kind) for kind in default]
    params += [
        pytest.param(others[kind], kind, marks=pytest.mark.wide if kind in WIDE else pytest.mark.full)
        for kind in kinds
        if kind not in default
    ]
    return pytest.mark.parametrize(("backend", "kind"), params, indirect=["backend"], scope="module")


@pytest.fixture(
    scope="module",
    params=[pytest.param(one, marks=() if one == "wandb" else pytest.mark.full) for one in TRACKERS],
)
def backend(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backend]:
    with BACKENDS[request.param](tmp_path_factory.mktemp(request.param)) as running:
        yield running


class Job:
    """Starts of the program in one directory, with one service."""

    def __init__(self, backend: Backend, directory: Path) -> None:
        self.backend, self.directory = backend, directory
        self.project = f"restarts-{secrets.token_hex(3)}"

    def run(self, attempt: Attempt, tracking: Mapping[str, Any] = {}, first: int = 0) -> str:
        settings = {"tracker": self.backend.name, "project": self.project, "tracking": {**tracking}, "rows": ROWS}
        text = json.dumps({**settings, "first": first, **attempt.settings})
        words = [*attempt.launcher, str(PROGRAM), *(["--resume"] if first else [])]
        more = {"RESTARTED": text}
        started = [
            jobs.start(words, self.directory, {**self.backend.environment(), **variables, **more})
            for variables in attempt.processes
        ]
        ended = [jobs.finish(process, self.directory) for process in started]
        output = "\n".join(one.output for one in ended)
        assert all((one.returncode == 0) == attempt.succeeds for one in ended), output
        return output

    def run_file(self, name: str = "run.json", number: int = 1) -> Path:
        """Where the run of a call is kept."""
        suffixes = [
            *([] if self.backend.name == "wandb" else [self.backend.name]),
            *([] if number == 1 else [str(number)]),
        ]
        return self.directory / ".".join([name, *suffixes])

    def kept(self, name: str = "run.json", number: int = 1) -> dict[str, Any]:
        """What is kept of it."""
        entry: dict[str, Any] = json.loads(self.run_file(name, number).read_text())
        return entry

    @property
    def points(self) -> dict[str, Counter[tuple[str, int]]]:
        """The rows of each run."""
        return {run.id: run.points for run in self.backend.runs(self.project)}


@pytest.fixture
def job(backend: Backend, tmp_path: Path) -> Job:
    return Job(backend, tmp_path)


@with_a_tracker_each(list(restarts("any")), ["a new process with run_file", "srun, a requeue"])
def test_a_job_that_is_started_again_goes_on_in_its_runs(job: Job, kind: str) -> None:
    restart = restarts(f"j{secrets.token_hex(4)}")[kind]
    for number, attempt in enumerate(restart.attempts):
        job.run(attempt, restart.tracking, number * ROWS)
    rows = [Counter((f"rank{rank}", n) for rank in ranks for n in range(2 * ROWS)) for ranks in restart.writers]
    found = job.points
    assert sorted(map(str, found.values())) == sorted(map(str, rows)) or list(found.values()) == rows, found
    if restart.ids:
        assert all(fnmatch(*pair) for pair in zip(sorted(found), sorted(restart.ids), strict=True)), found
    if "run_file" in restart.tracking:
        entry = job.kept(restart.tracking["run_file"])
        assert (entry["restart_count"], entry["has_ended"]) == (1, True)
        if job.backend.name != "mlflow":  # it has the values of the first attempt
            counts = [run.config["tracking_init"]["restart_count"] for run in job.backend.runs(job.project)]
            assert counts == [1] * len(restart.writers)


def file_of(run_file: str) -> dict[str, Any]:
    return {"run_file": run_file}


SEVERAL: dict[str, Callable[[str], list[tuple[Attempt, dict[str, Any]]]]] = {
    "two trainings with one run_file": lambda _: [(Attempt(), file_of("run.json"))] * 2,
    "two starts of torchrun in a batch script": lambda job: [
        (Attempt([in_slurm(job, 0)], ["sh", "-c", '"$@" && "$@" && exit', "batch.sh", *torchrun()]), {})
    ],
    "a torchrun in each of two tasks of a step": lambda job: [
        (
            Attempt(
                [in_slurm(job, 0, SLURM_STEP_ID="0", SLURM_STEP_NUM_TASKS="2", SLURM_PROCID=str(n)) for n in range(2)],
                torchrun(),
            ),
            {},
        )
    ],
    "two starts in the tasks of a step": lambda job: [
        (Attempt(slurm_tasks(job, 0), ["sh", "-c", '"$@" && "$@" && exit', "task.sh", sys.executable]), {})
    ],
    "two starts of a program by itself in a batch script": lambda job: [
        (Attempt([in_slurm(job, 0)], ["sh", "-c", '"$@" && "$@" && exit', "batch.sh", sys.executable]), {})
    ],
    "two programs by themselves at the same time": lambda job: [
        (Attempt([in_slurm(job, 0)], ["sh", "-c", '"$@" & "$@" & wait', "batch.sh", sys.executable]), {})
    ],
    "two folds with mp.spawn in a program": lambda job: [
        (Attempt([in_slurm(job, 0)], settings={"spawns": 2, "folds": 2}), {})
    ],
    "two jobs of Slurm": lambda job: [(Attempt([in_slurm(f"{job}{n}", 0)], torchrun()), {}) for n in range(2)],
    "two managed jobs of SkyPilot with one name": lambda job: [
        (Attempt([managed("33", f"{job}{n}")], torchrun()), {}) for n in range(2)
    ],
    "two files": lambda _: [(Attempt(settings=KILLED, succeeds=False), file_of(f"{n}.json")) for n in range(2)],
    "two projects with one run_file": lambda _: [
        (Attempt(settings=KILLED, succeeds=False), {**file_of("run.json"), "notes": "a"}),
        (Attempt(settings={"project": "another"}), file_of("run.json")),
    ],
}


@with_a_tracker_each(list(SEVERAL), ["two trainings with one run_file"])
def test_trainings_that_are_not_one_have_a_run_each(job: Job, kind: str) -> None:
    for attempt, tracking in SEVERAL[kind](f"j{secrets.token_hex(4)}"):
        job.run(attempt, tracking)
    runs = [*job.points.values(), *(run.points for run in job.backend.runs("another"))]
    assert len(runs) == 2
    assert [sum(points.values()) for points in runs if points] == [ROWS] * len([one for one in runs if one])


# What a batch script starts in its first attempt, and after a requeue: the name of each program, how its torchrun is
# started, and what it gets. The rows of a program are to be in one run.
SCRIPTS: dict[str, Sequence[Sequence[tuple[str, str, dict[str, Any]]]]] = {
    "the first training has a run_file": [
        [("train", "", {"tracking": file_of("a.json"), **KILLED})],
        [("train", "", {"tracking": file_of("a.json")}), ("train", "", {"first": 100})],
    ],
}


@pytest.mark.wide
@pytest.mark.parametrize("backend", ["trackio"], indirect=True)
@pytest.mark.parametrize("script", SCRIPTS)
def test_trainings_of_a_batch_script_stay_apart_over_a_requeue(job: Job, script: str) -> None:
    number = f"j{secrets.token_hex(4)}"
    common = {"tracker": job.backend.name, "project": job.project, "rows": ROWS}
    agent = shlex.join(jobs.torchrun("--standalone", "--nproc-per-node=1", "--monitor-interval=0.1"))
    for attempt, starts in enumerate(SCRIPTS[script]):
        lines = []
        for program, before, settings in starts:
            shutil.copy(PROGRAM, job.directory / f"{program}.py")
            text = shlex.quote(json.dumps({**common, "first": attempt * ROWS, **settings}))
            lines.append(f"export RESTARTED={text}; {before} {agent} {program}.py")
        jobs.run(
            ["bash", "-c", "\n".join(lines)], job.directory, {**job.backend.environment(), **in_slurm(number, attempt)}
        )
    requeued = Counter(("rank0", n) for n in range(len(SCRIPTS[script]) * ROWS))
    other = Counter(("rank0", n) for n in range(100, 100 + ROWS))
    assert sorted(map(str, job.points.values())) == sorted(map(str, [requeued, other]))


@pytest.mark.sampled_full(2)
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "run_file=.*/run.json.trackio cannot be read: .* This is a new run"),
        ('{"base_id": "../x", "project": null, "server": null, "has_ended": false}', "cannot be read"),
        (
            '{"base_id": "x", "has_ended": false, "restart_count": "0", "after": null, "directory": "/gone"}',
            "cannot be read",
        ),
        (
            '{"base_id": "x", "has_ended": false, "restart_count": 0, "after": null, "directory": "/", "project": "p"}',
            "is of another place",
        ),
    ],
)
@pytest.mark.parametrize("backend", ["trackio"], indirect=True)
def test_a_file_that_cannot_be_used_makes_a_new_run_with_a_warning(job: Job, content: str, message: str) -> None:
    path = job.run_file()
    path.write_text(content)
    output = job.run(Attempt(settings=KILLED, succeeds=False), file_of("run.json"))
    assert len([line for line in output.splitlines() if "run_file" in line]) == 1, output
    assert re.search(message, output)
    unreadable = job.directory / "run.json.trackio.unreadable"
    assert unreadable.exists() == (message != "is of another place")
    assert not unreadable.exists() or unreadable.read_text() == content
    job.run(Attempt(), file_of("run.json"), ROWS)
    (points,) = job.points.values()
    assert points == Counter(("rank0", n) for n in range(2 * ROWS))
    assert job.kept()["has_ended"]


@pytest.mark.wide
@pytest.mark.parametrize("backend", ["wandb"], indirect=True)
@pytest.mark.parametrize(
    ("tracking", "variables"),
    [
        pytest.param({"run_file": "run.json"}, {}, id="run_file"),
        pytest.param({"id": "chosen"}, {}, id="id"),
    ],
)
def test_a_later_job_tells_what_it_changes_and_keeps_the_earlier_ones_console(
    job: Job, tracking: dict[str, Any], variables: dict[str, str]
) -> None:
    failing = Attempt([variables], settings={"end": "raise"}, succeeds=False)
    job.run(failing, {**tracking, "config": {"lr": 0.1, "seed": 0}})
    output = job.run(Attempt([variables]), {**tracking, "config": {"lr": 0.2, "seed": 0}}, ROWS)
    (line,) = (line for line in output.splitlines() if "this attempt changes the config" in line)
    assert line.endswith(": lr: 0.1 -> 0.2")
    if "run_file" not in tracking:  # with an id, `output.log` is the last job's, as with the bare client
        return
    (run,) = (run for run in cast("Any", job.backend)._server.runs if run.project == job.project)
    consoles = [content.decode() for name, content in run.files.items() if "output" in name]
    starts = [re.findall(r"starts at (\d+)", console) for console in consoles]
    assert sorted(starts) == [["0"], [str(ROWS)]], run.files


@pytest.mark.parametrize("backend", ["wandb"], indirect=True)
def test_an_attempt_that_may_not_resume_has_a_run_of_its_own(job: Job) -> None:
    number = f"j{secrets.token_hex(4)}"
    for attempt in range(2):
        settings = {"end": "raise"} if attempt == 0 else {}
        job.run(Attempt([in_slurm(number, attempt)], settings=settings, succeeds=attempt == 1), {"resume": "never"})
    assert list(job.points.values()) == [Counter(("rank0", n) for n in range(ROWS))] * 2


@pytest.mark.wide
@pytest.mark.parametrize("backend", ["trackio"], indirect=True)
def test_a_file_that_was_linked_leads_to_the_run(job: Job) -> None:
    """A backup by `cp -al` of what a killed job has left, which is no other training's, and a symbolic link."""
    backup, link = job.directory / "backup", job.directory / "latest.json"
    job.run(Attempt(settings=KILLED, succeeds=False), file_of("ckpt/run.json"))
    subprocess.run(["cp", "-al", job.directory / "ckpt", backup], check=True, timeout=60)
    assert job.run_file("backup/run.json").stat().st_nlink == 2
    job.run(Attempt(settings=KILLED, succeeds=False), file_of("ckpt/run.json"), ROWS)
    link.symlink_to("ckpt/run.json")
    job.run(Attempt(), file_of("latest.json"), 2 * ROWS)
    assert link.is_symlink()
    (points,) = job.points.values()
    assert points == Counter(("rank0", n) for n in range(3 * ROWS))


@pytest.mark.full
@pytest.mark.parametrize("backend", ["trackio"], indirect=True)
def test_a_copy_of_the_file_is_a_new_run_and_a_directory_that_was_moved_goes_on(job: Job) -> None:
    """A training that is branched off the checkpoints of another one, and one whose experiment got another name."""
    job.run(Attempt(settings=KILLED, succeeds=False), file_of("first/run.json"))
    (first,) = job.points
    shutil.copytree(job.directory / "first", job.directory / "branch")
    output = job.run(Attempt(settings=KILLED, succeeds=False), file_of("branch/run.json"), ROWS)
    (line,) = (line for line in output.splitlines() if "run_file=" in line)
    assert re.search(f"run_file=.*/branch/.* is a copy of .*/first/.*, pass id='{first}'. This is a new run", line)
    job.run(Attempt(), file_of("branch/run.json"), 2 * ROWS)
    (job.directory / "first").rename(job.directory / "moved")
    job.run(Attempt(), file_of("moved/run.json"), 3 * ROWS)
    (branch,) = job.points.keys() - {first}
    rows = {first: (0, 3), branch: (1, 2)}
    assert job.points == {
        run: Counter(("rank0", part * ROWS + n) for part in parts for n in range(ROWS)) for run, parts in rows.items()
    }


@pytest.mark.parametrize("backend", ["wandb"], indirect=True)
def test_what_the_service_refuses_or_does_not_keep_leaves_a_run_and_the_file(job: Job) -> None:
    """An id that it does not take, from a file that was edited; a client that is turned off; another team's run."""
    path, kept = job.directory / "run.json", file_of("run.json")
    place = {"entity": None, "project": job.project, "server": job.backend.environment()["WANDB_BASE_URL"]}
    entry = {"base_id": "a:b", "after": None, "restart_count": 0, "has_ended": False, "directory": "/gone"}
    path.write_text(json.dumps({**entry, **place}))
    output = job.run(Attempt(settings=KILLED, succeeds=False), kept)
    assert "run.json cannot be read: ConfigError: " in output
    text = path.read_text()
    job.run(Attempt([{"WANDB_MODE": "disabled"}]), kept)
    assert path.read_text() == text
    output = job.run(Attempt([{"WANDB_ENTITY": "another-team"}]), kept)
    assert "is of another place, {'entity': None" in output
    assert job.kept()["entity"] == "another-team"


@pytest.mark.wide
@pytest.mark.parametrize("backend", ["trackio"], indirect=True)
def test_calls_of_a_process_have_a_file_each_and_a_retry_ends_those_that_have_failed(job: Job) -> None:
    script = job.directory / "script.py"
    script.write_text(
        "import os, sys\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "from flyteplugins_tracking import get_run, tracking_init\n"
        "@tracking_init(tracker='trackio', project=sys.argv[1], run_file='run.json')\n"
        "def train(number):\n"
        "    os.write(1, f'ID {get_run().id}\\n'.encode())\n"
        "    if number == sys.argv[2]:\n"
        "        raise MemoryError\n"
        "def attempt(number):\n"
        "    try:\n"
        "        train(number)\n"
        "    except MemoryError:\n"
        "        pass\n"
        "if sys.argv[2] == 'none':\n"
        "    with ThreadPoolExecutor(8) as pool:\n"
        "        list(pool.map(attempt, map(str, range(8))))\n"
        "else:\n"
        "    attempt('first'), attempt('second')\n"
    )

    def run(failing: str) -> list[str]:
        words = [sys.executable, script, job.project, failing]
        done = jobs.run(words, job.directory, job.backend.environment())
        assert done.returncode == 0, done.output
        return re.findall("^ID (.*)$", done.output, re.MULTILINE)

    assert len(set(run("none"))) == 8
    assert len([*job.directory.glob("run.json.*")]) == 8
    assert all(job.kept(number=number)["has_ended"] for number in range(1, 9))
    for path in job.directory.glob("run.json.*"):
        path.unlink()
    before = run("second")
    assert [job.kept(number=number)["has_ended"] for number in (1, 2)] == [True, False]
    # The first call is a new training, so that the second one may be another one than before.
    after = run("first")
    assert job.kept(number=2)["has_ended"]
    assert len({*before, *after}) == 4
    # The first call has failed, and the second one was its retry.
    assert len({*before, *after, *run("none of two")}) == 6


@pytest.mark.wide
@pytest.mark.parametrize("backend", ["trackio"], indirect=True)
def test_a_file_that_cannot_be_written_costs_a_warning(job: Job) -> None:
    (job.directory / "a-file").touch()
    output = job.run(Attempt(), file_of("a-file/run.json"))
    assert "run_file=" in output
    assert len(job.points) == 1
    script = job.directory / "full_disk.py"
    script.write_text(
        "import errno, os, signal, sys\n"
        "from flyteplugins_tracking import get_run, tracking_init\n"
        "from flyteplugins_tracking._runs import run_file\n"
        "def refuse(*_):\n"
        "    raise OSError(errno.ENOSPC, 'No space left on device')\n"
        "if sys.argv[2] != 'kill':\n"
        "    run_file.replace_whole = refuse\n"
        "@tracking_init(tracker='trackio', project=sys.argv[1], run_file='run.json')\n"
        "def train():\n"
        "    print('ID', get_run().id, flush=True)\n"
        "    sys.argv[2] == 'kill' and os.kill(os.getpid(), signal.SIGKILL)\n"
        "train()\n"
    )
    outputs = [
        jobs.run([sys.executable, script, job.project, how], job.directory, job.backend.environment()).output
        for how in ("end", "kill", "end")
    ]
    assert len(re.findall("run_file=.* cannot be written, so that the next job will not go on in run", outputs[0])) == 1
    assert re.findall("so that the next job goes on in run (run-.*) in any case", outputs[2]) == re.findall(
        "^ID (.*)$", outputs[1], re.MULTILINE
    )
    assert [output.count("run_file=") for output in outputs] == [1, 0, 1]


@pytest.mark.wide
@pytest.mark.parametrize("backend", ["trackio"], indirect=True)
def test_what_is_no_file_stays_what_it_is_and_costs_a_warning(job: Job) -> None:
    """As root, a name in /dev could be replaced."""
    os.mkfifo(job.run_file("fifo"))
    job.run_file("folder").mkdir()
    for name in ("fifo", "folder"):
        output = job.run(Attempt(), file_of(name))
        assert re.search(f"run_file=.*/{name}.trackio cannot be read: .*This is a new run$", output, re.MULTILINE)
        assert output.count("run_file=") == 1
    assert job.run_file("fifo").is_fifo()
    assert not [*job.directory.glob("fifo*")][1:]
    assert len(job.points) == 2


@pytest.mark.full
@needs_root
@pytest.mark.parametrize("backend", ["trackio"], indirect=True)
def test_another_users_file_stays_and_costs_a_warning(job: Job) -> None:
    path = job.run_file()
    path.write_text("{}")
    os.chown(path, NOBODY, NOBODY)
    output = job.run(Attempt(), file_of("run.json"))
    assert re.search(
        "run_file=.*/run.json.trackio cannot be read: PermissionError: .*This is a new run$", output, re.MULTILINE
    )
    assert output.count("run_file=") == 1
    assert (path.read_text(), path.stat().st_uid) == ("{}", NOBODY)
    assert not [*job.directory.glob("*.unreadable")]


@contextlib.contextmanager
def running(job: Job, directory: Path) -> Iterator[Callable[..., str]]:
    """A job with `run_file=` that has its run open in a directory. Yields what runs a second one in the job's."""
    words = [sys.executable, str(PROGRAM)]
    tracking = {**file_of("run.json"), "init_timeout_s": 4}
    settings = {"tracker": job.backend.name, "project": job.project, "tracking": tracking, "rows": ROWS}
    slow = json.dumps({**settings, "end": "kill", "before_s": 30})
    first = jobs.start([*words, slow], directory, job.backend.environment())
    wait_until(lambda: any(path.suffix != ".lock" for path in directory.glob("run.json*")), first)

    def run_second(end: str = "return") -> str:
        second = json.dumps({**settings, "first": 100, "end": end})
        done = jobs.run([*words, second], job.directory, job.backend.environment())
        assert (done.returncode == 0) == (end == "return"), done.output
        return done.output

    yield run_second
    jobs.kill(first)
    first.communicate()


@pytest.mark.parametrize("backend", ["trackio"], indirect=True)
def test_a_second_job_with_the_file_has_its_own_run_and_says_so(job: Job) -> None:
    with running(job, job.directory) as run_second:
        kept = job.kept()
        output = run_second()
        assert "run_file=" in output
        assert "is used by another job: this is a new run" in output
        assert job.kept() == kept
    assert len(job.points) == 2


@pytest.mark.wide
@pytest.mark.parametrize("backend", ["wandb"], indirect=True)
def test_a_copy_of_the_file_of_a_running_job_leads_to_a_run_of_its_own(job: Job) -> None:
    """An experiment that is branched off the checkpoints of a job which still runs."""
    with running(job, job.directory / "first") as run_second:
        shutil.copy(job.directory / "first" / "run.json", job.directory / "run.json")
        assert "is a copy of" in run_second("raise")
        own_id = job.kept()["base_id"]
    job.run(Attempt(), file_of("run.json"), 2 * ROWS)
    assert job.points[own_id] == Counter(("rank0", n) for n in (*range(100, 100 + ROWS), *range(2 * ROWS, 3 * ROWS)))


@pytest.mark.full
@pytest.mark.parametrize("backend", ["trackio"], indirect=True)
def test_the_other_ranks_need_not_see_the_file(job: Job) -> None:
    """Each node has its own working directory, and so a file of its own."""
    for number, settings in enumerate((KILLED, {})):
        endpoint = f"127.0.0.1:{jobs.free_port()}"
        agent = jobs.torchrun("--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}")
        tracking = {**file_of("run.json"), "run_mode": "new", "rank_scope": "worker"}
        job_settings = {"tracker": job.backend.name, "project": job.project, "tracking": tracking, "rows": ROWS}
        job_settings["marks"] = str(job.directory)
        words = [*agent, str(PROGRAM), json.dumps({**job_settings, "first": number * ROWS, **settings})]
        nodes = []
        for node in range(2):
            (job.directory / str(node)).mkdir(exist_ok=True)
            nodes.append(jobs.start(words, job.directory / str(node), job.backend.environment()))
        ended = [jobs.finish(node, job.directory / str(node)) for node in nodes]
        assert all((one.returncode == 0) == bool(number) for one in ended), [one.output for one in ended]
    assert len(list(job.directory.glob("*/run.json*"))) == 1
    assert len(job.points) == 2
    assert sum(map(Counter, job.points.values()), Counter()) == Counter(
        (f"rank{rank}", number) for rank in range(2) for number in range(2 * ROWS)
    )


@pytest.mark.wide
@pytest.mark.parametrize("backend", ["trackio"], indirect=True)
def test_a_file_system_without_locks_costs_a_warning(job: Job) -> None:
    """As Lustre without `flock`, which is not to be had here."""
    script = job.directory / "lockless.py"
    script.write_text(
        "import errno, os, signal, sys\n"
        "from flyteplugins_tracking import get_run, tracking_init\n"
        "from flyteplugins_tracking._util import lock\n"
        "lock_file = lock.lock_file\n"
        "def refuse(descriptor):\n"
        "    if 'run.json' in os.readlink(f'/proc/self/fd/{descriptor}'):\n"
        "        raise OSError(errno.ENOSYS, 'Function not implemented')\n"
        "    lock_file(descriptor)\n"
        "lock.lock_file = refuse\n"
        "@tracking_init(tracker='trackio', project=sys.argv[1], run_file='run.json')\n"
        "def train():\n"
        "    print('ID', get_run().id, flush=True)\n"
        "    sys.argv[2] == 'kill' and os.kill(os.getpid(), signal.SIGKILL)\n"
        "train()\n"
    )
    outputs = [
        jobs.run([sys.executable, script, job.project, how], job.directory, job.backend.environment()).output
        for how in ("kill", "end", "end")
    ]
    killed, again, new = (re.findall("^ID (.*)$", output, re.MULTILINE) for output in outputs)
    assert killed == again != new, outputs
    assert all(output.count("its file system has no locks") == 1 for output in outputs)


@pytest.mark.wide
@pytest.mark.parametrize("backend", ["trackio"], indirect=True)
def test_stacked_trackers_have_a_file_each(job: Job) -> None:
    script = job.directory / "stacked.py"
    script.write_text(
        "import os, signal, sys\n"
        "from flyteplugins_tracking import get_run, tracking_init\n"
        "given = {'project': sys.argv[1], 'run_file': 'run.json'}\n"
        "@tracking_init(tracker='wandb', **given)\n"
        "@tracking_init(tracker='trackio', **given)\n"
        "def train():\n"
        "    print('IDS', get_run('wandb').id, get_run('trackio').id, flush=True)\n"
        "    sys.argv[2] == 'kill' and os.kill(os.getpid(), signal.SIGKILL)\n"
        "train()\n"
    )
    outputs = [
        jobs.run([sys.executable, script, job.project, how], job.directory, job.backend.environment()).output
        for how in ("kill", "end", "end")
    ]
    killed, again, new = (re.findall("^IDS (.*)$", output, re.MULTILINE) for output in outputs)
    assert killed == again != new, outputs
    assert {path.name for path in job.directory.glob("run.json*")} == {"run.json", "run.json.trackio"}


@pytest.mark.full
@pytest.mark.parametrize("backend", ["trackio"], indirect=True)
def test_ranks_that_torchrun_starts_again_stay_in_the_files_run_if_rank_0_had_returned(job: Job) -> None:
    script = job.directory / "late.py"
    script.write_text(
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "from flyteplugins_tracking import get_run, tracking_init\n"
        "@tracking_init(tracker='trackio', project=sys.argv[1], run_file='run.json')\n"
        "def train():\n"
        "    if run := get_run():\n"
        "        print('ID', run.id, flush=True)\n"
        "    elif os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "        while '\"has_ended\": true' not in Path('run.json.trackio').read_text():\n"
        "            time.sleep(0.01)\n"
        "        raise ValueError\n"
        "train()\n"
    )
    job.run(Attempt(settings=KILLED, succeeds=False), file_of("run.json"))
    (killed,) = job.points
    done = jobs.run([*torchrun("--max-restarts=1"), script, job.project], job.directory, job.backend.environment())
    assert done.returncode == 0, done.output
    assert re.findall("ID (.*)", done.output) == [killed] * 2
    assert job.kept()["restart_count"] == 2

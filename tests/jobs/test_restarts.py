"""What starts a job again, without any id: one run, with every row; and what must never be one run."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

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
    """

    attempts: Sequence[Attempt]
    tracking: Mapping[str, Any] = field(default_factory=dict)
    ids: Sequence[str] = ()


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


def managed(seconds: str, job: str) -> dict[str, str]:
    """SkyPilot's name of a managed job, which has the time of its launch."""
    return {"SKYPILOT_TASK_ID": f"sky-managed-2026-09-17-15-26-{seconds}-123456_train_{job}-0"}


def restarts(job: str) -> dict[str, Restart]:
    """The kinds of restart, of a job with a name that no other test has."""
    first, second = in_slurm(job, 0), in_slurm(job, 1)
    return {
        "torchrun, its ranks after an exception": Restart(
            [Attempt(launcher=torchrun("--max-restarts=1"), settings={"end": "raise", "raises": 1, "before_s": 2})]
        ),
        "torchrun in a batch job, a requeue": Restart(
            [
                Attempt([first], torchrun(), KILLED, succeeds=False),
                Attempt([second], torchrun()),
            ],
            ids=[f"slurm-c-{job}-batch-restar-{DIGEST}"],
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
        "mp.spawn in a batch job, a requeue": Restart(
            [
                Attempt([first], settings={**KILLED, "spawns": 2}, succeeds=False),
                Attempt([second], settings={"spawns": 2}),
            ],
            ids=[f"slurm-c-{job}-batch-restar-{DIGEST}"],
        ),
        "a new process with run_file": Restart(killed_then_again(), {"run_file": "ckpt/run.json"}),
        "a new torchrun with run_file": Restart(killed_then_again(launcher=torchrun()), {"run_file": "run.json"}),
        "a new Slurm job with run_file, after a stop with a checkpoint": Restart(
            [
                Attempt([in_slurm(job, 0)], torchrun(), {"end": "stop"}),
                Attempt([in_slurm(f"{job}-next", 0)], torchrun()),
            ],
            {"run_file": "run.json"},
            [f"slurm-c-{job}-batch-restar-{DIGEST}"],
        ),
    }


# The others have a launcher, platform or file that one of these has too.
FULL = {
    "torchrun in a batch job, a requeue",
    "a new Slurm job with run_file, after a stop with a checkpoint",
    "two projects with one run_file",
}


def with_a_tracker_each(kinds: Sequence[str], default: Sequence[str]) -> pytest.MarkDecorator:
    """Run each kind with one tracker, in turn; those of the default tier with W&B."""
    others = {kind: TRACKERS[number % len(TRACKERS)] for number, kind in enumerate(kinds)}
    params = [pytest.param("wandb", kind) for kind in default]
    params += [
        pytest.param(others[kind], kind, marks=pytest.mark.full if kind in FULL else pytest.mark.wide)
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
    found = job.points
    assert list(found.values()) == [Counter(("rank0", n) for n in range(2 * ROWS))], found
    if restart.ids:
        assert all(fnmatch(*pair) for pair in zip(sorted(found), sorted(restart.ids), strict=True)), found
    if "run_file" in restart.tracking:
        entry = job.kept(restart.tracking["run_file"])
        assert (entry["restart_count"], entry["has_ended"]) == (1, True)
        if job.backend.name != "mlflow":  # it has the values of the first attempt
            (run,) = job.backend.runs(job.project)
            assert run.config["tracking_init"]["restart_count"] == 1


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
    "two jobs of Slurm": lambda job: [(Attempt([in_slurm(f"{job}{n}", 0)], torchrun()), {}) for n in range(2)],
    "two managed jobs of SkyPilot with one name": lambda job: [
        (Attempt([managed("33", f"{job}{n}")], torchrun()), {}) for n in range(2)
    ],
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
@pytest.mark.sampled_full(1)
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


@pytest.mark.parametrize("backend", ["trackio"], indirect=True)
def test_a_copy_of_the_file_is_a_new_run_and_a_directory_that_was_moved_goes_on(job: Job) -> None:
    """A training that is branched off the checkpoints of another one, and one whose experiment got another name."""
    job.run(Attempt(settings=KILLED, succeeds=False), file_of("first/run.json"))
    (first,) = job.points
    shutil.copytree(job.directory / "first", job.directory / "branch")
    output = job.run(Attempt(), file_of("branch/run.json"), ROWS)
    (line,) = (line for line in output.splitlines() if "run_file=" in line)
    assert re.search(f"run_file=.*/branch/.* is a copy of .*/first/.*, pass id='{first}'. This is a new run", line)
    (job.directory / "first").rename(job.directory / "moved")
    job.run(Attempt(), file_of("moved/run.json"), 2 * ROWS)
    (branch,) = job.points.keys() - {first}
    rows = {first: (0, 2), branch: (1,)}
    assert job.points == {
        run: Counter(("rank0", part * ROWS + n) for part in parts for n in range(ROWS)) for run, parts in rows.items()
    }


@pytest.mark.full
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


@pytest.mark.full
@needs_root
@pytest.mark.parametrize("backend", ["trackio"], indirect=True)
def test_what_is_no_file_or_another_users_stays_as_it_is_and_costs_a_warning(job: Job) -> None:
    """As root, a name in /dev could be replaced."""
    os.mkfifo(job.run_file("fifo"))
    job.run_file("folder").mkdir()
    theirs = job.run_file("theirs")
    theirs.write_text("{}")
    os.chown(theirs, NOBODY, NOBODY)
    for name in ("fifo", "folder", "theirs"):
        output = job.run(Attempt(), file_of(name))
        assert re.search(f"run_file=.*/{name}.trackio cannot be read: .*This is a new run$", output, re.MULTILINE)
        assert output.count("run_file=") == 1
    assert job.run_file("fifo").is_fifo()
    assert (theirs.read_text(), theirs.stat().st_uid) == ("{}", NOBODY)
    (job.directory / "a-file").touch()
    assert job.run(Attempt(), file_of("a-file/run.json")).count("run_file=") == 1
    assert not [*job.directory.glob("*.unreadable")]
    assert len(job.points) == 4


# A program whose calls print the ids of their runs. Its arguments: the project, and the call that fails.
SEVERAL_CALLS = """
import sys
from flyteplugins_tracking import get_run, tracking_init
@tracking_init(tracker='trackio', project=sys.argv[1], run_file='run.json')
def train(name):
    print('ID', get_run().id, flush=True)
    if name == sys.argv[2]:
        raise MemoryError
for name in ('first', 'second'):
    try:
        train(name)
    except MemoryError:
        pass
"""


@pytest.mark.wide
@pytest.mark.parametrize("backend", ["trackio"], indirect=True)
def test_calls_of_a_process_have_a_file_each_and_a_retry_ends_those_that_have_failed(job: Job) -> None:
    def run(failing: str) -> list[str]:
        words = [sys.executable, "-c", SEVERAL_CALLS, job.project, failing]
        done = jobs.run(words, job.directory, job.backend.environment())
        assert done.returncode == 0, done.output
        return re.findall("^ID (.*)$", done.output, re.MULTILINE)

    before = run("second")
    assert [job.kept(number=number)["has_ended"] for number in (1, 2)] == [True, False]
    # The first call is a new training, so that the second one may be another one than before.
    after = run("first")
    assert job.kept(number=2)["has_ended"]
    assert len({*before, *after}) == 4
    # The first call has failed, and the second one was its retry.
    assert len({*before, *after, *run("none of two")}) == 6


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


@pytest.mark.wide
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

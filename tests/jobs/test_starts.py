"""Programs that a job starts: each has a run of its own, and the same one after a requeue."""

from __future__ import annotations

import errno
import os
import re
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from support import jobs
from support.users import needs_root

from flyteplugins_tracking import DistributedInfo
from flyteplugins_tracking._job import starts
from flyteplugins_tracking._job.identity import Identity, from_launcher, identity_of_program
from flyteplugins_tracking._rank import children

EXAMPLES = Path(__file__).parents[2] / "examples"
TRAINING = """\
import os, sys, time
from jsonl_tracker import JsonlTracker
from flyteplugins_tracking import get_run, tracking_init
time.sleep(float(os.environ.get("WAIT", 0)))
train = tracking_init(tracker=JsonlTracker(), project="p", run_mode=os.environ.get("MODE", "auto"))(
    lambda: os.write(1, f"ID {os.environ['TAG']} {get_run().id}\\n".encode())
)
train()
time.sleep(float(os.environ.get("LIVE", 0)))
"""
# Each starts trainings, and is no training itself, or one of two of its forks is.
STARTERS = {
    "sweep": """\
import os, subprocess, sys
if "TAG" in os.environ:
    import training
else:
    for tag in ("sweep-1", "sweep-2"):
        subprocess.run([sys.executable, *sys.argv], env={**os.environ, "TAG": tag}, check=True)
""",
    "run": """\
import subprocess, sys
sys.exit(subprocess.run(sys.argv[1:]).returncode)
""",
    "forks": """\
import os
for tag in ("fork-1", "fork-2"):
    if os.fork() == 0:
        os.environ["TAG"] = tag
        import training
        os._exit(0)
    os.wait()
""",
    "parsed": """\
import sys
sys.argv = sys.argv[:1]
import training
""",
}
TORCHRUN = "torchrun --standalone --nproc-per-node=1"
TWICE = "TAG={0}1 {1}\nTAG={0}2 {1}\n"
SLURM = {"SLURM_CLUSTER_NAME": "c", "SLURMD_NODENAME": "n", "SLURM_RESTART_COUNT": "0"}
REQUEUED = {**SLURM, "SLURM_RESTART_COUNT": "1"}
SKYPILOT = """\
export SKYPILOT_TASK_ID=sky-managed-2026-09-17-15-26-{at}-123456_train_$JOB-0 SKYPILOT_NUM_NODES=1 SKYPILOT_NODE_RANK=0
export SKYPILOT_USER_ID=u
"""


def started(directory: Path, script: str, env: Mapping[str, str]) -> dict[str, str]:
    """Run a script of a job, and return the ids of its runs by the tags of its trainings."""
    for name, code in {**STARTERS, **dict.fromkeys(("training", "train", "late", "late.v2"), TRAINING)}.items():
        (directory / f"{name}.py").write_text(code)
    path = os.pathsep.join(map(str, (EXAMPLES / "jsonl_tracker", directory)))
    programs = os.pathsep.join((os.path.dirname(sys.executable), os.environ["PATH"]))
    done = jobs.run(["bash", "-c", script], directory, {**env, "PATH": programs, "PYTHONPATH": path})
    found = re.findall(r"^ID (\S+) (\S+)$", done.output, re.MULTILINE)
    assert len(dict(found)) == len(found), done.output
    assert found, done.output
    return dict(found)


def assert_each_has_its_run(
    directory: Path, attempts: list[tuple[str, Mapping[str, str]]], count: int | None = None
) -> None:
    """The trainings of all attempts, of which the first one starts all, have a run each, or `count` runs."""
    ids = [started(directory, script, env) for script, env in attempts]
    first, *later = ids
    assert len(first) == len(set(first.values())) == (count or len(set(re.findall(r"TAG=(\w+)", attempts[0][0])))), (
        first
    )
    assert not any("-rank-" in base_id or base_id == "None" for base_id in first.values())
    for again in later:
        assert again == {tag: first[tag] for tag in again}


# The script of a batch job, and what a requeue starts of it if that is not all.
SCRIPTS: dict[str, tuple[str, str | None]] = {
    "programs that start trainings": (
        "python sweep.py\npython forks.py\n" + TWICE.format("wrapped", "python run.py bash -c 'python train.py; true'"),
        None,
    ),
    "names that an id cannot have": (
        "cp train.py 训练.py\ncp train.py 评估.py\ncp train.py train.2.py\n"
        "TAG=a python 训练.py\nTAG=b python 评估.py\nTAG=c python train.2.py\n" + TWICE.format("d", "python train.py"),
        "TAG=b python 评估.py\n" + TWICE.format("d", "python train.py") + "TAG=c python train.2.py\n",
    ),
    "a child with the same command": (TWICE.format("a", "python run.py python train.py"), None),
    "places of their own for temporary files": (
        "for tag in a b; do TAG=$tag TMPDIR=$(mktemp -d) HOME=$(mktemp -d) python train.py; done\n",
        None,
    ),
    "programs with the same file name": (
        "mkdir -p a b; cp train.py a/__main__.py; cp train.py b/__main__.py\n"
        "TAG=a python -m a\nTAG=b python -m b\nTAG=c python a/__main__.py\nTAG=d python b/__main__.py\n"
        "TAG=e python -c 'e = 1; import training'\nTAG=f python -c 'f = 1; import training'\n",
        "TAG=f python -c 'f = 1; import training'\nTAG=d python b/__main__.py\nTAG=b python -m b\n",
    ),
    "arguments that the program takes away": (
        "TAG=a WAIT=1 python parsed.py --lr 1 & TAG=b python parsed.py --lr 2 & wait\n",
        "TAG=b python parsed.py --lr 2\n",
    ),
    "two that open their runs in another order": (
        "TAG=a WAIT=2 python late.v2.py & sleep 0.2; TAG=b LIVE=2 python late.v2.py & wait\n",
        "TAG=a LIVE=2 python late.v2.py & sleep 0.2; TAG=b WAIT=2 python late.v2.py & wait\n",
    ),
    "torchrun's with other arguments, of which a requeue skips one": (
        f"TAG=a {TORCHRUN} train.py --lr 1 & TAG=b {TORCHRUN} train.py --lr 2 & wait\n",
        f"TAG=b {TORCHRUN} train.py --lr 2\n",
    ),
    "two in other directories": (
        "mkdir -p a b; (cd a; TAG=a WAIT=1 python ../late.py) & (cd b; TAG=b python ../late.py) & wait\n",
        "cd b; TAG=b python ../late.py\n",
    ),
    "a requeue with options to go on": (
        "TAG=a python train.py cfg.yaml --lr -1\n",
        "TAG=a python train.py --resume cfg.yaml --lr -1 --ckpt -1\n",
    ),
}


# How many runs they have, where it is not the number of tags in the script.
COUNTS = {
    "programs that start trainings": 6,
    "places of their own for temporary files": 2,
}


@pytest.mark.sampled_full(2)
@pytest.mark.full
@pytest.mark.parametrize("kind", SCRIPTS)
def test_trainings_of_a_batch_script_have_their_runs_again_after_a_requeue(tmp_path: Path, kind: str) -> None:
    script, again = SCRIPTS[kind]
    job = {"SLURM_JOB_ID": secrets.token_hex(4)}
    attempts = [(script, {**SLURM, **job}), (again or script, {**REQUEUED, **job})]
    assert_each_has_its_run(tmp_path, attempts, COUNTS.get(kind))


@pytest.mark.wide
def test_trainings_of_a_script_that_sets_the_jobs_variables_have_their_runs_again(tmp_path: Path) -> None:
    """As SkyPilot's: the script's own process has not had them at its start."""
    script = TWICE.format("a", "python train.py") + TWICE.format("b", f"{TORCHRUN} train.py")
    job = {"JOB": secrets.token_hex(4)}
    assert_each_has_its_run(tmp_path, [(SKYPILOT.format(at=at) + script, job) for at in (33, 59)], 4)


def test_a_job_that_a_requeued_job_has_submitted_has_its_runs_again(tmp_path: Path) -> None:
    """Slurm hands the other job's count on, and sets no count of 0."""
    job = {**REQUEUED, "SLURM_JOB_ID": secrets.token_hex(4)}
    script = TWICE.format("a", "python train.py")
    attempts = [(script, {**job, "SLURM_JOB_START_TIME": at}) for at in ("1790000000", "1790000600")]
    assert_each_has_its_run(tmp_path, attempts, 2)


def test_tasks_below_a_program_that_starts_them_agree(tmp_path: Path) -> None:
    """`srun conda run python train.py`, in a script that sets RANK: the program has the variables of the rank too."""
    job = {**SLURM, "SLURM_JOB_ID": secrets.token_hex(4), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    bases = {
        started(
            tmp_path,
            "TAG=a python run.py python train.py",
            {**job, "SLURM_PROCID": rank, "RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank, "MODE": "new"},
        )["a"].removesuffix(f"-rank-{rank}")
        for rank in "01"
    }
    assert bases == {f"slurm-c-{job['SLURM_JOB_ID']}-0-train"}


JOB = {"SLURM_JOB_ID": "7", "SLURM_CLUSTER_NAME": "c"}
FLUX = {"FLUX_JOB_ID": "f5A", "FLUX_JOB_ID_PATH": "/f5A", "FLUX_JOB_SIZE": "1", "FLUX_TASK_RANK": "0"}
AWS = {"SLURM_JOB_ID": "1", "SLURM_CLUSTER_NAME": "parallelcluster"}
POD = {"KONDUKTOR_JOB_NAME": "j", "NUM_NODES": "2", "RANK": "0"}  # in a rank of torchrun's
SKY = {"SKYPILOT_TASK_ID": "sky-managed-2026-09-17-15-26-33-123456_train_1-0"}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({**JOB, **FLUX}, {**JOB, **FLUX, "SLURM_JOB_ID": "8"}),
        ({**FLUX, "FLUX_JOB_ID_PATH": "/f1/f5A"}, {**FLUX, "FLUX_JOB_ID_PATH": "/f2/f5A"}),
        ({**SKY, "SKYPILOT_USER_ID": "ada"}, {**SKY, "SKYPILOT_USER_ID": "bob"}),
        ({**AWS, "SLURM_SUBMIT_HOST": "ip-10-0-0-1"}, {**AWS, "SLURM_SUBMIT_HOST": "ip-10-0-0-2"}),
        ({**POD, "SKYPILOT_NODE_RANK": "0"}, {**POD, "SKYPILOT_NODE_RANK": "1"}),
        ({**JOB, "SLURM_STEP_ID": "0"}, {**JOB, "SLURM_STEP_ID": "1"}),
        ({**JOB, "SLURMD_NODENAME": "n"}, {**JOB, "SLURM_STEP_ID": "1"}),
    ],
)
def test_jobs_that_only_one_variable_tells_apart_are_not_one(one: dict[str, str], other: dict[str, str]) -> None:
    assert starts.outer_job(one) != starts.outer_job(other)


def test_a_login_that_slurm_lets_into_a_job_is_no_start_of_it() -> None:
    """pam_slurm_adopt sets the job's number and nothing else: two logins would have one name."""
    login = {**JOB, "SSH_CONNECTION": "10.0.0.1 50000 10.0.0.2 22"}
    assert starts.outer_job(login) is None
    # A job has the variables of the login that has submitted it.
    assert starts.outer_job({**login, "SLURMD_NODENAME": "n"}) == starts.outer_job(JOB) is not None


NEW_PIDS = "unshare --pid --fork --mount-proc"
# What the program needs may lie in /tmp itself.
NEW_TMP = (
    "unshare --mount sh -c 'mount --bind /tmp /mnt && mount -t tmpfs none /tmp && "
    f'for part in "$PWD" {sys.prefix} {jobs.PACKAGE.parent}; do case "$part" in '
    '/tmp/*) mkdir -p "$part" && mount --bind "/mnt${part#/tmp}" "$part";; esac; done && cd "$PWD" && "$@"\' sh'
)


@needs_root
@pytest.mark.parametrize(("container", "is_told"), [("", True), (NEW_PIDS, False), (NEW_TMP, False)])
def test_a_start_in_a_container_that_does_not_show_the_job_is_a_new_run_and_says_so(tmp_path, container, is_told):
    """Slurm names the process of its task: a container with processes of its own has no such one."""
    job = {**SLURM, "SLURM_JOB_ID": secrets.token_hex(4)}
    script = "export SLURM_TASK_PID=$$\n" + TWICE.format("a", f"{container} {sys.executable} train.py") + "true\n"
    ids = started(tmp_path, script, job)
    assert len(set(ids.values())) == 2
    assert all(base_id.startswith("slurm-") == is_told for base_id in ids.values())


def full_disk(*_: object, **__: object) -> Path:
    raise OSError(errno.ENOSPC, "No space left on device", "/tmp/x")


def test_starts_that_cannot_be_counted_have_a_random_id_and_a_warning_and_ranks_of_a_step_agree(monkeypatch, caplog):
    monkeypatch.setattr(starts, "private_directory", full_disk)
    monkeypatch.setattr(starts._warn_once, "_logged", set())
    monkeypatch.setattr("sys.argv", ["train.py"])
    assert identity_of_program(JOB) == Identity(None)
    assert re.findall("cannot be told: .*No space left on device.*makes a new run.*run_file=", caplog.text)
    info = DistributedInfo(rank=1, world_size=2, launcher="slurm", job_id="7")
    step = {**JOB, "SLURM_STEP_ID": "0"}
    assert from_launcher(info, step, agreement=True) == Identity("slurm-c-7-0-train")


def test_a_start_beside_one_that_another_process_has_started_is_a_new_run_and_says_so(tmp_path: Path) -> None:
    """Two scripts at the same time, whose trainings only their variables tell apart."""
    job = {**SLURM, "SLURM_JOB_ID": secrets.token_hex(4)}
    (tmp_path / "one.sh").write_text("export TAG=$1 LIVE=3; python train.py; true\n")
    ids = started(tmp_path, "bash one.sh a & sleep 0.5; bash one.sh b & wait", job)
    assert [base_id.startswith("slurm-") for _, base_id in sorted(ids.items(), key=lambda pair: pair[1])] == [
        False,
        True,
    ]


def test_a_worker_of_a_pool_is_no_start(monkeypatch):
    """Ray Train's rank 0 may have the numbers of a task of Slurm's, and another name than the other ranks then."""
    step = {**JOB, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}
    ranks = [DistributedInfo(rank=rank, world_size=2, launcher="ray", job_id="fit-1") for rank in range(2)]
    monkeypatch.setattr(children, "variables_at_birth", lambda: {"RANK": "0", "WORLD_SIZE": "2"})
    assert {from_launcher(rank, step, agreement=True, in_pool=True).base_id for rank in ranks} == {"fit-1"}

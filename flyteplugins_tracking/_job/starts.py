"""Which start of a program this is in the job around it: a name that the job's restart keeps.

A batch system, or a cloud's job, keeps its name when it starts again. What runs inside of it has none: torchrun, the
tasks of a step, a program by itself. What a job's script starts one after the other is several training runs. They have
the names of their programs, with a digest of the arguments, as a program may be one of many. Those of one name are
numbered in the order of their starts: the script starts them in the same order again. The tasks of a step, whose
arguments may differ, have no digest: each step is most often one training.

What is one start is told by what its processes share: torchrun's ranks have one agent. Any other program is a start by
itself. Of the ranks that a program has started, rank 0 stands for all. A worker of a pool is no start.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from flyteplugins_tracking._rank import children
from flyteplugins_tracking._rank.info import DistributedInfo
from flyteplugins_tracking._util import proc
from flyteplugins_tracking._util.files import private_directory
from flyteplugins_tracking._util.proc import Env
from flyteplugins_tracking._util.text import digest
from flyteplugins_tracking._util.warn_once import WarnOnce

_warn_once = WarnOnce(logging.getLogger(__name__))
_SLURM = "SLURM_JOB_ID"
_AGENT = "TORCHELASTIC_RUN_ID"
# Names that many clusters have. AWS ParallelCluster gives each cluster the first one, and counts its jobs from 1.
_COMMON_CLUSTERS = {"parallelcluster", "cluster", "linux"}
# Arguments that a script adds when it is started again, also in the style of Hydra: `trainer.resume=true`; and those
# that are another one for each rank or node.
_PASSING = re.compile(
    r"([-+]+|(?=[\w.]+=))([\w.]*\.)?(resume|restore|continue|checkpoint|ckpt|(local|node|machine|global)[-_]rank\b)",
    re.IGNORECASE,
)
# A value of such an option, and not the next option or a file of the program's own.
_VALUE = re.compile(r"(?!-\D|-$)(?!.*\.(ya?ml|json|toml|py)$).*", re.DOTALL)
_UNCOUNTED = "which start of %s in this job this is cannot be told: %s. A restart of the job %s. Pass run_file=..."
# How often the numbers are looked at again, because another start has taken one meanwhile.
_LOOKS = 100
# The launchers that an outer job is itself: each of its tasks is a rank.
_OF_TASKS = {"flux", "slurm", "konduktor", "skypilot"}
# Those whose variables a script may set from the outer job's.
_BY_HAND = {"env", "env_rank"}


class OuterJob(NamedTuple):
    """A job in which programs are started.

    Attributes:
        variable: A variable that names it.
        parts: The parts of its name, which no other job has, and which its restart keeps.
        attempt: A text that is different for each attempt of the job on a machine.
        restarts: How often it was started again, as far as its variables tell it.
        tasks: How many tasks, or nodes, can each start a program.
        task: The one of them that this process is in.
    """

    variable: str
    parts: tuple[str, ...]
    attempt: str
    restarts: int
    tasks: str
    task: str


def outer_job(env: Env) -> OuterJob | None:
    """Return the job that this process runs in; None if it has no name that a restart keeps.

    The job of a heterogeneous Slurm step is that of its first component. Flux may run inside Slurm.
    """
    requeues, recoveries = (env.get(name, "0") for name in ("SLURM_RESTART_COUNT", "RESTART_ATTEMPT"))
    if env.get("FLUX_JOB_ID"):
        # Flux numbers its jobs from its own start: the job that it runs in tells them apart.
        around = (env.get("FLUX_ENCLOSING_ID", ""), env.get(_SLURM, ""), env.get("SLURM_STEP_ID", ""))
        flux = ("flux", *around, env.get("FLUX_JOB_ID_PATH") or env["FLUX_JOB_ID"])
        tasks, task = env.get("FLUX_JOB_SIZE", "1"), env.get("FLUX_TASK_RANK", "0")
        return OuterJob("FLUX_JOB_ID", flux, requeues, 0, tasks, task)
    job = env.get("SLURM_JOB_ID_HET_GROUP_0") or env.get(_SLURM)
    # pam_slurm_adopt lets a login into a job, with the job's number and no other variable.
    is_login = "SSH_CONNECTION" in env and env.keys().isdisjoint({"SLURM_STEP_ID", "SLURMD_NODENAME"})
    if job and not is_login:
        cluster = env.get("SLURM_CLUSTER_NAME", "")
        if cluster in _COMMON_CLUSTERS:
            cluster += digest(env.get("SLURM_SUBMIT_HOST", ""), length=6)
        parts = ("slurm", cluster, job, env.get("SLURM_STEP_ID", "batch"))
        attempt = f"{requeues} {env.get('SLURM_JOB_START_TIME', '')}"
        tasks, task = env.get("SLURM_STEP_NUM_TASKS", "1"), env.get("SLURM_PROCID", "0")
        return OuterJob(_SLURM, parts, attempt, _count(requeues), tasks, task)
    for variable, nodes in (("KONDUKTOR_JOB_NAME", "NUM_NODES"), ("SKYPILOT_TASK_ID", "SKYPILOT_NUM_NODES")):
        if env.get(variable):
            # The name of a managed job of SkyPilot has the time of its launch, which its recovery changes, as
            # `sky-managed-2026-09-17-15-26-33-123456_train_3985-0` (https://github.com/autogluon/tabarena/pull/587).
            stable = re.sub(r"^sky-managed-[\d-]+_", "sky-managed-", env[variable])
            name = (stable, env.get("SKYPILOT_USER_ID", ""))  # each user's jobs are numbered from 1
            # konduktor has both, and torchrun replaces the second one.
            node = env.get("SKYPILOT_NODE_RANK") or env.get("RANK", "0")
            attempt = f"{env[variable]} {recoveries}"
            return OuterJob(variable, name, attempt, _count(recoveries), env.get(nodes, "1"), node)
    # SageMaker's, and not a variable that a user has named so.
    if env.get("TRAINING_JOB_NAME") and ("SM_HOSTS" in env or "TRAINING_JOB_ARN" in env):
        hosts = 1 + env.get("SM_HOSTS", "").count(",")  # a list in JSON
        first = [pid for pid in proc.lineage() if "TRAINING_JOB_NAME" in proc.variables_at_start(pid)][-1:]
        attempt, host = "".join(map(_start_of, first)), env.get("SM_CURRENT_HOST", "")
        return OuterJob("TRAINING_JOB_NAME", (env["TRAINING_JOB_NAME"],), attempt, 0, str(hosts), host)
    return None


def _count(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def launch_directory(env: Env) -> str:
    """Return the private directory of the torchelastic launch that this worker is in; empty without one.

    An agent creates `{run_id}_{random}` once for each invocation, with a subfolder for each attempt.
    """
    match = re.match(r"(.+)/attempt_\d+/\d+/error\.json$", env.get("TORCHELASTIC_ERROR_FILE", ""))
    return match[1] if match else ""


def is_task(outer: OuterJob, info: DistributedInfo) -> bool:
    """Whether each task of the job is a rank, as with `srun python`, also if the script sets RANK from SLURM_PROCID."""
    set_by_script = {"RANK": outer.task, "WORLD_SIZE": outer.tasks}
    if info.launcher in _BY_HAND:
        return children.has(children.variables_at_birth(), set_by_script)
    return info.launcher in _OF_TASKS


def start_in(outer: OuterJob | None, info: DistributedInfo | None) -> tuple[str, ...] | None:
    """Return the parts of a base id for this process's start in its outer job; None if it has no name there.

    All tasks that are ranks have the same start, and all ranks of a torchrun on this node. Of other ranks, which a
    program has started, only rank 0 has one: the others get its id.

    Args:
        outer: The job.
        info: This rank; None for a program by itself.
    """
    if outer is None:
        return None
    are_ranks = info is not None and is_task(outer, info)
    is_agents = info is not None and info.launcher == "torchelastic"
    nodes = 1 if info is None else info.num_workers
    # One start spans all tasks, or each task has its own. If it spans only some of them, they may differ next time.
    is_of_task = nodes == 1 or (nodes is None and outer.tasks == "1")
    spans_all = str(nodes) == outer.tasks or outer.parts[-1] == "batch"
    is_of_program = info is not None and not (are_ranks or is_agents)
    if not (are_ranks or is_of_task or spans_all) or (is_of_program and info is not None and info.rank):
        return None
    is_own, name = is_of_task and not are_ranks, _word(_program())
    if is_own:  # ranks on several nodes may have arguments of their own, as `logs/node-1`
        # Multiprocessing's children have the arguments of their parent.
        words = _lasting(sys.orig_argv[1:] if children.is_program() else sys.argv)
        name = f"{name}-{digest(children.DIRECTORY, *words, length=6)}"
    starter = proc.nearest_without(_AGENT) if is_agents else os.getpid()
    launch = launch_directory(os.environ) if is_agents else proc.image()
    try:
        number = _number_of(outer, name, starter, launch, is_of_program)
    except (OSError, ValueError) as error:  # a full disk; a name that is no number, as of NFS
        follows = "may go on in another training's run" if are_ranks else "makes a new run"
        _warn_once("uncounted", _UNCOUNTED, name, error, follows)
        if not are_ranks:
            return None
        number = 1
    *parts, last = outer.parts
    task = f".task{outer.task}" if is_own and outer.tasks != "1" else ""
    return (*parts, f"{last}{task}", name if number == 1 else f"{name}.{number}")


def _number_of(outer: OuterJob, name: str, starter: int, launch: str, is_of_program: bool) -> int:
    """Return which of the starts of a name in this task and this attempt of the job this one is, from 1.

    Each start with a run here has a link with its number as the name, which is made in one step. An older one that
    lives may open its run later: its number stays free. They are known by their command if one process has started
    them, as one script. torchelastic gives rank 0 to the host whose name sorts first, so one node has all links.

    Args:
        outer: The job.
        name: The name.
        starter: The process that the start begins with.
        launch: What tells the starts of one process apart.
        is_of_program: Whether that is a rank which a program has started, beside others with the same command.

    Raises:
        OSError: It cannot be told, or there is no place for the links.
    """
    if outer.variable == _SLURM and not _sees_job(os.environ.get("SLURM_TASK_PID", "")):
        raise OSError("the job's task is not seen here, as in a container with processes or a /tmp of its own")
    directory = private_directory("starts", digest(*outer, name, length=64), is_of_machine=True)
    started, parent = _start_of(starter), _start_of(proc.parent(starter))
    own = "\n".join((started, "" if is_of_program else parent, launch))
    for _ in range(_LOOKS):
        number, last = 1, ""
        for claimed, text in sorted((int(path.name), os.readlink(path)) for path in directory.iterdir()):
            if text == own:
                return claimed
            other, of, _ = text.split("\n")
            # A shell may have become the last program that it starts: that is newer than its children, and looks older.
            is_newer = other == parent or (other > started and of != started)
            is_beside = other == started or (not is_of_program and (of in (parent, started) or other == parent))
            if not is_beside and (is_newer or _lives(other)):
                raise OSError("another start of it runs at the same time, or an older one opens its run later")
            if not is_newer:
                number, last = claimed + 1, max(last, other)
        number += sum(last < one < started for one in (() if is_of_program else _alike(starter, outer)))
        with suppress(FileExistsError):  # of another rank of this start, or of one beside it: look again
            os.symlink(own, directory / str(number))
            return number
    raise OSError("another start of it runs at the same time")


def _lives(started: str) -> bool:
    pid = int(started.split()[1])
    return started == _start_of(pid) and proc.state(pid) != "Z"


def _alike(starter: int, outer: OuterJob) -> list[str]:
    """Return the starts of this job that the same process has started with the same command and directory."""

    def asked(pid: int) -> tuple[object, ...]:
        return proc.command_line(pid), proc.directory(pid)

    beside = [pid for pid in proc.children(proc.parent(starter)) if asked(pid) == asked(starter)]
    return [_start_of(pid) for pid in beside if outer_job(proc.variables_at_start(pid)) == outer]


def _sees_job(task: str) -> bool:
    """Whether this process sees the process of its task of Slurm, if that is known, and has the same /tmp."""
    if task and int(task) not in proc.lineage():
        return False
    with suppress(PermissionError):  # a program of root's, as an Apptainer that is installed with setuid
        return not task or os.path.samefile(f"/proc/{task}/root/tmp", "/tmp")  # noqa: S108
    return True


def _start_of(pid: int) -> str:
    """Return a text that is different for each process of this machine, and sorts by their starts."""
    return f"{proc.start_time(pid):0>20} {pid:0>10}"


def _program() -> str:
    """Return the name of this process's program: `train` of `a/train.py` and `-m a.train`, `a` of `-m a`."""
    path = Path(*sys.argv[:1])
    return path.parent.name if path.stem == "__main__" else path.stem


def _lasting(words: list[str]) -> list[str]:
    """Return arguments without those that scripts add when they go on, as `--resume`, `--ckpt last.pt`, and ranks."""
    lasting, may_be_value = [], False
    for word in words:
        if _PASSING.match(word):
            may_be_value = "=" not in word
            continue
        if not (may_be_value and _VALUE.fullmatch(word)):
            lasting.append(word)
        may_be_value = False
    return lasting


def _word(name: str) -> str:
    """Return a name as a part of an id, with a digest if the id cannot have it as it is.

    Ids have a number behind a dot, or, for a rank and a process's second call, behind a dash.
    """
    word = re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-")
    return word if word == name and not re.search(r"-\d+$", word) else f"{word}-{digest(name, length=6)}".lstrip("-")

"""Which start of a program this is in the job around it: a name that the job's restart keeps.

A batch system, or a cloud's job, keeps its name when it starts again. What runs inside of it has none: torchrun, the
tasks of a step, a program by itself. What a job's script starts one after the other is several training runs. They have
the names of their programs, with a digest of the arguments, as a program may be one of many. Those of one name are
numbered in the order of their starts: the script starts them in the same order again. The tasks of a step, whose
arguments may differ, have no digest: each step is most often one training.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import sys
from pathlib import Path
from typing import NamedTuple

from flyteplugins_tracking._rank import children
from flyteplugins_tracking._rank.info import DistributedInfo
from flyteplugins_tracking._rank.launchers import LAUNCHERS
from flyteplugins_tracking._util import proc
from flyteplugins_tracking._util.files import own_text, private_directory, replace_whole
from flyteplugins_tracking._util.lock import locked
from flyteplugins_tracking._util.proc import Env
from flyteplugins_tracking._util.text import digest
from flyteplugins_tracking._util.warn_once import WarnOnce

_warn_once = WarnOnce(logging.getLogger(__name__))
_SLURM = "SLURM_JOB_ID"
_AGENT = "TORCHELASTIC_RUN_ID"
# What Python runs in torchelastic's agents, and in other programs that start ranks.
_AGENTS = {
    *("torchrun", "torch.distributed.run", "torch.distributed.launch", "deepspeed", "tune"),
    *("accelerate", "accelerate-launch", "accelerate.commands.launch"),
}
# A process that has one of these, and this one has not, is a rank of a program.
_OF_RANKS = {"RANK", "LOCAL_RANK"}
# Names that many clusters have. AWS ParallelCluster gives each cluster the first one, and counts its jobs from 1.
_COMMON_CLUSTERS = {"parallelcluster", "cluster", "linux"}
# The first process in an Apptainer container with processes of its own. Those of others have the job's variables.
_CONTAINER_INITS = {"appinit", "sinit"}
_SHELLS = {"sh", "bash", "dash", "ksh", "zsh"}
# Arguments that a script adds when it is started again, also in the style of Hydra: `trainer.resume=true`; and those
# that are another one for each rank or node.
_PASSING = re.compile(
    r"([-+]+|(?=[\w.]+=))([\w.]*\.)?(resume|restore|continue|checkpoint|ckpt|(local|node|machine|global)[-_]rank\b)",
    re.IGNORECASE,
)
# A value of such an option, and not the next option or a file of the program's own.
_VALUE = re.compile(r"(?!-\D|-$)(?!.*\.(ya?ml|json|toml|py)$).*", re.DOTALL)
# How long another start may read or write the numbers, in seconds.
_LOCK_S = 10
_UNCOUNTED = (
    "the starts of %s in this job cannot be counted: %s. A restart of the job may make a new run, and a task of a step "
    "counts as one of the first start. Pass run_file=..., or have room in /tmp"
)
# The launchers that an outer job is itself: each of its tasks is a rank.
_OF_TASKS = {"flux", "slurm", "konduktor", "skypilot", "sagemaker"}


class OuterJob(NamedTuple):
    """A job in which programs are started.

    Attributes:
        variable: A variable that all processes of the job have, and the one that starts it has not.
        parts: The parts of its name, which no other job has, and which its restart keeps.
        tasks: How many tasks, or nodes, can each start a program.
        task: The one of them that this process is in.
    """

    variable: str
    parts: tuple[str, ...]
    tasks: str
    task: str


def outer_job(env: Env) -> OuterJob | None:
    """Return the job that this process runs in; None if it has no name that a restart keeps.

    The job of a heterogeneous Slurm step is that of its first component. Flux may run inside Slurm.
    """
    if env.get("FLUX_JOB_ID"):
        # Flux numbers its jobs from its own start: the job that it runs in tells them apart.
        around = (env.get("FLUX_ENCLOSING_ID", ""), env.get(_SLURM, ""), env.get("SLURM_STEP_ID", ""))
        flux = ("flux", *around, env.get("FLUX_JOB_ID_PATH") or env["FLUX_JOB_ID"])
        return OuterJob("FLUX_JOB_ID", flux, env.get("FLUX_JOB_SIZE", "1"), env.get("FLUX_TASK_RANK", "0"))
    job = env.get("SLURM_JOB_ID_HET_GROUP_0") or env.get(_SLURM)
    # pam_slurm_adopt lets a login into a job, with the job's number and no other variable.
    is_login = "SSH_CONNECTION" in env and env.keys().isdisjoint({"SLURM_STEP_ID", "SLURMD_NODENAME"})
    if job and not is_login:
        cluster = env.get("SLURM_CLUSTER_NAME", "")
        if cluster in _COMMON_CLUSTERS:
            cluster += digest(env.get("SLURM_SUBMIT_HOST", ""), length=6)
        parts = ("slurm", cluster, job, env.get("SLURM_STEP_ID", "batch"))
        return OuterJob(_SLURM, parts, env.get("SLURM_STEP_NUM_TASKS", "1"), env.get("SLURM_PROCID", "0"))
    for variable, nodes in (("KONDUKTOR_JOB_NAME", "NUM_NODES"), ("SKYPILOT_TASK_ID", "SKYPILOT_NUM_NODES")):
        if env.get(variable):
            name = (stable_name(env[variable]), env.get("SKYPILOT_USER_ID", ""))  # each user's jobs are numbered from 1
            # konduktor has both, and torchrun replaces the second one.
            node = env.get("SKYPILOT_NODE_RANK") or env.get("RANK", "0")
            return OuterJob(variable, name, env.get(nodes, "1"), node)
    # SageMaker's, and not a variable that a user has named so.
    if env.get("TRAINING_JOB_NAME") and ("SM_HOSTS" in env or "TRAINING_JOB_ARN" in env):
        hosts = 1 + env.get("SM_HOSTS", "").count(",")  # a list in JSON
        return OuterJob("TRAINING_JOB_NAME", (env["TRAINING_JOB_NAME"],), str(hosts), env.get("SM_CURRENT_HOST", ""))
    return None


def stable_name(job: str) -> str:
    """Return the part of SkyPilot's name of a managed job that its recovery keeps: not the time of the launch.

    `sky-managed-2026-09-17-15-26-33-123456_train_3985-0` (https://github.com/autogluon/tabarena/pull/587).
    """
    return re.sub(r"^sky-managed-[\d-]+_", "sky-managed-", job)


def launch_directory(env: Env) -> str:
    """Return the private directory of the torchelastic launch that this worker is in; empty without one.

    An agent creates `{run_id}_{random}` once for each invocation, with a subfolder for each attempt.
    """
    match = re.match(r"(.+)/attempt_\d+/\d+/error\.json$", env.get("TORCHELASTIC_ERROR_FILE", ""))
    return match[1] if match else ""


def _program() -> str:
    """Return the name of this process's program: `train` of `a/train.py` and `-m a.train`, `a` of `-m a`."""
    path = Path(*sys.argv[:1])
    return path.parent.name if path.stem == "__main__" else path.stem


def restarts_of(env: Env) -> int:
    """Return how often the job around a program was started again, as far as its variables tell it."""
    outer = outer_job(env)
    count = env.get("SLURM_RESTART_COUNT" if outer and outer.variable == _SLURM else "RESTART_ATTEMPT", "")
    return int(count) if outer and count.isdecimal() else 0


def is_task(outer: OuterJob, info: DistributedInfo) -> bool:
    """Whether each task of the job is a rank, as with `srun python`, also if the script sets RANK from SLURM_PROCID."""
    if info.launcher in _OF_TASKS:
        return True
    is_rank = (str(info.rank), str(info.world_size)) == (outer.task, outer.tasks)
    return is_rank and info.launcher in LAUNCHERS and _starter(info) == os.getpid()


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
    # One start spans all tasks, or each task has its own. If it spans only some of them, they may differ next time.
    is_of_task = info is None or info.num_workers == 1 or (info.num_workers is None and outer.tasks == "1")
    spans_all = info is not None and (str(info.num_workers) == outer.tasks or outer.parts[-1] == "batch")
    if not (are_ranks or is_of_task or spans_all):
        return None
    starter, launch, variable = os.getpid(), proc.image(), ""
    if info is not None and not are_ranks:  # a program may start ranks several times
        starter, launch = _starter(info), launch_directory(os.environ) or _start_of(os.getpid())
        is_agents = info.launcher == "torchelastic"
        if not is_agents and (info.launcher not in LAUNCHERS or info.rank or starter == os.getpid()):
            return None  # ranks of a pool, or that a shell has started one by one
        variable = _AGENT if is_agents else LAUNCHERS[info.launcher].rank
    name = _word(_program())
    if is_of_task and not are_ranks:  # ranks on several nodes may have arguments of their own, as `logs/node-1`
        name = f"{name}-{digest(os.environ.get('PWD', ''), _main_file(), *_own(), length=6)}"
    number = _number_of_start(outer, name, starter, launch, variable)
    if number is None and not are_ranks:
        return None
    *parts, last = outer.parts
    task = f".task{outer.task}" if is_of_task and not are_ranks and outer.tasks != "1" else ""
    return (*parts, f"{last}{task}", name if number in (1, None) else f"{name}.{number}")


def _number_of_start(outer: OuterJob, name: str, starter: int, launch: str, variable: str) -> int | None:
    """Return which of the starts of a name in this task and this attempt of the job this one is, from 1.

    Each start with a run here has a file with its number as the name. An older one that lives may open its run later:
    its number stays free. torchelastic gives rank 0 to the host whose name sorts first, so one node has all files.

    Returns:
        None if nobody counts: a container with processes of its own shows neither the others of the job nor the files,
        and there may be no place for the files. That is warned of.
    """
    if outer.variable == _SLURM and _is_in_container():
        return None
    started, attempt = _start_of(starter), _attempt_of(outer, os.getpid(), os.environ)
    own = started + launch
    key = digest(outer, attempt, name, length=64)
    try:
        directory = private_directory("starts", key, is_of_machine=True)
        with locked(directory / "lock", _LOCK_S):
            numbers = {own_text(path) or "": int(path.name) for path in directory.iterdir() if path.name.isdecimal()}
            if own in numbers:
                return numbers[own]
            beside = {_start_of(pid) for pid in proc.processes() if _is_alike(pid, outer, variable, attempt)}
            free = (number for number in itertools.count(1) if number not in numbers.values())
            with_numbers = {text[: len(started)] for text in numbers}
            number = next(itertools.islice(free, sum(start < started for start in beside - with_numbers), None))
            replace_whole(directory / str(number), own)
            return number
    except OSError as error:  # a full disk, or another start that is stopped
        _warn_once("uncounted", _UNCOUNTED, name, error)
        return None


def _attempt_of(outer: OuterJob, pid: int, env: Env) -> str:
    """Return a text that is different for each attempt of a job: Slurm's, or the variable and the start of its script.

    SkyPilot's script sets the variables itself, so that the script's own shell has not had them at its start.
    """
    if outer.variable == _SLURM:
        return f"{env.get('SLURM_RESTART_COUNT', '0')} {env.get('SLURM_JOB_START_TIME', '')}"
    for above in proc.ancestors(pid):
        is_shell = os.path.basename(proc.command_line(above)[0]).lstrip("-") in _SHELLS
        if not (is_shell or outer.variable in proc.variables_at_start(above)):
            break
        pid = above
    return f"{env.get(outer.variable)} {_start_of(pid)}"


def _start_of(pid: int) -> str:
    """Return a text that is different for each process of this machine, and sorts by their starts."""
    return f"{proc.start_time(pid):0>20} {pid:0>10}"


def _starter(info: DistributedInfo) -> int:
    """Return the process that this rank's start begins with: torchrun's agent, a program that starts ranks, or itself.

    A program as `conda run`, which has the rank's variables, has not started the rank.
    """
    if info.launcher == "torchelastic":
        return proc.nearest_without(_AGENT)
    first, above = os.getpid(), os.getppid()
    while above > 1 and info.launcher in LAUNCHERS:
        python, *words = proc.command_line(above)
        has_rank = LAUNCHERS[info.launcher].rank in proc.variables_at_start(above)
        first = above if _is_python(python) and _names_program(words) and not has_rank else first
        above = proc.parent(above)
    return first


def _is_alike(pid: int, outer: OuterJob, variable: str, attempt: str) -> bool:
    """Whether a process, maybe this one, is a start of this program in this task and attempt: an agent of torchrun.

    Args:
        pid: The process.
        outer: The job.
        variable: That of this rank, which what starts ranks has not; empty if this process is a start itself.
        attempt: The attempt of the job.
    """
    python, *words = proc.command_line(pid)[:-1] or [""]
    if not _is_python(python) or proc.is_fork(pid):
        return False
    their, own = _program_words(words), _own()
    is_agent = bool(variable) and os.path.basename(their[0]) in _AGENTS and their[-len(own) :] == own
    if not (is_agent or their == own):
        return False
    env, of_ranks = proc.variables_at_start(pid), {variable} if variable else _OF_RANKS - os.environ.keys()
    if of_ranks & env.keys() or env.get("PWD") != os.environ.get("PWD"):
        return False
    return outer_job(env) == outer and _attempt_of(outer, pid, env) == attempt


def _is_in_container() -> bool:
    """Whether this is a container of its own in a Slurm job: it shows neither the job's processes nor its files."""
    if _SLURM in proc.variables_at_start(1):
        return True
    above = [*proc.ancestors(os.getpid())]
    is_below_slurm = any(proc.command_name(pid) == "slurmstepd" for pid in above)
    return above[-1:] == [1] and not is_below_slurm and proc.command_name(1) in _CONTAINER_INITS


def _is_python(path: str) -> bool:
    return os.path.basename(path).startswith("python")


def _names_program(words: list[str]) -> bool:
    """Whether one of these arguments of Python is this process's program: its path, or the name of its module."""
    return any(_program() in (Path(word).stem, word.rpartition(".")[2]) for word in words)


def _own() -> list[str]:
    """Return this process's program and arguments. Multiprocessing's children have those of their parent."""
    return _program_words(sys.orig_argv[1:]) if children.is_program() else _lasting(sys.argv)


def _main_file() -> str:
    """Return the path of this process's program, which tells in which directory a relative one was started."""
    return getattr(sys.modules.get("__main__"), "__file__", None) or ""


def _program_words(words: list[str]) -> list[str]:
    """Return the program of Python's arguments, its path, module or code, and its own arguments that last."""
    words = list(words)
    while words and words[0][:1] == "-" and words[0][1:2] not in ("", "m", "c"):
        del words[: 2 if words[0] in ("-W", "-X") else 1]
    return _lasting(words[1:] if words[:1] in (["-m"], ["-c"]) else words) or [""]


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

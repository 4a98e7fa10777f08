"""Which start of torchrun this is in the job around it: a name that the job's restart keeps.

A batch system, or a cloud's job, keeps its name when it starts again, and torchrun inside of it has none. What a job's
script starts one after the other is several training runs. They have the names of their programs, and those of one
program are numbered in the order of their starts: the script starts them in the same order again.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import sys
from pathlib import Path
from typing import NamedTuple

from flyteplugins_tracking._rank.info import DistributedInfo
from flyteplugins_tracking._util import proc
from flyteplugins_tracking._util.files import own_text, private_directory
from flyteplugins_tracking._util.lock import locked
from flyteplugins_tracking._util.proc import Env

_SLURM = "SLURM_JOB_ID"
# What Python runs in torchelastic's agents.
_AGENTS = {"torchrun", "torch.distributed.run", "torch.distributed.launch", "accelerate"}


class OuterJob(NamedTuple):
    """A job in which torchrun may be started.

    Attributes:
        variable: A variable that all processes of the job have, and the one that starts it has not.
        parts: The parts of its name, which no other job has, and which its restart keeps.
        tasks: How many tasks, or nodes, can each start a torchrun.
        task: The one of them that this process is in.
    """

    variable: str
    parts: tuple[str, ...]
    tasks: str
    task: str


def outer_job(env: Env) -> OuterJob | None:
    """Return the job that this process runs in; None if it has no name that a restart keeps.

    The job of a heterogeneous Slurm step is that of its first component.
    """
    job = env.get("SLURM_JOB_ID_HET_GROUP_0") or env.get(_SLURM)
    if job:
        parts = ("slurm", env.get("SLURM_CLUSTER_NAME", ""), job, env.get("SLURM_STEP_ID", "batch"))
        return OuterJob(_SLURM, parts, env.get("SLURM_STEP_NUM_TASKS", "1"), env.get("SLURM_PROCID", "0"))
    for variable, nodes, node in (
        ("KONDUKTOR_JOB_NAME", "NUM_NODES", "RANK"),
        ("SKYPILOT_TASK_ID", "SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK"),
    ):
        if env.get(variable):
            return OuterJob(variable, (stable_name(env[variable]),), env.get(nodes, "1"), env.get(node, "0"))
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


def program() -> str:
    """Return the name of this process's program: a script that leaves out one that is done starts the others alone."""
    return Path(*sys.argv[:1]).stem


def start_in(outer: OuterJob | None, info: DistributedInfo) -> tuple[str, ...] | None:
    """Return the parts of a base id for this rank's torchrun in its outer job; None if it has no name there.

    One torchrun spans all tasks, or each task has its own. If it spans only some of them, they may differ next time. In
    a container with processes of its own, others of the job cannot be seen, nor the files with their numbers.
    """
    if outer is None or (info.num_workers != 1 and str(info.num_workers) != outer.tasks and outer.parts[-1] != "batch"):
        return None
    if outer.variable == _SLURM and _SLURM in proc.variables_at_start(1):
        return None
    number = _number_of_start(outer)
    *parts, last = outer.parts
    task = f".task{outer.task}" if info.num_workers == 1 and outer.tasks != "1" else ""
    return (*parts, f"{last}{task}", f"{program()}{'' if number == 1 else f'.{number}'}")


def _number_of_start(outer: OuterJob) -> int:
    """Return which of the agents that this task has had in this attempt of the job is the one of this rank, from 1.

    Only those count that have started the same program.

    Each agent with a run here has a file with its number as the name. An older one that lives may open its run later:
    its number stays free. torchelastic gives rank 0 to the host whose name sorts first, so one node has all files.
    """
    agent = proc.nearest_without("TORCHELASTIC_RUN_ID")
    own, attempt = _start_of(agent), _attempt_of(outer, os.getpid())
    try:
        key = hashlib.sha256(repr((outer, attempt, program())).encode()).hexdigest()
        directory = private_directory("starts", key, is_of_machine=True)
        with locked(directory / "lock"):
            numbers = {own_text(path): int(path.name) for path in directory.iterdir() if path.name.isdecimal()}
            if own in numbers:
                return numbers[own]
            beside = {_start_of(pid) for pid in proc.processes() if _is_agent_beside(agent, pid, attempt, outer)}
            free = (number for number in itertools.count(1) if number not in numbers.values())
            number = next(itertools.islice(free, sum(start < own for start in beside - numbers.keys()), None))
            (directory / str(number)).write_text(own)
            return number
    except OSError:  # a full disk
        return 1


def _attempt_of(outer: OuterJob, pid: int) -> str:
    """Return a text that is different for each attempt of a job: Slurm's number, or the start of its first process."""
    if outer.variable == _SLURM:
        return proc.variables_at_start(pid).get("SLURM_RESTART_COUNT", "0")
    while (above := proc.parent(pid)) > 0 and outer.variable in proc.variables_at_start(above):
        pid = above
    return _start_of(pid)


def _start_of(pid: int) -> str:
    """Return a text that is different for each process of this machine, and sorts by their starts."""
    return f"{proc.start_time(pid):0>20} {pid:0>10}"


def _is_agent_beside(agent: int, pid: int, attempt: str, outer: OuterJob) -> bool:
    """Whether a process is another agent of torchelastic's in the same attempt of the same task, with one program."""
    python, *words = proc.command_line(pid)
    if not os.path.basename(python).startswith("python") or _AGENTS.isdisjoint(map(os.path.basename, words[:3])):
        return False
    env = proc.variables_at_start(pid)
    return (
        pid != agent
        and "TORCHELASTIC_RUN_ID" not in env
        and program() in {re.split(r"[/.]", word.removesuffix(".py"))[-1] for word in words}
        and outer_job(env) == outer
        and _attempt_of(outer, pid) == attempt
    )

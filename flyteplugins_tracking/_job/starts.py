"""Which start of torchrun this is in the job around it: a name that the job's restart keeps.

A batch system, or a cloud's job, keeps its name when it starts again, and torchrun inside of it has none. What a job's
script starts one after the other is several training runs: they are numbered in the order of their starts, and the
script starts them in the same order again.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
from typing import NamedTuple

from flyteplugins_tracking._rank.info import DistributedInfo
from flyteplugins_tracking._util import proc
from flyteplugins_tracking._util.files import own_text, private_directory
from flyteplugins_tracking._util.lock import locked
from flyteplugins_tracking._util.proc import Env

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
    job = env.get("SLURM_JOB_ID_HET_GROUP_0") or env.get("SLURM_JOB_ID")
    if job:
        parts = ("slurm", env.get("SLURM_CLUSTER_NAME", ""), job, env.get("SLURM_STEP_ID", "batch"))
        return OuterJob("SLURM_JOB_ID", parts, env.get("SLURM_STEP_NUM_TASKS", "1"), env.get("SLURM_PROCID", "0"))
    for variable, nodes, node in (
        ("KONDUKTOR_JOB_NAME", "NUM_NODES", "RANK"),
        ("SKYPILOT_TASK_ID", "SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK"),
    ):
        if env.get(variable):
            return OuterJob(variable, (stable_name(env[variable]),), env.get(nodes, "1"), env.get(node, "0"))
    if env.get("TRAINING_JOB_NAME"):  # SageMaker's
        hosts = 1 + env.get("SM_HOSTS", "").count(",")  # a list in JSON
        return OuterJob("TRAINING_JOB_NAME", (env["TRAINING_JOB_NAME"],), str(hosts), env.get("SM_CURRENT_HOST", ""))
    return None


def stable_name(job: str) -> str:
    """Return the part of SkyPilot's name of a managed job that its recovery keeps: not the time of the launch.

    `sky-managed-2026-09-17-15-26-33-123456_train_3985-0` (https://github.com/autogluon/tabarena/pull/587).
    """
    return re.sub(r"^sky-managed-[\d-]+_", "sky-managed-", job)


def start_in(outer: OuterJob | None, info: DistributedInfo) -> tuple[str, ...] | None:
    """Return the parts of a base id for this rank's torchrun in its outer job; None if it has no name there.

    One torchrun spans all tasks, or each task has its own. If it spans only some of them, they may differ next time.
    """
    if outer is None or (info.num_workers != 1 and str(info.num_workers) != outer.tasks and outer.parts[-1] != "batch"):
        return None
    number = _number_of_start(outer)
    *parts, last = outer.parts
    task = f".task{outer.task}" if info.num_workers == 1 and outer.tasks != "1" else ""
    return (*parts, f"{last}{task}{'' if number == 1 else f'.{number}'}")


def _number_of_start(outer: OuterJob) -> int:
    """Return which of the agents that this task has had in this attempt of the job is the one of this rank, from 1.

    Each agent with a run here has a file with its number as the name. An older one that lives may open its run later:
    its number stays free. torchelastic gives rank 0 to the host whose name sorts first, so one node has all files.
    """
    agent = proc.nearest_without("TORCHELASTIC_RUN_ID")
    own, attempt = _start_of(agent), _start_of(_outermost_with(outer.variable))
    try:
        directory = private_directory("starts", hashlib.sha256(repr((outer, attempt)).encode()).hexdigest())
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


def _outermost_with(variable: str, pid: int | None = None) -> int:
    """Return the first process of an attempt of a job: the farthest ancestor with the job's variable."""
    pid = os.getpid() if pid is None else pid
    while (above := proc.parent(pid)) > 0 and variable in proc.variables_at_start(above):
        pid = above
    return pid


def _start_of(pid: int) -> str:
    """Return a text that is different for each process of this machine, and sorts by their starts."""
    return f"{proc.start_time(pid):0>20} {pid:0>10}"


def _is_agent_beside(agent: int, pid: int, attempt: str, outer: OuterJob) -> bool:
    """Whether a process is another agent of torchelastic's in the same attempt of the same task."""
    program, *words = proc.command_line(pid)[:4]
    if not os.path.basename(program).startswith("python") or _AGENTS.isdisjoint(map(os.path.basename, words)):
        return False
    return (
        pid != agent
        and "TORCHELASTIC_RUN_ID" not in proc.variables_at_start(pid)
        and _start_of(_outermost_with(outer.variable, pid)) == attempt
    )

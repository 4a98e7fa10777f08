"""Which start of torchrun this is in its Slurm job: a name that a requeue keeps.

Slurm keeps the number of a job that it requeues, and numbers the steps of a script anew. What one step, or one batch
script, starts one after the other is several training runs: they are numbered in the order of their starts, and a
requeued script starts them in the same order again.
"""

from __future__ import annotations

import hashlib
import itertools
import os

from flyteplugins_tracking._rank.info import DistributedInfo
from flyteplugins_tracking._util import proc
from flyteplugins_tracking._util.files import own_text, private_directory
from flyteplugins_tracking._util.lock import locked
from flyteplugins_tracking._util.proc import Env

# What Python runs in torchelastic's agents.
_AGENTS = {"torchrun", "torch.distributed.run", "torch.distributed.launch", "accelerate"}
# The variables of a step, and what they are in a batch script.
_STEP, _TASKS, _TASK = ("SLURM_STEP_ID", "batch"), ("SLURM_STEP_NUM_TASKS", "1"), ("SLURM_PROCID", "0")
# They are equal in the processes of one task.
_OF_TASK = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID")


def slurm_start(info: DistributedInfo, env: Env) -> tuple[str, ...] | None:
    """Return the parts of a base id for torchrun inside a Slurm job; None outside of one, and if they are not known.

    The job of a heterogeneous step is that of its first component. A step has one torchrun over all its tasks, or one
    in each task. If torchrun spans only some of them, which ones may differ after a requeue.
    """
    job = env.get("SLURM_JOB_ID_HET_GROUP_0") or env.get("SLURM_JOB_ID")
    if not job:
        return None
    step, tasks, task = (env.get(name, other) for name, other in (_STEP, _TASKS, _TASK))
    number = _number_of_start("-".join(("slurm", job, step, task, env.get("SLURM_RESTART_COUNT", "0"))))
    if info.num_workers == 1 and tasks != "1":
        step = f"{step}.task{task}"
    elif "SLURM_STEP_ID" in env and str(info.num_workers) != tasks:
        return None
    return ("slurm", env.get("SLURM_CLUSTER_NAME") or "", job, step if number == 1 else f"{step}.{number}")


def _number_of_start(attempt: str) -> int:
    """Return which of the agents that this task has had in this attempt of the job is the one of this rank, from 1.

    Each agent with a run here has a file with its number as the name. An older one that lives may open its run later:
    its number stays free. torchelastic gives rank 0 to the host whose name sorts first, so one node has all files.
    """
    agent = proc.nearest_without("TORCHELASTIC_RUN_ID")
    own = _start_of(agent)
    try:
        directory = private_directory("starts", hashlib.sha256(attempt.encode()).hexdigest())
        with locked(directory / "lock"):
            numbers = {own_text(path): int(path.name) for path in directory.iterdir() if path.name.isdecimal()}
            if own in numbers:
                return numbers[own]
            beside = {_start_of(pid) for pid in proc.processes() if _is_agent_beside(agent, pid)}
            free = (number for number in itertools.count(1) if number not in numbers.values())
            number = next(itertools.islice(free, sum(start < own for start in beside - numbers.keys()), None))
            (directory / str(number)).write_text(own)
            return number
    except OSError:  # a full disk
        return 1


def _start_of(pid: int) -> str:
    """Return a text that is different for each process of this machine, and sorts by their starts."""
    return f"{proc.start_time(pid):0>20} {pid:0>10}"


def _is_agent_beside(agent: int, pid: int) -> bool:
    """Whether a process is an agent of torchelastic's in the same task of the same step."""
    program, *words = proc.command_line(pid)[:4]
    if not os.path.basename(program).startswith("python") or _AGENTS.isdisjoint(map(os.path.basename, words)):
        return False
    own, other = proc.variables_at_start(agent), proc.variables_at_start(pid)
    return "TORCHELASTIC_RUN_ID" not in other and all(own.get(name) == other.get(name) for name in _OF_TASK)

"""The launchers that are known: one detector each, in one ordered list.

Every detector reads *all* its fields from one launcher's variables. Bad values of a launcher are an error, never rank
0: this module exists to prevent the bug that every process is rank 0.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from flyteplugins_tracking._rank.info import DistributedInfo, check_orders
from flyteplugins_tracking.errors import TopologyError

Env = Mapping[str, str]

# A rank's variable, for each launcher whose variables have its name: only the processes below that launcher have it.
RANK_VARIABLES = {
    "horovod": "HOROVOD_RANK",
    "openmpi": "OMPI_COMM_WORLD_RANK",
    "mvapich": "MV2_COMM_WORLD_RANK",
    "jsm": "JSM_NAMESPACE_RANK",
    "mpich": "PMI_RANK",
    "slurm": "SLURM_PROCID",
}


def _ray_train(_: Env) -> DistributedInfo | None:
    """A worker of Ray Train, which is inside whatever has started Ray."""
    if "ray" not in sys.modules:
        return None
    from flyteplugins_tracking._rank import ray

    return ray.train_world()


def _torchelastic(env: Env) -> DistributedInfo | None:
    """torchrun, torch.distributed.launch, Elastic of Flyte 1 and 2.

    https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
    """
    if "TORCHELASTIC_RUN_ID" not in env:
        return None
    # Flyte 2 Clustered sets NODE_RANK only. Elsewhere a NODE_RANK beside GROUP_RANK comes from an outer launcher.
    worker_index = "GROUP_RANK" if "GROUP_RANK" in env else "NODE_RANK"
    return _from_env(
        env,
        "torchelastic",
        rank="RANK",
        world_size="WORLD_SIZE",
        local_rank="LOCAL_RANK",
        local_world_size="LOCAL_WORLD_SIZE",
        worker_index=worker_index,
        num_workers="GROUP_WORLD_SIZE",
        restart_count=("TORCHELASTIC_RESTART_COUNT", "JOBSET_RESTART_ATTEMPT"),
        job_id="TORCHELASTIC_RUN_ID",
        local_rank_value=_true_local_rank(env),
    )


def _true_local_rank(env: Env) -> int | None:
    """Return the local rank under `--virtual-local-rank`, which sets LOCAL_RANK=0 in every process; else None.

    The path of the agent's error file contains the true one. Without that file: workers of equal size have consecutive
    ranks.
    """
    rank, local_world_size = _integer(env, "RANK"), _integer(env, "LOCAL_WORLD_SIZE")
    if env.get("LOCAL_RANK") != "0" or not rank or not local_world_size:
        return None
    match = re.search(r"/attempt_\d+/(\d+)/error\.json$", env.get("TORCHELASTIC_ERROR_FILE", ""))
    if match:
        return int(match[1])
    group_rank, groups = _integer(env, "GROUP_RANK"), _integer(env, "GROUP_WORLD_SIZE")
    if group_rank is None or groups is None or groups * local_world_size != _integer(env, "WORLD_SIZE"):
        return None
    local_rank = rank - group_rank * local_world_size
    return local_rank if 0 <= local_rank < local_world_size else None


def _rank_variables(env: Env) -> DistributedInfo | None:
    """Ray Train, Accelerate, Composer, DeepSpeed and hand-written launchers: RANK, WORLD_SIZE and LOCAL_RANK.

    A process group of the same size knows better: on a CPU, `Accelerator()` sets RANK=0 in each process that
    `debug_launcher` has started, which ACCELERATE_DEBUG_RDV_FILE tells. A group of one process does not: some programs
    make one on each rank.
    """
    if not _are_set(env, "RANK", "WORLD_SIZE", "LOCAL_RANK"):
        return None
    info = _from_env(
        env,
        "env",
        rank="RANK",
        world_size="WORLD_SIZE",
        local_rank="LOCAL_RANK",
        local_world_size=_first(env, "LOCAL_WORLD_SIZE", "LOCAL_SIZE"),
        worker_index=_first(env, "GROUP_RANK", "NODE_RANK", "CROSS_RANK"),
        num_workers=_first(env, "GROUP_WORLD_SIZE", "CROSS_SIZE"),
    )
    group = detect_process_group()
    if group is None or group.world_size != info.world_size:
        return info
    if "ACCELERATE_DEBUG_RDV_FILE" in env:
        return group
    # The launcher stays the same on all ranks: it is a part of the run's id.
    return info if group.rank == info.rank else replace(group, launcher="env")


def _slurm(env: Env) -> DistributedInfo | None:
    """A process of an srun step. An sbatch shell has SLURM_PROCID too, but no step: it is one process.

    https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES
    """
    if "SLURM_STEP_ID" not in env or _integer(env, "SLURM_STEP_NUM_TASKS") == 1:
        return None
    if not _slurm_step_is_ours(env):
        return None
    return _from_env(
        env,
        "slurm",
        rank=RANK_VARIABLES["slurm"],
        world_size="SLURM_STEP_NUM_TASKS",
        local_rank="SLURM_LOCALID",
        local_world_size="SLURM_STEP_TASKS_PER_NODE",
        worker_index="SLURM_NODEID",
        num_workers="SLURM_STEP_NUM_NODES",
        restart_count=("SLURM_RESTART_COUNT",),
        job_id="SLURM_JOB_ID",
        local_world_size_value=_slurm_tasks_on_this_node(env),
    )


def _slurm_step_is_ours(env: Env) -> bool:
    """Return False in an sbatch shell that a task submitted: it inherits the step, but its SLURM_GTIDS is shorter."""
    tasks, ranks_here = _slurm_tasks_on_this_node(env), env.get("SLURM_GTIDS")
    return tasks is None or ranks_here is None or len(ranks_here.split(",")) == tasks


def _slurm_tasks_on_this_node(env: Env) -> int | None:
    """Expand `SLURM_STEP_TASKS_PER_NODE`, for instance "4(x2),3", at `SLURM_NODEID`."""
    text, node = env.get("SLURM_STEP_TASKS_PER_NODE"), _integer(env, "SLURM_NODEID")
    if text is None or node is None:
        return None
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if not match:
            raise TopologyError(f"SLURM_STEP_TASKS_PER_NODE={text!r} is not of the form '4(x2),3'")
        node -= int(match[2] or 1)
        if node < 0:
            return int(match[1])
    raise TopologyError(f"SLURM_NODEID={env['SLURM_NODEID']} has no entry in SLURM_STEP_TASKS_PER_NODE={text!r}")


def _lightning(env: Env) -> DistributedInfo | None:
    """A child of Lightning's own launcher: LOCAL_RANK and WORLD_SIZE, and no RANK.

    On the first node the local rank is the rank. On other nodes the rank depends on the number of processes per node,
    which no variable has.
    """
    if "RANK" in env or not _are_set(env, "LOCAL_RANK", "WORLD_SIZE"):
        return None
    node_variable = _first(env, "NODE_RANK", "GROUP_RANK")
    if (_integer(env, node_variable) or 0) > 0:
        raise TopologyError(
            f"{node_variable}={env[node_variable]} and LOCAL_RANK={env['LOCAL_RANK']} without RANK: which rank this is "
            "cannot be known on any but the first node. Start with torchrun, or set RANK in each process."
        )
    return _from_env(
        env,
        "lightning",
        rank="LOCAL_RANK",
        world_size="WORLD_SIZE",
        local_rank="LOCAL_RANK",
        worker_index=node_variable,
        worker_index_value=0,
    )


def detect_process_group(_: Env | None = None) -> DistributedInfo | None:
    """A process group that the user's code initialised, whose ranks are in no variable."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    return DistributedInfo(rank=dist.get_rank(), world_size=dist.get_world_size(), launcher="process_group")


def _kubeflow(env: Env) -> DistributedInfo | None:
    """A pod of PyTorchJob, Kubeflow's Trainer v2, PAI-DLC or AIHC, without torchrun in it: one process per node.

    There RANK is the node. It is the process's rank only if one process runs per node.
    https://www.alibabacloud.com/help/en/pai/general-environment-variables
    """
    if _are_set(env, "RANK", "WORLD_SIZE"):
        rank, world_size = "RANK", "WORLD_SIZE"
    elif _are_set(env, "PET_NODE_RANK", "PET_NNODES"):
        rank, world_size = "PET_NODE_RANK", "PET_NNODES"
    else:
        return None
    processes = _first(env, "PET_NPROC_PER_NODE", "NPROC_PER_NODE")
    if not any(name in env for name in (processes, *_POD_VARIABLES)):
        return None
    if processes == "NPROC_PER_NODE" and _integer(env, world_size) == 1:
        return None
    if env.get(processes, "1") != "1":
        raise _is_a_node(env, rank, processes, _torchrun_in_pod(env, processes))
    if world_size == "PET_NNODES" and ":" in env[world_size]:
        raise TopologyError(
            f"PET_NNODES={env[world_size]} does not say how many nodes there are now, and nothing else does. "
            "Call the decorated function in the workers: torchrun train.py"
        )
    nodes = env.get("PET_NNODES")
    if nodes is not None and ":" not in nodes and _integer(env, "PET_NNODES") != _integer(env, world_size):
        raise TopologyError(
            f"{world_size}={env[world_size]} and PET_NNODES={nodes} contradict each other for one process per node"
        )
    return _from_env(
        env,
        "kubeflow",
        rank=rank,
        world_size=world_size,
        worker_index="PET_NODE_RANK" if "PET_NODE_RANK" in env else rank,
        num_workers=world_size,
        local_rank_value=0,
        local_world_size_value=1,
    )


# One of them is set in a pod. Elsewhere RANK and WORLD_SIZE alone are not a node's.
_POD_VARIABLES = ("PET_NNODES", "PET_NODE_RANK", "AIHC_JOB_NAME", "DLC_JOB_ID", "KUBERNETES_SERVICE_HOST")


def _torchrun_in_pod(env: Env, processes: str) -> str:
    """Return the command that starts the processes of a pod. torchrun reads the variables that begin with PET_."""
    address = ' --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT"'
    if processes == "NPROC_PER_NODE":
        return f'torchrun --nnodes="$WORLD_SIZE" --node-rank="$RANK" --nproc-per-node="${processes}"{address} train.py'
    return f"torchrun{address if 'RANK' in env else ''} train.py"


def _jax(_: Env) -> DistributedInfo | None:
    """A process that `jax.distributed.initialize` has connected to others."""
    if "jax" not in sys.modules:
        return None
    from flyteplugins_tracking._rank import jax

    return jax.world()


def _is_a_node(env: Env, rank: str, processes: str, command: str) -> TopologyError:
    return TopologyError(
        f"{rank}={env.get(rank)} is a node, not a process: {processes}={env[processes]} and no LOCAL_RANK. "
        f"Call the decorated function in the workers: {command}"
    )


def _rank_alone(env: Env) -> DistributedInfo | None:
    """A script's own RANK and WORLD_SIZE, in no pod. The place on the node is in no variable."""
    if not _are_set(env, "RANK", "WORLD_SIZE"):
        return None
    info = _from_env(env, "env_rank", rank="RANK", world_size="WORLD_SIZE")
    if info.world_size > 1 and _has_left_its_group() and _was_set_late(env, "RANK"):
        raise TopologyError(
            f"RANK={info.rank} and WORLD_SIZE={info.world_size} were set in this process for a process group that is "
            "destroyed: they may be left from an earlier training. Unset them, or call the decorated function after "
            "torch.distributed.init_process_group()."
        )
    return info


def _has_left_its_group() -> bool:
    """Return whether this process had a process group, and has destroyed it. torch keeps the way it was made."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or dist.is_initialized():
        return False
    return getattr(getattr(dist, "distributed_c10d", None), "_default_pg_init_method", None) is not None


def _was_set_late(env: Env, name: str) -> bool:
    """Return whether this process was started without this value of the variable. False if that is unknown."""
    from flyteplugins_tracking._util import proc

    at_start = proc.variables_at_start(os.getpid())
    return bool(at_start) and at_start.get(name) != env[name]


def _konduktor(env: Env) -> DistributedInfo | None:
    """A konduktor pod: RANK is the node, and WORLD_SIZE is not set."""
    if "KONDUKTOR_JOB_NAME" not in env:
        return None
    node = _first(env, "SKYPILOT_NODE_RANK", "RANK")
    return _one_process_per_node(env, "konduktor", node, "NUM_NODES", "NUM_GPUS_PER_NODE", "KONDUKTOR_JOB_NAME")


def _skypilot(env: Env) -> DistributedInfo | None:
    """A SkyPilot task: https://docs.skypilot.co/en/latest/running-jobs/environment-variables.html."""
    if "SKYPILOT_NODE_RANK" not in env:
        return None
    return _one_process_per_node(
        env, "skypilot", "SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES", "SKYPILOT_NUM_GPUS_PER_NODE", "SKYPILOT_TASK_ID"
    )


def _lepton(env: Env) -> DistributedInfo | None:
    """A worker of a batch job on DGX Cloud Lepton."""
    node, nodes, gpus_per_node = (
        "LEPTON_JOB_WORKER_INDEX",
        "LEPTON_JOB_TOTAL_WORKERS",
        "LEPTON_RESOURCE_ACCELERATOR_NUM",
    )
    if node not in env:
        return None
    master = "${LEPTON_JOB_SERVICE_PREFIX:-$LEPTON_JOB_NAME}-0.${LEPTON_SUBDOMAIN:-$LEPTON_JOB_NAME-job-svc}"
    command = (
        f'torchrun --nnodes="${nodes}" --node-rank="${node}" --nproc-per-node="${gpus_per_node}" '
        f'--master-addr="{master}" train.py'
    )
    return _one_process_per_node(env, "lepton", node, nodes, gpus_per_node, "LEPTON_JOB_NAME", command)


def _one_process_per_node(
    env: Env,
    launcher: str,
    node: str,
    nodes: str,
    gpus_per_node: str,
    job_id: str,
    command: str = "torchrun train.py",
) -> DistributedInfo | None:
    if _integer(env, nodes) in (None, 1):
        return None
    if (_integer(env, gpus_per_node) or 0) > 1:
        raise _is_a_node(env, node, gpus_per_node, command)
    return _from_env(
        env,
        launcher,
        rank=node,
        world_size=nodes,
        worker_index=node,
        num_workers=nodes,
        restart_count=("RESTART_ATTEMPT",),
        job_id=job_id,
        local_rank_value=0,
        local_world_size_value=1,
    )


def refuse_ranks_that_disagree(info: DistributedInfo, env: Env) -> None:
    """Refuse a RANK that differs from mpirun's or srun's, for instance RANK=0 exported once for all processes."""
    for name in RANK_VARIABLES:
        other = None
        with suppress(TopologyError):
            other = DETECTORS[name](env)
        if other is not None and other.world_size == info.world_size > 1 and other.rank != info.rank:
            raise TopologyError(
                f"RANK={info.rank} and WORLD_SIZE={info.world_size} contradict {other.launcher}, for which this is "
                f"rank {other.rank} of {other.world_size}: set RANK in each process, or unset it."
            )


def refuse_leftovers(env: Env) -> None:
    """Refuse the variables of an incomplete launcher: no process becomes rank 0 by default."""
    if "RANK" in env and "WORLD_SIZE" not in env and env.get("NUM_NODES") != "1":
        raise TopologyError(
            f"RANK={env['RANK']} is set and WORLD_SIZE is not: is it a process or a node? Start the job with torchrun, "
            "set WORLD_SIZE and LOCAL_RANK too, or unset RANK."
        )
    if (_integer(env, "PMI_SIZE") or 1) > 1 and "SLURM_JOB_ID" not in env:
        raise TopologyError(
            f"PMI_RANK={env.get('PMI_RANK')} of PMI_SIZE={env['PMI_SIZE']} without MPI_LOCALRANKID does not come "
            "from a known launcher: set RANK, WORLD_SIZE and LOCAL_RANK in each process."
        )
    for name in ("LOCAL_RANK", "NODE_RANK", "GROUP_RANK"):
        if (_integer(env, name) or 0) > 0 and "RANK" not in env:
            raise TopologyError(
                f"{name}={env[name]} is set and RANK is not: which rank this process is cannot be known. "
                f"Start the job with torchrun, or unset {name}."
            )


Detector = Callable[[Env], DistributedInfo | None]


def _plain(launcher: str, *markers: str, **names: str) -> Detector:
    """Return the detector of a launcher that has a plain variable for each field.

    Args:
        launcher: The launcher's name, which is in `RANK_VARIABLES`.
        *markers: The variables that are set beside the rank's if, and only if, it started the process.
        **names: The variable of each other field, as for `_from_env`.
    """
    rank = RANK_VARIABLES[launcher]

    def detector(env: Env) -> DistributedInfo | None:
        return _from_env(env, launcher, rank=rank, **names) if _are_set(env, rank, *markers) else None  # type: ignore[arg-type]

    return detector


_PLAIN = {
    "horovod": _plain(
        "horovod",
        world_size="HOROVOD_SIZE",
        local_rank="HOROVOD_LOCAL_RANK",
        local_world_size="HOROVOD_LOCAL_SIZE",
        worker_index="HOROVOD_CROSS_RANK",
        num_workers="HOROVOD_CROSS_SIZE",
    ),
    # OMPI_COMM_WORLD_NODE_RANK is *not* the node: it is the rank on the node, over all jobs.
    # https://docs.open-mpi.org/en/main/tuning-apps/environment-var.html
    "openmpi": _plain(
        "openmpi",
        world_size="OMPI_COMM_WORLD_SIZE",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_world_size="OMPI_COMM_WORLD_LOCAL_SIZE",
        job_id="PMIX_NAMESPACE",
    ),
    "mvapich": _plain(
        "mvapich",
        world_size="MV2_COMM_WORLD_SIZE",
        local_rank="MV2_COMM_WORLD_LOCAL_RANK",
        local_world_size="MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    # IBM's jsrun, under LSF.
    "jsm": _plain(
        "jsm",
        world_size="JSM_NAMESPACE_SIZE",
        local_rank="JSM_NAMESPACE_LOCAL_RANK",
        job_id="LSB_JOBID",
    ),
    # MPICH and Intel MPI (hydra). PMI_RANK alone may be Slurm's.
    "mpich": _plain(
        "mpich",
        "MPI_LOCALRANKID",
        world_size="PMI_SIZE",
        local_rank="MPI_LOCALRANKID",
        local_world_size="MPI_LOCALNRANKS",
    ),
}
# By the launcher's name, the innermost first: the variables of an outer launcher describe the agent, not this process.
# Launchers that set the rank of a process come before those that set only the node's. If both are set, the order among
# `_PLAIN` decides: Horovod may run on top of an MPI.
DETECTORS: dict[str, Detector] = {
    "ray": _ray_train,
    "torchelastic": _torchelastic,
    "env": _rank_variables,
    **_PLAIN,
    "slurm": _slurm,
    "lightning": _lightning,
    "process_group": detect_process_group,
    "jax": _jax,
    "lepton": _lepton,
    "kubeflow": _kubeflow,
    "konduktor": _konduktor,
    "skypilot": _skypilot,
    "env_rank": _rank_alone,
}


def _from_env(
    env: Env,
    launcher: str,
    *,
    rank: str,
    world_size: str,
    local_rank: str = "",
    local_world_size: str = "",
    worker_index: str = "",
    num_workers: str = "",
    restart_count: tuple[str, ...] = (),
    job_id: str = "",
    local_rank_value: int | None = None,
    local_world_size_value: int | None = None,
    worker_index_value: int | None = None,
) -> DistributedInfo:
    """Read the named variables. A `_value` argument replaces a variable that does not have the plain number."""
    names = {
        "rank": rank,
        "world_size": world_size,
        "local_rank": local_rank,
        "local_world_size": local_world_size,
        "worker_index": worker_index,
        "num_workers": num_workers,
    }
    computed = {
        "local_rank": local_rank_value,
        "local_world_size": local_world_size_value,
        "worker_index": worker_index_value,
    }
    values = {field: _computed_or_read(env, name, computed.get(field)) for field, name in names.items()}
    _fill_in_a_single_worker(values)
    for required in ("rank", "world_size"):
        if values[required] is None:
            raise TopologyError(f"{names[required]} is not set, though the other variables of {launcher} are")
    check_orders(values, names)
    numbers: dict[str, Any] = values
    return DistributedInfo(
        **numbers,
        restart_count=sum(_integer(env, name) or 0 for name in restart_count),
        launcher=launcher,
        job_id=env.get(job_id) or None,
    )


def _computed_or_read(env: Env, name: str, computed: int | None) -> int | None:
    return computed if computed is not None else _integer(env, name)


def _fill_in_a_single_worker(values: dict[str, int | None]) -> None:
    """Make this worker the only one if all processes are on it."""
    if values["local_world_size"] is None or values["local_world_size"] != values["world_size"]:
        return
    if values["worker_index"] is None:
        values["worker_index"] = 0
    if values["num_workers"] is None:
        values["num_workers"] = 1


def _integer(env: Env, name: str) -> int | None:
    text = env.get(name)
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise TopologyError(f"{name}={text!r} is not a whole number") from None


def _are_set(env: Env, *names: str) -> bool:
    """Return whether all are set. They are read in their order, which the doctor shows."""
    return all(name in env for name in names)


def _first(env: Env, *names: str) -> str:
    """Return the first of `names` that is set, or `names[0]` if none is."""
    return next((name for name in names if name in env), names[0])

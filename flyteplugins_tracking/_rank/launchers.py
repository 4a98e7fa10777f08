"""The launchers that are known: a table with one entry each, the innermost first.

All fields of a rank come from one launcher. Bad values of a launcher are an error, never rank 0: this module exists to
prevent the bug that every process is rank 0.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from flyteplugins_tracking._rank.info import DistributedInfo, check_orders
from flyteplugins_tracking._util import proc
from flyteplugins_tracking._util.modules import initialised_distributed, loaded
from flyteplugins_tracking._util.proc import Env
from flyteplugins_tracking._util.record import Record, replace
from flyteplugins_tracking.errors import TopologyError

if TYPE_CHECKING:
    Names = str | tuple[str, ...]


# The fields of an entry that are numbers of a `DistributedInfo`.
_FIELDS = ("rank", "world_size", "local_rank", "local_world_size", "worker_index", "num_workers")


class Launcher(Record):
    """A launcher and its variables. A field with several names is read from the first of them that is set.

    Attributes:
        name: Its name, in `DistributedInfo.launcher`.
        markers: The variables that are all set if, and only if, it has started the process. By default the
            rank's, or none if it has a function.
        rank: The variable of the rank. Its ranks and the processes below them have it; the launcher itself has not.
        world_size: The variable of the world size.
        local_rank: The variable of the local rank; "" for none, as below.
        local_world_size: The variable of the local world size.
        worker_index: The variable of the worker's index.
        num_workers: The variable of the number of workers.
        restart_count: The variables of restart counts, which are added.
        job_id: The variable of the job's name.
        function: For a launcher whose place is not in such variables. It is called if the markers are set, and returns
            None if the launcher has not started this process.
        is_of_node: Whether its variables describe a pod or a machine, and not a process: they never make a rank of a
            pool's worker.
        has_one_process_per_job: Whether the ranks on a node have one ancestor for each job, as one mpirun. A daemon of
            Slurm may start the ranks of several jobs.
    """

    name: str
    markers: tuple[str, ...] = ()
    rank: str = "RANK"
    world_size: Names = "WORLD_SIZE"
    local_rank: Names = ""
    local_world_size: Names = ""
    worker_index: Names = ""
    num_workers: Names = ""
    restart_count: tuple[str, ...] = ()
    job_id: str = ""
    function: Callable[[Launcher, Env], DistributedInfo | None] | None = None
    is_of_node: bool = False
    has_one_process_per_job: bool = False

    @property
    def variables(self) -> set[str]:
        """The variables that tell the place of a process."""
        fields = [getattr(self, field) for field in (*_FIELDS, "restart_count")] + [self.markers]
        return {name for names in fields for name in ((names,) if isinstance(names, str) else names)} - {""}

    def detect(self, env: Env) -> DistributedInfo | None:
        """Return this process's place according to `env`; None if this launcher has not started it.

        Raises:
            TopologyError: The values are malformed or contradict each other.
        """
        if not _are_set(env, *(self.markers or (() if self.function else (self.rank,)))):
            return None
        return self.read(env) if self.function is None else self.function(self, env)

    def read(self, env: Env, *, names: Mapping[str, Names] = {}, **computed: int | None) -> DistributedInfo:
        """Return the place that the variables tell.

        Args:
            env: The environment variables.
            names: Variables that replace the entry's, by field.
            **computed: Values that replace a variable which does not have the plain number, by field.
        """
        variables = {field: _first(env, names.get(field, getattr(self, field))) for field in _FIELDS}
        values: dict[str, Any] = {
            field: _integer(env, name) if computed.get(field) is None else computed[field]
            for field, name in variables.items()
        }
        if values["num_workers"] == 1 and values["local_world_size"] is None:
            values["local_world_size"] = values["world_size"]
        if values["local_world_size"] is not None and values["local_world_size"] == values["world_size"]:
            # All processes are on this worker.
            values["worker_index"] = values["worker_index"] or 0
            values["num_workers"] = 1 if values["num_workers"] is None else values["num_workers"]
        for required in ("rank", "world_size"):
            if values[required] is None:
                raise TopologyError(f"{variables[required]} is not set, though the other variables of {self.name} are")
        check_orders(values, variables)
        return DistributedInfo(
            **values,
            restart_count=sum(_integer(env, name) or 0 for name in self.restart_count),
            launcher=self.name,
            job_id=env.get(self.job_id) or None,
        )


def _ray_train(_: Launcher, __: Env) -> DistributedInfo | None:
    if "ray" not in sys.modules:
        return None
    from flyteplugins_tracking._rank import engines

    return engines.ray_world()


def _torchelastic(launcher: Launcher, env: Env) -> DistributedInfo:
    """On the first node the local rank is the rank, but under `--virtual-local-rank`: there it is 0 in each process."""
    info = launcher.read(env)
    if _integer(env, "GROUP_RANK") == 0 and info.local_rank not in (None, info.rank):
        raise TopologyError(
            f"LOCAL_RANK={info.local_rank} contradicts RANK={info.rank} and GROUP_RANK=0: start torchrun without "
            "--virtual-local-rank, or set the place of each process with override_distributed_info()."
        )
    return info


def _rank_variables(launcher: Launcher, env: Env) -> DistributedInfo:
    """Prefer a process group of the same size to the variables.

    On a CPU, `Accelerator()` sets RANK=0 in each process that `debug_launcher` has started, which
    ACCELERATE_DEBUG_RDV_FILE tells. A group of one process does not know better: some programs make one on each rank.
    """
    info, group = launcher.read(env), detect_process_group()
    if group is None or group.world_size != info.world_size:
        return info
    if "ACCELERATE_DEBUG_RDV_FILE" in env:
        return group
    # The launcher stays the same on all ranks: it is a part of the run's id.
    return info if group.rank == info.rank else replace(group, launcher=launcher.name)


def _slurm(launcher: Launcher, env: Env) -> DistributedInfo | None:
    if _integer(env, "SLURM_STEP_NUM_TASKS") == 1:
        return None
    tasks, ranks_here = _slurm_tasks_on_this_node(env), env.get("SLURM_GTIDS")
    if tasks is not None and ranks_here is not None and len(ranks_here.split(",")) != tasks:
        return None  # an sbatch shell that a task submitted: it inherits the step, but its SLURM_GTIDS is shorter
    return launcher.read(env, local_world_size=tasks)


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


def _lightning(launcher: Launcher, env: Env) -> DistributedInfo | None:
    """On the first node the local rank is the rank.

    On other nodes the rank depends on the number of processes per node, which no variable has.
    """
    if "RANK" in env:
        return None
    node_variable = _first(env, launcher.worker_index)
    if (_integer(env, node_variable) or 0) > 0:
        raise TopologyError(
            f"{node_variable}={env[node_variable]} and LOCAL_RANK={env['LOCAL_RANK']} without RANK: which rank this is "
            "cannot be known on any but the first node. Start with torchrun, or set RANK in each process."
        )
    return launcher.read(env, names={"rank": "LOCAL_RANK"}, worker_index=0)


def detect_process_group(*_: object) -> DistributedInfo | None:
    """Return this process's place in a process group that the user's code initialised; None without one."""
    dist = initialised_distributed()
    return dist and DistributedInfo(dist.get_rank(), dist.get_world_size(), launcher="process_group")


def _jax(_: Launcher, __: Env) -> DistributedInfo | None:
    if "jax" not in sys.modules:
        return None
    from flyteplugins_tracking._rank import engines

    return engines.jax_world()


def _kubeflow(launcher: Launcher, env: Env) -> DistributedInfo | None:
    """RANK is the pod: it is the process's rank only if one process runs in each pod, without torchrun.

    https://www.alibabacloud.com/help/en/pai/general-environment-variables
    """
    if _are_set(env, "RANK", "WORLD_SIZE"):
        rank, world_size = "RANK", "WORLD_SIZE"
    elif _are_set(env, "PET_NODE_RANK", "PET_NNODES"):
        rank, world_size = "PET_NODE_RANK", "PET_NNODES"
    else:
        return None
    processes = _first(env, ("PET_NPROC_PER_NODE", "NPROC_PER_NODE"))
    if not any(name in env for name in (processes, *_POD_VARIABLES)):
        return None
    if processes == "NPROC_PER_NODE" and _integer(env, world_size) == 1:
        return None
    if env.get(processes, "1") != "1":
        raise _is_a_node(env, rank, processes)
    nodes = env.get("PET_NNODES")
    if nodes is not None and ":" not in nodes and _integer(env, "PET_NNODES") != _integer(env, world_size):
        raise TopologyError(
            f"{world_size}={env[world_size]} and PET_NNODES={nodes} contradict each other for one process per node"
        )
    names = {"rank": rank, "world_size": world_size, "num_workers": world_size}
    return launcher.read(env, names=names, local_rank=0, local_world_size=1)


# One of them is set in a pod. Elsewhere RANK and WORLD_SIZE alone are not a node's.
_POD_VARIABLES = ("PET_NNODES", "PET_NODE_RANK", "AIHC_JOB_NAME", "DLC_JOB_ID", "KUBERNETES_SERVICE_HOST")


def _is_a_node(env: Env, rank: str, processes: str) -> TopologyError:
    return TopologyError(
        f"{rank}={env.get(rank)} is a node, not a process: {processes}={env[processes]} and no LOCAL_RANK. "
        "Call the decorated function in the workers: "
        "torchrun --nnodes=... --node-rank=... --nproc-per-node=... --master-addr=... train.py"
    )


def _one_process_per_node(gpus_per_node: str) -> Callable[[Launcher, Env], DistributedInfo | None]:
    """Return the function of a launcher that starts one process on each node."""

    def detect(launcher: Launcher, env: Env) -> DistributedInfo | None:
        node, nodes = (_first(env, names) for names in (launcher.worker_index, launcher.world_size))
        if _integer(env, nodes) in (None, 1):
            return None
        if (_integer(env, gpus_per_node) or 0) > 1:
            raise _is_a_node(env, node, gpus_per_node)
        names = {"rank": node, "num_workers": nodes}
        return launcher.read(env, names=names, local_rank=0, local_world_size=1)

    return detect


# The first that has started the process counts: the variables of an outer launcher describe the agent of an inner one.
# So an inner launcher comes before an outer one in which it may run, and one that sets the rank of each process before
# one that sets only the node's.
_TABLE = (
    # Inside whatever has started Ray.
    Launcher("ray", function=_ray_train),
    # torchrun, torch.distributed.launch, Elastic of Flyte 1 and 2. Flyte 2 Clustered sets NODE_RANK only; elsewhere a
    # NODE_RANK beside GROUP_RANK comes from an outer launcher.
    # https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
    Launcher(
        "torchelastic",
        markers=("TORCHELASTIC_RUN_ID",),
        local_rank="LOCAL_RANK",
        local_world_size="LOCAL_WORLD_SIZE",
        worker_index=("GROUP_RANK", "NODE_RANK"),
        num_workers="GROUP_WORLD_SIZE",
        restart_count=("TORCHELASTIC_RESTART_COUNT", "JOBSET_RESTART_ATTEMPT", "SLURM_RESTART_COUNT"),
        job_id="TORCHELASTIC_RUN_ID",
        function=_torchelastic,
    ),
    # Ray Train, Accelerate, Composer, DeepSpeed and hand-written launchers, also inside an MPI or Slurm.
    Launcher(
        "env",
        markers=("RANK", "WORLD_SIZE", "LOCAL_RANK"),
        local_rank="LOCAL_RANK",
        local_world_size=("LOCAL_WORLD_SIZE", "LOCAL_SIZE"),
        worker_index=("GROUP_RANK", "NODE_RANK", "CROSS_RANK"),
        num_workers=("GROUP_WORLD_SIZE", "CROSS_SIZE"),
        function=_rank_variables,
    ),
    # It may run on top of an MPI.
    Launcher(
        "horovod",
        rank="HOROVOD_RANK",
        world_size="HOROVOD_SIZE",
        local_rank="HOROVOD_LOCAL_RANK",
        local_world_size="HOROVOD_LOCAL_SIZE",
        worker_index="HOROVOD_CROSS_RANK",
        num_workers="HOROVOD_CROSS_SIZE",
        has_one_process_per_job=True,
    ),
    # The MPIs, which may run inside Slurm. OMPI_COMM_WORLD_NODE_RANK is *not* the node: it is the rank on the node,
    # over all jobs. https://docs.open-mpi.org/en/main/tuning-apps/environment-var.html
    Launcher(
        "openmpi",
        rank="OMPI_COMM_WORLD_RANK",
        world_size="OMPI_COMM_WORLD_SIZE",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_world_size="OMPI_COMM_WORLD_LOCAL_SIZE",
        job_id="PMIX_NAMESPACE",
        has_one_process_per_job=True,
    ),
    # MPICH and Intel MPI (hydra). PMI_RANK alone may be Slurm's.
    Launcher(
        "mpich",
        markers=("PMI_RANK", "MPI_LOCALRANKID"),
        rank="PMI_RANK",
        world_size="PMI_SIZE",
        local_rank="MPI_LOCALRANKID",
        local_world_size="MPI_LOCALNRANKS",
        has_one_process_per_job=True,
    ),
    # A process of an srun step. An sbatch shell has SLURM_PROCID too, but no step: it is one process.
    # https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES
    Launcher(
        "slurm",
        markers=("SLURM_STEP_ID",),
        rank="SLURM_PROCID",
        world_size="SLURM_STEP_NUM_TASKS",
        local_rank="SLURM_LOCALID",
        local_world_size="SLURM_STEP_TASKS_PER_NODE",
        worker_index="SLURM_NODEID",
        num_workers="SLURM_STEP_NUM_NODES",
        restart_count=("SLURM_RESTART_COUNT",),
        job_id="SLURM_JOB_ID",
        function=_slurm,
    ),
    # A task of `flux run`, also in a batch job.
    # https://flux-framework.readthedocs.io/projects/flux-core/en/latest/man7/flux-environment.html
    Launcher(
        "flux",
        rank="FLUX_TASK_RANK",
        world_size="FLUX_JOB_SIZE",
        local_rank="FLUX_TASK_LOCAL_ID",
        num_workers="FLUX_JOB_NNODES",
        job_id="FLUX_JOB_ID",
    ),
    # A child of Lightning's own launcher has no RANK.
    Launcher(
        "lightning",
        markers=("LOCAL_RANK", "WORLD_SIZE"),
        local_rank="LOCAL_RANK",
        worker_index=("NODE_RANK", "GROUP_RANK"),
        function=_lightning,
    ),
    # mpiexec of HPE's PALS, in a job of PBS. Flux may run inside it. https://docs.alcf.anl.gov/polaris/running-jobs/
    Launcher(
        "pals",
        markers=("PBS_JOBID", "PMI_RANK", "PMI_LOCAL_RANK"),
        rank="PMI_RANK",
        world_size="PMI_SIZE",
        local_rank="PMI_LOCAL_RANK",
        local_world_size="PMI_LOCAL_SIZE",
    ),
    # These two are in no variable, so that the launchers of processes come first.
    Launcher("process_group", function=detect_process_group),
    Launcher("jax", function=_jax),
    # From here on the rank is the node's, if each node has one process.
    # A pod of PyTorchJob, Kubeflow's Trainer v2, PAI-DLC or AIHC.
    Launcher("kubeflow", worker_index=("PET_NODE_RANK", "RANK"), function=_kubeflow, is_of_node=True),
    # A konduktor pod, where RANK is the node, and WORLD_SIZE is not set.
    Launcher(
        "konduktor",
        markers=("KONDUKTOR_JOB_NAME",),
        world_size="NUM_NODES",
        worker_index=("SKYPILOT_NODE_RANK", "RANK"),
        restart_count=("RESTART_ATTEMPT",),
        job_id="KONDUKTOR_JOB_NAME",
        function=_one_process_per_node("NUM_GPUS_PER_NODE"),
        is_of_node=True,
    ),
    # konduktor's pods have its variable of the node too.
    # https://docs.skypilot.co/en/latest/running-jobs/environment-variables.html
    Launcher(
        "skypilot",
        markers=("SKYPILOT_NODE_RANK",),
        world_size="SKYPILOT_NUM_NODES",
        worker_index="SKYPILOT_NODE_RANK",
        restart_count=("RESTART_ATTEMPT",),
        job_id="SKYPILOT_TASK_ID",
        function=_one_process_per_node("SKYPILOT_NUM_GPUS_PER_NODE"),
        is_of_node=True,
    ),
    # A script's own RANK and WORLD_SIZE, in no pod. They may be left in a pool's worker from a group that has ended.
    Launcher("env_rank", markers=("RANK", "WORLD_SIZE"), is_of_node=True),
)
LAUNCHERS: dict[str, Launcher] = {launcher.name: launcher for launcher in _TABLE}


def rank_variable(launcher: str) -> str:
    """Return the variable that a launcher sets for its ranks, and does not have itself."""
    return LAUNCHERS[launcher].rank if launcher in LAUNCHERS else "RANK"


def refuse_ranks_that_disagree(info: DistributedInfo, env: Env) -> None:
    """Refuse a RANK that differs from mpirun's or srun's, for instance RANK=0 exported once for all processes."""
    for launcher in LAUNCHERS.values():
        other = None
        with suppress(TopologyError):
            other = None if launcher.rank == "RANK" else launcher.detect(env)
        if other is not None and other.world_size == info.world_size > 1 and other.rank != info.rank:
            raise TopologyError(
                f"RANK={info.rank} and WORLD_SIZE={info.world_size} contradict {other.launcher}, for which this is "
                f"rank {other.rank} of {other.world_size}: set RANK in each process, or unset it."
            )


def refuse_left_over(info: DistributedInfo, env: Env) -> None:
    """Refuse the variables that a long-lived worker has from an earlier training: they were set in it for a group.

    torch keeps how its last group was made.
    """
    group, at_start = detect_process_group(), proc.variables_at_start(os.getpid())
    had_group = getattr(loaded("torch.distributed.distributed_c10d"), "_default_pg_init_method", None) is not None
    has_group = group is not None and (group.rank, group.world_size) == (info.rank, info.world_size)
    if had_group and not has_group and info.world_size > 1 and at_start and at_start.get("RANK") != env["RANK"]:
        raise TopologyError(
            f"RANK={info.rank} and WORLD_SIZE={info.world_size} were set in this process for a process group that is "
            "destroyed: they may be left from an earlier training. Unset them, or use override_distributed_info()."
        )


def refuse_leftovers(env: Env) -> None:
    """Refuse the variables of an incomplete launcher: no process becomes rank 0 by default."""
    if "RANK" in env and "WORLD_SIZE" not in env and env.get("NUM_NODES") != "1":
        raise TopologyError(
            f"RANK={env['RANK']} is set and WORLD_SIZE is not: is it a process or a node? Start the job with torchrun, "
            "set WORLD_SIZE and LOCAL_RANK too, or unset RANK."
        )
    if "," in env.get("SM_HOSTS", ""):  # a list in JSON
        raise TopologyError(
            f"SM_CURRENT_HOST={env.get('SM_CURRENT_HOST')} of SM_HOSTS={env['SM_HOSTS']} is a host, not a process: "
            "start torchrun on each host, or set the place of each process with override_distributed_info()."
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


# Slurm sets it too, for an MPI that a task may use.
_NO_RANKS = {"PMI_RANK"}


def ranks_of_unknown(env: Env) -> str:
    """Return the variables that look like a rank of a launcher that is not in the table; empty if there are none."""
    for rank in sorted(name for name in env if name.endswith("_RANK")):
        size = f"{rank.removesuffix('_RANK')}_SIZE"
        if rank not in _NO_RANKS and env[rank].isdecimal() and env.get(size, "").isdecimal() and int(env[size]) > 1:
            return f"{rank}={env[rank]} and {size}={env[size]}"
    return ""


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


def _first(env: Env, names: Names) -> str:
    """Return the first of `names` that is set; the first of all if none is."""
    if isinstance(names, str):
        return names
    return next((name for name in names if name in env), names[0])

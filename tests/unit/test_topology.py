"""The topology that each launcher's variables describe, and variables that contradict each other."""

from __future__ import annotations

import sys
import types

import pytest

from flyteplugins_tracking import (
    DistributedInfo,
    TopologyError,
    get_distributed_info,
    override_distributed_info,
    plan,
)
from flyteplugins_tracking._rank.launchers import LAUNCHERS
from flyteplugins_tracking._rank.topology import detect
from flyteplugins_tracking._util import proc

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "job",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
}
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "9",
    "SLURM_STEP_NUM_TASKS": "11",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),3",
    "SLURM_RESTART_COUNT": "1",
}
FLUX = {
    "FLUX_TASK_RANK": "3",
    "FLUX_JOB_SIZE": "4",
    "FLUX_TASK_LOCAL_ID": "1",
    "FLUX_JOB_NNODES": "2",
    "FLUX_JOB_ID": "f5A",
}
SAGEMAKER = {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2", "TRAINING_JOB_NAME": "job-1"}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "PMIX_NAMESPACE": "ns",
}
PALS = {"PBS_JOBID": "7.s", "PMI_RANK": "3", "PMI_SIZE": "4", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2"}
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
PAI_DLC = {"RANK": "1", "WORLD_SIZE": "2", "NPROC_PER_NODE": "8", "MASTER_ADDR": "x", "MASTER_PORT": "23456"}


def without(env: dict[str, str], *names: str, **changed: str) -> dict[str, str]:
    return {name: value for name, value in {**env, **changed}.items() if name not in names}


RANKS = {
    "torchrun": (TORCHRUN, DistributedInfo(5, 8, 1, 4, 1, 2, 2, "torchelastic", "job")),
    "torchrun with leftovers from outside": (
        {**TORCHRUN, "NODE_RANK": "7", "SLURM_PROCID": "3", "OMPI_COMM_WORLD_RANK": "1"},
        DistributedInfo(5, 8, 1, 4, 1, 2, 2, "torchelastic", "job"),
    ),
    "Flyte 2 Clustered": (
        {**without(TORCHRUN, "GROUP_RANK", "GROUP_WORLD_SIZE"), "NODE_RANK": "1", "JOBSET_RESTART_ATTEMPT": "1"},
        DistributedInfo(5, 8, 1, 4, 1, None, 3, "torchelastic", "job"),
    ),
    "Ray Train, Composer": (
        {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "1"},
        DistributedInfo(3, 4, 1, 2, 1, None, launcher="env"),
    ),
    "DeepSpeed": (
        {
            "RANK": "3",
            "WORLD_SIZE": "4",
            "LOCAL_RANK": "1",
            "LOCAL_SIZE": "2",
            "CROSS_RANK": "1",
            "CROSS_SIZE": "2",
        },
        DistributedInfo(3, 4, 1, 2, 1, 2, launcher="env"),
    ),
    "a launcher inside mpirun": (
        {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", **OPENMPI},
        DistributedInfo(1, 2, 1, 2, 0, 1, launcher="env"),
    ),
    "Horovod over MPI": (
        {
            "HOROVOD_RANK": "3",
            "HOROVOD_SIZE": "4",
            "HOROVOD_LOCAL_RANK": "1",
            "HOROVOD_LOCAL_SIZE": "2",
            "HOROVOD_CROSS_RANK": "1",
            "HOROVOD_CROSS_SIZE": "2",
            **OPENMPI,
        },
        DistributedInfo(3, 4, 1, 2, 1, 2, launcher="horovod"),
    ),
    "Open MPI": (OPENMPI, DistributedInfo(3, 4, 1, 2, None, None, 0, "openmpi", "ns")),
    "Open MPI on one node": (
        {**OPENMPI, "OMPI_COMM_WORLD_LOCAL_RANK": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"},
        DistributedInfo(3, 4, 3, 4, 0, 1, 0, "openmpi", "ns"),
    ),
    "mpiexec of PALS": (PALS, DistributedInfo(3, 4, 1, 2, launcher="pals")),
    "a task of Flux inside PALS": (
        {**PALS, **FLUX, "FLUX_TASK_RANK": "2"},
        DistributedInfo(2, 4, 1, None, None, 2, launcher="flux", job_id="f5A"),
    ),
    "AzureML's PyTorch": (
        {"AZUREML_RUN_ID": "r", "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "NODE_RANK": "1"},
        DistributedInfo(3, 4, 1, None, 1, None, launcher="env"),
    ),
    "MPICH": (
        {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
        DistributedInfo(3, 4, 1, 2, launcher="mpich"),
    ),
    "a Slurm step with its ranks here": (
        {**SLURM, "SLURM_GTIDS": "8,9,10"},
        DistributedInfo(9, 11, 1, 3, 2, 3, 1, "slurm", "77"),
    ),
    "a Slurm step": (SLURM, DistributedInfo(9, 11, 1, 3, 2, 3, 1, "slurm", "77")),
    "a Slurm step with variables of its script": (
        {**SLURM, "PMI_RANK": "9", "WORLD_SIZE": "11", "MASTER_ADDR": "x"},
        DistributedInfo(9, 11, 1, 3, 2, 3, 1, "slurm", "77"),
    ),
    "a child of Lightning in an interactive step": (
        {"LOCAL_RANK": "1", "WORLD_SIZE": "2", "NODE_RANK": "0", **SLURM, "SLURM_STEP_NUM_TASKS": "1"},
        DistributedInfo(1, 2, 1, None, 0, None, launcher="lightning"),
    ),
    "a PyTorchJob pod": (
        {"RANK": "1", "WORLD_SIZE": "2", **POD},
        DistributedInfo(1, 2, 0, 1, 1, 2, launcher="kubeflow"),
    ),
    "a pod of AIHC with one process": (
        {"RANK": "1", "WORLD_SIZE": "2", "PET_NNODES": "2", "AIHC_JOB_NAME": "j"},
        DistributedInfo(1, 2, 0, 1, 1, 2, launcher="kubeflow"),
    ),
    "a pod of PAI-DLC with one process": (
        {"RANK": "1", "WORLD_SIZE": "2", "NPROC_PER_NODE": "1"},
        DistributedInfo(1, 2, 0, 1, 1, 2, launcher="kubeflow"),
    ),
    "a script's RANK and WORLD_SIZE, in no pod": (
        {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "x"},
        DistributedInfo(1, 2, launcher="env_rank"),
    ),
    "a pod of an elastic PyTorchJob": (
        {"RANK": "1", "WORLD_SIZE": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": "1", "PET_NNODES": "1:2"},
        DistributedInfo(1, 2, 0, 1, 1, 2, launcher="kubeflow"),
    ),
    "a pod of Kubeflow Trainer": (
        {"PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": "1", "PET_NNODES": "2"},
        DistributedInfo(1, 2, 0, 1, 1, 2, launcher="kubeflow"),
    ),
    "a konduktor pod": (
        {"KONDUKTOR_JOB_NAME": "j", "RANK": "1", "NUM_NODES": "2", "RESTART_ATTEMPT": "3"},
        DistributedInfo(1, 2, 0, 1, 1, 2, 3, "konduktor", "j"),
    ),
    "a SkyPilot task": (
        {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_TASK_ID": "t"},
        DistributedInfo(1, 2, 0, 1, 1, 2, 0, "skypilot", "t"),
    ),
    "a task of Flux": (FLUX, DistributedInfo(3, 4, 1, None, None, 2, launcher="flux", job_id="f5A")),
    "tasks of Flux on one node": (
        {**FLUX, "FLUX_JOB_NNODES": "1"},
        DistributedInfo(3, 4, 1, 4, 0, 1, 0, "flux", "f5A"),
    ),
}


def test_each_launcher_is_understood(subtests):
    for case, (env, expected) in RANKS.items():
        with subtests.test(case):
            assert detect(env) == expected


ALONE = {
    "nothing": {},
    "the only task of a Flux job": {**FLUX, "FLUX_JOB_SIZE": "1", "FLUX_TASK_RANK": "0", "FLUX_TASK_LOCAL_ID": "0"},
    "the only host of SageMaker": {**SAGEMAKER, "SM_HOSTS": '["algo-2"]'},
    "a script's WORLD_SIZE alone": {"WORLD_SIZE": "8", "MASTER_ADDR": "x"},
    "a world of one": {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"},
    "an sbatch shell": without(SLURM, "SLURM_STEP_ID"),
    "an interactive step": {**SLURM, "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
    "an sbatch shell that a step submitted": {**SLURM, "SLURM_PROCID": "0", "SLURM_GTIDS": "0"},
    "PMI_RANK handed on to an sbatch shell": {"PMI_RANK": "1", "PMI_SIZE": "2", "SLURM_JOB_ID": "7"},
    "the only process of PALS": {
        **PALS,
        "PMI_RANK": "0",
        "PMI_SIZE": "1",
        "PMI_LOCAL_RANK": "0",
        "PMI_LOCAL_SIZE": "1",
    },
    "a job of one process inside mpirun": {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", **OPENMPI},
    "a konduktor pod alone": {"KONDUKTOR_JOB_NAME": "j", "RANK": "0", "NUM_NODES": "1"},
    "Lightning's parent on the first node": {"NODE_RANK": "0", "MASTER_ADDR": "x"},
    "a Trainer pod alone": {"PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": "0", "PET_NNODES": "1"},
    "a pod of PAI-DLC alone": {**PAI_DLC, "RANK": "0", "WORLD_SIZE": "1"},
    "RANK and WORLD_SIZE of a world of one": {"RANK": "0", "WORLD_SIZE": "1"},
}


def test_one_process_is_not_a_distributed_job(subtests):
    for case, env in ALONE.items():
        with subtests.test(case):
            assert detect(env) is None


BAD: list[tuple[dict[str, str], str]] = [
    ({"RANK": "abc", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "RANK='abc' is not a whole number"),
    ({"RANK": "5", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "RANK=5 and WORLD_SIZE=2 contradict"),
    ({"RANK": "-1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "RANK=-1 is below 0"),
    ({"RANK": "0", "WORLD_SIZE": "0", "LOCAL_RANK": "0"}, "WORLD_SIZE=0 is below 1"),
    ({**TORCHRUN, "LOCAL_RANK": "4"}, "LOCAL_RANK=4 and LOCAL_WORLD_SIZE=4 contradict"),
    ({**TORCHRUN, "GROUP_RANK": "2"}, "GROUP_RANK=2 and GROUP_WORLD_SIZE=2 contradict"),
    (without(TORCHRUN, "RANK"), "RANK is not set, though the other variables of torchelastic are"),
    ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "NODE_RANK": "7"}, "NODE_RANK=7 and WORLD_SIZE=2"),
    ({"RANK": "5"}, "RANK=5 is set and WORLD_SIZE is not"),
    ({"LOCAL_RANK": "1"}, "LOCAL_RANK=1 is set and RANK is not"),
    ({"NODE_RANK": "1", "MASTER_ADDR": "x"}, "NODE_RANK=1 is set and RANK is not"),
    ({"LOCAL_RANK": "0", "WORLD_SIZE": "4", "NODE_RANK": "1"}, "NODE_RANK=1 and LOCAL_RANK=0 without RANK"),
    ({"RANK": "1", "WORLD_SIZE": "16", "PET_NPROC_PER_NODE": "8"}, "RANK=1 is a node, not a process"),
    (
        PAI_DLC,
        "RANK=1 is a node, not a process: NPROC_PER_NODE=8 and no LOCAL_RANK. Call the decorated function in the "
        "workers: torchrun --nnodes=",
    ),
    ({"RANK": "1", "WORLD_SIZE": "16", "PET_NPROC_PER_NODE": "auto"}, "PET_NPROC_PER_NODE=auto"),
    ({"RANK": "1", "WORLD_SIZE": "16", "PET_NNODES": "2"}, "WORLD_SIZE=16 and PET_NNODES=2 contradict"),
    ({"PET_NODE_RANK": "1", "PET_NNODES": "1:4"}, "PET_NNODES='1:4' is not a whole number"),
    ({"PET_NODE_RANK": "0", "PET_NNODES": "2", "PET_NPROC_PER_NODE": "4"}, "PET_NODE_RANK=0 is a node"),
    (
        {"KONDUKTOR_JOB_NAME": "j", "RANK": "1", "NUM_NODES": "2", "NUM_GPUS_PER_NODE": "8"},
        "RANK=1 is a node, not a process: NUM_GPUS_PER_NODE=8",
    ),
    (
        {**OPENMPI, "RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0"},
        "RANK=0 and WORLD_SIZE=4 contradict openmpi, for which this is rank 3 of 4",
    ),
    ({**SLURM, "RANK": "0", "WORLD_SIZE": "11", "LOCAL_RANK": "0"}, "contradict slurm, for which this is rank 9"),
    (
        {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"},
        "contradict horovod, for which this is rank 1 of 2",
    ),
    ({**PALS, "RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}, "contradict pals, for which this is rank 3 of 4"),
    (
        SAGEMAKER,
        """SM_CURRENT_HOST=algo-2 of SM_HOSTS=["algo-1", "algo-2"] is a host, not a process: start torchrun""",
    ),
    (
        {**TORCHRUN, "RANK": "2", "LOCAL_RANK": "0", "GROUP_RANK": "0"},
        "LOCAL_RANK=0 contradicts RANK=2 and GROUP_RANK=0: start torchrun without --virtual-local-rank",
    ),
    ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "PMI_RANK=1 of PMI_SIZE=2 without MPI_LOCALRANKID"),
    (without(SLURM, "SLURM_PROCID"), "SLURM_PROCID is not set"),
    ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "4x"}, "SLURM_STEP_TASKS_PER_NODE='4x' is not of the form"),
    ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "4"}, "SLURM_NODEID=2 has no entry"),
    ({**OPENMPI, "OMPI_COMM_WORLD_RANK": "4"}, "OMPI_COMM_WORLD_RANK=4 and OMPI_COMM_WORLD_SIZE=4 contradict"),
]


def test_bad_values_are_reported_by_variable_and_value_and_no_process_becomes_rank_0(subtests):
    for env, message in BAD:
        with subtests.test(message):
            with pytest.raises(TopologyError) as caught:
                detect(env)
            assert message in str(caught.value)


def test_a_rank_of_an_unknown_launcher_is_told_once_and_what_is_none_of_several_is_not(caplog):
    for env in (
        {"ALPS_APP_RANK": "1", "ALPS_APP_SIZE": "4"},
        {"MV2_COMM_WORLD_RANK": "0", "MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_LOCAL_RANK": "0"},
        {"PMIX_RANK": "3", "PMIX_SIZE": "8"},
    ):
        caplog.clear()
        assert (detect(env), detect(env)) == (None, None)
        (message,) = caplog.messages
        (rank, _), (size, _) = sorted(env.items(), key=lambda one: "LOCAL" in one[0])[:2]
        assert message.startswith(f"{rank}={env[rank]} and {size}={env[size]} look like a rank of a launcher that is")
    caplog.clear()
    for env in (
        {"ALPS_APP_RANK": "0", "ALPS_APP_SIZE": "1"},
        {"A_RANK": "x", "A_SIZE": "2"},
        {"A_RANK": "1"},
    ):
        assert detect(env) is None
    assert not caplog.messages


def test_the_documented_launchers_are_those_that_are_detected():
    assert [name for name in LAUNCHERS if f'"{name}"' not in (DistributedInfo.__doc__ or "")] == []


def test_variables_are_read_at_the_call_and_a_world_of_one_is_no_distributed_job_even_under_torchrun(bare_environment):
    assert get_distributed_info() is None
    for name, value in TORCHRUN.items():
        bare_environment.setenv(name, value)
    info = get_distributed_info()
    assert info is not None
    assert (info.rank, info["rank"], dict(info)["worker_index"]) == (5, 5, 1)
    with pytest.raises(KeyError):
        info["ranks"]
    for name in TORCHRUN:
        if name.endswith(("RANK", "SIZE")):
            bare_environment.setenv(name, str(int(name.endswith("SIZE"))))
    assert get_distributed_info() is None


class Group(types.ModuleType):
    """Stands in for an initialised `torch.distributed`; the real one is in the torchrun tests."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__("torch.distributed")
        self.get_rank, self.get_world_size = (lambda: rank), (lambda: world_size)

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True


def test_an_initialised_process_group_has_the_rank_if_no_variable_has_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.distributed", Group(9, 16))
    assert detect({}) == DistributedInfo(9, 16, launcher="process_group")
    # mp.spawn in the pods of a PyTorchJob: RANK is the pod's.
    assert detect({"RANK": "1", "WORLD_SIZE": "2", **POD}) == DistributedInfo(9, 16, launcher="process_group")


def test_rank_and_world_size_that_a_destroyed_group_has_left_are_refused(monkeypatch):
    """In a worker that serves several trainings. Those that the process was started with are its launcher's."""
    dist = pytest.importorskip("torch", reason="torch is not installed").distributed
    left = {"RANK": "1", "WORLD_SIZE": "2"}
    assert detect(left) == DistributedInfo(1, 2, launcher="env_rank")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(dist.distributed_c10d, "_default_pg_init_method", "env://")
    dist.destroy_process_group()
    with pytest.raises(TopologyError, match="for a process group that is destroyed"):
        detect(left)
    monkeypatch.setattr(proc, "variables_at_start", lambda _: left)
    assert detect(left) == DistributedInfo(1, 2, launcher="env_rank")


def test_the_variables_take_precedence_over_a_process_group(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.distributed", Group(0, 1))
    assert detect(TORCHRUN) == DistributedInfo(5, 8, 1, 4, 1, 2, 2, "torchelastic", "job")


def test_an_override_takes_precedence():
    override = DistributedInfo(rank=1, world_size=3)
    with override_distributed_info(override):
        assert detect(TORCHRUN) == override
    assert detect({}) is None
    with pytest.raises(TopologyError, match="rank=3 and world_size=3"):
        DistributedInfo(rank=3, world_size=3)


@pytest.mark.parametrize("variable", ["GROUP_RANK", "NODE_RANK"])
def test_an_incomplete_launcher_does_not_make_two_nodes_one(variable):
    """The launcher sets no LOCAL_WORLD_SIZE, and may set NODE_RANK instead of GROUP_RANK."""
    infos = []
    for rank in range(4):
        node, local_rank = divmod(rank, 2)
        infos.append(detect({"RANK": f"{rank}", "WORLD_SIZE": "4", "LOCAL_RANK": f"{local_rank}", variable: f"{node}"}))
    assert [(info.worker_index, info.local_rank) for info in infos] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all(info.num_workers != 1 for info in infos)
    ids = {plan(info, "new", "worker", "base").run_id for info in infos}
    assert len(ids) == 4

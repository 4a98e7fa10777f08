"""Base ids that can be tested without a running launcher. The others are in the torchrun and Flyte tests."""

from __future__ import annotations

import secrets

import pytest

from flyteplugins_tracking import DistributedInfo, IdentityError
from flyteplugins_tracking._job import board
from flyteplugins_tracking._job.identity import Identity, from_launcher, readable
from flyteplugins_tracking._job.starts import _lasting
from flyteplugins_tracking._rank.topology import Detection
from flyteplugins_tracking._runs.context import Asked, ProcessContext, Task, World
from flyteplugins_tracking._runs.identity import identity_of
from flyteplugins_tracking._util.record import replace
from flyteplugins_tracking.trackers.config import TrackingConfig
from flyteplugins_tracking.trackers.registry import find_tracker

# Launchers that give a job no name of its own. The error for Lightning's own launcher is another.
NAMELESS = ("env", "mpich", "pals", "horovod", "kubeflow", "env_rank", "process_group", "jax")
TWO_NODES = DistributedInfo(rank=1, world_size=4, local_rank=1, local_world_size=2, launcher="env")


def slurm(job: str) -> DistributedInfo:
    return DistributedInfo(rank=0, world_size=2, launcher="slurm", job_id=job)


def test_a_slurm_step_is_named_by_cluster_job_step_and_program(monkeypatch):
    job = secrets.token_hex(4)  # starts are counted by job
    step = {"SLURM_JOB_ID": job, "SLURM_CLUSTER_NAME": "alpha"}
    for program, name in {"pre/train.py": "train", "evaluate": "evaluate"}.items():
        monkeypatch.setattr("sys.argv", [program, "--steps=3"])
        for number in "01":
            identity = from_launcher(slurm(job), {**step, "SLURM_STEP_ID": number}, agreement=True)
            assert identity == Identity(f"slurm-alpha-{job}-{number}-{name}")


@pytest.mark.parametrize(
    ("words", "lasting"),
    [
        (["--lr", "1", "--resume"], ["--lr", "1"]),
        (["--resume", "last.pt", "--lr", "1"], ["--lr", "1"]),
        (["--resume_from_checkpoint=last.pt", "--lr", "1"], ["--lr", "1"]),
        (["--resume", "--fp16", "data"], ["--fp16", "data"]),
        (["lr=1", "trainer.ckpt_path=last.pt", "+resume=true"], ["lr=1"]),
        (["checkpoints/a.pt"], ["checkpoints/a.pt"]),
    ],
)
def test_options_that_a_restart_adds_do_not_name_a_program(words, lasting):
    assert _lasting(words) == lasting


def test_konduktor_gives_its_job_name_to_each_program(monkeypatch):
    monkeypatch.setattr("sys.argv", ["pre/train.py"])
    info = DistributedInfo(rank=0, world_size=2, launcher="konduktor", job_id="my-job")
    job = f"job-{secrets.token_hex(4)}"
    env = {"KONDUKTOR_JOB_NAME": job, "NUM_NODES": "2", "RANK": "0"}
    assert from_launcher(info, env, agreement=True) == Identity(f"{job}-train")


@pytest.mark.parametrize("launcher", NAMELESS)
def test_several_nodes_that_share_nothing_cannot_agree(launcher):
    info = DistributedInfo(rank=1, world_size=4, num_workers=2, worker_index=1, launcher=launcher)
    with pytest.raises(IdentityError, match=f"no run id that all 2 nodes agree on: {launcher} offers none.*id="):
        from_launcher(info, {}, agreement=True)


def test_the_error_of_lightnings_own_launcher_says_what_to_start_with():
    """`id=` would not help: the first rank starts as a single process, whose run no other rank shares."""
    info = DistributedInfo(rank=1, world_size=2, local_rank=1, worker_index=0, launcher="lightning")
    with pytest.raises(IdentityError, match="For run_mode='new' or 'shared' start with torchrun"):
        from_launcher(info, {}, agreement=True)


def test_one_rank_alone_needs_no_agreement():
    assert from_launcher(TWO_NODES, {}, agreement=False) == Identity(None)


def test_a_primary_alone_does_not_wait_for_rank_0_which_has_no_run(monkeypatch):
    dist = pytest.importorskip("torch", reason="torch is not installed").distributed
    store = dist.HashStore()
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    info = DistributedInfo(rank=3, world_size=4, num_workers=2, launcher="env")
    first = from_launcher(info, {}, agreement=False)
    assert first.base_id.startswith("env-")
    assert from_launcher(info, {}, agreement=False) == first  # of the second call in this process


def test_a_store_that_does_not_answer_is_an_identity_error(monkeypatch):
    pytest.importorskip("torch", reason='torch is not installed: pip install "flyteplugins-tracking[torch]"')
    monkeypatch.setattr(board.agents_store, "__defaults__", (board.timedelta(milliseconds=100),))
    info = DistributedInfo(rank=0, world_size=2, num_workers=2, launcher="torchelastic", job_id="job")
    env = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    with pytest.raises(IdentityError, match=r"MASTER_ADDR=127.0.0.1 MASTER_PORT=9 does not answer.*Pass id="):
        from_launcher(info, env, agreement=True)
    with pytest.raises(IdentityError, match="MASTER_PORT=x"):
        from_launcher(info, {**env, "MASTER_PORT": "x"}, agreement=True)


@pytest.mark.parametrize(
    ("variables", "base_id"),
    [
        ({"MLOP_RUN_ID": "b"}, "b"),
        ({"MLOP_RUN_ID": "b", "PLUTO_RUN_ID": "a"}, "a"),
        ({"MLOP_RUN_ID": "b", "PLUTO_RUN_ID": " "}, "b"),
        ({"PLUTO_RUN_ID": ""}, None),  # the tracker makes one
    ],
)
def test_the_first_variable_of_the_tracker_that_is_set_gives_the_id(bare_environment, monkeypatch, variables, base_id):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    asked = Asked(TrackingConfig(tracker="pluto"), find_tracker("pluto"), ProcessContext(), Task(), World())
    assert identity_of(asked, Detection(), 1, None) == Identity(base_id)
    with_id = replace(asked, config=replace(asked.config, id="c"))
    assert identity_of(with_id, Detection(), 1, None) == Identity("c")


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (("job", "12ab"), "job-12ab"),
        (("a/b:c d", "12ab"), "a-b-c-d-12ab"),
        (("", None, "12ab"), "12ab"),
        (("--x--",), "x"),
    ],
)
def test_ids_are_valid_for_every_tracker(parts, expected):
    assert readable(*parts) == expected


def test_long_ids_are_cut_and_stay_different():
    first, second = readable("x" * 60, "a"), readable("x" * 60, "b")
    assert len(first) == len(second) == 39
    assert first != second

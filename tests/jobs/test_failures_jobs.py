"""Who failed first, in real jobs: on other nodes, without a store, with restarts, and under mpirun.

Faults on one node under torchrun are lines of the fault matrix.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from support import jobs

PROGRAM = jobs.PROGRAMS / "failing_ranks.py"
FAILURE = ("failure/rank", "failure/type")


def failing(how: dict[str, str], **settings: Any) -> list[str]:
    """The command's arguments."""
    return [str(PROGRAM), json.dumps({"how": how, **settings})]


def two_nodes(directory: Path, how: dict[str, str], **settings: Any) -> jobs.Done:
    """2 agents of 2 ranks, which are two nodes."""
    options = [
        "--nnodes=2",
        "--nproc-per-node=2",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{jobs.free_port()}",
    ]
    command = [*jobs.torchrun(*options, "--monitor-interval=0.1"), *failing(how, **settings)]
    agents = [jobs.start(command, directory) for _ in range(2)]
    done = [jobs.finish(agent, directory) for agent in agents]
    return jobs.Done(max(one.returncode for one in done), "\n".join(one.output for one in done), directory)


def failure(run: Any) -> tuple[Any, ...]:
    return (run.exit_code, *(run.summary.get(key) for key in FAILURE))


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("raise", (1, 3, "ValueError")),
        # Nobody on its node has a run: what is known is that its peers were cut off.
        pytest.param("kill", None, marks=pytest.mark.full),
    ],
)
def test_a_rank_of_another_node_is_named_if_it_could_report(tmp_path, how, expected):
    done = two_nodes(tmp_path, {"3": how}, collectives=True)
    assert done.returncode != 0
    (run,) = done.runs
    if expected is None:
        assert run.exit_code == 1
        assert run.summary["failure/message"]
        return
    assert failure(run) == expected, done.output
    assert "wandb: the run has failed: rank 3 on" in done.output
    assert 'raise ValueError("made to fail")' in done.output
    text = next(tmp_path.rglob("failure.txt")).read_text()
    assert "ValueError: made to fail" in text
    assert "flyteplugins_tracking" not in text  # the frames are the user's


@pytest.mark.wide
def test_of_two_nodes_the_exit_of_a_rank_beside_the_primary_is_seen(tmp_path):
    done = two_nodes(tmp_path, {"1": "kill"}, collectives=True)
    assert done.returncode != 0
    (run,) = done.runs
    assert failure(run) == (137, 1, "SIGKILL"), done.output


@pytest.mark.full
def test_each_attempt_tells_its_own_failure(tmp_path):
    settings = {"torch": True, "tracking": {"id": jobs.RUN_ID}}
    torchrun = jobs.torchrun("--standalone", "--nproc-per-node=3", "--max-restarts=1", "--monitor-interval=0.1")
    done = jobs.run([*torchrun, *failing({"1": "raise"}, **settings)], tmp_path)
    assert done.returncode == 0, done.output
    assert [failure(run) for run in done.runs] == [(1, 1, "ValueError"), (0, None, None)]


@pytest.mark.wide
@jobs.needs_mpirun
@pytest.mark.parametrize(
    ("shell", "how", "expected"), [(True, "raise", (1, 1, "exit")), (False, "kill", (137, 1, "SIGKILL"))]
)
def test_mpirun_without_any_store(tmp_path, shell, how, expected):
    wrapped = ["bash", "-c", '"$0" "$@"; exit $?'] if shell else []
    # Its SIGKILL follows its SIGTERM after 1 s, if this is left out.
    grace = ["--mca", "odls_base_sigkill_timeout", "10"]
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", *grace, "-n", "3", *wrapped, sys.executable]
    done = jobs.run([*mpirun, *failing({"1": how}, tracking={"id": jobs.RUN_ID})], tmp_path)
    assert done.returncode != 0
    (run,) = done.runs
    assert failure(run) == expected, done.output


def test_an_exception_that_the_caller_handles_is_not_the_end_of_the_rank(tmp_path):
    torchrun = jobs.torchrun("--standalone", "--nproc-per-node=2", "--monitor-interval=0.1")
    done = jobs.run([*torchrun, str(jobs.PROGRAMS / "retrying_ranks.py")], tmp_path)
    assert done.returncode != 0
    first, second = sorted(done.runs, key=lambda run: run.id)
    assert failure(first) == (1, 0, "KeyError")
    assert failure(second) == (9, 1, "SystemExit")


@pytest.mark.full
def test_a_rank_that_dies_while_the_primary_opens_its_run_is_named(tmp_path):
    """Also if its agent has taken its status before the primary could read it."""
    # The agent sends SIGTERM as soon as the rank has ended.
    torchrun = jobs.torchrun("--standalone", "--nproc-per-node=2", "--monitor-interval=0.001")
    done = jobs.run([*torchrun, *failing({"1": "kill"}, while_opening=True)], tmp_path)
    assert done.returncode != 0
    (run,) = done.runs
    assert failure(run) == (137, 1, "SIGKILL"), done.output


@pytest.mark.full
def test_an_interrupted_rank_is_the_cause_and_its_cut_off_peers_are_not(tmp_path):
    torchrun = jobs.torchrun("--standalone", "--nproc-per-node=2", "--monitor-interval=0.1")
    done = jobs.run([*torchrun, *failing({"1": "interrupt"}, collectives=True)], tmp_path)
    assert done.returncode != 0
    (run,) = done.runs
    assert failure(run) == (130, 1, "SIGINT"), done.output
    assert "was interrupted (signal 2)" in run.summary["failure/message"]


ONE_NODE = jobs.torchrun("--standalone", "--nproc-per-node=2", "--monitor-interval=3")


@pytest.mark.sampled_full(3)
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("how", "run_mode", "expected"),
    [
        ("raise", "auto", (1, 1, "ValueError")),
        ("sys.exit 0", "auto", (0, None, None)),
        ("handled", "auto", (0, None, None)),
        ("lingering", "auto", (1, 1, "ValueError")),
        ("sys.exit 7", "shared", (7, 1, "SystemExit")),
        ("kill", "auto", (137, 1, "SIGKILL")),
        ("raise", "new", (0, None, None)),
    ],
)
def test_a_primary_that_returns_after_another_rank_has_failed_has_the_jobs_failure(tmp_path, how, run_mode, expected):
    """Its agent has not seen the failure yet. A rank that exits with 0 has not failed, also if it has raised before."""
    settings = {"winner": 0, "torch": True, "tracking": {"run_mode": run_mode, "id": jobs.RUN_ID}}
    done = jobs.run([*ONE_NODE, *failing({"1": how}, **settings)], tmp_path)
    assert (done.returncode == 0) == (how in ("sys.exit 0", "handled")), done.output
    # Offline, the directories of other ranks of a shared run have a suffix.
    run = min(done.runs, key=lambda run: (run.id, len(str(run.path))))
    assert failure(run) == expected, done.output


@pytest.mark.full
def test_what_a_rank_says_at_its_end_arrives(tmp_path):
    torchrun = jobs.torchrun("--standalone", "--nproc-per-node=2", "--monitor-interval=0.1")
    how = {"1": "sys.exit no data left"}
    done = jobs.run([*torchrun, *failing(how, torch=True, tracking={"id": jobs.RUN_ID})], tmp_path)
    assert done.returncode != 0
    (run,) = done.runs
    assert failure(run) == (1, 1, "SystemExit"), done.output
    assert run.summary["failure/message"] == "no data left"


@pytest.mark.wide
def test_without_torch_a_rank_is_named_with_its_exit(tmp_path):
    torchrun = jobs.torchrun("--standalone", "--nproc-per-node=2", "--monitor-interval=0.1")
    done = jobs.run([*torchrun, *failing({"1": "sys.exit 7"}, tracking={"id": jobs.RUN_ID})], tmp_path)
    (run,) = done.runs
    assert failure(run) == (7, 1, "exit"), done.output

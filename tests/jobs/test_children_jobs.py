"""The processes that a rank starts: each has a run of its own, also when they do not overlap."""

import sys
from pathlib import Path

import pytest
from support import jobs

TRIALS = jobs.PROGRAMS / "trials.py"
TORCHRUN = jobs.torchrun("--standalone", "--nproc-per-node=1")
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable]


def assert_a_run_for_each_trial(done: jobs.Done, ranks: int = 1, others: int = 0) -> None:
    """Each trial of each rank has a run with its rows and its config; `others` have no rows."""
    assert done.returncode == 0, done.output
    assert len({run.id for run in done.runs}) == len(done.runs) == 3 * ranks + others, done.output
    trials = [run for run in done.runs if run.config["trial"] != "parent"]
    assert sorted(run.config["trial"] for run in trials) == sorted([0, 1, 2] * ranks)
    for run in trials:
        assert [(row["trial"], row["row"]) for row in run.rows] == [(run.config["trial"], n) for n in range(20)]
        assert run.exit_code == 0


@pytest.mark.sampled_full(1)
@pytest.mark.full
@pytest.mark.parametrize(
    ("how", "parent"),
    [("fork", "tracked"), ("spawn", "plain"), ("subprocess", "tracked")],
)
def test_trials_of_the_only_rank_of_torchrun(tmp_path: Path, how: str, parent: str) -> None:
    done = jobs.run([*TORCHRUN, TRIALS, how, parent], tmp_path)
    assert_a_run_for_each_trial(done, others=int(parent == "tracked"))
    assert done.output.count("this process was started by rank 0") == 3
    prefixes = {run.id.rpartition("-")[0] for run in done.runs if run.config["trial"] != "parent"}
    assert len(prefixes) == 1
    assert prefixes >= {run.id for run in done.runs if run.config["trial"] == "parent"}


@pytest.mark.wide
@jobs.needs_mpirun
def test_trials_of_the_ranks_of_mpirun(tmp_path: Path) -> None:
    assert_a_run_for_each_trial(jobs.run([*MPIRUN, TRIALS, "fork", "plain"], tmp_path), ranks=2)


@pytest.mark.full
def test_a_run_id_from_the_environment_is_that_of_the_rank_and_not_of_its_children(tmp_path: Path) -> None:
    done = jobs.run([*TORCHRUN, TRIALS, "fork", "tracked"], tmp_path, {"WANDB_RUN_ID": jobs.RUN_ID})
    assert_a_run_for_each_trial(done, others=1)
    assert [run.id for run in done.runs if run.config["trial"] == "parent"] == [jobs.RUN_ID]


@pytest.mark.wide
def test_processes_that_get_their_variables_inside_are_ranks(tmp_path: Path) -> None:
    done = jobs.run([*TORCHRUN, TRIALS, "rank", "plain"], tmp_path)
    assert done.returncode == 0, done.output
    assert "was started by" not in done.output


# What starts the rank: as `accelerate launch` and `conda run`, which have called no decorated function; as Slurm or a
# debugger, which has the rank's variables too; a launcher in a rank of another one.
PYTHON = "import subprocess, sys; sys.exit(subprocess.run(sys.argv[1:]).returncode)"
BETWEEN = {
    "a Python program": (2, [sys.executable, "-c", PYTHON, sys.executable]),
    "a shell": (2, ["bash", "-c", '"$0" "$@"; exit $?', sys.executable]),
    "torchrun": (1, jobs.torchrun("--standalone", "--nproc-per-node=2")),
}


@pytest.mark.sampled_full(1)
@pytest.mark.full
@pytest.mark.parametrize("between", BETWEEN)
def test_a_program_between_the_launcher_and_the_rank_changes_nothing(tmp_path: Path, between: str) -> None:
    processes, command = BETWEEN[between]
    launcher = jobs.torchrun("--standalone", f"--nproc-per-node={processes}", "--no-python")
    done = jobs.run([*launcher, *command, *jobs.train()], tmp_path)
    assert done.returncode == 0, done.output
    assert [run.exit_code for run in done.runs] == [0]
    assert [report["world_size"] for report in done.reports] == [2, 2]
    assert "was started by" not in done.output

"""Real process groups: of 4 gloo ranks, of one process, on GPUs where there are any; and what is refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support import jobs

FOUR = 4


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory):
    """The job, and what each rank saw."""
    directory = tmp_path_factory.mktemp("groups")
    command = [*jobs.torchrun("--standalone", f"--nproc-per-node={FOUR}"), jobs.PROGRAMS / "process_groups.py"]
    done = jobs.run(command, directory)
    reports = [directory / f"{rank}.json" for rank in range(FOUR)]
    assert all(report.exists() for report in reports), done.output
    return done, [json.loads(report.read_text()) for report in reports]


@pytest.fixture
def ranks(four_ranks):
    return four_ranks[1]


def test_ranks_meet_in_a_gloo_group_on_the_cpu(ranks):
    assert [(seen["device"], seen["backend"]) for seen in ranks] == [("cpu", "gloo")] * FOUR
    assert [seen["place"] for seen in ranks] == [[rank, FOUR] for rank in range(FOUR)]


def test_a_group_that_is_there_is_joined_and_left_alone(ranks):
    assert [seen["joined"] for seen in ranks] == [["cpu", True]] * FOUR
    assert [seen["left alone"] for seen in ranks] == [True] * FOUR


@pytest.mark.parametrize("call", ["again", "openmpi"])
def test_groups_come_one_after_the_other_also_where_rank_0_listens_by_itself(ranks, call):
    assert [seen[call] for seen in ranks] == [[0, 4, 8, 12]] * FOUR


def test_a_model_that_outlives_its_group_does_not_hang_in_its_destructor(ranks):
    assert all(seen["models that outlive their group"] for seen in ranks)


@pytest.mark.wide
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler: apt-get install gcc")
def test_a_thread_of_gloo_that_is_late_does_not_abort_the_process_at_its_end(tmp_path):
    """Without the package's part, torch ends the process with SIGABRT."""
    import torch

    late = tmp_path / "late.so"
    build = ["cc", "-shared", "-fPIC", "-o", str(late), str(jobs.PROGRAMS / "late_gloo.c"), "-ldl"]
    subprocess.run(build, check=True, timeout=60)
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    env = {"LD_PRELOAD": str(late), "TORCH_LIBRARY": str(library)}
    job = jobs.start([sys.executable, jobs.PROGRAMS / "late_gloo.py"], tmp_path, env, cold=True)
    done = jobs.finish(job, tmp_path)
    assert done.returncode == 0, done.output
    assert "late\n" in done.output


def test_a_group_is_destroyed_at_the_end_and_after_an_exception(ranks):
    assert [seen["destroyed"] for seen in ranks] == [True] * FOUR
    assert [seen["destroyed by the user"] for seen in ranks] == [True] * FOUR
    assert [seen["after an exception"] for seen in ranks] == [["'mine'", False]] * FOUR


def test_keys_that_name_the_rank_reach_the_run_of_a_decorated_function(four_ranks):
    done = four_ranks[0]
    (run,) = (run for run in done.runs if run.exit_code == 0)
    assert [row["loss"] for row in run.rows] == [1.5, 2.5, 3.5]
    assert [row["rank_0/step"] for row in run.rows] == [0, 1, 2]


def test_a_rank_that_fails_ends_the_job_soon_with_its_error(four_ranks):
    """The other ranks wait in a group of 600 s, and the fixture for the job's end only 240 s."""
    done, _ = four_ranks
    assert done.returncode == 1
    assert "ValueError: made to fail" in done.output
    assert [run.exit_code for run in done.runs if not run.rows] == [1]


@pytest.mark.full
def test_ranks_with_a_gpu_each_meet_in_an_nccl_group(tmp_path):
    import torch

    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU: NCCL is not tested")
    count = min(torch.cuda.device_count(), FOUR)
    command = [*jobs.torchrun("--standalone", f"--nproc-per-node={count}"), jobs.PROGRAMS / "nccl_groups.py"]
    done = jobs.run(command, tmp_path, timeout_s=180)
    assert done.returncode == 1
    assert "ValueError: made to fail" in done.output
    for rank in range(count):
        seen = json.loads((tmp_path / f"{rank}.json").read_text())
        assert (seen["device"], seen["joined"], seen["backend"], seen["rank"]) == (
            f"cuda:{rank}",
            f"cuda:{rank}",
            "nccl",
            rank,
        )
        assert seen["destroyed"]
        assert seen["after an exception"]
        assert seen["sum"] == sum(range(count))

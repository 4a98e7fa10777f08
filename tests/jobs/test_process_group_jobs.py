"""Real process groups: of 4 gloo ranks, of one process, on GPUs where there are any; and what is refused."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import jobs

FOUR = 4

SPREAD = math.sqrt(1.25)  # of four consecutive numbers


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


@pytest.mark.parametrize(
    ("key", "values", "statistics"),
    [
        ("float", [0.5, 1.5, 2.5, 3.5], [2.0, 0.5, 3.5, 8.0, SPREAD]),
        ("int", [100, 101, 102, 103], [101.5, 100, 103, 406, SPREAD]),
        ("bool", [1, 0, 0, 0], [0.25, 0, 1, 1, math.sqrt(3) / 4]),
        ("numpy", [0.0, 1.0, 2.0, 3.0], [1.5, 0.0, 3.0, 6.0, SPREAD]),
        ("numpy bool", [0, 0, 1, 1], [0.5, 0, 1, 2, 0.5]),
        ("array", [0, 1, 2, 3], [1.5, 0, 3, 6, SPREAD]),
        ("bfloat16", [0.5, 1.5, 2.5, 3.5], [2.0, 0.5, 3.5, 8.0, SPREAD]),
        ("float32", [0.0, 1.0, 2.0, 3.0], [1.5, 0.0, 3.0, 6.0, SPREAD]),
        ("int64", [2**53 + 1] * 4, [2.0**53, 2**53 + 1, 2**53 + 1, 4 * (2**53 + 1), 0.0]),
        ("parameter", [0.0, 1.0, 2.0, 3.0], [1.5, 0.0, 3.0, 6.0, SPREAD]),
        ("nan", [0.0, math.nan, 2.0, 3.0], [math.nan] * 5),
        ("inf", [-math.inf, 0.0, 0.0, math.inf], [math.nan, -math.inf, math.inf, math.nan, math.nan]),
        ("odd", [None, 1, None, 3], [2.0, 1, 3, 4, 1.0]),
        ("first", [1.0, None, None, None], [1.0, 1.0, 1.0, 1.0, 0.0]),
    ],
)
def test_the_primary_has_each_ranks_value_and_the_statistics(ranks, key, values, statistics):
    gathered = ranks[0]["all"]
    held = {f"rank_{rank}/{key}": value for rank, value in enumerate(values) if value is not None}
    found = {name: gathered[name] for name in gathered if name.startswith("rank_") and name.endswith(f"/{key}")}
    assert json.dumps(found) == json.dumps(held)  # 1 and 1.0 differ there, and NaN is NaN
    names = [f"{key}/{stat}" for stat in ("mean", "min", "max", "sum", "std")]
    assert [gathered[name] for name in names] == pytest.approx(statistics, nan_ok=True)


def test_a_call_is_one_collective_and_gives_the_others_none(ranks):
    assert [seen["calls"] for seen in ranks] == [1] * FOUR
    assert [seen["all"] for seen in ranks[1:]] == [None] * 3


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("default", {"loss/mean": 1.5, "loss/min": 0.0, "loss/max": 3.0, **{f"rank_{i}/loss": i for i in range(4)}}),
        ("empty", {"loss/mean": 1.0, "rank_3/loss": 1.0}),
        ("none", {f"rank_{i}/loss": i for i in range(4)}),
        ("different stats", {"loss/sum": 6, **{f"rank_{i}/loss": i for i in range(4)}}),
        ("after", {"loss/sum": 4.0, **{f"rank_{i}/loss": 1.0 for i in range(4)}}),
    ],
)
def test_what_is_gathered_has_the_primarys_statistics_of_the_ranks_that_have_the_key(ranks, call, expected):
    assert [seen[call] for seen in ranks] == [expected, None, None, None]


def test_the_row_is_on_the_primary_that_is_asked_for(ranks):
    expected = {"loss/sum": 6, **{f"rank_{i}/loss": i for i in range(4)}}
    assert [seen["to the last"] for seen in ranks] == [None, None, None, expected]


@pytest.mark.parametrize(
    ("call", "own", "told"),
    [
        ("text", "ConfigError: metrics['loss'] is 'abc', of type str", ""),
        ("none", "ConfigError: metrics['loss'] is None, of type NoneType", ""),
        ("two elements", "ConfigError: metrics['loss'] is tensor([0., 0.]), of type Tensor", ""),
        ("array", "ConfigError: metrics['loss'] is array([0., 0.]), of type ndarray", ""),
        ("no mapping", "ConfigError: metrics must be a mapping of text to values, got 0.5", ""),
        ("key", "ConfigError: metrics must be a mapping of text to values, got {7: 0.5}", ""),
        ("raises", "OSError: cannot be read", "OSError: cannot be read"),
        ("stat", "ConfigError: an entry of stats='maen' is not one of", ""),
        ("stats", "ConfigError: stats must be a sequence of names such as ('mean',), got 'mean'", ""),
    ],
)
def test_what_one_rank_cannot_send_fails_there_and_on_the_primary(ranks, call, own, told):
    primary, *others = (seen[f"bad {call}"] for seen in ranks)
    assert others[0] is others[2] is None
    assert others[1].startswith(own)
    assert primary.startswith(f"ConfigError: gather_metrics: rank 2: {told or own.removeprefix('ConfigError: ')}")


def test_what_the_primary_cannot_send_fails_there_alone(ranks):
    assert ranks[0]["bad primary"].startswith("ConfigError: gather_metrics: rank 0: metrics['loss'] is 'abc'")
    assert [seen["bad primary"] for seen in ranks[1:]] == [None] * 3
    assert ranks[0]["bad all"].count("metrics['loss'] is 'abc'") == FOUR


def test_two_metrics_that_come_to_one_key_are_refused(ranks):
    assert ranks[0]["same key"].startswith("ConfigError: gather_metrics: 'rank_3/loss/mean' would be the key of two")
    assert [seen["same key"] for seen in ranks[1:]] == [None] * 3


def test_a_group_that_is_there_is_joined_and_left_alone(ranks):
    assert [seen["joined"] for seen in ranks] == [["cpu", True]] * FOUR
    assert [seen["left alone"] for seen in ranks] == [True] * FOUR


@pytest.mark.parametrize("call", ["again", "openmpi"])
def test_groups_come_one_after_the_other_also_where_rank_0_listens_by_itself(ranks, call):
    assert [seen[call] for seen in ranks] == [[0, 4, 8, 12], *[[None] * 4] * 3]


def test_a_model_that_outlives_its_group_does_not_hang_in_its_destructor(ranks):
    assert all(seen["models that outlive their group"] for seen in ranks)


@pytest.mark.full
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler: apt-get install gcc")
def test_a_thread_of_gloo_that_is_late_does_not_abort_the_process_at_its_end(tmp_path):
    """Without the package's part, torch ends the process with SIGABRT."""
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


def test_the_gathered_row_reaches_the_run_of_a_decorated_function(four_ranks):
    done = four_ranks[0]
    (run,) = (run for run in done.runs if run.exit_code == 0)
    assert [row["loss/mean"] for row in run.rows] == [1.5, 2.5, 3.5]
    assert [row["rank_3/loss"] for row in run.rows] == [3.0, 4.0, 5.0]
    assert [row["rank_0/step"] for row in run.rows] == [0, 1, 2]


def test_a_rank_that_fails_ends_the_job_soon_with_its_error(four_ranks):
    """The other ranks wait in a group of 600 s, and the fixture for the job's end only 240 s."""
    done, _ = four_ranks
    assert done.returncode == 1
    assert "ValueError: made to fail" in done.output
    assert [run.exit_code for run in done.runs if not run.rows] == [1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU: NCCL is not tested")
def test_ranks_with_a_gpu_each_meet_in_an_nccl_group(tmp_path):
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
        if rank == 0:
            assert seen["gathered"]["loss/sum"] == sum(range(count)) + count / 2
            assert seen["gathered"][f"rank_{count - 1}/norm"] == count - 1
            assert f"rank {count - 1}: metrics['loss'] is tensor([0., 0.], device='cuda" in seen["bad"]
        else:
            assert seen["gathered"] is None

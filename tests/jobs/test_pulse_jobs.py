"""The pulse of real jobs: ranks that meet in each step, of which one is slow or stopped."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support import jobs
from support.waiting import wait_until
from wandb_files import StoredRun

PROGRAM = jobs.PROGRAMS / "pulsing_ranks.py"
PULSE_S = 1
RANKS = 4
TORCHRUN = jobs.torchrun("--standalone", f"--nproc-per-node={RANKS}", "--monitor-interval=0.1")


def pulsing(how: str, steps: int) -> list[str]:
    return [str(PROGRAM), how, str(PULSE_S), str(steps)]


def own_directory(directory: Path) -> dict[str, str]:
    """Where the files of running jobs are, apart from those of other tests."""
    return {"TMPDIR": str(directory)}


def assert_rows_are_the_functions(run: StoredRun, steps: int) -> None:
    assert [row["step"] for row in run.rows] == list(range(steps))
    assert [row["_step"] for row in run.rows] == list(range(steps))


def slowest(run: StoredRun) -> list[int]:
    """The slowest rank of each pulse that knows step times."""
    return [row["ranks/slowest"] for row in run.rows if "ranks/step_time/max" in row]


def test_the_rank_that_the_others_wait_for_is_named_within_two_pulses(tmp_path):
    done = jobs.run([*TORCHRUN, *pulsing("sleeps", 40)], tmp_path, own_directory(tmp_path))
    assert done.returncode == 0, done.output
    (run,) = done.runs
    assert_rows_are_the_functions(run, 40)
    named = slowest(run)
    assert set(named[1:]) == {2}, named  # the first one is partly of the ranks' start
    assert len(named) > 2
    own = [(row["ranks/own_time/max"], row["ranks/own_time/median"]) for row in run.rows if "ranks/own_time/max" in row]
    assert any(longest > 3 * median for longest, median in own), own  # a busy machine makes all ranks slow at times
    assert run.summary["ranks/silent"] == 0
    assert run.summary["ranks/memory/max"] > 10


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.full
def test_the_run_counts_a_rank_that_is_silent_until_it_goes_on(tmp_path):
    job = jobs.start([*TORCHRUN, *pulsing("until told", 100_000)], tmp_path, own_directory(tmp_path))

    def silent(count: str) -> bool:
        seen = tmp_path / "silent"
        return seen.exists() and seen.read_text() == count

    wait_until(lambda: len(list(tmp_path.glob("pid-*"))) == RANKS and silent("0"), job)
    with stopped(int((tmp_path / "pid-1").read_text())):
        wait_until(lambda: silent("1"), job)
    wait_until(lambda: silent("0"), job)
    (tmp_path / "stop").touch()
    done = jobs.finish(job, tmp_path)
    assert done.returncode == 0, done.output
    (run,) = done.runs
    assert 1 in [row.get("ranks/silent") for row in run.rows]
    assert run.summary["ranks/silent"] == 0
    assert_rows_are_the_functions(run, len(run.rows))


@pytest.mark.wide
def test_what_waits_when_the_run_ends_is_in_its_summary(tmp_path):
    done = jobs.run([sys.executable, *pulsing("alone", 400)], tmp_path, own_directory(tmp_path))
    assert done.returncode == 0, done.output
    (run,) = done.runs
    assert len(run.rows) == 1
    assert run.summary["ranks/slowest"] == 0
    assert run.summary["ranks/step_time/median"] > 0


@pytest.mark.wide
def test_in_a_shared_run_the_values_join_the_primarys_rows_without_a_prefix(tmp_path):
    done = jobs.run([*TORCHRUN, *pulsing("shared", 40)], tmp_path, own_directory(tmp_path))
    assert done.returncode == 0, done.output
    assert [len(run.rows) for run in done.runs] == [40] * RANKS
    (run,) = [run for run in done.runs if any("rank_0/step" in row for row in run.rows)]
    with_pulse = [row for row in run.rows if "ranks/slowest" in row]
    assert with_pulse
    assert all("rank_0/step" in row for row in with_pulse)
    assert set(slowest(run)[1:]) == {1}


@pytest.mark.wide
def test_without_a_launchers_store_the_ranks_meet_in_that_of_their_process_group(tmp_path):
    place = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(jobs.free_port())}
    ranks = [
        jobs.start(
            [sys.executable, *pulsing("sleeps", 40)],
            tmp_path,
            {**own_directory(tmp_path), **place, "RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "4"},
        )
        for rank in range(RANKS)
    ]
    done = [jobs.finish(rank, tmp_path) for rank in ranks]
    assert [rank.returncode for rank in done] == [0] * RANKS, "\n".join(rank.output for rank in done)
    (run,) = done[0].runs
    assert_rows_are_the_functions(run, 40)
    assert set(slowest(run)[2:]) == {2}

"""JAX without torch: two processes on the CPU, connected by `jax.distributed`. Ranks, ids, rows and ends."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from support import jobs
from support.wandb_server import RecordedRun, WandbServer

pytest.importorskip("jax", reason="jax is not installed")
pytestmark = pytest.mark.full

JAX = jobs.PROGRAMS / "jax_training.py"


def trained(directory: Path, server: WandbServer, **how: Any) -> tuple[list[jobs.Done], list[dict[str, Any]]]:
    """Train in two processes. Returns them as they have ended, and what each call has seen, by its number and rank."""
    port, how = str(jobs.free_port()), {"tracking": {}, **how}
    how["tracking"] = {"project": "jax", **how["tracking"]}
    commands = [[sys.executable, str(JAX), port, str(index), json.dumps(how)] for index in range(2)]
    env = {**server.environment, "TRAIN_DIR": str(directory)}
    started = [jobs.start(command, directory, env, cold=True) for command in commands]
    done = [jobs.finish(process, directory, timeout_s=120) for process in started]
    seen = [json.loads(path.read_text()) for path in sorted(directory.glob("seen-*.json"))]
    return done, seen


def rows(run: RecordedRun) -> list[tuple[int, int]]:
    return [(row["rank"], row["step"]) for row in run.rows]


def test_rank_0_alone_has_the_run_and_the_ranks_are_jaxs(tmp_path):
    with WandbServer() as server:
        done, seen = trained(tmp_path, server)
        assert [one.returncode for one in done] == [0, 0], done
        assert [(one["info"]["rank"], one["info"]["world_size"]) for one in seen] == [(0, 2), (1, 2)]
        assert [one["truth"] for one in seen] == [[0, 2], [1, 2]]
        assert {one["info"]["launcher"] for one in seen} == {"jax"}
        (run,) = server.runs
        assert (rows(run), run.exit_codes) == ([(0, 1), (0, 2), (0, 3)], [0])
        assert [one["id"] for one in seen] == [run.id, None]


def test_the_ranks_agree_on_an_id_through_jaxs_store_for_each_training_and_another_for_the_next_job(tmp_path):
    with WandbServer() as server:
        bases = []
        for attempt in ("first", "second"):
            done, seen = trained(tmp_path / attempt, server, tracking={"run_mode": "new"}, twice=attempt == "first")
            assert [one.returncode for one in done] == [0, 0], done
            groups = {one["group"] for one in seen}
            assert {one["id"] for one in seen} == {f"{group}-rank-{rank}" for group in groups for rank in range(2)}
            bases.append(min(groups))
            assert groups == ({bases[-1], f"{bases[-1]}-2"} if attempt == "first" else {bases[-1]})
        assert bases[0] != bases[1]
        assert [run.exit_codes for run in server.runs] == [[0]] * 6
        assert all(len(run.rows) == 3 for run in server.runs)


def test_both_ranks_log_to_a_shared_run_which_waits_for_all_rows(tmp_path):
    with WandbServer() as server:
        done, seen = trained(tmp_path, server, tracking={"run_mode": "shared"})
        assert [one.returncode for one in done] == [0, 0], done
        (run,) = server.runs
        assert {one["id"] for one in seen} == {run.id}
        assert sorted(rows(run)) == [(rank, step) for rank in range(2) for step in (1, 2, 3)]
        assert run.exit_codes == [0]


def test_a_function_that_initialises_jax_itself_is_warned(tmp_path):
    with WandbServer() as server:
        done, _ = trained(tmp_path, server, late=True)
        assert [one.returncode for one in done] == [0, 0], done
        assert len(server.runs) == 2
        assert "the function has connected 2 ranks, of which this is rank 1" in done[1].output
        assert "after jax.distributed.initialize()" in done[1].output

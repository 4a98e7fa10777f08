"""Shared runs under real torchrun and in real Elastic workers: what arrives, and what they cost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support import jobs
from support.harness import ENDS, Job, ends, job, python, torchrun
from support.loopback import Fault
from support.waiting import stop
from support.wandb_server import WandbServer
from wandb_files import read_runs

from flyteplugins_tracking._util.proc import parent

RUNS = jobs.PROGRAMS / "shared_runs.py"
SHARED = {"run_mode": "shared"}
GIVEN = {**SHARED, "id": jobs.RUN_ID}  # ranks that need not agree on an id are spared torch, 2 s of CPU each
PROMPT = {"WANDB__FILE_STREAM_TRANSMIT_INTERVAL": "1"}


def start(job: Job, nodes: list[int], env: dict[str, str] | None = None, **settings: Any) -> None:
    """One agent for each node, with so many ranks."""
    rendezvous = f"127.0.0.1:{jobs.free_port()}"
    for ranks in nodes:
        options = [f"--nnodes={len(nodes)}", f"--nproc-per-node={ranks}", "--monitor-interval=0.1"]
        where = ["--rdzv-backend=c10d", f"--rdzv-endpoint={rendezvous}"]
        job.start([*jobs.torchrun(*options, *where), str(ENDS)], {**PROMPT, **(env or {})}, **settings)


def sequences(rows: list[dict[str, Any]]) -> dict[int, list[int]]:
    """The values of each rank, in the order in which they are kept."""
    found = defaultdict(list)
    for row in rows:
        assert row["global_step"] == row["n"]
        found[row["pid"]].append(row["n"])
    return found


@pytest.mark.parametrize(
    ("nodes", "mode"),
    [
        ([2, 2], "online"),
        pytest.param([3, 1], "offline", marks=pytest.mark.wide),
    ],
    ids=str,
)
def test_every_row_of_every_rank_arrives_through_a_client_of_its_own(tmp_path, nodes, mode):
    """A training of each scope, one after the other."""
    env = {} if mode == "online" else {"WANDB_MODE": "offline"}
    with job(tmp_path) as started:
        scopes = {
            "tracking": {**SHARED, "id": "all", "rank_scope": "global"},
            "then": {**SHARED, "id": "each", "rank_scope": "worker"},
        }
        start(started, nodes, env, **ends("until go", rows=500, step_s=0.5, with_step=True, **scopes))
        for rank in range(4):
            started.wait_for(f"ready {rank} 0")
        cores = started.pids("wandb-core")
        started.go()
        found = started.outcome()
        assert (found.returncode, found.leaked, len(cores)) == (0, (), 4), found.output
        assert len(found.logged) >= 4000
        stored = read_runs(tmp_path / "wandb")
        assert len(stored) == 2 * 4
        kept = started.server.runs if mode == "online" else stored
        assert sorted({run.id for run in kept}) == ["all", *(f"each-worker-{node}" for node in range(len(nodes)))]
        arrived = [sequences(run.rows) for run in kept]
        assert {(pid, n) for by_rank in arrived for pid, numbers in by_rank.items() for n in numbers} == found.logged
        for by_rank in arrived:
            assert all(numbers == [*range(numbers[0], numbers[0] + len(numbers))] for numbers in by_rank.values())
        if mode == "offline":
            assert [run.exit_code for run in stored] == [0] * 2 * 4
            return
        assert (set(found.exit_codes), found.state) == ({0}, "finished")
        for run in kept:
            writers = 4 if run.id == "all" else nodes[int(run.id[-1])]
            assert (len(run.clients), len(run.senders)) == (writers, writers)
            assert (run.mixed_writers, run.rows_overwritten) == (False, 0)
            assert (run.exit_codes, run.config["tracking_init"]["world_size"]) == ([0], 4)


@pytest.mark.wide
def test_the_printed_command_sends_what_all_ranks_have_logged_offline(tmp_path):
    how = "with the directories of all nodes: "
    with job(tmp_path) as started:
        settings = ends("return", rows=100, with_step=True, tracking={**GIVEN, "config": {"lr": 0.1}})
        start(started, [2, 1], {"WANDB_MODE": "offline", "WANDB_SILENT": "false"}, **settings)
        found = started.outcome()
        (command,) = [line.partition(how)[2] for line in found.output.splitlines() if how in line]
        variables = {**os.environ, **started.server.environment, "HOME": str(tmp_path)}
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        for _ in range(2):  # the second time, there is nothing to send
            more = {"env": {**variables, "PATH": path}, "check": True, "timeout": 120}
            subprocess.run(["bash", "-c", command], cwd=tmp_path, **more)
        (run,) = started.server.runs
        rows = [(row["pid"], row["n"]) for row in run.rows]
        assert (set(rows), len(rows)) == (found.logged, 300)
        assert (run.rows_overwritten, run.mixed_writers, len(run.clients)) == (0, False, 3)
        assert (run.config["lr"], run.state, run.exit_codes) == (0.1, "finished", [0])


@pytest.mark.full
def test_a_job_that_was_offline_and_is_preempted_is_so_when_all_ranks_are_sent(tmp_path):
    with job(tmp_path) as started:
        agent = started.start(torchrun(ranks=2), {"WANDB_MODE": "offline"}, **ends("loop", attempts=9, tracking=GIVEN))
        for rank in (0, 1):
            started.wait_for(f"ready {rank} 0")
        started.signal(agent.pid)
        agent.communicate()
        command = [sys.executable, "-m", "flyteplugins_tracking", "send", "wandb"]
        done = jobs.run(command, tmp_path, started.server.environment)
        assert done.returncode == 0, done.output
        found = started.outcome()
        assert (found.lost, found.exit_codes[-1], found.state) == (0, 143, "preempted"), done.output


@pytest.mark.full
def test_what_a_rank_has_logged_offline_can_be_sent_when_the_run_has_ended(tmp_path):
    with job(tmp_path) as started:
        started.start(torchrun(ranks=2), {"WANDB_MODE": "offline"}, **ends("return", rows=20, tracking=GIVEN))
        found = started.outcome()
        for directory in sorted((tmp_path / "wandb").glob("offline-run-*"), key=lambda path: "rank" in path.name):
            done = jobs.run(
                [sys.executable, "-m", "flyteplugins_tracking", "send", directory], tmp_path, started.server.environment
            )
            assert done.returncode == 0, done.output
        (run,) = started.server.runs
        rows = [(row["pid"], row["n"]) for row in run.rows]
        assert (set(rows), len(rows), run.mixed_writers) == (found.logged, 40, False)
        assert (run.exit_codes, run.state) == ([0], "finished")


@pytest.mark.wide
def test_ranks_whose_nodes_are_unknown_have_a_client_each(tmp_path):
    """As Open MPI starts them on two hosts."""
    with job(tmp_path) as started:
        for rank in range(2):
            variables = {"RANK": rank, "SIZE": 2, "LOCAL_RANK": 0, "LOCAL_SIZE": 1}
            env = {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in variables.items()}
            started.start(python(), {**PROMPT, **env}, **ends("return", with_step=True, tracking=GIVEN))
        found = started.outcome()
        (run,) = started.server.runs
        assert (found.lost, run.exit_codes, len(run.clients), run.mixed_writers) == (0, [0], 2, False), found.output


def test_one_process_logs_as_a_rank_does(tmp_path):
    with job(tmp_path) as started:
        tracking = {**SHARED, "rank_prefix": True, "step_metric": "epoch"}
        started.start(python(), **ends("return", rows=3, with_step=True, tracking=tracking))
        started.server.wait_for(lambda: [run.completed for run in started.server.runs] == [True])
        rows = started.server.runs[0].rows
        assert [(row["epoch"], row["rank_0/n"]) for row in rows] == [(0, 0), (1, 1), (2, 2)]


def features(tmp_path: Path, server: WandbServer) -> list[Any]:
    """What each of three ranks reports of `shared.py`."""
    (tmp_path / "code.py").touch()
    settings = json.dumps({**SHARED, "config": {"lr": 0.1}})
    variables = {**server.environment, **PROMPT, "TRAIN_SETTINGS": settings}
    command = [*jobs.torchrun("--standalone", "--nproc-per-node=3"), str(jobs.PROGRAMS / "shared.py")]
    done = jobs.run(command, tmp_path, variables)
    assert done.returncode == 0, done.output
    after = [json.loads(path.read_text()) for path in tmp_path.glob("after-*.json")]
    assert after == [{"global": True, "run": True}] * 3
    return [json.loads((tmp_path / f"report-{rank}.json").read_text()) for rank in range(3)]


def test_everything_of_the_run_works_on_every_rank(tmp_path):
    with WandbServer() as server:
        reports = features(tmp_path, server)
        (run,) = [run for run in server.runs if not run.id.startswith(("own-", "later-"))]
        for name, value in {"id": run.id, "resumed": False, "is_run": True, "is_global": True}.items():
            assert [report[name] for report in reports] == [value] * 3
        assert [report["url"] for report in reports] == [f"{server.url}/{run.entity}/tests/runs/{run.id}"] * 3
        assert len({report["directory"] for report in reports}) == 3
        changes = ["item", "attribute", "update", "setdefaults", "wandb.config", "update_locked"]
        assert [report["refused"] for report in reports] == [[], changes, changes]
        assert [report["config"]["lr"] for report in reports] == [0.1] * 3
        assert run.config["item_0"] == 0
        assert not {"item_1", "update_2"} & run.config.keys()
        for rank in range(3):
            assert any(name.startswith(f"media/images/image_{rank}_") for name in run.files)
            assert any(name.startswith(f"media/table/table_{rank}_") for name in run.files)
            assert f"weights-{rank}" in run.artifacts
            assert run.summary[f"accuracy_{rank}"]["max"] == 3
            assert run.summary[f"best_{rank}"] == rank
        rows = [{k: v for k, v in row.items() if not k.startswith(("_", "roles/"))} for row in run.rows]
        for rank in range(3):
            assert {"loss": rank + 0.5, "global_step": 10 * rank} in rows
            assert {"kept": 1, "beside": 2, "global_step": 10 * rank} in rows
            assert {"by_wandb": rank, "global_step": 3} in rows
            assert {"late": rank, f"accuracy_{rank}": 1, "global_step": 3} in rows
            assert {"after_finish": rank, "global_step": 3} in rows
            assert [row for row in rows if row.get("from_child") == rank]
            (watched,) = [row for row in rows if f"watched_{rank}" in row]
            assert watched["gradients/weight"]["_type"] == "histogram"
        metrics = run.raw_config["_wandb"]["value"]["m"]
        assert any(metric.get("2") == "*" for metric in metrics)
        assert {"1": "global_step", "6": [], "7": []} in metrics
        assert (run.exit_codes, run.rows_after_completion, server.unknown_operations) == ([0], 0, [])
        assert len([name for name in run.artifacts if name.startswith("source-")]) == 3
        for rank in range(3):  # what the user opens beside
            kept = {name: server.run(f"{name}-{rank}") for name in ("own", "later")}
            assert [set(row) & {"inside", "outside"} for row in kept["own"].rows] == [{"inside"}, {"outside"}]
            assert [row["later"] for row in kept["later"].rows] == [rank]
            assert [one.exit_codes for one in kept.values()] == [[0], [0]]


def place(rank: int) -> dict[str, str]:
    """The variables of a rank that nobody has launched, and nobody kills when another one dies."""
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "NODE_RANK": 0}
    return {name: str(value) for name, value in variables.items()}


def test_a_rank_does_not_wait_for_its_primary(tmp_path):
    """Which does not come at all."""
    with job(tmp_path) as started:
        started.start(python(), place(1), **ends("return", tracking=GIVEN))
        found = started.outcome()
        assert (found.returncode, found.lost, found.exit_codes, found.state) == (0, 0, (), "running"), found.output


@pytest.mark.wide
def test_the_next_attempt_sends_what_ranks_have_logged_offline_in_an_outage(tmp_path):
    with job(tmp_path) as started:
        tracking = {**GIVEN, "init_timeout_s": 12, "if_unavailable": "degrade"}
        with started.server.failing(Fault.refuse()):
            jobs.finish(started.start(torchrun(ranks=3), **ends("return", tracking=tracking)), tmp_path)
        assert started.server.runs == []
        assert len([run for run in read_runs(tmp_path / "wandb") if run.rows]) == 3
        started.start(torchrun(ranks=2), **ends("return", tracking=tracking))  # one less: the primary sends its rows
        found = started.outcome()
        assert (found.returncode, found.lost, found.duplicates, len(found.logged)) == (0, 0, 0, 250), found.output
        assert found.output.count(f"flyteplugins-tracking send {tmp_path / 'wandb'}\n") == 3
        assert started.server.runs[0].mixed_writers is False


@pytest.mark.wide
def test_the_primary_waits_for_the_other_ranks_and_warns_about_late_ones(tmp_path):
    """Their later rows arrive all the same."""
    with job(tmp_path) as started:
        tracking = {**GIVEN, "kill_after_s": 10}  # rank 2 has half of it
        how = {"1": "until go", "*": "until all are ready"}
        started.start(torchrun(ranks=3), **ends(how, step_s=0.05, tracking=tracking))
        started.server.wait_for(lambda: started.server.runs[0].completed, 240)
        (left,) = started.wait_for("ready 1 0")
        started.log_more(rows=20, but_not=set(started.notes()) - {left})
        started.go()
        found = started.outcome()
        assert (found.returncode, found.exit_codes, found.state) == (0, (0,), "finished"), found.output
        assert "these writers have not sent all their rows: rank-1." in found.output
        assert (found.lost, found.duplicates) == (0, 0)


@pytest.mark.wide
def test_a_run_that_another_rank_has_logged_to_before_is_no_resumed_one(tmp_path):
    """A script that loads its checkpoint if `run.resumed` would look for one that nobody has written."""
    with WandbServer() as server:
        command = [*jobs.torchrun("--standalone", "--nproc-per-node=2"), str(RUNS), "primary_last"]
        started = jobs.start(command, tmp_path, server.environment)
        server.wait_for(lambda: [run for run in server.runs if run.rows])
        (tmp_path / "go").touch()
        done = jobs.finish(started, tmp_path)
        (run,) = server.runs
        assert (done.returncode, run.exit_codes, done.output.count("resumed False")) == (0, [0], 2), done.output
        assert sorted(row["number"] for row in run.rows) == [0, 1]


@pytest.mark.wide
@pytest.mark.parametrize("end", ["returns in a hurry", "is killed", "is terminated"])
def test_no_row_is_lost_when_a_ranks_wandb_core_is_slow_to_read(tmp_path, end):
    """The rank waits for it, if it may. Otherwise its rows are kept."""
    with job(tmp_path) as started:
        for rank in range(2):
            tracking = {**GIVEN, "kill_after_s": 4 if end == "returns in a hurry" else 30}
            started.start(python(), {**PROMPT, **place(rank)}, **ends("until go", tracking=tracking))
        primary, other = (started.wait_for(f"ready {rank} 0")[0] for rank in range(2))
        (core,) = [pid for pid in started.pids("wandb-core") if parent(pid) == other]
        stop(core)
        started.log_more(rows=20)
        if end == "is killed":
            os.kill(other, signal.SIGKILL)
            started.log_more(rows=200, but_not={other})  # the primary has seen it
        if end == "is terminated":
            os.kill(other, signal.SIGTERM)
            os.kill(primary, signal.SIGTERM)
        started.go()
        time.sleep(8)
        with suppress(ProcessLookupError):
            os.kill(core, signal.SIGCONT)
        found = started.outcome()
        assert "Rows are lost" not in found.output
        is_told = f"flyteplugins-tracking send {tmp_path / 'wandb'}" in found.output
        assert is_told == (end == "returns in a hurry"), found.output
        command = [sys.executable, "-m", "flyteplugins_tracking", "send", tmp_path / "wandb"]
        done = jobs.run(command, tmp_path, started.server.environment)
        assert done.returncode == 0, done.output
        (run,) = started.server.runs
        rows = [(row["pid"], row["n"]) for row in run.rows]
        assert (set(rows), len(rows)) == (found.logged, len(found.logged))
        if end != "is killed":  # its parent may reap the rank before its status is read: then it is unknown
            assert run.state == ("preempted" if end == "is terminated" else "finished")
        assert not list((tmp_path / "wandb").glob("*/*.journal.*"))


@pytest.mark.full
def test_a_run_of_several_nodes_ends_with_the_last_one(tmp_path):
    with job(tmp_path) as started:
        tracking = {**SHARED, "settings": {"x_stats_sampling_interval": 1}}
        start(started, [1, 2], **ends({"0": "return", "*": "until go"}, tracking=tracking))
        started.wait_for("returns")
        statistics = {"system.cpu/l:rank-0", "system.cpu/l:rank-1"}  # one rank of each node measures
        started.server.wait_for(
            lambda: statistics <= {key for row in started.server.runs[0].events for key in row}, 240
        )
        assert not any("rank-2" in key for row in started.server.runs[0].events for key in row)
        (run,) = started.server.runs
        assert not run.completed
        started.go()
        found = started.outcome()
        assert (found.lost, run.exit_codes, run.rows_after_completion) == (0, [0], 0), found.output


@pytest.mark.wide
def test_two_jobs_with_one_id_have_a_run_each(tmp_path):
    with job(tmp_path) as started:
        settings = ends("until go", tracking={**GIVEN, "init_timeout_s": 15})
        started.start(torchrun(ranks=2), **settings)
        started.wait_for("ready 1 0")
        started.start(torchrun(ranks=2), **settings)
        started.wait_for("ready 0 0", count=2)
        started.wait_for("ready 1 0", count=2)
        started.go()
        found = started.outcome()
        assert (found.returncode, found.lost) == (0, 0), found.output
        first, second = started.server.runs
        assert first.id == jobs.RUN_ID
        assert second.id.startswith(f"{jobs.RUN_ID}-")
        writers = [{row["pid"] for row in run.rows} for run in (first, second)]
        assert [len(pids) for pids in writers] == [2, 2]
        assert not writers[0] & writers[1]


@pytest.mark.full
def test_sigterm_while_the_writer_waits_for_its_neighbours_keeps_their_rows(tmp_path):
    """All are told to end: the job has not succeeded, and what the others log in `finally` arrives."""
    with job(tmp_path) as started:
        agent = started.start(
            torchrun(ranks=3), **ends({"0": "return", "*": "finally"}, tracking={**GIVEN, "kill_after_s": 605})
        )
        started.wait_for("returns")
        for rank in (1, 2):
            started.wait_for(f"ready {rank} 0")
        started.signal(agent.pid)
        found = started.outcome()
        assert (found.lost, found.exit_codes, found.leaked) == (0, (143,), ()), found.output
        assert "kill_after_s" not in found.output


@pytest.mark.wide
def test_an_uncommitted_row_is_logged_with_its_step(tmp_path):
    with WandbServer() as server:
        done = jobs.run([sys.executable, str(RUNS), "uncommitted"], tmp_path, server.environment)
        (run,) = server.runs
        rows = [{k: v for k, v in row.items() if not k.startswith(("_", "roles/"))} for row in run.rows]
        assert rows == [
            *({"loss": step, "global_step": step} for step in range(3)),
            {"eval": 1, "global_step": 3},
            {"good": 1, "global_step": 3},
            {"told": 1, "global_step": 3},
        ]
        assert (done.returncode, run.exit_codes) == (0, [0]), done.output
        assert "values that were logged with commit=False are lost: bad" in done.output

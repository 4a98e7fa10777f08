"""`send` of attempts of one run that logged online and offline in turn: each row once, and the true end.

A line of a W&B run is at the place that its writer gave: one that starts at too low a count overwrites.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from faults.matrix import PROMPT
from support import backends, jobs
from support.kills import kill_with_children, logged
from support.waiting import wait_until
from support.wandb_server import WandbServer
from support.wandb_store import RecordedRun

COMMAND = [sys.executable, "-m", "flyteplugins_tracking", "send", "wandb"]
# Attempts of one run, in the order in which they ran: where each has logged, and how it has ended. Together they have
# each mode before and behind the other one.
ORDERS = {
    "online that was killed, offline": ["online kill", "offline"],
    "offline that was killed, online": ["offline kill", "online"],
    "offline, online, offline": ["offline raise", "online raise", "offline"],
    "online, then offline that failed": ["online", "offline raise"],
}


def send(directory: Path, server: WandbServer) -> jobs.Done:
    return jobs.run(COMMAND, directory, server.environment)


def start_attempt(directory: Path, number: int, how: str, server: WandbServer) -> jobs.Process:
    """Start an attempt: its mode, then how it ends if it does not return, and its number of rows.

    Its node has another time zone than the one before: by the local times of W&B's names, it was an earlier one.
    """
    mode, *more = how.split()
    # Of what is to be killed, nothing is sent before.
    env = {**server.environment, **({} if "kill" in more else PROMPT)} if mode == "online" else {}
    ends = {"raise": {"end": {"0": "raise"}}, "kill": {"linger_s": 600}, "linger": {"linger_s": 600}}
    arguments = jobs.train(
        rows=rows_of(how),
        tracking={"id": "run", "project": "p", "config": {"attempt": number, f"only-{number}": True}},
        fail_attempts=99,
        **next((ends[word] for word in more if word in ends), {}),
    )
    env |= {"TORCHELASTIC_RESTART_COUNT": str(number), "TZ": f"UTC-{9 - number}"}
    return jobs.start([sys.executable, *arguments], directory, env)


def log_attempt(directory: Path, number: int, how: str, server: WandbServer) -> str:
    process = start_attempt(directory, number, how, server)
    if "kill" in how:
        wait_until(lambda: (directory / "reports" / f"attempt-{number}").exists(), process)
        if "written" in how:  # else the local time in its directory's name, of another zone, tells its place
            wait_until(lambda: all(one.stat().st_size > 500 for one in directory.glob("wandb/*/*.wandb")), process)
        kill_with_children(process.pid)
    return jobs.finish(process, directory).output


def rows_of(how: str) -> int:
    return next((int(word) for word in how.split() if word.isdigit()), 4)


def assert_each_row_once(run: RecordedRun, counts: Sequence[int]) -> None:
    logged = [(number, row) for number, count in enumerate(counts) for row in range(count)]
    assert sorted((row["attempt"], row["row"]) for row in run.rows) == logged
    assert sorted(row["_step"] for row in run.rows) == list(range(len(logged)))
    assert run.rows_overwritten == 0


@pytest.mark.full
def test_the_directory_of_the_last_offline_attempt_is_sent_with_the_earlier_ones(tmp_path):
    """The last lines of an attempt name its own directory."""
    with WandbServer() as server:
        for number, how in enumerate(["offline raise", "offline kill written", "offline"]):
            log_attempt(tmp_path, number, how, server)
        last = sorted((tmp_path / "wandb").glob("offline-run-*"))[0]  # its local time is that of another zone
        done = jobs.run([*COMMAND[:-1], last], tmp_path, server.environment)
        assert done.returncode == 0, done.output
        assert_each_row_once(server.run("run"), [4, 4, 4])
        assert [row["attempt"] for row in server.run("run").rows] == [0] * 4 + [1] * 4 + [2] * 4
        assert server.run("run").state == "finished"


@pytest.mark.sampled(1)
@pytest.mark.sampled_full(2)
@pytest.mark.parametrize("order", ORDERS)
def test_attempts_that_are_sent_take_no_row_and_no_end_of_others(tmp_path, order):
    """The run has each row once, and is left as its last attempt has left it."""
    with WandbServer() as server:
        outputs = [log_attempt(tmp_path, number, how, server) for number, how in enumerate(ORDERS[order])]
        for _ in range(2):
            done = send(tmp_path, server)
            outputs.append(done.output)
            assert done.returncode == 0, done.output
            run, last = server.run("run"), len(ORDERS[order]) - 1
            assert_each_row_once(run, list(map(rows_of, ORDERS[order])))
            attempts = [row["attempt"] for row in sorted(run.rows, key=lambda row: row["_step"])]
            offline = [number for number in attempts if ORDERS[order][number].startswith("offline")]
            assert offline == sorted(offline)
            state = "finished" if ORDERS[order][-1] in ("online", "offline") else "failed"
            assert run.state == state, (run.exit_codes, *outputs)
            assert run.config["attempt"] == run.summary["attempt"] == last
            # The client may not have written the config of one that was killed at once.
            whole = [number for number, how in enumerate(ORDERS[order]) if how != "offline kill"]
            assert {f"only-{number}" for number in whole} <= run.config.keys()
            assert ("failure/type" in run.summary) == ("raise" in ORDERS[order][-1])


@pytest.mark.full
def test_rows_of_a_killed_attempt_whose_steps_another_disk_has_taken_are_sent_behind_these(tmp_path):
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    with WandbServer() as server:
        log_attempt(here, 0, "online kill", server)
        log_attempt(elsewhere, 1, "online 9", server)
        for _ in range(2):
            done = send(here, server)
            assert done.returncode == 0, done.output
            run = server.run("run")
            assert_each_row_once(run, [4, 9])
            assert (run.state, run.config["attempt"], run.summary["attempt"]) == ("finished", 1, 1)


@pytest.mark.full
def test_the_next_attempt_sends_what_another_disk_has_taken_the_steps_of(tmp_path):
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    with WandbServer() as server:
        log_attempt(here, 0, "online kill", server)
        log_attempt(elsewhere, 1, "online 9", server)
        log_attempt(here, 2, "online", server)
        assert_each_row_once(server.run("run"), [4, 9, 4])
        assert server.run("run").summary["attempt"] == 2


@pytest.mark.sampled(1)
@pytest.mark.parametrize("place", [pytest.param("here", marks=pytest.mark.wide), "elsewhere"])
def test_a_run_that_is_open_is_left_alone(tmp_path, place):
    """Two writers of one run count its lines apart, and overwrite each other's."""
    with WandbServer() as server:
        log_attempt(tmp_path / "here", 0, "offline raise", server)
        open_ = start_attempt(tmp_path / place, 1, "online linger", server)
        server.wait_for(lambda: server.runs and server.run("run").rows)
        refused = send(tmp_path / "here", server)
        assert_each_row_once(server.run("run"), [0, 4])
        assert server.run("run").state == "running"
        kill_with_children(open_.pid)
        jobs.finish(open_, tmp_path)
    why = "a process is writing to run run" if place == "here" else "W&B shows run run as running"
    assert refused.returncode == 1
    assert why in refused.output, refused.output


@pytest.mark.full
def test_files_of_the_bare_client_that_was_not_told_to_resume_do_not_overwrite_rows(tmp_path):
    code = "import sys, wandb; run = wandb.init(project='p', id='run')\n"
    code += "[run.log({'attempt': int(sys.argv[1]), 'row': row}) for row in range(4)]; run.finish()"
    with WandbServer() as server:
        for number in range(2):
            done = jobs.python(tmp_path, "-c", code, str(number))
            assert done.returncode == 0, done.output
        done = send(tmp_path, server)
        assert done.returncode == 0, done.output
        assert_each_row_once(server.run("run"), [4, 4])


@pytest.mark.wide
def test_rows_that_are_counted_late_are_not_overwritten(tmp_path):
    with WandbServer(late=(4.0, 4.0)) as server:
        log_attempt(tmp_path, 0, "offline raise", server)
        log_attempt(tmp_path, 1, "online", server)
        done = send(tmp_path, server)
        assert done.returncode == 0, done.output
        assert_each_row_once(server.run("run"), [4, 4])
        assert server.run("run").state == "finished"


@pytest.mark.wide
def test_a_shared_run_that_has_gone_on_online_keeps_its_end(tmp_path):
    tracking = {"id": "run", "project": "p", "run_mode": "shared"}
    with WandbServer() as server:
        for number, (env, end) in enumerate([({}, {"0": "raise"}), (server.environment, {})]):
            arguments = jobs.train(rows=4, tracking=tracking, end=end, fail_attempts=99)
            command = [*jobs.torchrun("--standalone", "--nproc-per-node=2"), *arguments]
            (tmp_path / str(number)).mkdir()
            jobs.run(command, tmp_path, {**env, "TRAIN_DIR": str(tmp_path / str(number))})
        for _ in range(2):
            done = send(tmp_path, server)
            assert done.returncode == 0, done.output
            run = server.run("run")
            assert sorted(row["row"] for row in run.rows if "row" in row) == sorted(4 * list(range(4)))
            assert run.state == "finished"
            assert "failure/type" not in run.summary


@pytest.mark.full
def test_a_kept_attempt_that_is_sent_after_a_later_one_leaves_its_end(tmp_path):
    """The later one has not seen the directory: it logged on another disk."""
    here, elsewhere, service = (tmp_path / name for name in ("here", "elsewhere", "service"))
    service.mkdir()
    command = [sys.executable, jobs.PROGRAMS / "killed_training.py", "trackio", "p"]
    with backends.BACKENDS["trackio"](service) as backend:
        kept = jobs.start(command, here, {**backend.missing(tmp_path), "IF_UNAVAILABLE": "degrade"})
        wait_until(lambda: logged(here), kept)
        kill_with_children(kept.pid)
        jobs.finish(kept, here)
        done = jobs.run([*command, "30"], elsewhere, backend.environment())
        assert done.returncode == 0, done.output
        done = jobs.run([sys.executable, "-m", "flyteplugins_tracking", "send", "."], here, backend.environment())
        assert done.returncode == 0, done.output
        (run,) = backend.runs("p")
    found = Counter(value for key, value in run.points.elements() if key == "rank0")
    expected = Counter([*logged(here), *logged(elsewhere)])
    assert not expected - found
    assert (found - expected).total() <= 1  # the kill may come before the program has noted its last row
    assert run.status == "finished"

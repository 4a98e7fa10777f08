"""What killed attempts of W&B have left: as W&B would have got it, once, and with its end, whoever sends it."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from support import jobs
from support.kills import kill_process, kill_with_children
from support.loopback import Fault
from support.waiting import wait_until
from support.wandb_server import WandbServer
from support.wandb_store import RecordedRun

SEND = [sys.executable, "-m", "flyteplugins_tracking", "send", "wandb"]
WATCH = [*SEND[:-1], "--watch", "--interval", "0.2", "--killed-after", "2", "wandb"]
PROGRAM = str(jobs.PROGRAMS / "left_by_wandb.py")
SHARED = {"RUN_MODE": "shared"}
OFFLINE = {"WANDB_MODE": "offline"}


def ranks_of(env: Mapping[str, str] | None) -> int:
    return 2 if env and "RUN_MODE" in env else 1


def start(
    directory: Path,
    server: WandbServer,
    what: str,
    end: str,
    number: int = 0,
    env: Mapping[str, str] | None = None,
) -> jobs.Process:
    """Start an attempt, which has two ranks if they share their run."""
    launcher = jobs.torchrun("--standalone", "--nproc-per-node=2") if ranks_of(env) == 2 else [sys.executable]
    variables = {**server.environment, "TORCHELASTIC_RESTART_COUNT": str(number), **(env or {})}
    return jobs.start([*launcher, PROGRAM, what, end, str(number)], directory, variables)


def has_logged(directory: Path, number: int, env: Mapping[str, str] | None = None) -> bool:
    return len(list(directory.glob(f"logged-{number}-*"))) == ranks_of(env)


def log(
    directory: Path,
    server: WandbServer,
    what: str,
    end: str,
    number: int = 0,
    env: Mapping[str, str] | None = None,
    arrived: int = 0,
) -> str:
    """Run an attempt. One that is killed is killed with its wandb-core, when so many of its rows have arrived.

    By default, nothing but its start is sent.
    """
    process = start(directory, server, what, end, number, env)
    if end == "kill":
        wait_until(lambda: has_logged(directory, number, env), process)
        server.wait_for(lambda: not arrived or len(server.run("run").rows) >= arrived)
        kill_with_children(process.pid)
    return jobs.finish(process, directory).output


def send(directory: Path, server: WandbServer, returncode: int = 0) -> str:
    done = jobs.run(SEND, directory, server.environment)
    assert done.returncode == returncode, done.output
    return done.output


def watch_until_done(directory: Path, server: WandbServer) -> None:
    done = jobs.run([*WATCH, "--until-done"], directory, server.environment)
    assert done.returncode == 0, done.output


def cores_at(port: int) -> set[int]:
    """The ids of the wandb-cores that have a connection to a server."""
    cores = [one for one in psutil.process_iter(["name"]) if "wandb-core" in (one.info["name"] or "")]
    found = set()
    for core in cores:
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            found |= {core.pid for one in core.net_connections() if one.raddr and one.raddr.port == port}
    return found


def numbers(run: RecordedRun) -> list[int]:
    return sorted(int(row["row"]) for row in run.rows if "row" in row)


def expected(*attempts: int) -> list[int]:
    return [1000 * number + place for number in attempts for place in range(10)]


# Who sends what a killed attempt has left; and whether that attempt was online.
DIAGONAL = [("online", "send"), ("offline", "next"), ("offline", "watch")]


@pytest.mark.parametrize("by", ["send", pytest.param("next", marks=pytest.mark.full)])
@pytest.mark.parametrize("is_in_file", [True, pytest.param(False, marks=pytest.mark.full)])
def test_rows_that_are_sent_again_have_the_axis_that_the_client_adds(tmp_path, by, is_in_file):
    """Before 0.31, W&B's client writes its file each 32 KiB: then the rows are in our journal alone."""
    env = {} if is_in_file else {"WANDB__TRANSACTION_LOG_FLUSH_INTERVAL": "60"}
    with WandbServer() as server:
        log(tmp_path, server, "axis", "kill", env=env)
        send(tmp_path, server) if by == "send" else log(tmp_path, server, "nothing", "return", 1)
        run = server.run("run")
        assert numbers(run) == expected(0)
        losses = [row for row in run.rows if "loss" in row]
        assert [row["train/global_step"] for row in losses] == [5 * place for place in range(10)]


@pytest.mark.full
@pytest.mark.parametrize("mode", ["online", pytest.param("offline", marks=pytest.mark.wide)])
def test_the_summary_has_the_last_row_that_only_a_journal_has(tmp_path, mode):
    with WandbServer() as server:
        log(tmp_path, server, "tail", "kill", env={"WANDB_MODE": mode})
        send(tmp_path, server)
        run = server.run("run")
        assert numbers(run) == expected(0)
        assert run.summary["row"] == 9
        assert run.summary["least"] in (2, {"min": 2})


@pytest.mark.parametrize("mode", ["online", pytest.param("offline", marks=pytest.mark.full)])
def test_what_is_set_when_wandb_core_has_died_is_sent_though_its_process_is_killed_too(tmp_path, mode):
    with WandbServer() as server:
        log(tmp_path, server, "set_when_dead", "kill", env={"WANDB_MODE": mode})
        send(tmp_path, server)
        run = server.run("run")
        assert numbers(run) == [*expected(0), 10, 11]
        assert (run.summary["row"], run.summary["best"], run.config["late"]) == (11, 5, 1)
        assert (run.name, list(run.tags)) == ("renamed", ["tagged"])
        assert run.files["saved.txt"] == b"saved"
        assert [title for title, *_ in run.alerts] == ["title"]


@pytest.mark.full
@pytest.mark.parametrize(("what", "mode"), [("artifact", "online"), ("artifact", "offline"), ("image", "online")])
def test_the_first_call_that_meets_a_dead_wandb_core_loses_no_file(tmp_path, what, mode):
    """The directory has a name that is a pattern too, as one of Hydra's may be."""
    directory = tmp_path / "layers=[64,64]"
    directory.mkdir()
    with WandbServer() as server:
        output = log(directory, server, f"{what}_when_dead", "return", env={"WANDB_MODE": mode})
        output += send(directory, server) if mode == "offline" else ""
        run = server.run("run")
        assert (numbers(run), run.state) == ([*expected(0), 10], "finished"), output
        if what == "artifact":
            assert run.committed.keys() == {"weights"}, output
        else:
            assert run.rows[-1]["image"]["path"] in run.files
            assert run.summary["least"] in (1, {"min": 1})


@pytest.mark.wide
@pytest.mark.parametrize(("mode", "by"), [("online", "send"), ("offline", "next")])
def test_rows_of_tensorboard_are_sent(tmp_path, mode, by):
    with WandbServer() as server:
        log(tmp_path, server, "tensorboard", "kill", env={"WANDB_MODE": mode})
        if by == "next":
            log(tmp_path, server, "rows", "return", 1)
        output = send(tmp_path, server)
        assert numbers(server.run("run")) == expected(*((0, 1) if by == "next" else (0,))), output
        assert output.count("it may lack the last rows of TensorBoard before a kill") == 1, output


@pytest.mark.parametrize("what", ["summary", pytest.param("nothing", marks=pytest.mark.wide)])
def test_a_run_that_was_killed_before_its_first_row_is_ended(tmp_path, what):
    with WandbServer() as server:
        log(tmp_path, server, what, "kill")
        assert server.run("run").state == "running"
        send(tmp_path, server)
        assert server.run("run").state == "failed"
        assert server.run("run").summary.get("accuracy") == (0.5 if what == "summary" else None)
        assert "nothing that is not sent yet" in send(tmp_path, server)


@pytest.mark.full
@pytest.mark.sampled_full(1)
@pytest.mark.parametrize("shared", [[0], [1], [0, 1]])
def test_rows_of_a_shared_attempt_and_of_one_with_one_process_are_sent_once(tmp_path, shared):
    """Each rank of a shared attempt has the same rows."""
    with WandbServer() as server:
        for number, end in enumerate(("kill", "return")):
            log(tmp_path, server, "rows", end, number, SHARED if number in shared else {})
        for _ in range(2):
            output = send(tmp_path, server)
            assert numbers(server.run("run")) == sorted(expected(0, 1, *shared)), output


@pytest.mark.sampled_full(1)
@pytest.mark.full
@pytest.mark.parametrize("by", ["next", "send"])
def test_rows_of_a_shared_run_that_arrive_at_its_kill_are_not_sent_twice(tmp_path, by):
    """W&B's answers are seconds old: they do not have these rows yet."""
    env = {**SHARED, "WANDB_X_FILE_STREAM_TRANSMIT_INTERVAL": "0.2"}
    with WandbServer(old=5.5) as server:
        log(tmp_path, server, "rows", "kill", 0, env, arrived=20)
        log(tmp_path, server, "rows", "return", 1, env) if by == "next" else send(tmp_path, server)
        assert numbers(server.run("run")) == sorted(expected(0, *([1] if by == "next" else [])) * 2)


@pytest.mark.full
@pytest.mark.sampled_full(1)
@pytest.mark.parametrize(("mode", "by"), DIAGONAL)
def test_rows_of_a_shared_run_without_a_number_are_sent_once(tmp_path, mode, by):
    with WandbServer() as server:
        log(tmp_path, server, "forked", "kill", 0, {**SHARED, "WANDB_MODE": mode})
        wanted = [*expected(0) * 2, *(row + 500 for row in expected(0))]
        if by == "next":
            log(tmp_path, server, "rows", "return", 1, SHARED)
            wanted += expected(1) * 2
        if by == "watch":
            watch_until_done(tmp_path, server)
        for _ in range(2):
            output = send(tmp_path, server)
            assert numbers(server.run("run")) == sorted(wanted), output


@pytest.mark.full
@pytest.mark.sampled_full(1)
@pytest.mark.parametrize(("mode", "by"), DIAGONAL)
def test_rows_of_one_time_are_all_sent(tmp_path, mode, by):
    """Behind those of an attempt on another disk, so that steps do not tell which rows have arrived."""
    with WandbServer() as server:
        log(tmp_path, server, "simultaneous", "kill", 0, {"WANDB_MODE": mode})
        second = tmp_path if by == "next" else tmp_path / "other"
        second.mkdir(exist_ok=True)
        log(second, server, "rows", "return", 1)
        if by == "watch":
            watch_until_done(tmp_path, server)
        for _ in range(2):
            output = send(tmp_path, server)
            assert numbers(server.run("run")) == expected(0, 1), output


@pytest.mark.wide
def test_a_second_send_does_not_end_a_run_again_for_a_file_that_is_gone(tmp_path):
    with WandbServer() as server:
        log(tmp_path, server, "saved", "raise", env=OFFLINE)
        for path in (*tmp_path.rglob("saved-0.txt"),):
            path.unlink()
        log(tmp_path, server, "rows", "return", 1)
        for _ in range(2):
            assert "saved-0.txt" in send(tmp_path, server, returncode=1)
            assert server.run("run").state == "finished"
            assert numbers(server.run("run")) == expected(0, 1)


@pytest.mark.sampled_full(1)
@pytest.mark.full
@pytest.mark.parametrize("by", ["next", "send"])
def test_files_of_a_killed_attempt_whose_rows_have_arrived_are_sent(tmp_path, by):
    with WandbServer() as server:
        with server.failing(Fault.mute(only="upload")):
            env = {"WANDB_X_FILE_STREAM_TRANSMIT_INTERVAL": "0.2"}
            log(tmp_path, server, "files", "kill", env=env, arrived=10)
        log(tmp_path, server, "rows", "return", 1) if by == "next" else send(tmp_path, server)
        run = server.run("run")
        assert numbers(run) == expected(0) if by == "send" else expected(0, 1)
        assert "saved.txt" in run.files
        assert len([name for name in run.files if name.startswith("media/html")]) == 3


@pytest.mark.full
@pytest.mark.parametrize(("mode", "by"), [("offline", "send"), pytest.param("online", "next", marks=pytest.mark.wide)])
def test_a_file_that_is_saved_again_under_its_name_is_sent(tmp_path, mode, by):
    with WandbServer() as server:
        log(tmp_path, server, "resaved", "return", 0)
        with server.failing(Fault.mute(only="upload")):
            log(tmp_path, server, "resaved", "kill", 1, {"WANDB_MODE": mode})
        assert server.run("run").files["checkpoint.txt"] == b"of attempt 0"
        log(tmp_path, server, "rows", "return", 2) if by == "next" else send(tmp_path, server)
        assert server.run("run").files["checkpoint.txt"] == b"of attempt 1"


@pytest.mark.wide
def test_a_file_that_a_later_attempt_has_saved_again_stays(tmp_path):
    with WandbServer() as server:
        log(tmp_path, server, "resaved", "kill", 0, OFFLINE)
        time.sleep(2)  # the service tells the second of an upload
        log(tmp_path, server, "resaved", "return", 1)
        send(tmp_path, server)
        assert numbers(server.run("run")) == expected(0, 1)
        assert server.run("run").files["checkpoint.txt"] == b"of attempt 1"


@pytest.mark.full
@pytest.mark.parametrize("mode", [SHARED, pytest.param({}, marks=pytest.mark.wide)], ids=["shared", "auto"])
def test_send_does_not_end_a_run_that_a_later_attempt_has_open(tmp_path, mode):
    with WandbServer() as server:
        log(tmp_path, server, "rows", "kill", 0, SHARED)
        later = start(tmp_path, server, "rows", "wait", 1, mode)
        wait_until(lambda: has_logged(tmp_path, 1, mode), later)
        assert "a process is writing to run run" in send(tmp_path, server, returncode=1)
        assert server.run("run").exit_codes == []
        (tmp_path / "go").touch()
        jobs.finish(later, tmp_path)
        send(tmp_path, server)
        assert numbers(server.run("run")) == sorted(expected(0) * 2 + expected(1) * ranks_of(mode))
        assert server.run("run").state == "finished"


@pytest.mark.full
@pytest.mark.parametrize("mode", [SHARED, pytest.param({}, marks=pytest.mark.wide)], ids=["shared", "auto"])
def test_two_sends_at_once_send_each_row_once(tmp_path, mode):
    with WandbServer() as server:
        log(tmp_path, server, "rows", "kill", 0, mode)
        both = [jobs.start(SEND, tmp_path, server.environment) for _ in range(2)]
        outputs = [jobs.finish(one, tmp_path).output for one in both]
        send(tmp_path, server)
        assert numbers(server.run("run")) == sorted(expected(0) * ranks_of(mode)), outputs


@pytest.mark.full
def test_rows_that_the_server_refuses_at_the_close_stay_on_the_disk(tmp_path):
    with WandbServer() as server:
        with server.failing(Fault.status(403, only="filestream")):
            output = log(tmp_path, server, "dead", "return")
        assert "was not sent completely" in output
        send(tmp_path, server)
        assert numbers(server.run("run")) == [*expected(0), 10]
        assert server.run("run").state == "finished"


@pytest.mark.parametrize(("mode", "by"), [({}, "send"), pytest.param(SHARED, "watch", marks=pytest.mark.full)])
def test_the_name_config_and_alerts_that_an_offline_run_has_at_last_are_sent(tmp_path, mode, by):
    with WandbServer() as server:
        log(tmp_path, server, "named", "return", 0, {**OFFLINE, **mode})
        send(tmp_path, server) if by == "send" else watch_until_done(tmp_path, server)
        run = server.run("run")
        assert (run.name, run.config["late"], run.exit_codes) == ("renamed", 1, [0])
        assert run.alerts == [("title", "of attempt 0", "INFO")]


@pytest.mark.parametrize(
    ("by", "status", "text"),
    [
        ("send", 409, "run run was previously created and deleted; try a new run name"),
        pytest.param("watch", 409, "run run was previously created and deleted; try again", marks=pytest.mark.wide),
        pytest.param("watch", 403, "permission denied", marks=pytest.mark.full),
    ],
)
def test_a_run_that_is_refused_for_good_is_named_and_keeps_no_other_from_being_sent(tmp_path, by, status, text):
    """That of a deleted run is 409, which W&B's client repeats."""
    with WandbServer() as server:
        log(tmp_path, server, "rows", "return", 0, OFFLINE)
        log(tmp_path, server, "rows", "return", 1, {**OFFLINE, "RUN": "other"})
        answers = server.graphql

        def refuse(posted: dict[str, Any]) -> tuple[int, Any]:
            is_opened = posted.get("operationName") == "UpsertBucket" and posted["variables"]["name"] == "run"
            return (status, {"errors": [{"message": text}]}) if is_opened else answers(posted)

        server.graphql = refuse
        command = SEND if by == "send" else [*WATCH, "--until-done"]
        done = jobs.run(command, tmp_path, {**server.environment, "WANDB_INIT_TIMEOUT": "5"})
        assert done.returncode == 1
        assert text in done.output
        assert ("another one" in done.output) == (status == 409)
        (run,) = server.runs
        assert (run.id, numbers(run), run.state) == ("other", expected(1), "finished")


@pytest.mark.wide
def test_a_watched_run_that_an_outage_keeps_from_being_opened_is_sent_after_it(tmp_path):
    """wandb-core has its id open since the opening has failed."""
    with WandbServer() as server:
        log(tmp_path, server, "rows", "return", 0, OFFLINE)
        answers, asked = server.graphql, list[float]()

        def fail(posted: dict[str, Any]) -> tuple[int, Any]:
            is_opened = posted.get("operationName") == "UpsertBucket"
            asked.extend([time.monotonic()] if is_opened else [])
            is_away = is_opened and time.monotonic() < asked[0] + 8
            return (503, {"errors": [{"message": "away"}]}) if is_away else answers(posted)

        server.graphql = fail
        done = jobs.run(
            [*WATCH, "--until-done", "--interval=1"], tmp_path, {**server.environment, "WANDB_INIT_TIMEOUT": "5"}
        )
        assert done.returncode == 0, done.output
        assert "could not be opened before" in done.output
        assert numbers(server.run("run")) == expected(0)
        assert server.run("run").state == "finished"


@pytest.mark.sampled_full(1)
@pytest.mark.full
@pytest.mark.parametrize("mode", ["offline", "online"])
def test_an_artifact_with_many_files_is_sent_whole_or_named(tmp_path, mode):
    env = {"WANDB_DATA_DIR": str(tmp_path / "data")}
    with WandbServer() as server:
        with server.failing(Fault.mute(only="upload")):
            log(tmp_path, server, "listed", "kill", 0, {**env, "WANDB_MODE": mode})
        listings = list((tmp_path / "data").rglob("artifact_manifests/*"))
        assert len(listings) == (mode == "offline")  # wandb-core has removed it
        done = jobs.run(SEND, tmp_path, {**server.environment, **env})
        run = server.run("run")
        assert numbers(run) == expected(0)
        assert done.returncode == (mode == "online"), done.output
        if mode == "online":
            assert "artifact weights" in done.output
            assert not run.committed
        else:
            assert len(run.committed["weights"]) == 3


@pytest.mark.sampled_full(1)
@pytest.mark.full
@pytest.mark.parametrize("by", ["next", "send"])
def test_an_artifact_of_which_there_is_no_copy_is_sent_from_its_own_files(tmp_path, by):
    """`send` sends none that was changed since: a stranger's record may name any file of the user."""
    with WandbServer() as server:
        with server.failing(Fault.mute(only="upload")):
            log(tmp_path, server, "immutable", "kill")
        weights = tmp_path / "weights.txt"
        text = weights.read_text()
        if by == "send":
            weights.write_text("changed")
            assert "artifact weights" in send(tmp_path, server, returncode=1)
            assert not server.run("run").committed
            weights.write_text(text)
            send(tmp_path, server)
        else:
            log(tmp_path, server, "rows", "return", 1)
        assert server.run("run").committed == {"weights": {"weights.txt": text.encode()}}


@pytest.mark.sampled_full(1)
@pytest.mark.full
@pytest.mark.parametrize("by", ["close", "send"])
def test_an_artifact_that_kills_wandb_core_each_time_costs_no_row_and_is_named(tmp_path, by):
    """It is given up, and the run ends."""
    with WandbServer() as server:
        answers = server.graphql

        def kill_at_artifacts(posted: dict[str, Any]) -> tuple[int, Any]:
            if "createArtifact(" in posted["query"]:
                for pid in cores_at(server.port):
                    kill_process(pid)
            return answers(posted)

        server.graphql = kill_at_artifacts
        output = log(tmp_path, server, "artifact", "return", 0, OFFLINE if by == "send" else {})
        if by == "send":
            output += send(tmp_path, server, returncode=1)
        run = server.run("run")
        assert numbers(run) == expected(0), output
        assert run.state == "finished", output
        assert "artifact weights" in output
        server.graphql = answers
        assert send(tmp_path, server)
        assert server.run("run").committed.keys() == {"weights"}
        assert server.run("run").state == "finished"


@pytest.mark.full
def test_a_watcher_tells_the_end_of_the_attempt_that_logged_last(tmp_path):
    """An offline attempt that was killed, then an online one that returned, then an offline one that gets SIGTERM."""
    with WandbServer() as server:
        log(tmp_path, server, "rows", "kill", 0, OFFLINE)
        log(tmp_path, server, "rows", "return", 1)
        watcher = jobs.start(WATCH, tmp_path, server.environment)
        try:
            wait_until(lambda: len(numbers(server.run("run"))) == 20, watcher)
            log(tmp_path, server, "rows", "term", 2, OFFLINE)
            wait_until(lambda: len(numbers(server.run("run"))) == 30, watcher)
            wait_until(lambda: server.run("run").exit_codes[-1] == 143, watcher)
        finally:
            jobs.kill(watcher)


@pytest.mark.wide
def test_a_watcher_sends_the_rows_behind_a_damaged_block_and_none_twice(tmp_path):
    with WandbServer() as server:
        log(tmp_path, server, "axis", "kill", 0, {"WANDB_MODE": "offline"})
        (directory,) = (tmp_path / "wandb").glob("offline-run-*")
        (file,) = directory.glob("*.wandb")
        for journal in directory.glob("*.journal.*"):
            journal.unlink()
        with file.open("ab") as end:
            end.write(bytes(40_000))
        watching = [*SEND[:-1], "--watch", "--interval", "0.2", "--killed-after", "20", "wandb"]
        watcher = jobs.start(watching, tmp_path, server.environment)
        try:
            wait_until(lambda: server.runs and len(server.run("run").rows) == 20, watcher)
            time.sleep(40)
            assert len(server.run("run").rows) == 20
            assert len(server.run("run").upserts) < 5
        finally:
            jobs.kill(watcher)


FULL_DISK = """
import errno, sys
from pathlib import Path
from flyteplugins_tracking.__main__ import main
from flyteplugins_tracking.trackers.wandb import sender
saves = sender.save_again
def save_again(*args):
    if Path("full").exists():
        raise OSError(errno.ENOSPC, "No space left on device", "files")
    return saves(*args)
sender.save_again = save_again
sys.exit(main())
"""


@pytest.mark.wide
def test_a_watcher_whose_disk_is_full_when_a_job_ends_ends_the_run_when_there_is_space(tmp_path):
    (tmp_path / "full").touch()
    with WandbServer() as server:
        command = [sys.executable, "-c", FULL_DISK, "send", "--watch", "--interval", "0.2", "--killed-after", "2", "."]
        watcher = jobs.start(command, tmp_path, server.environment)
        try:
            log(tmp_path, server, "saved", "raise", env={"WANDB_MODE": "offline"})
            server.wait_for(lambda: server.runs and len(server.run("run").upserts) > 2, 120)
            (tmp_path / "full").unlink()
            wait_until(lambda: server.run("run").state == "failed", watcher)
        finally:
            jobs.kill(watcher)
        assert numbers(server.run("run")) == expected(0)
        assert "saved-0.txt" in server.run("run").files

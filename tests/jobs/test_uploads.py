"""Ends that upload: an ordinary one waits as W&B's bare client does, and what a cut one leaves is sent later."""

from __future__ import annotations

import json
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support import jobs
from support.loopback import Fault
from support.waiting import wait_until
from support.wandb_server import WandbServer

UPLOADS = jobs.PROGRAMS / "uploads.py"
ALL = ["artifact", "model", "save", "media", "table"]
# An upload takes longer than an end that is bounded: 5 s with kill_after_s=10.
BOUNDED, SLOW_S = {"kill_after_s": 10}, 8.0
ARTIFACTS = {"weights", "network", "run-r-table"}


def start(server: WandbServer, directory: Path, **arguments: Any) -> jobs.Process:
    return jobs.start([sys.executable, UPLOADS, json.dumps(arguments)], directory, server.environment)


def send(server: WandbServer, directory: Path) -> jobs.Done:
    command = [sys.executable, "-m", "flyteplugins_tracking", "send", *(directory / "wandb").glob("*run-*")]
    return jobs.run(command, directory, server.environment)


def stored(server: WandbServer) -> dict[str, Any]:
    """What the service has of the run: its values, its files but for those with times in them, and its end."""
    run = server.run("r")
    rows = [{key: value for key, value in row.items() if key[0] != "_" and key != "table"} for row in run.rows]
    own = ("media/", "saved.txt")
    files = {name: content for name, content in run.files.items() if name.startswith(own)}
    return {"rows": rows, "files": files, "artifacts": run.committed, "state": run.state, "codes": run.exit_codes}


@pytest.mark.full
def test_an_ordinary_end_uploads_what_the_bare_client_uploads_however_long_that_takes(tmp_path):
    with WandbServer() as of_bare, WandbServer() as of_ours:
        of_bare.fault, of_ours.fault = (Fault.slow(SLOW_S, only="upload") for _ in range(2))
        bare = start(of_bare, tmp_path / "bare", files=ALL, bare=True)
        ours = start(of_ours, tmp_path / "ours", files=ALL, **BOUNDED)
        done = [jobs.finish(process, tmp_path) for process in (bare, ours)]
        assert stored(of_ours) == stored(of_bare), done[1].output
        assert of_ours.run("r").committed.keys() == ARTIFACTS
    assert done[0].returncode == done[1].returncode == 0
    assert "was not sent completely" not in done[1].output
    assert not list((tmp_path / "ours" / "wandb").rglob("*.journal.*"))


@pytest.mark.full
def test_an_upload_goes_on_after_an_outage_that_is_short(tmp_path):
    with WandbServer() as server:
        with server.failing(Fault.mute(only="upload")) as stops:
            process = start(server, tmp_path, files=ALL, kill_after_s=120)
            server.wait_for(lambda: stops.hits > 2, 60)
        with server.failing(Fault.status(503)) as fault:
            wait_until(lambda: fault.hits, process)
        done = jobs.finish(process, tmp_path)
        assert stored(server)["artifacts"].keys() == ARTIFACTS, done.output
        assert (len(stored(server)["rows"]), server.run("r").state, done.returncode) == (5, "finished", 0)


def test_an_end_gives_up_on_a_service_that_is_away_and_all_is_sent_later(tmp_path):
    with WandbServer() as server:
        with server.failing(Fault.mute(only="upload")) as stops:
            process = start(server, tmp_path, files=ALL, kill_after_s=6)
            server.wait_for(lambda: stops.hits > 2, 60)
            server.fault = Fault.mute()
            done = jobs.finish(process, tmp_path)
        assert "nothing has moved for 3 s (kill_after_s=6). Nothing is lost" in done.output
        assert (done.returncode, server.run("r").state) == (0, "running")
        assert_all_is_sent(server, tmp_path)


@pytest.mark.full
@pytest.mark.sampled_full(1)
@pytest.mark.parametrize(("place", "sent"), [("main", "SIGTERM"), ("thread", "SIGTERM"), ("main", "Ctrl-C")])
def test_a_signal_bounds_an_end_that_uploads_and_all_is_sent_later(tmp_path, place, sent):
    """The function has returned: that is the run's status. The process ends by the signal."""
    with WandbServer() as server:
        with server.failing(Fault.mute(only="upload")) as stops:
            process = start(server, tmp_path, files=ALL, place=place, **BOUNDED)
            server.wait_for(lambda: stops.hits > 2, 60)
            wait_until(lambda: ended(tmp_path), process)
            process.send_signal(signal.SIGTERM if sent == "SIGTERM" else signal.SIGINT)
            done = jobs.finish(process, tmp_path)
        assert f"{sent} has come, which leaves it 5 s (kill_after_s=10). Nothing is lost" in done.output
        assert ("To stop it at once, press Ctrl-C again" in done.output) == (sent == "Ctrl-C")
        assert done.returncode == (143 if sent == "SIGTERM" else -signal.SIGINT)
        assert_all_is_sent(server, tmp_path)


@pytest.mark.full
def test_the_next_attempt_sends_the_artifacts_that_a_cut_end_has_left(tmp_path):
    with WandbServer() as server:
        with server.failing(Fault.mute(only="upload")) as stops:
            process = start(server, tmp_path, files=["artifact", "model", "table"], **BOUNDED)
            server.wait_for(lambda: stops.hits > 2, 60)
            wait_until(lambda: ended(tmp_path), process)
            process.send_signal(signal.SIGTERM)
            jobs.finish(process, tmp_path)
        done = jobs.finish(start(server, tmp_path, files=[]), tmp_path)
        run = server.run("r")
        assert (done.returncode, len(run.rows), run.committed.keys()) == (0, 4 + 3, ARTIFACTS), done.output
        assert send(server, tmp_path).returncode == 0
        assert len(server.run("r").artifacts) == len(run.artifacts)


@pytest.mark.wide
def test_a_second_ctrl_c_ends_an_end_that_uploads_and_all_is_sent_later(tmp_path):
    with WandbServer() as server:
        with server.failing(Fault.mute(only="upload")) as stops:
            process = start(server, tmp_path, files=ALL)
            server.wait_for(lambda: stops.hits > 2, 60)
            wait_until(lambda: ended(tmp_path), process)
            while process.poll() is None:
                process.send_signal(signal.SIGINT)
                time.sleep(1)
            done = jobs.finish(process, tmp_path)
        assert "its end was interrupted. Nothing is lost" in done.output
        assert done.returncode in (-signal.SIGINT, 130)
        assert_all_is_sent(server, tmp_path)


@pytest.mark.wide
def test_what_another_node_uploads_arrives_though_the_primary_has_ended_the_run(tmp_path):
    with WandbServer() as server:
        server.fault = Fault.slow(SLOW_S, only="upload")
        endpoint = f"--rdzv-endpoint=127.0.0.1:{jobs.free_port()}"
        launcher = [*jobs.torchrun("--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d"), endpoint]
        arguments = {"files": [], "run_mode": "shared", **BOUNDED}
        agents = [
            jobs.start([*launcher, UPLOADS, json.dumps(arguments)], tmp_path, server.environment) for _ in range(2)
        ]
        output = "".join(jobs.finish(agent, tmp_path).output for agent in agents)
        run = server.run("r")
        assert (len(run.rows), run.exit_codes) == (6, [0]), output
        assert (run.state, run.committed.keys()) == ("finished", {"weights"})
    assert "these writers have not sent all their rows: rank-1" in output


def ended(directory: Path) -> list[Path]:
    """The journals of runs that end."""
    return [path for path in (directory / "wandb").rglob("*.journal.*") if b'"exit_code"' in path.read_bytes()]


def is_noted(name: str, directory: Path) -> bool:
    """Whether W&B's file says that a file of this name was saved."""
    return any(name.encode() in path.read_bytes() for path in (directory / "wandb").rglob("*.wandb"))


def assert_all_is_sent(server: WandbServer, directory: Path) -> None:
    sent = send(server, directory)
    run = server.run("r")
    assert sent.returncode == 0, sent.output
    assert (len(run.rows), run.committed.keys(), run.exit_codes[-1:]) == (5, ARTIFACTS, [0]), sent.output
    assert all(f" {name}" in sent.output for name in ("rows of run r, with", "saved.txt", "artifact weights"))
    assert {"saved.txt"} < run.files.keys()
    assert sum(name.startswith("media/") for name in run.files) == 2
    assert run.committed["weights"] == {"weights.txt": (directory / "weights.txt").read_bytes()}
    again = send(server, directory)
    assert (again.returncode, len(server.run("r").rows), len(server.run("r").artifacts)) == (0, 5, len(run.artifacts))


@pytest.mark.wide
def test_the_next_attempt_sends_the_files_that_were_logged_offline_in_an_outage(tmp_path):
    with WandbServer() as server:
        with server.failing(Fault.status(503)):
            away = jobs.finish(start(server, tmp_path, files=ALL, init_timeout_s=8), tmp_path)
        assert "The next attempt that finds it sends it" in away.output
        done = jobs.finish(start(server, tmp_path, files=[]), tmp_path)
        run = server.run("r")
        assert (done.returncode, len(run.rows), run.committed.keys()) == (0, 5 + 3, ARTIFACTS), done.output
        assert {"saved.txt"} < run.files.keys()
        assert sum(name.startswith("media/") for name in run.files) == 2


@pytest.mark.sampled(1)
@pytest.mark.parametrize("how", ["taken", "gone", pytest.param("refused", marks=pytest.mark.wide)])
def test_send_looks_for_the_files_of_a_run_that_was_offline(tmp_path, how):
    """`wandb sync` ends with 0 in any case."""
    names = "artifact weights", "artifact network", "artifact run-r-table", "saved.txt"
    with WandbServer() as server:
        offline = {**server.environment, "WANDB_MODE": "offline"}
        jobs.run([sys.executable, UPLOADS, json.dumps({"files": ALL})], tmp_path, offline)
        if how == "gone":
            shutil.rmtree(tmp_path / ".local" / "share" / "wandb" / "artifacts" / "staging")
            (tmp_path / "saved.txt").unlink()
        server.fault = Fault.status(403, only="upload") if how == "refused" else None
        sent = [send(server, tmp_path)]
        server.fault = None
        sent.append(send(server, tmp_path))
        assert [done.returncode for done in sent] == {"taken": [0, 0], "gone": [1, 1], "refused": [1, 0]}[how], sent
        assert how == "taken" or all(name in sent[0].output for name in names), sent[0].output
        run, arrives = server.run("r"), how != "gone"
        assert (len(run.rows), run.state, run.exit_codes[-1]) == (5, "finished", 0)
        assert (run.committed.keys(), "saved.txt" in run.files) == (ARTIFACTS if arrives else set(), arrives)
        assert sum(name.startswith("media/") for name in run.files) == 2


@pytest.mark.full
def test_send_fails_and_names_what_is_not_on_this_disk_any_more(tmp_path):
    named = "saved.txt, artifact weights, artifact network, artifact run-r-table"
    with WandbServer() as server:
        with server.failing(Fault.mute(only="upload")) as stops:
            process = start(server, tmp_path, files=ALL, **BOUNDED)
            server.wait_for(lambda: stops.hits, 60)
            # wandb-core writes which files were saved when the run ends.
            wait_until(lambda: ended(tmp_path) and is_noted("saved.txt", tmp_path), process)
            process.kill()
            jobs.finish(process, tmp_path)
        shutil.rmtree(tmp_path / ".local" / "share" / "wandb" / "artifacts" / "staging", ignore_errors=True)
        (tmp_path / "saved.txt").unlink()
        for _ in range(2):
            done = send(server, tmp_path)
            assert done.returncode == 1, done.output
            assert f"files and artifacts that W&B lacks: {named}. They are not on this disk" in done.output
            assert (len(server.run("r").rows), server.run("r").committed) == (5, {})

"""`send DIRECTORY...` with W&B: what it calls sent has arrived, and a key goes to no server that only data names."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from support import jobs
from support.loopback import Fault
from support.users import NOBODY, needs_root
from support.waiting import wait_until
from support.wandb_server import WandbServer

from flyteplugins_tracking._commands.directories import SENT
from flyteplugins_tracking._commands.send import main
from flyteplugins_tracking.trackers.journal import Journal, encode, stored
from flyteplugins_tracking.trackers.outbox import how_to_send, servers_of
from flyteplugins_tracking.trackers.wandb import datastore, sender, vendor


def send(directory: Path, env: dict[str, str], *arguments: object) -> jobs.Done:
    command = [sys.executable, "-m", "flyteplugins_tracking", "send", *map(str, arguments)]
    return jobs.run(command, directory, env)


def offline_runs(directory: Path, *rows: int) -> list[Path]:
    """The directories of runs that W&B's client has logged offline."""
    for number, count in enumerate(rows):
        done = jobs.python(directory, *jobs.train(rows=count, tracking={"id": f"run-{number}", "project": "p"}))
        assert done.returncode == 0, done.output
    return sorted((directory / "wandb").glob("offline-run-*"))


def stub(directory: Path, size: int) -> Path:
    """What a process leaves that is killed while it opens its run."""
    copy = directory.with_name(f"offline-run-20260101_00000{size}-stub{size}")
    shutil.copytree(directory, copy)
    (file,) = copy.glob("*.wandb")
    file.write_bytes(file.read_bytes()[:size])
    for journal in copy.glob("*.journal.*"):
        journal.unlink()
    return copy


@needs_root
def test_a_file_of_another_user_is_named_and_does_not_keep_others_from_being_sent(tmp_path):
    directories = offline_runs(tmp_path, 5)
    empty, planted = (stub(directories[0], size) for size in (0, 7))
    os.chown(next(planted.glob("*.wandb")), NOBODY, NOBODY)
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "rank-0.journal.txt").write_bytes(bytes(100))
    os.chown(kept / "rank-0.journal.txt", NOBODY, NOBODY)
    with WandbServer() as server:
        done = send(tmp_path, server.environment, empty, planted, *directories)
        assert len(server.run("run-0").rows) == 5
        unread = send(tmp_path, server.environment, kept)
    assert (done.returncode, unread.returncode) == (1, 1), done.output + unread.output
    assert f"cannot send: {planted} was not sent: its .wandb file is not a file of this user" in done.output
    assert "Traceback" not in done.output + unread.output
    assert f"{empty} has no rows" in done.output
    assert (done.output + unread.output).count("has no rows") == 1
    assert f"cannot send: {kept} has nothing of a run" in unread.output


@pytest.mark.full
@needs_root
def test_a_directory_on_a_read_only_file_system_is_refused_with_that_cause(tmp_path):
    (directory,) = offline_runs(tmp_path, 5)
    mounted = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"'
    sending = ["unshare", "-m", "sh", "-c", mounted, directory, sys.executable, "-m", "flyteplugins_tracking", "send"]
    if subprocess.run([*sending[:-4], "true"], check=False).returncode:
        pytest.skip("this machine does not let root mount")
    with WandbServer() as server:
        done = jobs.run([*sending, directory], tmp_path, server.environment)
        assert server.runs == []
    assert done.returncode == 1
    assert f"{directory} was not sent: OSError: [Errno 30] Read-only file system" in done.output
    assert "has not confirmed" not in done.output


def test_a_directory_of_runs_means_all_runs_below_it(tmp_path):
    """That of W&B, the working directory, that of other trackers' runs; runs that were sent are not sent again.

    A file in it that looks like one of a run hides none.
    """
    directories = offline_runs(tmp_path / "outputs" / "2026-01-01", 5, 7)
    job, elsewhere = directories[0].parents[1], tmp_path / "elsewhere"
    kept = [kept_run(job / "tracking-offline" / f"trackio-{name}", "trackio", id=name) for name in ("a", "b")]
    (job / "wandb" / "latest-run").unlink(missing_ok=True)
    (job / "wandb" / "latest-run").symlink_to(directories[0])
    for name in ("loop", "wandb"):
        (elsewhere / name).parent.mkdir(exist_ok=True)
        (elsewhere / name).symlink_to(elsewhere if name == "loop" else job / "wandb")
    for stray in (elsewhere / "run-old.wandb", job / SENT):
        stray.touch()
    with WandbServer() as server:
        env = {**server.environment, "TRACKIO_DIR": str(tmp_path / "trackio")}
        missing = send(tmp_path, env, "output")
        by_link = send(elsewhere, env, elsewhere)
        assert [len(server.run(f"run-{number}").rows) for number in range(2)] == [5, 7]
        done, requests = send(job, env, "."), server.run("run-0").requests
        (job / SENT).unlink()
        again = send(tmp_path, env, "outputs", job)
        assert server.run("run-0").requests == requests
    assert (by_link.returncode, done.returncode, again.returncode) == (0, 0, 0), by_link.output + done.output
    for directory, rows in zip(directories, (5, 7), strict=True):
        assert f"sent {directory}: {rows} rows of run " in by_link.output
    assert [f"sent {path.relative_to(job)} as run {path.name[-1]}" in done.output for path in kept] == [True, True]
    assert "outputs has nothing that is not sent yet: looked at the 4 runs below it" in again.output
    assert (missing.returncode, missing.output) == (1, "cannot send: output is not a directory\n")


@needs_root
def test_what_is_left_out_below_a_directory_is_named(tmp_path, capsys, monkeypatch):
    (tmp_path / "theirs").mkdir()
    kept_run(tmp_path / "theirs" / "run", "trackio")
    (tmp_path / "link").symlink_to(tmp_path / "deep")
    (tmp_path / "\x1b[31m").mkdir()
    assert main([str(tmp_path / "\x1b[31m")]) == 0
    assert "\x1b" not in capsys.readouterr().out
    for path in (tmp_path / "theirs", tmp_path / "theirs" / "run", tmp_path / "link"):
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    assert main([str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert (
        f"{tmp_path} has no rows, and nothing to send. The local databases of MLflow and Trackio are not sent" in output
    )
    assert f"left out, as another user's or not to be read: {tmp_path / 'theirs'}" in output


def test_a_run_that_the_bare_client_may_still_write_is_not_sent_unless_it_is_named(tmp_path):
    """`wandb sync` marks its file as sent: what is logged later was lost."""
    (directory,) = offline_runs(tmp_path, 5)
    for journal in directory.glob("*.journal.*"):
        journal.unlink()
    (file,) = directory.glob("*.wandb")
    ends = [end for end, data in datastore.records_from(file, 0) if b"row" in data]
    file.write_bytes(file.read_bytes()[: ends[-1] + 10])  # without its end, and torn
    with WandbServer() as server:
        below = send(tmp_path, server.environment, "wandb", "another")  # its failure does not hide what is left out
        assert server.runs == []
        named = send(tmp_path, server.environment, directory)
        assert len(server.run("run-0").rows) == 5
    assert (below.returncode, named.returncode) == (1, 0), below.output + named.output
    assert "another is not a directory" in below.output
    assert f"wandb/{directory.name} has no end, and was written to just now: send it later, or name it" in below.output


@pytest.mark.full
def test_a_directory_with_a_file_that_cannot_be_read_is_not_called_sent(tmp_path):
    """All else of it is sent, and what other directories have."""
    first, second = (kept_run(tmp_path / name, "trackio", id=name) for name in ("first", "second"))
    (first / "0001-damaged.journal.txt").write_bytes(bytes(4096) + b"rows")
    done = send(tmp_path, {"TRACKIO_DIR": str(tmp_path)}, first, second)
    assert done.returncode == 1, done.output
    assert f"sent {second} as run second" in done.output
    assert f"sent {first}" not in done.output
    assert f"{first} was sent, but for what is in these files" in done.output
    assert [path.name for path in first.glob("*.journal.*")] == ["0001-damaged.journal.txt"]


def test_rows_that_the_service_rejects_are_not_called_sent(tmp_path):
    """Nor has a run without an end succeeded, whose process was killed."""
    directory = kept_run(tmp_path / "kept", "trackio", "x", "\ud800", "y", arguments={"project": "p"})
    done = send(tmp_path, {"TRACKIO_DIR": str(tmp_path)}, directory)
    assert done.returncode == 1, done.output
    assert "sent 2 rows again" in done.output
    assert f"{directory} was sent, but for 1 rows that the service rejects" in done.output
    assert [path.suffix for path in directory.glob("*.journal.*")] == [".bad"]
    with closing(sqlite3.connect(tmp_path / "p.db")) as database:
        ((config,),) = database.execute("SELECT config FROM configs").fetchall()
    assert json.loads(config)["tracking_init"]["status"] == "failed"


@pytest.mark.full
def test_a_run_whose_rows_do_not_arrive_is_not_called_sent(tmp_path, bare_environment, monkeypatch, capsys):
    (directory,) = offline_runs(tmp_path, 5)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sender, "_CONFIRMED_S", 2.0)
    with WandbServer(late=(1000.0, 0.0)) as server:  # which looks as a service that has dropped the rows
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        # Another test of this process may have set up the client for another server.
        monkeypatch.setattr(vendor.session().settings, "base_url", server.url)
        assert main([str(directory)]) == 1
    output, errors = capsys.readouterr()
    assert f"sent {directory}" not in output
    assert f"W&B has not confirmed {directory}: it counts 0 rows" in errors
    assert "should count 5. Keep the directory" in errors


def test_a_key_goes_to_no_server_that_only_the_data_names(tmp_path):
    """The directories of an online run: they name their server."""
    with WandbServer() as named, WandbServer() as own:
        done = jobs.run(
            [sys.executable, *jobs.train(rows=5, tracking={"id": "named", "project": "p"})], tmp_path, named.environment
        )
        assert done.returncode == 0, done.output
        (directory,) = (tmp_path / "wandb").glob("run-*")
        # As after a kill: without the end.
        journal = Journal(directory, "rows-x", {"place": [named.url, "", "p", "named"], "step": 0, "is_shared": False})
        journal.add(b"")
        journal.acknowledge(1)
        journal.close()
        with named.failing(Fault.status(500)) as fault:
            done = send(tmp_path, own.environment, directory)
        assert (done.returncode, fault.hits) == (1, 0)
        assert f"{directory} is of the server {named.url}, for which this process is not set up" in done.output
        assert f"If the server is right: export WANDB_BASE_URL={named.url}\n" in done.output
        told = send(tmp_path, named.environment, directory)
        assert told.returncode == 0, told.output


@pytest.mark.parametrize(
    "how", ["send", *(pytest.param(how, marks=pytest.mark.full) for how in ("watch", "next attempt"))]
)
def test_only_the_server_that_is_set_up_here_is_asked_and_gets_the_key(tmp_path, how):
    """A failing job with a saved file knows another server. Its directory is sent where this one is set up."""
    job = [sys.executable, jobs.PROGRAMS / "uploads.py", json.dumps({"files": ["save"], "ends": "later"})]
    with WandbServer() as of_job, WandbServer() as own:
        offline = jobs.start(job, tmp_path, {**of_job.environment, "WANDB_MODE": "offline"})
        wait_until(lambda: list(tmp_path.rglob("*.journal.*")), offline)
        options = ["--watch", "--until-done", "--interval", "0.2"] if how == "watch" else []
        sending = [sys.executable, "-m", "flyteplugins_tracking", "send", *options, str(tmp_path / "wandb")]
        if how == "watch":
            watcher = jobs.start(sending, tmp_path, own.environment)
            own.wait_for(lambda: own.run("r").rows, 60)
        (tmp_path / "end").touch()
        jobs.finish(offline, tmp_path)
        if how == "next attempt":
            jobs.run(job, tmp_path, own.environment)
        done = jobs.finish(watcher, tmp_path) if how == "watch" else jobs.run(sending, tmp_path, own.environment)
        assert of_job.headers == []
        assert (done.returncode, "saved.txt" in own.run("r").files) == (0, True), done.output
        assert own.run("r").state == "failed"


def kept_run(directory: Path, tracker: str, *keys: str, **changes: object) -> Path:
    """The directory of a run that was logged to files: a row for each key. Its header has these values too."""
    header = {"tracker": tracker, "id": "kept", "group": None, "primary": True, "attempt": 0, "run_metadata": {}}
    journal = Journal(directory, f"0000-1-0-rank-0-{directory.name}", {**header, "arguments": {}, **changes})
    for step, key in enumerate(keys or ["x"]):
        journal.add(encode({"row": {key: 1}, "step": step, "time": 1.0}))
    journal.close()
    return directory


OWN = "http://127.0.0.1:9"


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("tracker", "arguments", "variable"),
    [
        ("mlflow", {"tracking_uri": "http://example.com"}, "MLFLOW_TRACKING_URI=http://example.com"),
        # Requests would go to example.com.
        ("mlflow", {"tracking_uri": f"http://example.com\\@{OWN[7:]}"}, "MLFLOW_TRACKING_URI="),
        ("mlflow", {"tracking_uri": f"http://me@{OWN[7:]}"}, f"MLFLOW_TRACKING_URI={OWN}"),
        ("mlflow", {"tracking_uri": "sqlite:////tmp/other.db"}, "MLFLOW_TRACKING_URI=sqlite:////tmp/other.db"),
        ("pluto", {"settings": {"url_api": "http://example.com"}}, "PLUTO_URL_API=http://example.com"),
        ("pluto", {"settings": {"host": "example.com"}}, "PLUTO_URL_APP=http://example.com:3000"),
        ("trackio", {"server_url": "http://example.com/a b"}, "TRACKIO_SERVER_URL='http://example.com/a b'"),
        ("trackio", {"server_url": OWN}, f"TRACKIO_SERVER_URL={OWN}"),  # the server of another tracker
    ],
)
def test_a_server_that_only_the_data_names_is_refused_wherever_it_is_named(
    tmp_path, bare_environment, monkeypatch, capsys, tracker, arguments, variable
):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", OWN)
    directory = kept_run(tmp_path / "kept", tracker, arguments=arguments)
    assert main([str(directory)]) == 1
    assert f"it gets no key of this process. If the server is right: export {variable}" in capsys.readouterr().err
    assert [path.suffix for path in directory.iterdir()] == [".txt"]  # nothing was begun


def test_the_rows_of_a_job_that_had_a_server_do_not_go_to_a_local_database(
    tmp_path, bare_environment, monkeypatch, capsys
):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:secret@127.0.0.1:9")
    monkeypatch.setenv("WANDB_BASE_URL", "http://example.com")
    servers = servers_of("mlflow")
    assert servers == {"MLFLOW_TRACKING_URI": OWN}
    directory = kept_run(tmp_path / "kept", "mlflow", servers=servers)
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    assert main([str(directory)]) == 1
    assert f"If the server is right: export MLFLOW_TRACKING_URI={OWN}" in capsys.readouterr().err


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        ({"tracking_uri": "http://h/a b"}, "MLFLOW_TRACKING_URI='http://h/a b' flyteplugins-tracking send x"),
        (
            {"settings": {"host": "h"}},
            "PLUTO_URL_APP=http://h:3000 PLUTO_URL_API=http://h:3001 PLUTO_URL_INGEST=http://h:3003 "
            "PLUTO_URL_PY=http://h:3004 flyteplugins-tracking send x",
        ),
        ({"settings": {"dir": "d"}, "link_host": "http://h"}, "flyteplugins-tracking send x"),
    ],
)
def test_the_command_sets_the_variables_of_the_servers_that_arguments_name(arguments, command):
    assert how_to_send("x", arguments) == command


@pytest.mark.sampled(1)
@pytest.mark.parametrize("changes", [{"id": "../../x"}, {"id": 5}, {"arguments": []}, {"run_metadata": None}])
def test_a_header_that_names_no_run_is_refused_in_words(tmp_path, capsys, changes):
    assert main([str(kept_run(tmp_path / "kept", "trackio", **changes))]) == 1
    assert "cannot send: " in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_a_run_that_another_node_has_just_written_is_not_sent_though_no_lock_is_seen(tmp_path, capsys):
    directory = kept_run(tmp_path / "kept", "trackio", host="another-node")
    assert main([str(directory)]) == 1
    assert f"a process is writing to {directory}, or was just now" in capsys.readouterr().err
    (journal,) = stored(directory)
    os.utime(journal.path, (0, 0))
    assert main([str(directory)]) == 0


@pytest.mark.full
def test_a_module_in_the_working_directory_is_not_run(tmp_path):
    """`python -m` would find it first, and the directory of W&B's files has the name of a module."""
    (run,) = offline_runs(tmp_path, 3)
    (tmp_path / "wandb" / "__init__.py").write_text(f"open({str(tmp_path / 'was_run')!r}, 'w').close()")
    command = [sys.executable, "-m", "flyteplugins_tracking", "send", str(run)]
    env = jobs.environment(tmp_path, PYTHONPATH=str(jobs.PACKAGE.parent), WANDB_BASE_URL="http://127.0.0.1:9")
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 1, done
    assert not (tmp_path / "was_run").exists(), done.stderr


WITHOUT_CLIENT = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == "wandb" else find(name, *more)
from flyteplugins_tracking.__main__ import main
sys.exit(main())
"""


def test_a_machine_without_the_client_is_told_what_to_install(tmp_path):
    run = tmp_path / "wandb" / "offline-run-20260101_000000-r"
    run.mkdir(parents=True)
    (run / "run-r.wandb").touch()
    done = jobs.run([sys.executable, "-c", WITHOUT_CLIENT, "send", tmp_path], tmp_path)
    assert (done.returncode, done.output) == (1, 'cannot send: pip install "flyteplugins-tracking[wandb]"\n')

"""`send --watch` in this process: which directories it looks at, and what it does with those that it cannot send."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.waiting import wait_until

from flyteplugins_tracking._commands import send
from flyteplugins_tracking._commands.watch import WatchedRun, Watcher
from flyteplugins_tracking.trackers.journal import Journal
from flyteplugins_tracking.trackers.wandb import attempts, vendor

COMMAND = [sys.executable, "-m", "flyteplugins_tracking", "send", "--watch", "--until-done", "--interval", "0.2"]


@pytest.fixture
def sent(monkeypatch) -> list[Path]:
    """The directories that were sent. No W&B is asked."""
    sent: list[Path] = []

    def send_all(run: WatchedRun) -> str:
        if run.is_written:
            return ""
        for path in run.directories:
            attempts.mark_synced(path)
        sent.extend(run.directories)
        return "is sent"

    monkeypatch.setattr(WatchedRun, "_send", send_all)
    monkeypatch.setattr(vendor, "session", lambda: SimpleNamespace(settings=SimpleNamespace(base_url="https://own")))
    monkeypatch.setattr(vendor, "has_credentials", lambda _: True)
    return sent


def wandb_run(directory: Path, run_id: str) -> Path:
    """What W&B's client has written when it opens a run."""
    made = directory / f"offline-run-20260101_000000-{run_id}"
    made.mkdir(parents=True)
    (made / f"run-{run_id}.wandb").write_bytes(b":W&B\x00\xe1\x00")
    return made


def kept_run(directory: Path) -> Path:
    """A run of another tracker."""
    journal = Journal(directory / "trackio-a", "a", {"tracker": "trackio"})
    journal.add(b"{}")
    journal.close()
    return journal.directory


@pytest.fixture
def watcher(tmp_path):
    return Watcher([tmp_path], killed_s=0.05)


def look(watcher: Watcher, times: int = 1) -> None:
    for _ in range(times):
        watcher.look()
        for run in watcher.runs.values():
            run.doing.result(60)


def look_until_done(watcher: Watcher) -> None:
    wait_until(lambda: look(watcher) or watcher.is_done)


def test_a_run_of_another_tracker_is_told_once_and_is_left_to_send(tmp_path, sent, watcher, capsys):
    of_wandb, kept = wandb_run(tmp_path / "a b", "x"), kept_run(tmp_path / "a b")
    look_until_done(watcher)
    look(watcher)
    assert sent == [of_wandb]
    assert not watcher.is_all_sent
    output = capsys.readouterr().out
    text = "runs of MLflow, Pluto and Trackio are not watched. Send them when the attempt has ended"
    assert output.count(f"{text}, for instance from cron: flyteplugins-tracking send '{kept}'\n") == 1
    (left,) = kept.iterdir()
    left.unlink()
    look(watcher)
    assert watcher.is_all_sent


def test_a_run_of_another_tracker_is_sent_while_its_directory_is_watched(tmp_path, watcher, monkeypatch, capsys):
    kept, sent = kept_run(tmp_path), list[Path]()
    monkeypatch.setattr(send, "send_directory", lambda path: sent.append(path) or "sent")
    assert send.main([str(kept)]) == 0
    assert sent == [kept]


def test_what_is_wrong_is_not_done(tmp_path, sent, watcher, monkeypatch):
    wandb_run(tmp_path, "x")
    monkeypatch.setattr(WatchedRun, "_send", lambda run: 1 / 0)
    look(watcher, 2)
    assert not watcher.is_done
    assert not watcher.is_all_sent


def test_a_disk_that_does_not_answer_for_a_moment_ends_no_run(tmp_path, sent, watcher, capsys, monkeypatch):
    runs = [wandb_run(tmp_path / name, name) for name in "ab"]
    look(watcher)
    scandir = os.scandir
    failing: list[str] = []

    def fails(path: Any = ".") -> Any:
        if str(path) in failing:
            raise OSError(errno.EIO, "Input/output error", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", fails)
    for path in (tmp_path / "a", tmp_path):
        failing[:] = [str(path)]
        look(watcher, 2)
        assert not watcher.is_done
        assert len(watcher.runs) == len(runs)
        assert capsys.readouterr().out.count(f" {path} cannot be looked at now: OSError: [Errno 5]") == 1
    assert send.main([str(tmp_path)]) == 1
    assert "cannot be looked at now" in capsys.readouterr().err
    failing.clear()
    look_until_done(watcher)
    look(watcher)
    assert sorted(sent) == runs
    assert watcher.is_all_sent


def test_it_ends_with_an_error_if_only_runs_of_other_trackers_are_left_also_if_nobody_reads(tmp_path):
    """The directory is given twice. Its name has a letter that the output's encoding lacks."""
    tmp_path /= "\N{CYRILLIC SMALL LETTER YA}"
    kept = kept_run(tmp_path)
    command = [*COMMAND, str(tmp_path), f"{kept}/.."]
    env = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1, done
    assert done.stdout.count("are not watched") == 1
    assert "is sent" not in done.stdout
    reader, writer = os.pipe()
    os.close(reader)
    assert subprocess.run(command, stdout=writer, stderr=subprocess.DEVNULL, timeout=60, check=False).returncode
    os.close(writer)
    closed = ["sh", "-c", 'exec "$@" >&-', "sh", *command]
    done = subprocess.run(closed, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr


def test_nobody_watches_what_is_above_or_below_what_another_process_watches(tmp_path, sent, capsys):
    run = wandb_run(tmp_path / "below", "x")
    code = (
        "import sys; from flyteplugins_tracking._commands.directories import *; "
        "lock = hold(Path(sys.argv[1])); print('held', flush=True); input()"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "below")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        watcher = Watcher([tmp_path], killed_s=0.05)
        look(watcher)
        assert "is watched already: host" in capsys.readouterr().out
        assert send.main([str(run)]) == 1
        assert "is watched already: host" in capsys.readouterr().err
        other.communicate("\n")
    look_until_done(watcher)
    assert sent == [run]


def test_runs_that_are_opened_at_once_use_the_server_that_is_set_up(tmp_path, monkeypatch):
    """W&B's client has its own server in its settings until it has read the variables."""

    class Session:
        loaded: Any = None

        @property
        def settings(self) -> Any:
            if self.loaded is None:
                self.loaded = SimpleNamespace(base_url="https://api.wandb.ai")
                time.sleep(0.2)
                self.loaded.base_url = "https://own"
            return self.loaded

    session, servers = Session(), list[str]()
    monkeypatch.setattr(vendor, "session", lambda: session)
    monkeypatch.setattr(vendor, "has_credentials", lambda server: servers.append(server) or True)
    run = WatchedRun("run", [])
    run.directories = [tmp_path]
    with ThreadPoolExecutor() as pool:
        for _ in range(2):
            pool.submit(run.require_usable)
    assert servers == ["https://own", "https://own"]


def test_a_run_that_has_only_a_damaged_file_left_is_refused(tmp_path, watcher, monkeypatch):
    """It was neither sent nor refused, and `--until-done` did not end."""
    session = SimpleNamespace(settings=SimpleNamespace(base_url="https://own"), _connection=None)
    monkeypatch.setattr(vendor, "session", lambda: session)
    monkeypatch.setattr(vendor, "has_credentials", lambda _: True)
    directory = wandb_run(tmp_path, "x")
    attempts.mark_synced(directory)
    (directory / "rows.journal.txt").write_bytes(b"damaged")
    look_until_done(watcher)
    (run,) = watcher.runs.values()
    assert "which are damaged or not yours alone: rows.journal.txt" in run.error

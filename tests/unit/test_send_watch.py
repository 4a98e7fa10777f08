"""`send --watch` in this process: what it does with journals that other processes write, take away and damage."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.waiting import wait_until

from flyteplugins_tracking._commands import directories, send
from flyteplugins_tracking._commands import watch as watching
from flyteplugins_tracking._commands.watch import Watcher
from flyteplugins_tracking.errors import TrackerUnavailableError
from flyteplugins_tracking.trackers import outbox as outboxes
from flyteplugins_tracking.trackers.base import Handle, RunRequest, Tracker
from flyteplugins_tracking.trackers.client import ClientHandle
from flyteplugins_tracking.trackers.journal import Journal, Line, Sent, stored
from flyteplugins_tracking.trackers.kept import OutboxHandle
from flyteplugins_tracking.trackers.outbox import AwayError, RejectedError
from flyteplugins_tracking.trackers.wandb import vendor

# A process that keeps rows in a journal: on each line of its input, how many.
WRITER = """
import json, sys
from pathlib import Path
from flyteplugins_tracking.trackers.journal import Journal, encode
directory, name, header, first = sys.argv[1:]
journal, count = Journal(Path(directory), name, json.loads(header)), int(first)
for text in sys.stdin:
    if text == "end\\n":
        journal.add(encode({"exit_code": 0}))
        break
    for _ in range(int(text)):
        journal.add(encode({"row": {"n": count}, "step": None, "time": 1.0 + count}))
        count += 1
    print(flush=True)
"""
HEADER = {
    **{"tracker": "kept", "id": "train", "group": None, "primary": True, "attempt": 0, "is_kept": True},
    **{"arguments": {"project": "p"}, "run_metadata": {}},
}


class Service(Tracker):
    """A service that has one of equal rows, and the steps and the end of a run."""

    name, title = "kept", "Kept"

    def __init__(self) -> None:
        self.rows: list[tuple[int, int]] = []  # the numbers and steps of rows, as often as they came
        self.ends: list[int] = []
        self.opened = 0
        self.is_away = threading.Event()
        self.rejects: Any = lambda line: False

    def open(self, request: RunRequest) -> Handle:
        self.opened += 1
        return _Handle(request, self, self)

    def send(self, lines: Sequence[Line], timeout_s: float | None) -> None:
        if self.is_away.is_set():
            raise AwayError("it is away")
        if any(map(self.rejects, lines)):
            raise RejectedError("it is not right")
        self.rows += [(line["row"]["n"], self.steps.take(line["step"])) for line in lines if "row" in line]

    @property
    def numbers(self) -> list[int]:
        return [number for number, _ in self.rows]


class _Handle(OutboxHandle):
    def __init__(self, request: RunRequest, tracker: Tracker, service: Service) -> None:
        super().__init__(request, tracker, service)
        self.service, self.run = service, None

    def stored_step(self) -> int:
        self._tracker.steps = self.steps  # of the sink
        return max((step for _, step in self._tracker.rows), default=-1)

    def end_run(self, exit_code: int, timeout_s: float) -> None:
        if self.service.is_away.is_set():
            raise AwayError("it is away")
        if self.ends_run:
            self.service.ends.append(exit_code)


class Writer:
    def __init__(self, directory: Path, name: str, first: int, **header: Any) -> None:
        arguments = [str(directory), name, json.dumps({**HEADER, **header}), str(first)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen([sys.executable, "-c", WRITER, *arguments], text=True, **pipes)

    def log(self, count: int) -> None:
        self.process.stdin.write(f"{count}\n")
        self.process.stdin.flush()
        self.process.stdout.readline()

    def end(self) -> None:
        self.process.communicate("end\n")

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def service(monkeypatch):
    monkeypatch.setattr(outboxes, "_WAIT_S", 0.01)
    for name in ("_SHORTEST_PAUSE_S", "_LONGEST_PAUSE_S", "_LAST_PAUSE_S"):
        monkeypatch.setattr(outboxes, name, 0.01)
    made = Service()
    monkeypatch.setattr(send, "find_tracker", lambda _: made)
    return made


@contextmanager
def writer(directory: Path, name: str = "a", first: int = 0, **header: Any) -> Iterator[Writer]:
    made = Writer(directory / "run", name, first, **header)
    try:
        yield made
    finally:
        made.kill()


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


def test_an_attempt_that_still_writes_is_not_ended_when_a_later_one_begins(tmp_path, service, watcher):
    with writer(tmp_path, "a") as first, writer(tmp_path, "b", 100) as second:
        first.log(3)
        look(watcher)
        second.log(2)
        look(watcher, 2)
        first.log(2)
        look(watcher)
        first.kill()
        look(watcher, 2)
        assert service.numbers == [0, 1, 2, 3, 4, 100, 101]
        assert service.ends == []
        second.kill()
        look_until_done(watcher)
    assert service.numbers == [0, 1, 2, 3, 4, 100, 101]
    assert [step for _, step in service.rows] == [*range(7)]
    assert service.ends == [1]
    look(watcher)
    assert watcher.is_all_sent


def test_rows_that_were_on_their_way_get_the_same_steps_when_all_ranks_have_logged_more(tmp_path, service, watcher):
    """The watcher was killed between one rank's rows and their note: the other's rows must not take their steps."""
    with writer(tmp_path, "a") as first, writer(tmp_path, "b", 100, primary=False) as second:
        first.log(2)
        second.log(2)
        look(watcher)
        arrived = dict(service.rows)
        (_, of_second) = stored(tmp_path / "run")
        of_second.note(Sent(0, 1, is_sending=True))
        first.log(2)
        watcher.release()
        look(Watcher([tmp_path], killed_s=60))
        assert {number: step for number, step in service.rows if number in arrived} == arrived
        assert len({step for _, step in set(service.rows)}) == len(set(service.rows)) == 6


def test_send_ends_a_run_whose_rows_a_killed_watcher_has_sent(tmp_path, service, watcher):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / directories.SENT).touch()  # of an earlier attempt
    with writer(tmp_path) as only:
        only.log(2)
        look(watcher)
    send.send_directory(tmp_path / "run")
    assert service.numbers == [0, 1]
    assert service.ends == [1]
    assert stored(tmp_path / "run") == []


def test_the_rows_of_attempts_that_are_sent_together_have_steps_of_their_own(tmp_path, service):
    for number, name in enumerate("abc"):
        with writer(tmp_path, name, 10 * number) as one:
            one.log(2)
    send.send_directory(tmp_path / "run")
    assert service.rows == [(0, 0), (1, 1), (10, 2), (11, 3), (20, 4), (21, 5)]


def test_an_attempt_that_has_the_service_is_left_to_itself_until_it_is_killed(tmp_path, service, watcher):
    with writer(tmp_path, is_kept=False) as only:
        only.log(2)
        look(watcher, 3)
        assert service.opened == 0
    look_until_done(watcher)
    assert service.numbers == [0, 1]
    assert service.ends == [1]


def test_an_end_that_the_service_has_not_taken_is_sent_later_from_a_relative_path(tmp_path, service, monkeypatch):
    monkeypatch.chdir(tmp_path)
    watcher = Watcher([Path()], killed_s=0.05)
    taking = _Handle.end_run
    with writer(tmp_path) as only:
        only.log(2)
        look(watcher)
    monkeypatch.setattr(_Handle, "end_run", lambda *_: 1 / 0)
    time.sleep(0.1)
    look(watcher, 2)
    assert stored(tmp_path / "run")
    monkeypatch.setattr(_Handle, "end_run", taking)
    look_until_done(watcher)
    assert service.ends == [1]
    assert set(service.numbers) == {0, 1}


@pytest.mark.parametrize("sender", ["watcher", "watcher at the second try", "another watcher", "send", "attempt"])
def test_rows_that_the_service_rejects_are_told_and_kept_whoever_ends_the_run(
    tmp_path, service, watcher, capsys, caplog, monkeypatch, sender
):
    """Also if the one that they were rejected for was killed."""
    service.rejects = lambda line: line.get("row") == {"n": 1}
    with writer(tmp_path) as only:
        only.log(3)
        look(watcher)
        only.log(1)
        look(watcher)
        only.end()
    path, bad = tmp_path / "run" / "a.journal.txt", ", but for 1 rows that the service rejects: the files are kept"
    if sender == "send":
        with pytest.raises(TrackerUnavailableError, match=f"was sent{bad}"):
            send.send_directory(tmp_path / "run")
    elif sender == "attempt":
        outbox = outboxes.Outbox("Kept", "train", Journal.closed(), service, stored(tmp_path / "run"))
        wait_until(lambda: f"from {path.parent}{bad}" in caplog.text)
        assert outbox.rejected_rows == 1
    else:
        if sender == "watcher at the second try":
            with monkeypatch.context() as patch:
                patch.setattr(_Handle, "end_run", lambda *_: 1 / 0)
                time.sleep(0.1)
                look(watcher, 2)
        if sender == "another watcher":
            watcher.release()
            watcher = Watcher([tmp_path], killed_s=0.05)
        look_until_done(watcher)
        look(watcher)
        assert not watcher.is_all_sent
        assert f"has ended with exit code 0, and is sent{bad}" in capsys.readouterr().out
    assert service.numbers == [0, 2, 3]
    assert [one.name for one in path.parent.glob("*.bad")] == ["a.journal.txt.bad"]


def test_a_run_of_a_tracker_without_an_outbox_is_sent_when_it_has_ended(tmp_path, service, watcher, monkeypatch):
    class Plain(ClientHandle):
        write = lambda self, row, step, **_: service.rows.append((row["n"], -1))  # noqa: E731
        end = lambda self, exit_code: service.ends.append(exit_code)  # noqa: E731

    monkeypatch.setattr(service, "open", lambda request: Plain(request, "Plain"))
    with writer(tmp_path) as only:
        only.log(2)
        look(watcher, 3)
        assert service.numbers == []
    look_until_done(watcher)
    assert service.numbers == [0, 1]
    assert service.ends == [1]


def test_rows_of_a_run_that_had_ended_before_are_noted_too_before_they_are_sent(
    tmp_path, service, watcher, monkeypatch
):
    with writer(tmp_path) as only:
        only.log(3)
        only.end()
    sends, noted = service.send, list[Sent]()

    def send_noted(lines: Sequence[Line], timeout_s: float | None) -> None:
        noted.extend(one.sent() for one in stored(tmp_path / "run") if any("row" in line for line in lines))
        sends(lines, timeout_s)

    monkeypatch.setattr(service, "send", send_noted)
    look_until_done(watcher)
    assert noted == [Sent(0, -1, is_sending=True)]
    assert service.rows == [(0, 0), (1, 1), (2, 2)]
    assert service.ends == [0]


def test_rows_of_an_outage_arrive_once_also_when_the_job_ends_in_it(tmp_path, service, watcher):
    with writer(tmp_path) as only:
        only.log(2)
        look(watcher)
        service.is_away.set()
        only.log(2)
        watcher.look()
        only.log(2)
    time.sleep(0.1)
    watcher.look()
    assert not watcher.is_done
    service.is_away.clear()
    look_until_done(watcher)
    assert service.numbers == [*range(6)]
    assert service.ends == [1]


def test_directories_that_are_too_deep_are_told_and_are_not_all_sent(tmp_path, service, watcher, capsys):
    (tmp_path / "/".join("abcdefghijkl")).mkdir(parents=True)
    look(watcher, 2)
    assert watcher.is_done
    assert not watcher.is_all_sent
    output = capsys.readouterr().out
    assert output.count("too deep") == 1
    assert output.count("has no rows, and nothing to send") == 1


def test_what_is_away_or_wrong_is_not_done(tmp_path, service, watcher, capsys):
    with writer(tmp_path) as only:
        only.log(1)
        look(watcher)
        tmp_path.rename(tmp_path.with_name("away"))
        look(watcher, 2)
        assert not watcher.is_done
        assert capsys.readouterr().out.count("is not there") == 1
        tmp_path.with_name("away").rename(tmp_path)
        only.log(1)
        look(watcher)
        assert service.numbers == [0, 1]
    (tmp_path / "run" / "b.journal.txt").write_bytes(b"\n00000000 header {}\n")
    look_until_done(watcher)
    assert list(watcher.runs)


def test_a_disk_that_does_not_answer_for_a_moment_ends_no_run(tmp_path, service, watcher, capsys, monkeypatch):
    with writer(tmp_path) as only, writer(tmp_path / "other") as other:
        for one in (only, other):
            one.log(1)
        look(watcher)
        scandir = os.scandir

        failing: list[str] = []

        def fails(path: Any = ".") -> Any:
            if str(path) in failing:
                raise OSError(errno.EIO, "Input/output error", str(path))
            return scandir(path)

        monkeypatch.setattr(os, "scandir", fails)
        for path in (tmp_path / "run", tmp_path):
            failing[:] = [str(path)]
            other.log(1)
            look(watcher, 2)
            assert not watcher.is_done
        assert capsys.readouterr().out.count("cannot be looked at now: OSError: [Errno 5]") == 2
        assert send.main([str(tmp_path)]) == 1
        assert "cannot be looked at now" in capsys.readouterr().err
        failing.clear()
        only.log(1)
        look(watcher)
    look_until_done(watcher)
    assert sorted(service.numbers) == [0, 0, 1, 1, 2]
    assert service.opened == 2
    assert service.ends == [1, 1]
    assert watcher.is_all_sent


def test_what_is_refused_is_not_said_to_be_sent_and_ends_until_done_also_if_nobody_reads(tmp_path):
    """The directory is given twice. Its name has a letter that the output's encoding lacks."""
    tmp_path /= "\N{CYRILLIC SMALL LETTER YA}"
    (tmp_path / "run").mkdir(parents=True)
    (tmp_path / "run" / "a.journal.txt").write_bytes(b"\n00000000 header {}\n")
    command = [sys.executable, "-m", "flyteplugins_tracking", "send", "--watch", "--until-done"]
    command += ["--interval", "0.5", "--killed-after", "0.1", str(tmp_path), f"{tmp_path}/run/.."]
    env = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1, done
    assert "has nothing of a run" in done.stdout
    assert "is sent" not in done.stdout
    reader, writer = os.pipe()
    os.close(reader)
    assert subprocess.run(command, stdout=writer, stderr=subprocess.DEVNULL, timeout=60, check=False).returncode
    os.close(writer)
    closed = ["sh", "-c", 'exec "$@" >&-', "sh", *command]
    done = subprocess.run(closed, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("is_removed", [False, True])
def test_a_journal_that_its_owner_removes_or_cuts_off_costs_no_other_row(
    tmp_path, service, watcher, capsys, is_removed
):
    path = tmp_path / "run" / "a.journal.txt"
    with writer(tmp_path) as only:
        only.log(50)
        look(watcher)
        if is_removed:
            path.unlink()
        else:
            os.truncate(path, 300)
            only.log(2)
        look(watcher)
    look_until_done(watcher)
    assert service.numbers == [*range(50 if is_removed else 52)]
    assert "not sent" not in capsys.readouterr().out


@pytest.mark.parametrize("damage", ["garbage", "torn", "link", "another user's", "huge"])
def test_a_note_that_is_none_costs_no_row(tmp_path, service, watcher, damage):
    with writer(tmp_path) as only:
        only.log(3)
        look(watcher)
        (left,) = stored(tmp_path / "run")
        note, whole = left._note, left._note.read_bytes()
        if damage == "link":
            note.unlink()
            note.symlink_to("/etc/passwd")
        elif damage == "another user's":
            if os.geteuid():
                pytest.skip("needs root")
            os.chown(note, 65534, 65534)
        else:
            note.write_bytes({"garbage": b"\xff{", "torn": whole[:-4], "huge": b'{"acknowledged": 1e999}'}[damage])
        only.log(2)
        watcher.release()
        look(Watcher([tmp_path], killed_s=60))
    assert set(service.numbers) == {0, 1, 2, 3, 4}


def test_nobody_watches_what_is_above_or_below_what_another_process_watches(tmp_path, service, capsys):
    with writer(tmp_path / "below") as only:
        only.log(1)
        code = (
            "import sys; from flyteplugins_tracking._commands.directories import *; "
            "lock = hold(Path(sys.argv[1])); print('held', flush=True); input()"
        )
        command = [sys.executable, "-c", code, str(tmp_path / "below")]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
            assert other.stdout is not None
            assert other.stdout.readline() == "held\n"
            watcher = Watcher([tmp_path], killed_s=60)
            look(watcher)
            assert "is watched already: host" in capsys.readouterr().out
            assert send.main([str(tmp_path)]) == 1
            assert "is watched already: host" in capsys.readouterr().err
            assert service.numbers == []
            other.communicate("\n")
        look(watcher)
        assert service.numbers == [0]


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
    run = watching.WandbRun("run", [])
    run.directories = [tmp_path]
    with ThreadPoolExecutor() as pool:
        for _ in range(2):
            pool.submit(run.require_usable)
    assert servers == ["https://own", "https://own"]


def test_sigterm_ends_it_at_once_wherever_it_waits(tmp_path, service, capfd):
    """Also when a disk or a service does not answer, and when another thread prints."""
    child = os.fork()
    if not child:
        signal.signal(signal.SIGTERM, watching._end_process)
        watching._printing.lock.acquire()
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        time.sleep(600)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 128 + signal.SIGTERM
    assert "ended by SIGTERM" in capfd.readouterr().out

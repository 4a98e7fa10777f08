"""Locks between processes: who may take one, and when it is free again."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flyteplugins_tracking._util import lock
from flyteplugins_tracking._util.lock import RunLock
from flyteplugins_tracking.trackers.mlflow import vendor

LONG_S = 60.0


@pytest.fixture(autouse=True)
def directory(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"flyteplugins_tracking-{os.geteuid()}" / "locks"


@contextlib.contextmanager
def process(function: Callable[[], object]) -> Iterator[int]:
    """A forked child that has called `function`, and waits until it is killed."""
    is_done, done = os.pipe()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            function()
            os.write(done, b".")
            time.sleep(LONG_S)
        os._exit(1)
    os.close(done)
    try:
        assert os.read(is_done, 1) == b"."
        yield pid
    finally:
        os.close(is_done)
        kill(pid)


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def acquired(name: str = "a", timeout_s: float = 0) -> RunLock:
    held = RunLock.acquire(name, timeout_s)
    assert held is not None
    return held


def test_a_lock_has_one_holder_in_a_process_and_leaves_no_file(directory):
    held, started = acquired(), time.monotonic()
    assert RunLock.acquire("a", LONG_S) is None  # this process is not waited for
    assert time.monotonic() - started < LONG_S / 2
    acquired("b").release()
    assert len(list(directory.iterdir())) == 1
    held.release()
    held.release()
    acquired().release()
    assert list(directory.iterdir()) == []


def test_another_process_cannot_take_it_and_its_try_does_not_free_it():
    held = acquired()

    def tries() -> None:
        assert RunLock.acquire("a") is None
        held.release()  # the parent's
        assert RunLock.acquire("a") is None

    with process(tries), process(tries):
        held.release()
        acquired().release()


def test_the_lock_of_a_process_that_is_killed_is_free_though_what_it_has_started_lives_on():
    def hold() -> None:
        acquired()
        subprocess.Popen(["/bin/sleep", str(LONG_S)], close_fds=False)
        if os.fork() == 0:
            time.sleep(LONG_S)
            os._exit(0)

    with process(hold) as pid:
        assert RunLock.acquire("a") is None
        kill(pid)
        acquired(timeout_s=LONG_S / 2).release()  # the forked one gives it up when it first runs


def test_who_reads_the_file_of_a_lock_does_not_free_it(tmp_path):
    """A training that copies the directory of its checkpoints, with the file of `run_file=`, opens and closes it."""

    def hold() -> None:
        RunLock.of_file(tmp_path / "lock")
        assert (tmp_path / "lock").read_text()

    with process(hold):
        assert RunLock.of_file(tmp_path / "lock") is None
    lock = RunLock.of_file(tmp_path / "lock")
    assert lock is not None
    lock.release()


def test_a_lock_whose_directory_was_moved_leaves_the_one_that_took_its_place(tmp_path):
    (tmp_path / "ck").mkdir()
    first = RunLock.of_file(tmp_path / "ck" / "lock")
    (tmp_path / "ck").rename(tmp_path / "old")
    (tmp_path / "ck").mkdir()

    def hold() -> None:
        RunLock.of_file(tmp_path / "ck" / "lock")

    with process(hold):
        assert first is not None
        first.release()
        assert (tmp_path / "ck" / "lock").exists()


def test_a_holder_of_another_family_is_waited_for():
    """Not a child, an ancestor or a sibling: as an earlier attempt that is ending."""
    with process(lambda: None), process(acquired) as pid:
        threading.Timer(0.3, kill, (pid,)).start()
        started = time.monotonic()
        acquired(timeout_s=LONG_S).release()
        assert 0.1 < time.monotonic() - started < LONG_S


def test_processes_that_come_and_go_never_hold_it_together(tmp_path):
    """Each removes the file that another one may have just opened."""
    program = (
        "import sys, time; from pathlib import Path; from flyteplugins_tracking._util.lock import RunLock\n"
        "folder = Path(sys.argv[1])\n"
        "for _ in range(30):\n"
        "    while (lock := RunLock.of_file(folder / 'lock')) is None:\n"
        "        time.sleep(0.001)\n"
        "    (folder / 'inside').touch(exist_ok=False); (folder / 'inside').unlink()\n"
        "    lock.release()\n"
    )
    ends = [subprocess.Popen([sys.executable, "-c", program, str(tmp_path)]) for _ in range(3)]
    assert [end.wait(LONG_S) for end in ends] == [0, 0, 0]


def test_tables_that_another_process_makes_for_ever_are_waited_for_a_while(monkeypatch, tmp_path):
    monkeypatch.setattr(vendor, "_LONGEST_S", 0.3)
    made = vendor.alone_with(f"sqlite:///{tmp_path}/a.db", None)
    with process(lambda: acquired(f"mlflow-tables/{tmp_path}/a.db")), made:
        pass


def test_where_there_are_no_locks_or_no_directory_no_file_says_that_there_is_a_holder(monkeypatch, tmp_path):
    def refuse(_: int) -> None:
        raise OSError(errno.ENOLCK, "made to fail")

    monkeypatch.setattr(lock, "lock_file", refuse)
    with pytest.raises(OSError, match="made to fail"):
        RunLock.of_file(tmp_path / "a.lock")
    assert not (tmp_path / "a.lock").exists()

    def nowhere(*_: str) -> Path:
        raise OSError

    monkeypatch.setattr(lock, "private_directory", nowhere)
    acquired().release()

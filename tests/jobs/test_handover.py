"""The hand-over on a node, between real processes."""

from __future__ import annotations

import os
import re
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest
from support import jobs

from flyteplugins_tracking.trackers.peers.node import Guest, HandoverError, Host

PROGRAM = jobs.PROGRAMS / "handover_nodes.py"
PATIENCE_S = 120  # no test waits so long unless something hangs


@pytest.fixture(autouse=True)
def directory(monkeypatch, tmp_path_factory):
    """A TMPDIR whose paths a socket can have, which pytest's own are too long for."""
    tmp_path_factory.getbasetemp()  # which would be in there, else
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        monkeypatch.setenv("TMPDIR", path)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield Path(path) / f"flyteplugins-tracking-{os.geteuid()}"


def start_guest(name: str, rank: int = 1) -> subprocess.Popen[str]:
    """It does what is written to it: see `handover_nodes.py`."""
    command = [sys.executable, str(PROGRAM), "guest", name, str(rank)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.fixture
def name(request) -> str:
    """Each test's own: this process counts how often it has been host of one."""
    return str(request.node.name)


def line(guest: subprocess.Popen[str]) -> str:
    assert guest.stdout is not None
    return guest.stdout.readline().strip()


def tell(guest: subprocess.Popen[str], command: str) -> None:
    assert guest.stdin is not None
    guest.stdin.write(f"{command}\n")
    guest.stdin.flush()


def in_a_process(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A function of `handover_nodes.py`."""
    command = [sys.executable, str(PROGRAM), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def test_guests_wait_get_the_value_and_are_waited_for(name):
    guests = [start_guest(name, rank) for rank in (1, 2)]
    host = Host(name, ask=lambda _: None, expected=2)
    assert host.wait(PATIENCE_S, until=lambda: host.wait(0) == [1, 2]) == [1, 2]
    value = {"text": "x" * 1_000_000, "number": 1}
    host.offer(value)
    assert [line(guest) for guest in guests] == [f"value {value}"] * 2
    assert host.wait(0.2) == [1, 2]
    guests[0].communicate("leave\n", timeout=PATIENCE_S)
    assert host.wait(PATIENCE_S, until=lambda: host.wait(0) == [2]) == [2]
    guests[1].kill()
    assert host.wait(PATIENCE_S) == []
    host.close()


def test_guests_get_the_reason_of_a_host_that_refuses(name):
    host = Host(name, ask=lambda _: None)
    threading.Timer(0.3, host.refuse, ["no key"]).start()
    with pytest.raises(HandoverError, match="no key"):
        Guest.join(name, 1, time.monotonic() + PATIENCE_S, 10)
    host.close()


def test_a_host_that_does_not_come_is_not_waited_for_past_the_deadline(name):
    began = time.monotonic()
    with pytest.raises(HandoverError, match="it has not, or has ended already"):
        Guest.join(name, 1, began + 0.5, PATIENCE_S)
    assert 0.4 < time.monotonic() - began < 2 * jobs.TIME_SCALE


def test_a_pause_holds_until_the_value_is_offered_again(name):
    asked: list[str] = []

    def answer(question: str) -> None:
        asked.append(question)
        host.offer({"n": 2})

    host = Host(name, ask=answer)
    host.offer({"n": 1})
    guest = start_guest(name)
    assert line(guest) == "value {'n': 1}"
    host.pause()
    assert line(guest) == "paused"
    tell(guest, "ask why")
    assert line(guest) == "offered {'n': 2}"
    assert asked == ["why"]
    host.close()
    assert line(guest) == "gone"
    guest.communicate(timeout=PATIENCE_S)


def test_an_answer_that_waits_for_a_pause_does_not_hold_it_up(name, monkeypatch):
    monkeypatch.setattr("flyteplugins_tracking.trackers.peers.node._PAUSE_S", 240.0)
    asked, is_paused, answered = threading.Event(), threading.Event(), threading.Event()

    def answer(_: str) -> None:
        asked.set()
        is_paused.wait(PATIENCE_S)
        answered.set()

    host = Host(name, ask=answer)
    host.offer({})
    guest = start_guest(name)
    assert line(guest) == "value {}"
    tell(guest, "ask")
    assert asked.wait(PATIENCE_S)
    host.pause()
    assert not answered.is_set()
    is_paused.set()
    assert line(guest) == "paused"
    host.close()
    guest.communicate(timeout=PATIENCE_S)


def test_a_stopped_guest_does_not_hold_up_a_pause(name):
    host = Host(name, ask=lambda _: None)
    host.offer({})
    guest = start_guest(name)
    assert line(guest) == "value {}"
    guest.send_signal(signal.SIGSTOP)
    while Path(f"/proc/{guest.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.01)
    began = time.monotonic()
    host.pause()
    assert 0.5 < time.monotonic() - began < 2 * jobs.TIME_SCALE
    guest.kill()
    guest.communicate()
    host.close()


def test_what_a_dead_job_has_left_is_replaced(name, directory):
    left = in_a_process("dies", name, "another")
    assert left.returncode == 0, left.stderr
    assert len(list(directory.iterdir())) == 2
    guest = start_guest(name)
    host = Host(name, ask=lambda _: None)
    host.offer({"n": 1})
    assert line(guest) == "value {'n': 1}"
    assert len(list(directory.iterdir())) == 1
    guest.communicate("leave\n", timeout=PATIENCE_S)
    host.close()
    assert list(directory.iterdir()) == []


def test_a_forked_child_keeps_nothing_open(name):
    """The host is killed, and its DataLoader's worker lives on."""
    command = [sys.executable, str(PROGRAM), "forks", name]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    worker = int(line(child))
    guest = start_guest(name)
    assert line(guest) == "value {}"
    tell(child, "")
    assert line(guest) == "gone"
    assert psutil.Process(worker).status() != psutil.STATUS_ZOMBIE
    os.kill(worker, signal.SIGKILL)
    child.communicate(timeout=PATIENCE_S)
    guest.communicate(timeout=PATIENCE_S)


def test_the_directory_is_this_users_alone(name, directory):
    host = Host(name, ask=lambda _: None)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    host.close()
    directory.chmod(0o755)
    with pytest.raises(HandoverError, match=re.escape(f"{directory} is not a directory of this user's")):
        Host(name, ask=lambda _: None)
    directory.rmdir()
    directory.symlink_to("/")
    with pytest.raises(HandoverError, match="Remove it, or set TMPDIR"):
        Guest.join(name, 1, time.monotonic() + 1, 1)


def test_a_tmpdir_that_is_too_long_for_a_socket(name, monkeypatch, tmp_path):
    long = tmp_path / ("x" * 80)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    host = Host(name, ask=lambda _: None)
    host.offer({"n": 1})
    assert Guest.join(name, 1, time.monotonic() + PATIENCE_S, 10).value == {"n": 1}
    host.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_not_served(name, directory):
    """Even where the directory were open."""
    host = Host(name, ask=lambda _: None)
    host.offer({"secret": 1})
    (path,) = directory.iterdir()
    for opened in (directory.parent, directory, path):
        opened.chmod(0o777)
    done = in_a_process("another_user", str(path))
    assert done.stdout.strip() == "b''", done.stderr
    host.close()


@pytest.mark.parametrize("sent", [b"\x80\x04N.\n", b"[1]\n", b'{"rank": []}\n', b'{"rank": 1}\n{"rank"', b""])
def test_a_guest_that_sends_no_valid_message_is_dropped(name, directory, sent):
    host = Host(name, ask=lambda _: None)
    (path,) = directory.iterdir()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        connection.sendall(sent)
    host.offer({"n": 1})
    guest = Guest.join(name, 2, time.monotonic() + PATIENCE_S, 10)
    assert guest.value == {"n": 1}
    assert host.wait(PATIENCE_S, until=lambda: host.wait(0) == [2]) == [2]
    guest.leave()
    assert host.wait(PATIENCE_S) == []
    host.close()


def test_a_guest_does_not_meet_the_host_of_the_training_before(name):
    """A guest that is ahead does not meet the host of the training before."""
    first = Host(name, ask=lambda _: None)
    first.offer({"n": 1})
    guest = start_guest(name)
    assert line(guest) == "value {'n': 1}"
    tell(guest, "leave\njoin")
    assert line(guest) == "gone"
    assert first.wait(PATIENCE_S) == []  # it is there again and again, and is not taken for one that has come
    first.close()
    second = Host(name, ask=lambda _: None)
    second.offer({"n": 2})
    assert line(guest) == "{'n': 2}"
    guest.kill()
    guest.communicate()
    second.close()

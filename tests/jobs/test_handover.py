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
import textwrap
import threading
import time
from pathlib import Path

import pytest

from flyteplugins_tracking.trackers.peers.node import Guest, HandoverError, Host

GUEST = """
    import sys, time
    from flyteplugins_tracking.trackers.peers.node import Guest

    guest = Guest.join({name!r}, int(sys.argv[1]), time.monotonic() + 20, 20)
    guest.listen(offered=lambda value: print("offered", value, flush=True),
                 paused=lambda: print("paused", flush=True), gone=lambda: print("gone", flush=True))
    print("value", guest.value, flush=True)
    for line in sys.stdin:
        exec(line)
"""


@pytest.fixture(autouse=True)
def directory(monkeypatch, tmp_path_factory):
    """A TMPDIR whose paths a socket can have, which pytest's own are too long for."""
    tmp_path_factory.getbasetemp()  # which would be in there, else
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        monkeypatch.setenv("TMPDIR", path)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield Path(path) / f"flyteplugins-tracking-{os.geteuid()}"


def start_guest(name: str, rank: int = 1) -> subprocess.Popen[str]:
    script = textwrap.dedent(GUEST.format(name=name))
    return subprocess.Popen(
        [sys.executable, "-c", script, str(rank)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


@pytest.fixture
def name(request) -> str:
    """Each test's own: this process counts how often it has been host of one."""
    return str(request.node.name)


def line(guest: subprocess.Popen[str]) -> str:
    assert guest.stdout is not None
    return guest.stdout.readline().strip()


def in_a_process(script: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(script)]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


def test_guests_wait_get_the_value_and_are_waited_for(name):
    guests = [start_guest(name, rank) for rank in (1, 2)]
    host = Host(name, ask=lambda _: None)
    time.sleep(0.3)
    value = {"text": "x" * 1_000_000, "number": 1}
    host.offer(value)
    assert [line(guest) for guest in guests] == [f"value {value}"] * 2
    assert host.wait(0.2) == [1, 2]
    guests[0].communicate("guest.leave()\n", timeout=10)
    assert host.wait(5, until=lambda: host.wait(0) == [2]) == [2]
    guests[1].kill()
    assert host.wait(10) == []
    host.close()


def test_a_host_that_has_nothing_says_why(name):
    host = Host(name, ask=lambda _: None)
    threading.Timer(0.3, host.refuse, ["no key"]).start()
    with pytest.raises(HandoverError, match="no key"):
        Guest.join(name, 1, time.monotonic() + 10, 10)
    host.close()


def test_a_host_that_does_not_come_is_not_waited_for_longer(name):
    began = time.monotonic()
    with pytest.raises(HandoverError, match="it has not, or has ended already"):
        Guest.join(name, 1, began + 0.5, 10)
    assert 0.4 < time.monotonic() - began < 2


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
    assert guest.stdin is not None
    guest.stdin.write("guest.ask('why')\n")
    guest.stdin.flush()
    assert line(guest) == "offered {'n': 2}"
    assert asked == ["why"]
    host.close()
    assert line(guest) == "gone"
    guest.communicate(timeout=10)


def test_an_answer_that_waits_for_a_pause_does_not_hold_it_up(name, monkeypatch):
    monkeypatch.setattr("flyteplugins_tracking.trackers.peers.node._PAUSE_S", 20.0)
    asked, is_paused = threading.Event(), threading.Event()

    def answer(_: str) -> None:
        asked.set()
        is_paused.wait(30)

    host = Host(name, ask=answer)
    host.offer({})
    guest = start_guest(name)
    assert line(guest) == "value {}"
    assert guest.stdin is not None
    guest.stdin.write("guest.ask()\n")
    guest.stdin.flush()
    assert asked.wait(20)
    began = time.monotonic()
    host.pause()
    assert time.monotonic() - began < 15
    is_paused.set()
    assert line(guest) == "paused"
    host.close()
    guest.communicate(timeout=10)


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
    assert 0.5 < time.monotonic() - began < 2
    guest.kill()
    guest.communicate()
    host.close()


def test_what_a_dead_job_has_left_is_replaced(name, directory):
    left = in_a_process(
        f"""
        import os
        from flyteplugins_tracking.trackers.peers.node import Host
        for name in ({name!r}, "another"):
            Host(name, ask=lambda _: None)
        os._exit(0)
        """
    )
    assert left.returncode == 0, left.stderr
    assert len(list(directory.iterdir())) == 2
    guest = start_guest(name)
    host = Host(name, ask=lambda _: None)
    host.offer({"n": 1})
    assert line(guest) == "value {'n': 1}"
    assert len(list(directory.iterdir())) == 1
    guest.communicate("guest.leave()\n", timeout=10)
    host.close()
    assert list(directory.iterdir()) == []


def test_a_forked_child_keeps_nothing_open(name):
    """The host is killed, and its DataLoader's worker lives on."""
    child = subprocess.Popen(
        [
            sys.executable,
            "-c",
            textwrap.dedent(
                f"""
                import multiprocessing, os, signal, time
                from flyteplugins_tracking.trackers.peers.node import Host
                host = Host({name!r}, ask=lambda _: None)
                host.offer({{}})
                worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(20,))
                worker.start()
                print(worker.pid, flush=True)
                input()
                os.kill(os.getpid(), signal.SIGKILL)
                """
            ),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    worker = int(line(child))
    guest = start_guest(name)
    assert line(guest) == "value {}"
    began = time.monotonic()
    assert child.stdin is not None
    child.stdin.write("\n")
    child.stdin.flush()
    assert line(guest) == "gone"
    assert time.monotonic() - began < 5
    os.kill(worker, signal.SIGKILL)
    child.communicate(timeout=10)
    guest.communicate(timeout=10)


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
    assert Guest.join(name, 1, time.monotonic() + 5, 5).value == {"n": 1}
    host.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_not_served(name, directory):
    """Even where the directory were open."""
    host = Host(name, ask=lambda _: None)
    host.offer({"secret": 1})
    (path,) = directory.iterdir()
    for opened in (directory.parent, directory, path):
        opened.chmod(0o777)
    done = in_a_process(
        f"""
        import os, socket
        os.setuid(65534)
        connection = socket.socket(socket.AF_UNIX)
        connection.connect({str(path)!r})
        try:
            connection.sendall(b'{{"rank": 1}}\\n')
            print(connection.recv(100))
        except OSError:
            print(b"")
        """
    )
    assert done.stdout.strip() == "b''", done.stderr
    host.close()


@pytest.mark.parametrize("sent", [b"\x80\x04N.\n", b"[1]\n", b'{"rank": []}\n', b'{"rank": 1}\n{"rank"', b""])
def test_a_guest_that_talks_nonsense_is_dropped(name, directory, sent):
    host = Host(name, ask=lambda _: None)
    (path,) = directory.iterdir()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        connection.sendall(sent)
    host.offer({"n": 1})
    guest = Guest.join(name, 2, time.monotonic() + 5, 5)
    assert guest.value == {"n": 1}
    assert host.wait(0.3) == [2]
    guest.leave()
    assert host.wait(5) == []
    host.close()


def test_names_are_met_in_turn(name):
    """A guest that is ahead does not meet the host of the training before."""
    first = Host(name, ask=lambda _: None)
    first.offer({"n": 1})
    guest = start_guest(name)
    assert line(guest) == "value {'n': 1}"
    assert guest.stdin is not None
    guest.stdin.write(f"guest.leave(); print(Guest.join({name!r}, 1, time.monotonic() + 20, 20).value, flush=True)\n")
    guest.stdin.flush()
    assert line(guest) == "gone"
    assert first.wait(0.5) == []  # it is there again and again, and is not taken for one that has come
    first.close()
    second = Host(name, ask=lambda _: None)
    second.offer({"n": 2})
    assert line(guest) == "{'n': 2}"
    guest.kill()
    guest.communicate()
    second.close()

"""The connections between a node's leader and its followers, between real processes."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from random import Random

import psutil
import pytest
from support import jobs
from support.users import as_nobody, needs_root
from support.waiting import stop, wait_until

from flyteplugins_tracking.trackers import node_group
from flyteplugins_tracking.trackers.node_group import NodeClient, NodeError, NodeServer

PROGRAM = jobs.PROGRAMS / "node_connections.py"
PATIENCE_S = 120  # no test waits so long unless something hangs


@pytest.fixture(autouse=True)
def directory(monkeypatch, tmp_path_factory):
    """A TMPDIR whose paths a socket can have, which pytest's own are too long for."""
    tmp_path_factory.getbasetemp()  # which would be in there, else
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        monkeypatch.setenv("TMPDIR", path)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield Path(path) / f"flyteplugins_tracking-{os.geteuid()}" / "sockets"


def start_follower(name: str, rank: int = 1) -> subprocess.Popen[str]:
    """It does what is written to it: see `node_connections.py`."""
    command = [sys.executable, str(PROGRAM), "follower", name, str(rank)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.fixture
def name(request) -> str:
    """Each test's own: this process counts how often it has been server of one."""
    return str(request.node.name)


def line(follower: subprocess.Popen[str]) -> str:
    assert follower.stdout is not None
    return follower.stdout.readline().strip()


def tell(follower: subprocess.Popen[str], command: str) -> None:
    assert follower.stdin is not None
    follower.stdin.write(f"{command}\n")
    follower.stdin.flush()


def in_a_process(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A function of `node_connections.py`."""
    command = [sys.executable, str(PROGRAM), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def test_followers_wait_for_the_value_and_the_leader_waits_for_followers(name):
    followers = [start_follower(name, rank) for rank in (1, 2)]
    server = NodeServer(name, on_request=lambda _: None, expected=2)
    assert server.wait(PATIENCE_S, until=lambda: server.wait(0) == [1, 2]) == [1, 2]
    value = {"text": "x" * 1_000_000, "number": 1}
    server.publish(value)
    assert [line(follower) for follower in followers] == [f"value {value}"] * 2
    assert server.wait(0.2) == [1, 2]
    followers[0].communicate("leave\n", timeout=PATIENCE_S)
    assert server.wait(PATIENCE_S, until=lambda: server.wait(0) == [2]) == [2]
    followers[1].kill()
    assert server.wait(PATIENCE_S) == []
    server.close()


def test_followers_get_the_reason_of_a_rejection(name):
    server = NodeServer(name, on_request=lambda _: None)
    threading.Timer(0.3, server.reject, ["no key"]).start()
    with pytest.raises(NodeError, match="no key"):
        NodeClient.connect(name, 1, time.monotonic() + PATIENCE_S, 10)
    server.close()


def test_a_leader_that_does_not_come_is_not_waited_for_past_the_deadline(name):
    began = time.monotonic()
    with pytest.raises(NodeError, match="that rank has not opened it, or has ended already"):
        NodeClient.connect(name, 1, began + 0.5, PATIENCE_S)
    assert 0.4 < time.monotonic() - began < 2 * jobs.TIME_SCALE


def test_the_leader_knows_who_has_said_that_all_was_read(name):
    server = NodeServer(name, on_request=lambda _: None)
    server.publish({})
    followers = [start_follower(name, rank) for rank in (1, 2, 3)]
    for follower in followers:
        assert line(follower) == "value {}"
        tell(follower, "writes")
    wait_until(lambda: server.unread == [1, 2, 3])
    tell(followers[0], "read")
    tell(followers[1], "read")
    tell(followers[1], "writes")
    wait_until(lambda: server.unread == [2, 3])
    for follower in followers:
        follower.kill()
        follower.communicate(timeout=PATIENCE_S)
    assert server.wait(PATIENCE_S) == []
    assert server.unread == [2, 3]
    server.forget_unread()
    assert server.unread == []
    server.close()


def test_a_suspended_value_is_unused_until_it_is_published_again(name):
    asked: list[str] = []

    def answer(question: str) -> None:
        asked.append(question)
        server.publish({"n": 2})

    server = NodeServer(name, on_request=answer)
    server.publish({"n": 1})
    follower = start_follower(name)
    assert line(follower) == "value {'n': 1}"
    server.suspend()
    assert line(follower) == "paused"
    tell(follower, "ask why")
    assert line(follower) == "offered {'n': 2}"
    assert asked == ["why"]
    server.close()
    assert line(follower) == "gone"
    follower.communicate(timeout=PATIENCE_S)


def test_a_request_handler_that_suspends_does_not_delay_it(name, monkeypatch):
    monkeypatch.setattr("flyteplugins_tracking.trackers.node_group.SEND_TIMEOUT_S", 240.0)
    asked, is_paused, answered = threading.Event(), threading.Event(), threading.Event()

    def answer(_: str) -> None:
        asked.set()
        is_paused.wait(PATIENCE_S)
        answered.set()

    server = NodeServer(name, on_request=answer)
    server.publish({})
    follower = start_follower(name)
    assert line(follower) == "value {}"
    tell(follower, "ask")
    assert asked.wait(PATIENCE_S)
    server.suspend()
    assert not answered.is_set()
    is_paused.set()
    assert line(follower) == "paused"
    server.close()
    follower.communicate(timeout=PATIENCE_S)


def test_a_stopped_follower_does_not_delay_suspend(name):
    server = NodeServer(name, on_request=lambda _: None)
    server.publish({})
    follower = start_follower(name)
    assert line(follower) == "value {}"
    stop(follower.pid)
    began = time.monotonic()
    server.suspend()
    assert 0.5 < time.monotonic() - began < 2 * jobs.TIME_SCALE
    follower.kill()
    follower.communicate()
    server.close()


def test_the_socket_of_a_dead_job_is_replaced(name, directory):
    left = in_a_process("dies", name, "another")
    assert left.returncode == 0, left.stderr
    assert len(list(directory.iterdir())) == 2
    follower = start_follower(name)
    server = NodeServer(name, on_request=lambda _: None)
    server.publish({"n": 1})
    assert line(follower) == "value {'n': 1}"
    assert len(list(directory.iterdir())) == 1
    follower.communicate("leave\n", timeout=PATIENCE_S)
    server.close()
    assert list(directory.iterdir()) == []


def test_a_forked_child_keeps_nothing_open(name):
    """The leader is killed, and its DataLoader's worker lives on."""
    command = [sys.executable, str(PROGRAM), "forks", name]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    worker = int(line(child))
    follower = start_follower(name)
    assert line(follower) == "value {}"
    tell(child, "")
    assert line(follower) == "gone"
    assert psutil.Process(worker).status() != psutil.STATUS_ZOMBIE
    os.kill(worker, signal.SIGKILL)
    child.communicate(timeout=PATIENCE_S)
    follower.communicate(timeout=PATIENCE_S)


def test_the_directory_is_this_users_alone(name, directory):
    server = NodeServer(name, on_request=lambda _: None)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    server.close()


@pytest.mark.parametrize("plant", [lambda path: path.chmod(0o755), lambda path: (path.rmdir(), path.symlink_to("/"))])
def test_a_directory_that_is_not_this_users_alone_is_left_and_they_meet_in_another(name, directory, plant):
    NodeServer(name, on_request=lambda _: None).close()
    plant(directory)
    server = NodeServer(name, on_request=lambda _: None)
    server.publish({"n": 1})
    assert NodeClient.connect(name, 1, time.monotonic() + PATIENCE_S, 10).value == {"n": 1}
    server.close()
    assert (directory.parent.with_name(f"{directory.parent.name}-1") / "sockets").is_dir()


@needs_root
def test_a_leader_and_a_follower_meet_although_another_user_has_made_the_directory(name, directory):
    directory.parent.parent.chmod(0o1777)
    as_nobody(lambda: os.mkdir(directory.parent))
    server = NodeServer(name, on_request=lambda _: None)
    server.publish({"n": 1})
    assert NodeClient.connect(name, 1, time.monotonic() + PATIENCE_S, 10).value == {"n": 1}
    server.close()


def test_a_tmpdir_that_is_too_long_for_a_socket(name, monkeypatch, tmp_path):
    long = tmp_path / ("x" * 80)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    server = NodeServer(name, on_request=lambda _: None)
    server.publish({"n": 1})
    assert NodeClient.connect(name, 1, time.monotonic() + PATIENCE_S, 10).value == {"n": 1}
    server.close()


@needs_root
def test_another_user_is_not_served(name, directory):
    """Even where the directory were open."""
    server = NodeServer(name, on_request=lambda _: None)
    server.publish({"secret": 1})
    (path,) = directory.iterdir()
    for opened in (directory.parent.parent, directory.parent, directory, path):
        opened.chmod(0o777)
    done = in_a_process("another_user", str(path))
    assert done.stdout.strip() == "b''", done.stderr
    server.close()


MALFORMED = [b"\x80\x04N.\n", b"[1]\n", b'{"rank": []}\n', b'{"rank": 1}\n{"rank"', b"", b'{"rank": 1e999}\n']


@pytest.mark.parametrize("sent", [*MALFORMED, pytest.param(b"[" * 500_000 + b"\n", id="nested")])
def test_a_follower_that_sends_no_valid_message_is_dropped(name, directory, sent):
    server = NodeServer(name, on_request=lambda _: None)
    (path,) = directory.iterdir()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        connection.sendall(sent)
    server.publish({"n": 1})
    follower = NodeClient.connect(name, 2, time.monotonic() + PATIENCE_S, 10)
    assert follower.value == {"n": 1}
    assert server.wait(PATIENCE_S, until=lambda: server.wait(0) == [2]) == [2]
    follower.leave()
    assert server.wait(PATIENCE_S) == []
    server.close()


def test_a_follower_whose_leader_says_something_else_notices_its_end(name):
    server = NodeServer(name, on_request=lambda _: None)
    server.publish({"n": 1})
    follower = NodeClient.connect(name, 2, time.monotonic() + PATIENCE_S, 10)
    is_over = threading.Event()
    follower.subscribe(lambda value: value["n"], lambda: None, is_over.set)
    server.publish({"m": 1})
    assert is_over.wait(PATIENCE_S)
    server.close()


@pytest.mark.parametrize("message", [b'{"publish": 1}\n', b'{"publish": {}, "server": []}\n'])
def test_a_leader_that_publishes_something_else_is_none(name, directory, message):
    NodeServer(name, on_request=lambda _: None).close()
    path = node_group._socket_path(name)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()

        def answer():
            with contextlib.suppress(OSError):
                while True:
                    listener.accept()[0].sendall(message)

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(NodeError):
            NodeClient.connect(name, 1, time.monotonic() + 1, 1)
        listener.shutdown(socket.SHUT_RDWR)


def test_200_damaged_conversations_harm_neither_the_leader_nor_the_next_follower(name, directory):
    """A real follower's lines with bytes changed, left out or doubled, at random places."""
    random = Random(28)
    good = b'{"rank": 1}\n{"request": "rows"}\n{"request": {"nested": [1, 2.5, null]}}\n'
    server = NodeServer(name, on_request=lambda _: None)
    (path,) = directory.iterdir()
    for _ in range(200):
        sent = bytearray(good)
        for _ in range(random.randint(1, 8)):
            at = random.randrange(len(sent))
            sent[at : at + random.randint(0, 3)] = random.choice([b"", random.randbytes(2), bytes(sent[: at + 1])])
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(path))
            with contextlib.suppress(OSError):  # the leader has hung up
                connection.sendall(sent)
    server.publish({"n": 1})
    follower = NodeClient.connect(name, 2, time.monotonic() + PATIENCE_S, 10)
    assert follower.value == {"n": 1}
    follower.leave()
    assert server.wait(PATIENCE_S) == []
    server.close()
    assert threading.active_count() < 10


def test_an_endless_line_is_ended_and_the_leader_goes_on(name, directory):
    server = NodeServer(name, on_request=lambda _: None)
    (path,) = directory.iterdir()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        connection.settimeout(PATIENCE_S)
        with pytest.raises(OSError):  # noqa: PT011 reset, or a broken pipe
            connection.sendall(b"x" * 100_000_000)
    server.publish({"n": 1})
    assert NodeClient.connect(name, 2, time.monotonic() + PATIENCE_S, 10).value == {"n": 1}
    server.close()


def test_thousands_of_requests_make_no_thousands_of_threads(name, directory):
    answer = threading.Event()
    server = NodeServer(name, on_request=lambda _: answer.wait(PATIENCE_S))
    (path,) = directory.iterdir()
    before = threading.active_count()
    with socket.socket(socket.AF_UNIX) as connection, contextlib.suppress(OSError):
        connection.connect(str(path))
        connection.settimeout(PATIENCE_S)
        connection.sendall(b'{"request": ""}\n' * 20_000)
        while connection.recv(1):  # the leader hangs up
            pass
    assert threading.active_count() - before <= 500 + 1  # the thread that has read them may be about to end
    answer.set()
    server.publish({"n": 1})
    assert NodeClient.connect(name, 2, time.monotonic() + PATIENCE_S, 10).value == {"n": 1}
    server.close()


def test_a_follower_that_says_to_be_every_rank_does_not_fill_the_memory(name, directory):
    server = NodeServer(name, on_request=lambda _: None, expected=2)
    (path,) = directory.iterdir()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        connection.sendall(b"".join(b'{"rank": %d}\n' % rank for rank in range(20_000)))
        assert server.wait(PATIENCE_S, until=lambda: server.wait(0) == [19_999]) == [19_999]
    assert len(server._seen_ranks) <= 500
    server.close()


def test_a_follower_for_which_there_is_no_thread_costs_itself_only(name, directory, monkeypatch):
    server = NodeServer(name, on_request=lambda _: None)
    server.publish({"n": 1})
    (path,) = directory.iterdir()

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch, socket.socket(socket.AF_UNIX) as connection:
        patch.setattr(threading.Thread, "start", refuse)
        connection.connect(str(path))
        connection.settimeout(PATIENCE_S)
        assert connection.recv(1) == b""
    assert NodeClient.connect(name, 2, time.monotonic() + PATIENCE_S, 10).value == {"n": 1}
    server.close()


def test_a_follower_does_not_meet_the_leader_of_the_training_before(name):
    """A follower that is ahead does not meet the leader of the training before."""
    first = NodeServer(name, on_request=lambda _: None)
    first.publish({"n": 1})
    follower = start_follower(name)
    assert line(follower) == "value {'n': 1}"
    tell(follower, "leave\njoin")
    assert line(follower) == "gone"
    assert first.wait(PATIENCE_S) == []  # it is there again and again, and is not taken for one that has come
    first.close()
    second = NodeServer(name, on_request=lambda _: None)
    second.publish({"n": 2})
    assert line(follower) == "{'n': 2}"
    follower.kill()
    follower.communicate()
    second.close()

"""When a rank calls the roll, and what it answers."""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import sysconfig
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from flyteplugins_tracking import DistributedInfo
from flyteplugins_tracking._job.board import Board, DirectoryStore
from flyteplugins_tracking._job.hang import Frame, RollCallDuty, frames_of, place_of, verdict_of

TIMEOUT_S = 1000.0


@pytest.fixture
def hang(monkeypatch):
    """Lets twice the timeout pass without progress."""
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + 2 * TIMEOUT_S)
    return lambda: monkeypatch.setattr("flyteplugins_tracking._job.hang.time", later)


@pytest.fixture
def board(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return Board(DirectoryStore(tmp_path / "board"), "ranks")


class Rank:
    """A rank of two with a run of its own, which has begun. Rank 0 is the primary."""

    def __init__(self, rank: int, board: Board) -> None:
        self.reports: list[str] = []
        info = DistributedInfo(rank, 2, rank, 2, 0, 1)
        show = None if rank else lambda verdict, _: self.reports.append(verdict)
        self.duty = RollCallDuty(info, TIMEOUT_S, show, has_run=True)
        self.duty.begin(board)


def test_one_roll_is_called_for_all_ranks_that_hang(board, hang):
    ranks = [Rank(rank, board) for rank in range(2)]
    try:
        hang()
        for _ in range(3):
            for rank in reversed(ranks):
                rank.duty.look()
            assert ranks[1].duty.next_wait_s() > 1  # only the primary waits for answers
        assert len(ranks[0].reports) == 1
        assert board.of_topic("hang").count("episodes") == 1
    finally:
        for rank in ranks:
            rank.duty.end(has_failed=False)


def test_stacks_of_an_earlier_block_for_which_nobody_has_asked_are_not_the_answer(board, hang):
    rank = Rank(1, board)
    try:
        place = json.loads(board.of_topic("hang").get("place/1"))
        os.write(place["descriptor"], b"as faulthandler's thread, while somebody held the GIL")
        rank.duty.look()
        hang()
        rank.duty.look()
        answer = board.of_topic("hang").get("stacks/1/1")
        assert answer is not None
        assert "faulthandler's thread" not in answer
        assert "test_hang_duty.py" in answer
    finally:
        rank.duty.end(has_failed=False)


def test_a_process_that_is_ended_leaves_no_file(board, tmp_path):
    rank = Rank(0, board)
    try:
        assert [path for path in Path(tmp_path).iterdir() if path.is_file()] == []
    finally:
        rank.duty.end(has_failed=False)


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        ("file without a name", "holds the GIL at train.py:8 step \N{REPLACEMENT CHARACTER}"),
        ("file", "does not answer"),
        ("pipe without a name", "does not answer"),
    ],
)
def test_what_the_board_names_is_read_only_if_it_is_a_file_without_a_name(board, hang, tmp_path, kind, found):
    rank, path = Rank(0, board), tmp_path / "key"
    if kind.startswith("pipe"):
        os.mkfifo(path)
    with open(os.open(path, os.O_RDWR | os.O_CREAT), "wb", buffering=0) as file:
        if kind.endswith("without a name"):
            path.unlink()
        file.write(b'Thread 0x7:\n  File "train.py", line 8 in step \x1b\n')
        place = {"host": socket.gethostname(), "pid": os.getpid(), "thread_id": 7, "descriptor": file.fileno()}
        board.of_topic("hang").put("place/1", json.dumps(place))
        hang()
        for _ in range(2):
            rank.duty.look()
        rank.duty.end(has_failed=False)
    assert rank.reports[0].endswith(f"; rank 1 {found}")


# Where ranks are, from the stacks that faulthandler writes


LIBRARY = f"{sysconfig.get_path('purelib')}/torch/distributed/distributed_c10d.py"


def test_the_frames_of_a_thread_are_found_in_a_real_dump(tmp_path):
    release, started = threading.Event(), threading.Event()

    def waits() -> None:
        started.set()
        release.wait(60)

    thread = threading.Thread(target=waits)
    thread.start()
    started.wait(60)
    with open(tmp_path / "stacks.txt", "w+") as file:
        faulthandler.dump_traceback(file=file, all_threads=True)
        file.seek(0)
        dump = file.read()
    release.set()
    thread.join()
    assert thread.ident is not None
    functions = [frame.function for frame in frames_of(dump, thread.ident)]
    assert "waits" in functions
    assert functions.index("waits") > functions.index("wait")  # the innermost comes first
    assert frames_of(dump, 1) == []


def test_a_place_is_the_users_line_and_the_innermost_function():
    users = Frame("/home/me/train.py", 88, "train")
    assert (
        place_of([Frame(LIBRARY, 2500, "all_reduce"), Frame(LIBRARY, 80, "wrapper"), users]) == "train.py:88 all_reduce"
    )
    assert place_of([Frame("/home/me/data.py", 40, "next_batch"), users]) == "data.py:40 next_batch"
    assert place_of([Frame(LIBRARY, 1, "wait")]) == "distributed_c10d.py:1 wait"
    assert place_of([]) == "an unknown place"


def test_ranks_of_equal_places_are_named_together_the_most_first():
    places = dict.fromkeys([0, 2, 3, 4, 6], "at train.py:88 all_reduce") | {
        1: "at data.py:40 next_batch",
        5: "has ended",
    }
    assert verdict_of(places) == (
        "ranks 0, 2-4, 6 at train.py:88 all_reduce; rank 1 at data.py:40 next_batch; rank 5 has ended"
    )

"""The journal of a writer: what is pending after any end of it. Where rows of a job that goes back are placed."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
import warnings
from random import Random
from types import SimpleNamespace

import pytest

from flyteplugins_tracking.trackers import journal as files
from flyteplugins_tracking.trackers.journal import Journal
from flyteplugins_tracking.trackers.wandb.run import Rollback


def stored(directory):
    """Read journals that this process writes too: it knows them by their paths, and these are others."""
    return files.stored(directory / ".." / directory.name)


def pending(directory):
    return [[entry.data for entry in journal.entries()] for journal in stored(directory)]


def test_what_is_not_acknowledged_is_pending(tmp_path):
    journal = Journal(tmp_path / "new", "rank-0", {"id": "x"})
    assert not (tmp_path / "new").exists()
    for number in range(5):
        journal.add(b"%d" % number)
    assert pending(tmp_path / "new") == [[b"0", b"1", b"2", b"3", b"4"]]
    journal.remove_acknowledged(3)
    assert pending(tmp_path / "new") == [[b"3", b"4"]]
    assert stored(tmp_path / "new")[0].header["id"] == "x"
    journal.remove()
    assert not list((tmp_path / "new").iterdir())
    journal.add(b"late")
    assert not list((tmp_path / "new").iterdir())


def test_a_process_does_not_read_the_journals_that_it_writes(tmp_path):
    """A second function of the process, with the same run, would send rows that the first one is about to send."""
    writing, left = (Journal(tmp_path, name, {"id": name}) for name in ("rank-0", "rank-1"))
    for journal in (writing, left):
        journal.add(b"row")
    left.close()
    assert [journal.header["id"] for journal in files.stored(tmp_path)] == ["rank-1"]
    writing.close()
    assert [journal.header["id"] for journal in files.stored(tmp_path)] == ["rank-0", "rank-1"]


def test_acknowledged_segments_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "SEGMENT_BYTES", 230)
    journal = Journal(tmp_path, "rank-0", {})
    for number in range(30):
        journal.add(b"%02d" % number)
    journal.remove_acknowledged(20)
    (left,) = stored(tmp_path)
    assert len(left.paths) == 2
    assert [entry.data for entry in left.entries()] == [b"%02d" % number for number in range(20, 30)]


@pytest.mark.parametrize("lost", [1, 5, 60])
def test_a_torn_end_is_left_out(tmp_path, lost):
    journal = Journal(tmp_path, "rank-0", {})
    journal.add(b"first")
    journal.add(b"second")
    (path,) = tmp_path.iterdir()
    os.truncate(path, path.stat().st_size - lost)
    assert pending(tmp_path) == ([[b"first"]] if lost < 60 else [[]])


def test_a_full_disk_warns_once_and_raises_nothing(tmp_path, monkeypatch, caplog):
    journal = Journal(tmp_path, "rank-0", {})
    journal.add(b"kept")
    monkeypatch.setattr(files.os, "write", lambda *_: 1)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            journal.add(b"lost")
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        f"rows cannot be kept in {tmp_path}"
    ]
    assert pending(tmp_path) == [[b"kept"]]


def test_a_forked_child_leaves_the_journal_alone(tmp_path):
    journal = Journal(tmp_path, "rank-0", {})
    journal.add(b"parent's")
    with journal._lock, warnings.catch_warnings():  # as another thread of the parent may hold it
        warnings.simplefilter("ignore")
        if (child := os.fork()) == 0:
            journal.add(b"child's")
            journal.remove()
            os._exit(0)
    os.waitpid(child, 0)
    journal.add(b"later")
    assert pending(tmp_path) == [[b"parent's", b"later"]]


def test_the_same_count_again_adds_nothing_to_the_file(tmp_path):
    journal = Journal(tmp_path, "rank-0", {})
    journal.add(b"x")
    journal.remove_acknowledged(1)
    (path,) = tmp_path.iterdir()
    size = path.stat().st_size
    for _ in range(1000):  # as a client does that writes every 0.2 s, also if nothing is logged
        journal.remove_acknowledged(1)
    assert path.stat().st_size == size


def test_what_is_acknowledged_at_once_stays_below_two_segments(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "SEGMENT_BYTES", 1000)
    journal = Journal(tmp_path, "rank-0", {})
    largest = 0
    for number in range(2000):
        journal.add(b"%04d" % number)
        journal.remove_acknowledged(number + 1)
        largest = max(largest, sum(path.stat().st_size for path in tmp_path.iterdir()))
    assert 1000 < largest < 2200


RECORDS = [b"%03d" % number * 10 for number in range(20)]


def frame_of(record, directory):
    """The bytes that a journal has a record in."""
    journal = Journal(directory, "frame", {})
    journal.add(b"")
    (path,) = directory.iterdir()
    start = path.stat().st_size
    journal.add(record)
    journal.close()
    return path.read_bytes()[start:]


@pytest.fixture
def written(tmp_path):
    """The bytes of a journal with 20 records."""
    journal = Journal(tmp_path / "whole", "rank-0", {"id": "x"})
    for record in RECORDS:
        journal.add(record)
    journal.close()
    (path,) = (tmp_path / "whole").iterdir()
    return path.read_bytes()


def test_behind_any_truncation_all_whole_records_are_read(tmp_path, written):
    record_size = len(frame_of(RECORDS[0], tmp_path / "frame"))
    (tmp_path / "cut").mkdir()
    path = tmp_path / "cut" / "rank-0.journal.0"
    path.write_bytes(written)
    for length in range(len(written), -1, -1):
        os.truncate(path, length)
        kept = [entry.data for journal in files.stored(tmp_path / "cut") for entry in journal.entries()]
        assert kept == RECORDS[: len(kept)]
        assert len(kept) >= len(RECORDS) - 1 - (len(written) - length) // record_size


@pytest.mark.parametrize("changes", [500, pytest.param(20_000, marks=pytest.mark.full)])
def test_of_a_journal_with_changed_bits_all_other_records_are_read(tmp_path, written, changes):
    """One bit, or two bits, at random places. No value changes, and nothing raises."""
    (tmp_path / "changed").mkdir()
    path = tmp_path / "changed" / "rank-0.journal.0"
    random = Random(0)
    bits = [random.choices(range(8 * len(written)), k=1 + number % 2) for number in range(changes)]
    for changed in bits:
        data = bytearray(written)
        for bit in changed:
            data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        kept = [entry.data for journal in files.stored(tmp_path / "changed") for entry in journal.entries()]
        if kept or len(changed) == 1:  # both headers may be changed
            assert set(kept) <= set(RECORDS)
            assert len(kept) >= len(RECORDS) - len(changed), changed


def test_zeros_at_the_end_are_reported_and_the_file_is_kept_when_its_rows_are_sent(tmp_path, caplog):
    journal = Journal(tmp_path, "rank-0", {"id": "x"})
    for record in RECORDS[:5]:
        journal.add(record)
    journal.close()
    path = tmp_path / "rank-0.journal.0"
    with path.open("ab") as file:  # as after a power loss
        file.write(bytes(4096))
    (left,) = files.stored(tmp_path)
    assert [entry.data for entry in left.entries()] == RECORDS[:5]
    assert f"{path} is damaged in 1 places" in caplog.text
    left.remove()
    assert [one.name for one in tmp_path.iterdir()] == ["rank-0.journal.0.bad"]
    assert files.stored(tmp_path) == []


def test_a_segment_is_never_written_into_what_is_there(tmp_path, monkeypatch, caplog):
    """Another user of the machine could have planted a link to a file of this user."""
    (tmp_path / "bashrc").write_text("mine\n")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "rank-0.journal.1").symlink_to(tmp_path / "bashrc")
    monkeypatch.setattr(files, "SEGMENT_BYTES", 230)
    journal = Journal(tmp_path / "run", "rank-0", {})
    for record in RECORDS:
        journal.add(record)
    assert (tmp_path / "bashrc").read_text() == "mine\n"
    assert "rows cannot be kept in" in caplog.text


@pytest.mark.skipif(os.getuid() != 0, reason="a file of another user is made by root only")
def test_a_journal_of_another_user_is_left_out(tmp_path, monkeypatch, caplog):
    journal = Journal(tmp_path, "rank-0", {"id": "x"})
    journal.add(b"planted")
    journal.close()
    os.chown(tmp_path / "rank-0.journal.0", 65534, -1)
    assert files.stored(tmp_path) == []
    assert "rank-0.journal.0 is left out" in caplog.text


@pytest.mark.parametrize("planted", ["fifo", "link"])
def test_what_is_no_file_is_left_out_and_nobody_waits_for_it(tmp_path, planted):
    path = tmp_path / "rank-0.journal.0"
    os.mkfifo(path) if planted == "fifo" else path.symlink_to("/dev/zero")
    assert files.stored(tmp_path) == []
    files.remove_torn(tmp_path)


PROGRAM_WITH_LITTLE_ROOM = """
import logging, resource, sys
from pathlib import Path
from flyteplugins_tracking.trackers.journal import Journal
logging.basicConfig(format="%(message)s")
for room in range(0, 600, 2):
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
    journal = Journal(Path(sys.argv[1], str(room)), "rank-0", {"id": "x"})
    for number in range(20):
        journal.add(b"%03d" % number)
        if number == 0 and room % 4:
            journal.remove_acknowledged(1)
    journal.add(b"end", is_last=True)
    print(journal.replaced)
"""


def test_wherever_the_disk_is_full_the_records_before_can_be_read(tmp_path):
    """The kernel writes a part of a frame, and refuses the next one. Each position in a frame is tried."""
    command = [sys.executable, "-c", PROGRAM_WITH_LITTLE_ROOM, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr.count("rows cannot be kept in") == 300
    all_records = [b"%03d" % number for number in range(20)]
    replaced = list(map(int, done.stdout.split()))
    assert max(replaced) == 1
    for room in range(0, 600, 2):
        kept = [entry.data for journal in stored(tmp_path / str(room)) for entry in journal.entries()]
        if kept:  # the end of the run stands in the place of what was torn, or of the record before
            assert kept.pop() == b"end"
        first = int(bool(room % 4) and kept[:1] != all_records[:1])  # the acknowledgement may be what was torn
        assert kept == all_records[first : first + len(kept)]
        assert room < 250 or kept


def test_a_journal_is_open_until_its_process_ends(tmp_path):
    program = f"""
import sys
import warnings
from pathlib import Path
from flyteplugins_tracking.trackers.journal import Journal
journal = Journal(Path({str(tmp_path)!r}), "rank-0", {{}})
journal.add(b"x")
print("added", flush=True)
sys.stdin.read()
"""
    writer = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert writer.stdout is not None
    assert writer.stdout.readline() == b"added\n"
    (journal,) = stored(tmp_path)
    assert journal.is_open()
    writer.kill()
    writer.wait()
    assert not journal.is_open()
    assert [entry.data for entry in journal.entries()] == [b"x"]


def rolled(first_step, *steps, next_step=None):
    """The rows of an attempt that logs at these steps, and how often it has defined the column for steps."""
    state = SimpleNamespace(first=first_step, next=first_step if next_step is None else next_step)
    defined: list[int] = []
    handle = SimpleNamespace(
        first_step=lambda: state.first,
        next_step=lambda: state.next,
        known_step=lambda: state.next,
        has_definitions=True,
        warn_once=lambda *_: None,
        id="late",
        run=SimpleNamespace(define_metric=lambda *_, **__: defined.append(1)),
    )
    config = SimpleNamespace(step_metric="global_step")
    rollback = Rollback(handle, SimpleNamespace(config=config, run_metadata={"tracking_init": {"restart_count": 2}}))
    rows = []
    for step in steps:
        row, at = rollback.place({"x": 1}, step)
        state.next = state.next + 1 if at is None else max(state.next, at)
        rows.append((at, row.get("global_step"), row.get("restart_count")))
    return rows, len(defined)


PROGRAM_THAT_WRITES = """
import sys
from pathlib import Path
from flyteplugins_tracking.trackers import journal
journal.SEGMENT_BYTES = 3000
written = journal.Journal(Path(sys.argv[1]), "rank-0", {"id": "x"})
while True:
    number = written.add(b"x" * 100)
    if number % 50 == 0:
        written.remove_acknowledged(max(0, number - 10))
"""


def test_a_writer_that_begins_a_file_is_never_taken_for_one_that_has_ended(tmp_path):
    """It begins one each millisecond, and removes the files before that."""
    writer = subprocess.Popen([sys.executable, "-c", PROGRAM_THAT_WRITES, str(tmp_path)])
    try:
        looks = 0
        while looks < 1000:
            for journal in files.stored(tmp_path):
                assert journal.is_open()
                looks += 1
            assert writer.poll() is None
    finally:
        writer.kill()
        writer.wait()


def test_a_file_has_its_name_when_it_is_locked(tmp_path, monkeypatch):
    """What another process does at any moment before that leaves it alone."""
    lock, found = files.fcntl.lockf, []

    def looked_at(*args):
        for _ in range(2):
            found.append([*files.files_in(tmp_path), *files.stored(tmp_path)])
            files.remove_torn(tmp_path)
            lock(*args)

    monkeypatch.setattr(files.fcntl, "lockf", looked_at)
    Journal(tmp_path, "rank-0", {}).add(b"x")
    monkeypatch.undo()
    assert found == [[], []]
    assert pending(tmp_path) == [[b"x"]]


def test_a_signal_handler_adds_a_record_while_a_file_is_begun(tmp_path, monkeypatch):
    journal, lock = Journal(tmp_path, "rank-0", {}), files.fcntl.lockf

    def interrupted(*args):
        monkeypatch.setattr(files.fcntl, "lockf", lock)
        journal.add(b"handler's")
        lock(*args)

    monkeypatch.setattr(files.fcntl, "lockf", interrupted)
    journal.add(b"first")
    journal.add(b"last")
    assert pending(tmp_path) == [[b"first", b"handler's", b"last"]]
    assert [path.name for path in tmp_path.iterdir()] == ["rank-0.journal.0"]


def test_a_file_that_has_lost_its_headers_is_read_with_those_of_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "SEGMENT_BYTES", 230)
    journal = Journal(tmp_path, "rank-0", {"id": "x", "step": 0})
    for record in RECORDS:
        journal.add(record)
    journal.close()
    path = tmp_path / "rank-0.journal.1"
    data = path.read_bytes()
    end = data.rfind(b"step")
    path.write_bytes(bytes(end) + data[end:])
    (left,) = files.stored(tmp_path)
    read = [entry.data for one in left.segments() for entry in one.entries()]
    assert read == [entry.data for entry in left.entries()]
    assert len(read) >= len(RECORDS) - 1


def test_a_journal_that_has_lost_its_headers_is_named(tmp_path, written, caplog, monkeypatch):
    path = tmp_path / "rank-0.journal.0"
    path.write_bytes(bytes(4096) + written[300:])
    assert files.stored(tmp_path) == []
    assert f"{path} is damaged: it does not say which run it is of" in caplog.text
    assert files.files_in(tmp_path) == [path]


def test_a_file_name_that_a_terminal_obeys_is_not_written_to_it(tmp_path, caplog, monkeypatch):
    (tmp_path / "\x1b[2J.journal.0").symlink_to("/etc/passwd")
    assert files.stored(tmp_path) == []
    assert "[2J.journal.0 is left out" in caplog.text
    assert "\x1b" not in caplog.text


ROW = {"row": {"n": 1}, "step": 1, "time": 1.0}


@pytest.mark.parametrize(
    "line",
    [
        *([], 1, "x", {}, {"row": {}}, {**ROW, "row": [1]}, {"row": {}, "time": 1.0}, {"row": {}, "step": 1}),
        *({**ROW, "step": step} for step in ("1", {}, float("inf"), float("nan"), 10**30, -(10**30))),
        *({**ROW, "time": time_s} for time_s in ("1", None, float("inf"), float("nan"), -1, 1e12, 10**400)),
        *({"call": "alert"}, {"call": 1, "args": [], "kwargs": {}}, {"call": "alert", "args": {}, "kwargs": {}}),
        *({"event": "stop"}, {"event": "stop", "values": [], "text": ""}, {"exit_code": "0"}, {"exit_code": 10**17}),
    ],
)
def test_a_record_that_cannot_be_sent_is_left_out(line):
    kept = [ROW, {**ROW, "step": None}, {"call": "alert", "args": ["x"], "kwargs": {}}, {"exit_code": 143}]
    entries = [files.Entry(files.encode(one), number) for number, one in enumerate([line, *kept])]
    assert [{**one, "id": None} for one in files.lines_of("x", entries)] == [{**one, "id": None} for one in kept]


def test_a_job_that_goes_back_logs_at_the_next_steps():
    assert rolled(100, 60, 60, 61, None) == ([(100, 60, 2), (100, 60, 2), (101, 61, 2), (None, None, 2)], 1)


def test_a_job_that_goes_on_logs_as_it_says():
    assert rolled(100, 100, 101, None, 101) == (
        [(100, None, None), (101, None, None), (None, None, None), (102, 101, None)],
        0,
    )


def test_heads_that_are_right_and_records_that_are_not_cost_no_time(tmp_path):
    journal = Journal(tmp_path, "a", {})
    journal.add(b"first")
    journal.close()
    head = frame_of(bytes(1_000_000), tmp_path / "frame")[:-1_000_000]
    path = tmp_path / "a.journal.0"
    path.write_bytes(path.read_bytes() + head * (2_000_000 // len(head)))
    began_s = time.process_time()
    (journal,) = files.stored(tmp_path)
    assert [entry.data for entry in journal.entries()] == [b"first"]
    assert time.process_time() - began_s < 5  # it was minutes


def test_a_journal_whose_header_says_nothing_is_none(tmp_path):
    journal = Journal(tmp_path, "a", {})
    journal.header = []
    journal.add(b"x")
    journal.close()
    assert files.stored(tmp_path) == []

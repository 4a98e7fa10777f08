"""The journal of a writer: what is pending after any end of it. Where rows of a job that goes back are placed."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
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
    journal.acknowledge(3)
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


@pytest.mark.parametrize(("lost", "left"), [(1, [b"first", b"second"]), (5, [b"first"]), (25, [])])
def test_a_torn_end_is_left_out(tmp_path, lost, left):
    journal = Journal(tmp_path, "rank-0", {})
    journal.add(b"first")
    journal.add(b"second")
    (path,) = tmp_path.iterdir()
    os.truncate(path, path.stat().st_size - lost)
    assert pending(tmp_path) == [left]


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


RECORDS = [b"%03d" % number * 10 for number in range(20)]


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
    (tmp_path / "cut").mkdir()
    path = tmp_path / "cut" / "rank-0.journal.txt"
    for length in range(len(written) + 1):
        path.write_bytes(written[:length])
        kept = [entry.data for journal in files.stored(tmp_path / "cut") for entry in journal.entries()]
        assert kept == [record for record in RECORDS if record in written[:length]]


@pytest.mark.parametrize("changes", [500, pytest.param(20_000, marks=pytest.mark.wide)])
def test_of_a_journal_with_changed_bits_all_other_records_are_read(tmp_path, written, changes):
    """One bit, or two bits, at random places. No value changes, and nothing raises."""
    (tmp_path / "changed").mkdir()
    path = tmp_path / "changed" / "rank-0.journal.txt"
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
    path = tmp_path / "rank-0.journal.txt"
    with path.open("ab") as file:  # as after a power loss
        file.write(bytes(4096))
    (left,) = files.stored(tmp_path)
    assert [entry.data for entry in left.entries()] == RECORDS[:5]
    assert f"{path} is damaged in 1 places" in caplog.text
    left.remove()
    assert [one.name for one in tmp_path.iterdir()] == ["rank-0.journal.txt.bad"]
    assert files.stored(tmp_path) == []


def test_a_journal_is_never_written_into_what_is_there(tmp_path, caplog):
    """Another user of the machine could have planted a link to a file of this user."""
    (tmp_path / "bashrc").write_text("mine\n")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "rank-0.journal.txt").symlink_to(tmp_path / "bashrc")
    journal = Journal(tmp_path / "run", "rank-0", {})
    for record in RECORDS:
        journal.add(record)
    journal.remove()
    assert (tmp_path / "bashrc").read_text() == "mine\n"
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["rank-0.journal.txt"]
    assert "rows cannot be kept in" in caplog.text


@pytest.mark.skipif(os.getuid() != 0, reason="a file of another user is made by root only")
def test_a_journal_of_another_user_is_left_out(tmp_path, monkeypatch, caplog):
    journal = Journal(tmp_path, "rank-0", {"id": "x"})
    journal.add(b"planted")
    journal.close()
    os.chown(tmp_path / "rank-0.journal.txt", 65534, -1)
    assert files.stored(tmp_path) == []
    assert "rank-0.journal.txt is left out" in caplog.text


@pytest.mark.parametrize("planted", ["fifo", "link"])
def test_what_is_no_file_is_left_out_and_nobody_waits_for_it(tmp_path, planted):
    path = tmp_path / "rank-0.journal.txt"
    os.mkfifo(path) if planted == "fifo" else path.symlink_to("/dev/zero")
    assert files.stored(tmp_path) == []
    files.remove_torn(tmp_path)


PROGRAM_WITH_LITTLE_ROOM = """
import logging, resource, sys
from pathlib import Path
from flyteplugins_tracking.trackers.journal import Journal
logging.basicConfig(format="%(message)s")
for room in range(1000):
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
    journal = Journal(Path(sys.argv[1], str(room)), "rank-0", {"id": "x"})
    for number in range(20):
        journal.add(b"%03d" % number)
        if number == 9:
            journal.acknowledge(1)
    if not journal.is_closed:
        break
"""


def test_wherever_the_disk_is_full_the_records_before_can_be_read(tmp_path):
    """The kernel writes a part of a line, and refuses the next one. Each position in a line is tried."""
    command = [sys.executable, "-c", PROGRAM_WITH_LITTLE_ROOM, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    rooms = sorted(map(int, os.listdir(tmp_path)))
    assert done.stderr.count("rows cannot be kept in") == len(rooms) - 1
    counts = []
    for room in rooms:
        kept = [entry.data for journal in stored(tmp_path / str(room)) for entry in journal.entries()]
        is_acknowledged = kept[:1] == [b"001"]
        assert kept == [b"%03d" % number for number in range(is_acknowledged, is_acknowledged + len(kept))]
        counts.append(len(kept) + is_acknowledged)
    assert counts == sorted(counts)
    assert set(counts) == set(range(21))


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
    rollback = Rollback(handle, SimpleNamespace(config=config, restart_count=2))
    rows = []
    for step in steps:
        row, at = rollback.place({"x": 1}, step)
        state.next = state.next + 1 if at is None else max(state.next, at)
        rows.append((at, row.get("global_step"), row.get("restart_count")))
    return rows, len(defined)


PROGRAM_THAT_WRITES = """
import itertools
import sys
from pathlib import Path
from flyteplugins_tracking.trackers.journal import Journal
for number in itertools.count():
    journal = Journal(Path(sys.argv[1]), f"rank-{number}", {"id": "x"})
    journal.add(b"x")
    journal.remove()
"""


def test_a_writer_that_begins_a_file_is_never_taken_for_one_that_has_ended(tmp_path):
    """It begins one each millisecond, and removes the file before that."""
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


PROGRAM_THAT_IS_KILLED = """
import os
import sys
from pathlib import Path
from flyteplugins_tracking.trackers.journal import Journal
journal = Journal(Path(sys.argv[1]), "rank-0", {"id": "x"})
while True:
    os.write(1, b"%d\\n" % journal.add(b"x" * 100))
"""


def test_a_kill_loses_no_record_that_was_added(tmp_path):
    writer = subprocess.Popen([sys.executable, "-c", PROGRAM_THAT_IS_KILLED, str(tmp_path)], stdout=subprocess.PIPE)
    assert writer.stdout is not None
    printed = [writer.stdout.readline() for _ in range(2000)]
    writer.kill()
    last = int([*printed, *writer.stdout.read().splitlines()][-1])
    writer.wait()
    (journal,) = files.stored(tmp_path)
    numbers = [entry.number for entry in journal.entries()]
    assert numbers == list(range(len(numbers)))
    assert len(numbers) in (last + 1, last + 2)


def test_a_file_has_its_name_when_it_is_locked(tmp_path, monkeypatch):
    """What another process does at any moment before that leaves it alone."""
    lock, found = files.lock_file, []

    def looked_at(*args):
        for _ in range(2):
            found.append([*files.files_in(tmp_path), *files.stored(tmp_path)])
            files.remove_torn(tmp_path)
            lock(*args)

    monkeypatch.setattr(files, "lock_file", looked_at)
    Journal(tmp_path, "rank-0", {}).add(b"x")
    monkeypatch.undo()
    assert found == [[], []]
    assert pending(tmp_path) == [[b"x"]]


@pytest.mark.parametrize("during", ["mkdir", "lock_file", "rename"])
def test_a_signal_handler_adds_a_record_while_the_file_is_begun(tmp_path, monkeypatch, during):
    journal = Journal(tmp_path, "rank-0", {})
    place = {"mkdir": files.Path, "lock_file": files, "rename": files.os}[during]
    called = getattr(place, during)

    def interrupted(*args, **kwargs):
        monkeypatch.setattr(place, during, called)
        journal.add(b"handler's")
        return called(*args, **kwargs)

    monkeypatch.setattr(place, during, interrupted)
    journal.add(b"first")
    journal.add(b"last")
    (left,) = stored(tmp_path)
    assert [(entry.number, entry.data) for entry in left.entries()] == [(0, b"handler's"), (1, b"first"), (2, b"last")]
    assert [path.name for path in tmp_path.iterdir()] == ["rank-0.journal.txt"]


def test_a_signal_handler_adds_records_at_any_moment(tmp_path):
    """Their lines are whole, and each record has a number of its own."""
    journal = Journal(tmp_path, "rank-0", {})
    before = signal.signal(signal.SIGALRM, lambda *_: journal.add(b"handler's"))
    random = Random(0)
    try:
        for _ in range(20_000):
            signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, 3e-5))
            journal.add(b"row")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    (left,) = stored(tmp_path)
    entries = list(left.entries())
    assert sorted(entry.number for entry in entries) == list(range(journal.added))
    assert {entry.data for entry in entries} == {b"row", b"handler's"}
    assert sum(entry.data == b"row" for entry in entries) == 20_000


def test_behind_a_line_that_is_cut_off_the_next_one_is_whole(tmp_path, monkeypatch, caplog):
    """The disk has room again when a signal handler logs."""
    journal, write = Journal(tmp_path, "rank-0", {}), os.write
    journal.add(b"first")

    def written_in_part(file, line):
        monkeypatch.setattr(files.os, "write", write)
        size = write(file, line[:-4])
        journal.add(b"handler's")
        return size

    monkeypatch.setattr(files.os, "write", written_in_part)
    journal.add(b"lost")
    assert pending(tmp_path) == [[b"first", b"handler's"]]
    assert "rows cannot be kept in" in caplog.text


def test_the_last_header_counts_and_a_damaged_one_does_not(tmp_path):
    journal = Journal(tmp_path, "rank-0", {"id": "x", "since": 9})
    journal.describe(id="y")  # there is no file yet
    journal.add(b"x")
    journal.describe(since=3)
    journal.describe(since=1)
    journal.close()
    journal.describe(since=0)
    assert files.stored(tmp_path)[0].header == {"id": "y", "since": 1}
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes().replace(b'"since": 1}', b'"since": 2}'))
    assert files.stored(tmp_path)[0].header == {"id": "y", "since": 3}


def test_a_line_without_an_end_is_read_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_LONGEST_LINE", 1000)
    journal = Journal(tmp_path, "rank-0", {"id": "x"})
    for record in (b"first", b"x" * 5000, b"last"):
        journal.add(record)
    assert pending(tmp_path) == [[b"first", b"last"]]


def test_a_journal_that_has_lost_its_headers_is_named(tmp_path, written, caplog, monkeypatch):
    path = tmp_path / "rank-0.journal.txt"
    path.write_bytes(bytes(4096) + written[written.index(b" 1 001") :])
    assert files.stored(tmp_path) == []
    assert f"{path} is damaged: it does not say which run it is of" in caplog.text
    assert files.files_in(tmp_path) == [path]


def test_a_file_name_that_a_terminal_obeys_is_not_written_to_it(tmp_path, caplog, monkeypatch):
    (tmp_path / "\x1b[2J.journal.txt").symlink_to("/etc/passwd")
    assert files.stored(tmp_path) == []
    assert "[2J.journal.txt is left out" in caplog.text
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


def test_a_journal_whose_header_says_nothing_is_none(tmp_path):
    journal = Journal(tmp_path, "a", {})
    journal.header = []
    journal.add(b"x")
    journal.close()
    assert files.stored(tmp_path) == []

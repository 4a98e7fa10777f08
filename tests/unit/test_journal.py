"""The journal of a run: what is read of it after any end of its process, and whatever has happened to its file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from support.away import LEFT, log

from flyteplugins_tracking.trackers import journal as files
from flyteplugins_tracking.trackers.journal import Journal


def stored(directory):
    """Read journals that this process writes too: it knows them by their paths, and these are others."""
    return files.stored(directory / ".." / directory.name)


def pending(directory):
    return [[entry.data for entry in journal.entries()] for journal in stored(directory)]


@pytest.fixture
def left(tmp_path, monkeypatch) -> Path:
    """The journal that a run of 10 rows has left in files."""
    monkeypatch.chdir(tmp_path)
    log(None, range(10))
    (path,) = LEFT.absolute().iterdir()
    return path


def records(path: Path) -> list[bytes]:
    return [entry.data for journal in files.stored(path.parent) for entry in journal.entries()]


def test_behind_any_truncation_all_whole_records_are_read(left):
    written, whole = left.read_bytes(), records(left)
    assert len(whole) > 10
    for length in range(len(written) + 1):
        left.write_bytes(written[:length])
        assert records(left) == [record for record in whole if record in written[:length]]


@pytest.mark.parametrize("changes", [500, pytest.param(20_000, marks=pytest.mark.wide)])
def test_of_a_journal_with_changed_bits_all_other_records_are_read(left, changes):
    """One bit, or two bits, at random places. No value changes, and nothing raises."""
    written, whole, random = left.read_bytes(), records(left), Random(0)
    for number in range(changes):
        changed = random.choices(range(8 * len(written)), k=1 + number % 2)
        data = bytearray(written)
        for bit in changed:
            data[bit // 8] ^= 1 << bit % 8
        left.write_bytes(data)
        kept = records(left)
        if kept:  # the header may be changed
            assert set(kept) <= set(whole)
            assert len(kept) >= len(whole) - len(changed), changed


def test_a_file_with_zeros_after_a_power_loss_is_reported_and_kept_when_its_rows_are_sent(left, caplog):
    whole, written = records(left), left.read_bytes()
    left.write_bytes(written + bytes(4096))
    assert records(left) == whole
    assert f"{left} is damaged in 1 places" in caplog.text
    files.stored(left.parent)[0].remove()
    assert [one.name for one in left.parent.iterdir()] == [f"{left.name}.bad"]
    assert files.stored(left.parent) == []
    first_row = written.rindex(b"\n", 0, written.index(b'{"row"'))
    left.write_bytes(bytes(4096) + written[first_row:])
    assert files.stored(left.parent) == []
    assert f"{left} is damaged: it does not say which run it is of" in caplog.text
    assert files.files_in(left.parent) == [left]


def test_a_journal_is_never_written_into_what_is_there(tmp_path, caplog):
    """Another user of the machine could have planted a link to a file of this user."""
    (tmp_path / "bashrc").write_text("mine\n")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "rank-0.journal.txt").symlink_to(tmp_path / "bashrc")
    journal = Journal(tmp_path / "run", "rank-0", {})
    journal.add(b"row")
    journal.remove()
    assert (tmp_path / "bashrc").read_text() == "mine\n"
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["rank-0.journal.txt"]
    assert "rows cannot be kept in" in caplog.text


@pytest.mark.parametrize("planted", ["another user's", "fifo", "link", "\x1b[2J"])
def test_what_is_no_journal_of_this_user_is_left_out_and_nobody_waits_for_it(left, caplog, planted):
    if planted == "another user's":
        if os.getuid() != 0:
            pytest.skip("a file of another user is made by root only")
        os.chown(left, 65534, -1)
    else:
        left.unlink()
        os.mkfifo(left) if planted == "fifo" else left.with_name(f"{planted}.journal.txt").symlink_to("/dev/zero")
    assert files.stored(left.parent) == []
    assert "is left out" in caplog.text
    assert "\x1b" not in caplog.text


PROGRAM_THAT_IS_KILLED = """
import os
import sys
from pathlib import Path
from flyteplugins_tracking.trackers.journal import Journal
journal = Journal(Path(sys.argv[1]), "rank-0", {"id": "x"})
while True:
    os.write(1, b"%d\\n" % journal.add(b"x" * 100))
"""


def test_a_kill_loses_no_record_that_was_added_and_leaves_the_journal_to_others(tmp_path):
    writer = subprocess.Popen([sys.executable, "-c", PROGRAM_THAT_IS_KILLED, str(tmp_path)], stdout=subprocess.PIPE)
    assert writer.stdout is not None
    printed = [writer.stdout.readline() for _ in range(2000)]
    (journal,) = files.stored(tmp_path)
    assert journal.is_open()
    writer.kill()
    last = int([*printed, *writer.stdout.read().splitlines()][-1])
    writer.wait()
    assert not journal.is_open()
    numbers = [entry.number for entry in journal.entries()]
    assert numbers == list(range(len(numbers)))
    assert len(numbers) in (last + 1, last + 2)


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

"""What an earlier attempt has left is in the run before any row of this one, with the real wandb-core."""

from __future__ import annotations

import os
import sys
import time
import zlib
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.offline_wandb import open_run
from support.users import NOBODY, needs_root
from wandb_files import StoredRun, read_run

from flyteplugins_tracking.trackers.base import Uncounted, Unwatched
from flyteplugins_tracking.trackers.journal import files
from flyteplugins_tracking.trackers.journal.files import Journal
from flyteplugins_tracking.trackers.wandb import datastore, offline, tail, vendor
from flyteplugins_tracking.trackers.wandb.run import WandbHandle

wandb = pytest.importorskip("wandb", reason='wandb is not installed: pip install "flyteplugins-tracking[wandb]"')
ROWS = 40


@pytest.fixture
def run(tmp_path, monkeypatch):
    yield open_run("tail", tmp_path, monkeypatch)
    vendor.set_global_run(None)
    assert vendor.restart_service()


@pytest.fixture
def earlier(run, monkeypatch) -> Path:
    """The directory of an attempt whose process was killed: with a journal, and an image."""
    directory = tail.run_directory(run).parent / "run-20260101_000000-tail"
    (directory / "files" / "media").mkdir(parents=True)
    (directory / "files" / "media" / "image.png").write_bytes(b"png")
    journal = Journal(directory, "owner-1", {"place": tail.Place.of(run), "step": 0, "is_shared": False})
    for number in range(ROWS):
        row = vendor._records().PartialHistoryRequest()
        for key, value in {"n": number, "_timestamp": 1.7e9 + number}.items():
            item = row.item.add()
            item.key, item.value_json = key, str(value)
        journal.add(row.SerializeToString())
    journal.close()
    return directory


def handle_of(run) -> WandbHandle:
    config = SimpleNamespace(step_metric="global_step", rollback="keep", finish_timeout_s=20)
    request = SimpleNamespace(
        config=config,
        watch=Unwatched(),
        plan=SimpleNamespace(primary=True),
        run_metadata={"restart_count": 1},
        steps=Uncounted(),
    )
    return WandbHandle(run, None, request, lambda *_: None)


def ended(directory: Path) -> StoredRun:
    """The run in a directory, once wandb-core has written its end."""
    (file,) = directory.glob("*.wandb")
    until = time.monotonic() + 60
    while (stored := read_run(file)).exit_code is None and time.monotonic() < until:
        time.sleep(0.05)
    return stored


@pytest.mark.parametrize("deadline", [None, 0.0], ids=["in time", "the rest in the background"])
def test_the_rows_of_an_earlier_attempt_come_first(run, earlier, deadline):
    tail.begin(run, deadline, is_shared=False)
    assert tail.has_rest(run) is (deadline is not None)
    handle = handle_of(run)
    run.log({"n": ROWS})
    run.log({"n": ROWS + 1}, step=3)  # the run has this step
    handle.finish(0)
    stored = ended(tail.run_directory(run))
    rows = stored.rows
    assert [(row["_step"], row["n"]) for row in rows] == [(n, n) for n in range(ROWS + 2)]
    assert [row["_timestamp"] for row in rows[:ROWS]] == [1.7e9 + n for n in range(ROWS)]
    assert (rows[-1]["global_step"], rows[-1]["restart_count"]) == (3, 1)
    assert stored.summary["n"] == ROWS + 1
    assert not files.stored(earlier)


def test_what_cannot_be_read_costs_one_warning(run, earlier, monkeypatch, caplog):
    monkeypatch.setattr(vendor, "parse_row", lambda _: 1 / 0)
    tail.begin(run, time.monotonic() + 60, is_shared=False)
    handle = handle_of(run)
    run.log({"n": 0})
    handle.finish(0)
    assert "could not be sent" in caplog.text
    assert files.stored(earlier)


def test_files_of_an_earlier_attempt_are_linked(run, earlier):
    record = sys.modules["wandb.proto.wandb_internal_pb2"].FilesRecord()
    for path in ("media/image.png", "config.yaml", "media/gone.png"):
        record.files.add().path = path
    own = tail.run_directory(run)
    assert tail._link_files(earlier, own, record)
    assert (own / "files" / "media" / "image.png").read_bytes() == b"png"
    run.finish()


def test_no_file_from_elsewhere_is_linked(run, earlier, tmp_path):
    """Neither by a path that leaves the directory, nor by a link that another user has planted in it."""
    (tmp_path / "id_rsa").write_text("key")
    (earlier / "id_rsa").write_text("key")
    (earlier / "files" / "planted").symlink_to(tmp_path / "id_rsa")
    (earlier / "files" / "elsewhere").symlink_to(tmp_path, target_is_directory=True)
    names = ["../id_rsa", str(tmp_path / "id_rsa"), "elsewhere/id_rsa"]
    if os.getuid() == 0:
        os.lchown(earlier / "files" / "planted", 65534, -1)
        names.append("planted")
    record = sys.modules["wandb.proto.wandb_internal_pb2"].FilesRecord()
    for name in names:
        record.files.add().path = name
    own = tail.run_directory(run)
    assert not tail._link_files(earlier, own, record)
    assert not list(own.rglob("id_rsa"))
    run.finish()


@pytest.fixture
def directories(tmp_path):
    """The directories of the runs `train`, `train-2`, and of rank 10 of `train`: in that order."""
    made = []
    for name, run_id in [("1-train", "train"), ("2-train-2", "train-2"), ("3-train-rank-10", "train")]:
        made.append(tmp_path / f"run-20260101_00000{name}")
        made[-1].mkdir()
        (made[-1] / f"run-{run_id}.wandb").write_bytes(bytes(7))
    return made


def test_runs_whose_ids_begin_alike_are_told_apart(directories):
    own = SimpleNamespace(id="train", dir=str(directories[2] / "files"))
    tail.mark_rewound(own)
    assert [tail.is_rewound(directory) for directory in directories] == [True, False, False]
    assert tail.directories_of(directories[0].parent, "train-2") == [directories[1]]
    assert tail.directories_of(directories[0].parent, "trai") == []


def test_a_mark_is_not_written_through_a_link(directories, tmp_path):
    """Another user could have planted it, in a directory in which others can write."""
    (directories[0] / "rewound").symlink_to(tmp_path / "elsewhere")
    tail.mark_rewound(SimpleNamespace(id="train", dir=str(directories[2] / "files")))
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.skipif(os.getuid() != 0, reason="a directory of another user is made by root only")
def test_a_directory_of_another_user_is_none_of_a_run(directories):
    os.chown(directories[0], 65534, -1)
    assert tail.directories_of(directories[0].parent, "train") == [directories[2]]


@pytest.mark.parametrize("torn", [0, 3, 2000])
def test_records_are_added_behind_those_that_are_whole(tmp_path, torn):
    """Records of each length from none to several blocks: they are split where W&B's client splits them."""
    path = tmp_path / "run-x.wandb"
    first, more = ([bytes([number]) * (number * 701) for number in range(start, start + 60)] for start in (1, 100))
    datastore.add(path, first)
    path.write_bytes(path.read_bytes()[: path.stat().st_size - torn])
    datastore.add(path, more)
    assert list(datastore.records(path)) == [*first[: -1 if torn else None], *more]
    datastore.add(path, [b""])
    assert list(datastore.records(path))[-1] == b""


@needs_root
def test_a_file_of_another_user_in_a_runs_directory_is_not_taken_for_its_rows(directories):
    directory = directories[0]
    os.mkfifo(directory / "0.wandb")
    (directory / "1.wandb").write_bytes(b"")
    for name in ("0.wandb", "1.wandb"):
        os.chown(directory / name, NOBODY, NOBODY)
    assert datastore.file_in(directory) == directory / "run-train.wandb"
    assert tail.directories_of(directory.parent, "train") == [directory, directories[2]]


@needs_root
def test_an_offline_attempt_of_another_user_is_not_read(run):
    parent = tail.run_directory(run).parent
    for number, kind in enumerate(("link", "file")):
        planted = parent / f"offline-run-2099010{number}_000000-{run.id}"
        planted.mkdir()
        file = planted / f"run-{run.id}.wandb"
        file.symlink_to("/dev/zero") if kind == "link" else file.write_bytes(bytes(7))
        os.lchown(file, NOBODY, NOBODY)
        os.chown(planted, NOBODY, NOBODY)
    assert offline.earlier_summary(run, "key") is None
    run.finish()


def test_an_events_file_takes_the_place_of_a_planted_link(run, tmp_path):
    own = tmp_path / "own"
    own.write_text("mine")
    handle = handle_of(run)
    (Path(run.dir) / "failure.txt").symlink_to(own)
    handle.record_event("failure", {}, "text")
    assert own.read_text() == "mine"
    assert (Path(run.dir) / "failure.txt").read_text() == "text"
    handle.finish(0)


def test_records_behind_a_damaged_one_are_read(tmp_path, caplog):
    """In the same block if the damaged record's length is whole, and in the next block in any case."""
    path = tmp_path / "run-x.wandb"
    payloads = [b"%05d" % number * 100 for number in range(200)]
    data = bytearray(datastore._HEADER)
    for payload in payloads:
        left = datastore._BLOCK - len(data) % datastore._BLOCK
        if left < datastore._FRAGMENT.size + len(payload):
            data += bytes(left)  # W&B's client would split it: for a reader this is a damaged place too
        checksum = zlib.crc32(bytes([datastore._FULL]) + payload)
        data += datastore._FRAGMENT.pack(checksum, len(payload), datastore._FULL) + payload
    path.write_bytes(data)
    assert list(datastore.records(path)) == payloads
    caplog.clear()
    data[datastore._HEADER + 30] ^= 1
    path.write_bytes(data)
    assert list(datastore.records(path)) == payloads[1:]
    data[datastore._HEADER + 5] ^= 1  # the length
    path.write_bytes(data)
    kept = list(datastore.records(path))
    assert kept == payloads[-len(kept) :]
    assert len(kept) > 100


def test_the_place_of_a_run_is_stored_without_the_servers_password():
    settings = SimpleNamespace(base_url="https://me:pass/word@wandb.example.com")
    place = tail.Place.of(SimpleNamespace(settings=settings, entity="e", project="p", id="i"))
    assert place == ("https://wandb.example.com", "e", "p", "i")

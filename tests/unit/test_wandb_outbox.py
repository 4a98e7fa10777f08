"""The journals and files of W&B runs, with the real wandb-core: what is read of them, and what a file of another is."""

from __future__ import annotations

import json
import math
import os
import random
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.offline_wandb import open_run
from support.users import NOBODY, needs_root
from wandb_files import StoredRun, read_run

from flyteplugins_tracking._rank.plan import RunPlan
from flyteplugins_tracking.trackers import journal as files
from flyteplugins_tracking.trackers.base import NoSigterm
from flyteplugins_tracking.trackers.journal import Journal
from flyteplugins_tracking.trackers.wandb import attempts, datastore, outbox, sender, vendor
from flyteplugins_tracking.trackers.wandb.attempts import Attempt, Place
from flyteplugins_tracking.trackers.wandb.run import WandbHandle

ROWS = 40


@pytest.fixture(scope="module")
def service():
    """One wandb-core for all runs of these tests, of which none is ended."""
    yield
    assert vendor.restart_service()


@pytest.fixture
def run(service, tmp_path, monkeypatch):
    yield open_run("tail", tmp_path, monkeypatch)
    vendor.set_global_run(None)


def journal_in(directory: Path, place, rows, name: str = "rows-1", step: int | None = 0, **more) -> None:
    """Leave a journal of rows: each its values, and the step if the writer knows it."""
    journal = Journal(directory, name, {"place": place, "step": step, **more})
    for values, at in rows:
        journal.header["step"] = at
        journal.add(outbox.record_of(serialized(values), at))
    journal.close()


def serialized(values: Mapping[str, Any]) -> bytes:
    """A row as W&B's client serializes it."""
    from wandb.proto.wandb_internal_pb2 import PartialHistoryRequest

    row = PartialHistoryRequest()
    for key, value in values.items():
        row.item.add(key=key, value_json=json.dumps(value))
    return bytes(row.SerializeToString())


@pytest.fixture
def earlier(run) -> Path:
    """The directory of an attempt whose process was killed: with a journal, and an image."""
    directory = outbox.run_directory(run).parent / "run-20260101_000000-tail"
    (directory / "files" / "media").mkdir(parents=True)
    (directory / "files" / "media" / "image.png").write_bytes(b"png")
    rows = [({"n": number, "_timestamp": 1.7e9 + number}, number) for number in range(ROWS)]
    journal_in(directory, Place.of(run), rows, first_step=0)
    return directory


def begun(run, has_one_writer: bool = True) -> outbox.WandbOutbox:
    """Give the run, which is offline, the outbox of one that is online."""
    with pytest.MonkeyPatch.context() as online:
        online.setattr(type(run), "offline", False)
        online.setattr(vendor.Reader, "stored", lambda _: None)  # there is no server
        made = vars(run)[outbox.OUTBOX] = outbox.WandbOutbox(
            run, has_one_writer, step_metric="global_step", restart_count=1
        )
        sender.send_earlier(request_of(), run)
    return made


def request_of() -> Any:
    config = SimpleNamespace(
        step_metric="global_step", finish_timeout_s=20, finish_limit="", run_mode="auto", roles=None
    )
    plan = RunPlan(opens=True, primary=True)
    return SimpleNamespace(config=config, sigterm=NoSigterm(), plan=plan, restart_count=1, info=None, deadline=0)


def handle_of(run) -> WandbHandle:
    return WandbHandle(run, None, request_of())


def values_of(row: datastore.Row) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for item in row.items:
        *parents, key = item.nested_key or [item.key]
        place = values
        for parent in parents:
            place = place.setdefault(parent, {})
        place[key] = json.loads(vendor.json_of(item))
    return values


def rows_since(attempt: Attempt, step: int) -> list[Any]:
    """The rows that are read to send those from a step on, but for one before it."""
    records = attempts.Reading(attempt, step).records()
    return [row for kind, row, _ in records if kind == "history" and row.step >= step]


def records_in(file: Path) -> list[bytes]:
    return [data for _, data in datastore.records_from(file, 0)]


def ended(directory: Path) -> StoredRun:
    """The run in a directory, once wandb-core has written its end."""
    (file,) = directory.glob("*.wandb")
    until = time.monotonic() + 60
    while (stored := read_run(file)).exit_code is None and time.monotonic() < until:
        time.sleep(0.05)
    return stored


def test_a_run_on_a_full_disk_that_is_not_sent_in_time_says_what_could_not_be_kept(run, monkeypatch, caplog):
    made = begun(run)
    handle = handle_of(run)
    run.log({"n": 0})
    with monkeypatch.context() as full:
        full.setattr("flyteplugins_tracking.trackers.journal.os.write", lambda *_: 1)
        run.log({"n": 1})
        run.log({"n": 2})
    assert made.unkept_rows == 2

    def too_long(*_: object) -> None:
        raise TimeoutError

    with monkeypatch.context() as late:
        late.setattr(vendor, "finish_while", too_long)
        handle.finish(0)
    assert "rows could not be kept: those that W&B has not got are lost. To send the rest" in caplog.text
    assert "Nothing is lost" not in caplog.text
    run.finish()


def test_what_cannot_be_read_costs_one_warning(run, earlier, monkeypatch, caplog):
    monkeypatch.setattr(attempts, "rows_of", lambda *_: 1 / 0)
    begun(run)
    handle = handle_of(run)
    run.log({"n": 0})
    assert "could not be sent" in caplog.text
    assert files.stored(earlier)
    handle.finish(0)
    assert [row["n"] for row in ended(outbox.run_directory(run)).rows] == [0]


def test_a_row_is_what_wandb_core_makes_of_its_parts(run, tmp_path):
    made = begun(run)
    run.log({"a": 1})
    run.log({"b": 2}, commit=False)
    run.log({"a": 3})
    run.log({"a": 4}, step=9)
    run.log({"b": float("nan")}, step=9)
    run.log({"a": 6}, step=8)  # dropped
    run.log({"a": 7, "nested": {"x": [1]}}, step=12)
    made.close()
    run.finish()
    directory = outbox.run_directory(run)
    kept = list(Attempt.at(directory).rows())
    assert [row.step for row in kept] == [0, 1, 9, 12]
    assert [sorted(row.columns) for row in kept[1:3]] == [["_timestamp", "a", "b"]] * 2
    assert [row.step for row in rows_since(Attempt.at(directory), 9)] == [9, 12]
    ended(directory)
    (file,) = directory.glob("*.wandb")
    records = map(vendor.parse_record, records_in(file))
    in_file = [datastore.row_of(record) for kind, record in records if kind == "history"]
    as_read = [[(row.step, row.time, str(sorted(values_of(row).items()))) for row in rows] for rows in (kept, in_file)]
    assert as_read[0] == as_read[1]
    assert [[row.number_in("a") for row in rows] for rows in (kept, in_file)] == [[1, 3, 4, 7]] * 2


def test_a_row_that_is_logged_after_the_end_stands_behind_the_one_that_the_end_completes(run):
    made = begun(run)
    run.log({"a": 1}, commit=False)
    made.keep_end(0)
    with made.alone(run):
        run.log({"b": 2})
    made.close()
    run.finish()
    kept = Attempt.at(outbox.run_directory(run)).rows()
    assert [(row.step, row.columns & {"a", "b"}) for row in kept] == [(0, {"a"}), (1, {"b"})]


def test_rows_of_a_process_whose_children_log_too_follow_those_that_the_file_has(run):
    """W&B's client gives the steps then. The file has rows of others, at other times."""
    begun(run, has_one_writer=False)
    for number in range(6):
        run.log({"n": number, "_timestamp": 1.7e9 + number})
    run.finish()
    directory = outbox.run_directory(run)
    ended(directory)
    for journal in files.stored(directory):
        journal.remove()
    rows = [({"n": number, "_timestamp": 1.7e9 + number}, None) for number in (0, 2, 4, 7, 8)]
    journal_in(directory, Place.of(run), rows, "rows-1", step=None)
    attempt = Attempt.at(directory)
    assert [(row.step, values_of(row)["n"]) for row in rows_since(attempt, 4)] == [(4, 4), (5, 5), (6, 7), (7, 8)]


def test_files_of_rows_are_uploaded_again_and_no_file_from_elsewhere(run, earlier, tmp_path):
    """Neither by a path that leaves the directory, nor through a link in it."""
    from wandb.proto.wandb_internal_pb2 import Record

    (tmp_path / "id_rsa").write_text("key")
    (earlier / "id_rsa").write_text("key")
    media = earlier / "files" / "media"
    (media / "elsewhere").symlink_to(tmp_path, target_is_directory=True)
    (media / "odd[1].png").write_bytes(b"odd")
    names = [
        "media/../../id_rsa",
        str(tmp_path / "id_rsa"),
        "media/elsewhere/id_rsa",
        "media/gone.png",
    ]
    image = {"_type": "image-file", "path": "media/image.png"}
    saved = Record()
    for name in [image["path"], "media/odd[1].png", *names]:
        saved.files.files.add().path = name
    journal = Journal(earlier, "rows-2", {"place": Place.of(run), "step": ROWS})
    journal.add(outbox.record_of_kind(attempts.RECORD, saved.SerializeToString()))
    journal.add(outbox.record_of(serialized({"image": image}), ROWS))
    journal.close()
    begun(run)
    run.finish()
    own = outbox.run_directory(run) / "files" / "media"
    assert (own / "image.png").read_bytes() == b"png"
    assert sorted(path.name for path in own.iterdir()) == ["image.png", "odd[1].png"]
    assert not list(own.rglob("id_rsa"))
    assert ended(outbox.run_directory(run)).rows[-1]["image/path"] == image["path"]


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
    assert attempts.directories_of(directories[0].parent, "train") == [directories[0], directories[2]]
    assert attempts.directories_of(directories[0].parent, "train-2") == [directories[1]]
    assert attempts.directories_of(directories[0].parent, "trai") == []


def test_a_mark_is_not_written_through_a_link(directories, tmp_path):
    """Another user could have planted it, in a directory in which others can write."""
    (directories[0] / "run-train.wandb.synced").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic link"):
        attempts.mark_synced(directories[0])
    assert not (tmp_path / "elsewhere").exists()


def test_a_file_that_has_grown_since_it_was_sent_is_not_sent(directories):
    directory = directories[0]
    attempts.mark_synced(directory, attempts.file_size(directory))
    attempts.mark_synced(directory)
    assert attempts.is_synced(directory)
    with (directory / "run-train.wandb").open("ab") as file:
        file.write(b"more")
    assert not attempts.is_synced(directory)
    (directory / "run-train.wandb.synced").write_text("")  # as `wandb sync` has it
    assert attempts.is_synced(directory)
    os.utime(directory / "run-train.wandb", times=(time.time() + 60,) * 2)  # a process goes on
    assert not attempts.is_synced(directory)
    attempts.mark_synced(directory)
    assert attempts.is_synced(directory)


@pytest.mark.skipif(os.getuid() != 0, reason="a directory of another user is made by root only")
def test_a_directory_of_another_user_is_none_of_a_run(directories):
    os.chown(directories[0], 65534, -1)
    assert attempts.directories_of(directories[0].parent, "train") == [directories[2]]


@needs_root
def test_a_mark_of_another_user_does_not_count(directories):
    directory = directories[0]
    mark = directory / "run-train.wandb.synced"
    mark.touch()
    os.chown(mark, NOBODY, NOBODY)
    assert not attempts.is_synced(directory)


@needs_root
def test_a_file_of_another_user_in_a_runs_directory_is_not_taken_for_its_rows(directories):
    directory = directories[0]
    os.mkfifo(directory / "0.wandb")
    (directory / "1.wandb").write_bytes(b"")
    for name in ("0.wandb", "1.wandb"):
        os.chown(directory / name, NOBODY, NOBODY)
    assert datastore.file_in(directory) == directory / "run-train.wandb"
    assert attempts.directories_of(directory.parent, "train") == [directory, directories[2]]


@needs_root
def test_an_offline_attempt_of_another_user_is_not_read(run):
    parent = outbox.run_directory(run).parent
    for number, kind in enumerate(("link", "file")):
        planted = parent / f"offline-run-2099010{number}_000000-{run.id}"
        planted.mkdir()
        file = planted / f"run-{run.id}.wandb"
        file.symlink_to("/dev/zero") if kind == "link" else file.write_bytes(bytes(7))
        os.lchown(file, NOBODY, NOBODY)
        os.chown(planted, NOBODY, NOBODY if kind == "file" else -1)
    assert attempts.directories_of(parent, run.id) == [outbox.run_directory(run)]
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


def blocks_of(payloads: list[bytes]) -> bytearray:
    """A file of these records, as W&B's client writes it: a record that its block has no room for is split."""
    data = bytearray(datastore._HEADER)
    for payload in payloads:
        rest, is_first = payload, True
        while rest:
            room = datastore._BLOCK - len(data) % datastore._BLOCK - datastore._FRAGMENT.size
            part, rest = rest[:room], rest[room:]
            kind = {(True, False): 1, (True, True): 2, (False, True): 3, (False, False): 4}[is_first, bool(rest)]
            data += datastore._FRAGMENT.pack(zlib.crc32(bytes([kind]) + part), len(part), kind) + part
            is_first = False
    return data


def test_records_behind_a_damaged_one_are_read(tmp_path, caplog):
    """In the same block if the damaged record's length is whole, and in the next block in any case."""
    path, payloads = tmp_path / "run-x.wandb", [b"%05d" % number * 100 for number in range(200)]
    data = blocks_of(payloads)
    path.write_bytes(data)
    assert records_in(path) == payloads
    caplog.clear()
    data[datastore._HEADER + 30] ^= 1
    path.write_bytes(data)
    assert records_in(path) == payloads[1:]
    data[datastore._HEADER + 5] ^= 1  # the length
    path.write_bytes(data)
    kept = records_in(path)
    assert kept == payloads[-len(kept) :]
    assert len(kept) > 100


def test_a_file_is_read_on_while_it_is_written(tmp_path):
    """What is not written completely yet is read later, also a record of several blocks."""
    path, payloads = tmp_path / "run-x.wandb", [b"a" * 50, b"b" * 70_000, b"c" * 50]
    data, found, position = blocks_of(payloads), [], 0
    for end in [*range(0, len(data), 10_007), len(data)]:
        path.write_bytes(data[:end])
        new = list(datastore.records_from(path, position, is_written=True))
        found += [record for _, record in new]
        position = new[-1][0] if new else position
    assert found == payloads


@pytest.mark.parametrize("at", [1.5, "yesterday", None, [1]])
def test_a_row_may_have_any_step_key_and_time(at):
    """A time in nanoseconds as the step, more than a float has; a key without a character; a time of the function's."""
    from wandb.proto.wandb_internal_pb2 import HistoryRecord

    record, step = HistoryRecord(), 1_795_964_203_626_989_101
    for key, value in (("_step", step), ("", 1), ("_timestamp", at)):
        record.item.add(nested_key=[key] if key else [], value_json=json.dumps(value))
    row = datastore.row_of(record)
    assert (row.step, row.columns) == (step, {"", "_timestamp"})
    assert row.time == (1.5 if at == 1.5 else 0)


@pytest.mark.parametrize("is_damaged", [False, True])
def test_the_last_rows_below_a_step_are_found_without_reading_the_file(tmp_path, is_damaged):
    """Rows of a few bytes and of several blocks, with steps left out, and much else between and behind them."""
    from wandb.proto.wandb_internal_pb2 import Record

    numbers, payloads, steps = random.Random(1), list[bytes](), list[int]()
    for _ in range(120):
        record = Record()
        if numbers.random() < 0.3:
            steps.append((steps[-1] if steps else 0) + numbers.choice([1, 1, 7]))
            size = numbers.choice([1, 100, 20_000, 90_000])
            record.history.item.add(nested_key=["_step"], value_json=str(steps[-1]))
            record.history.item.add(nested_key=["text"], value_json=json.dumps("x" * size))
        else:
            record.output_raw.line = "x" * numbers.choice([1, 9_000])
        payloads.append(record.SerializeToString())
    data = blocks_of(payloads)
    if is_damaged:
        data[len(data) // 2 : len(data) // 2 + 40_000] = bytes(40_000)
    file = tmp_path / "run-x.wandb"
    file.write_bytes(data)
    kept = [mark.step for mark in datastore.marks_in(file)]
    assert (kept == steps) is not is_damaged
    for below in [*range(steps[-1] + 3), math.inf]:
        found = datastore.last_rows(tmp_path, below)
        assert [mark.step for mark in found] == [step for step in kept if step < below][-len(found) or len(kept) :]
        assert found or below <= kept[0]
        if found:  # reading on from there gives that row first
            assert next(datastore.marks_in(file, found[-1].position)).step == found[-1].step


def test_the_place_of_a_run_is_stored_without_the_servers_password():
    settings = SimpleNamespace(base_url="https://me:pass/word@wandb.example.com")
    place = Place.of(SimpleNamespace(settings=settings, entity="e", project="p", id="i"))
    assert place == ("https://wandb.example.com", "e", "p", "i")


def test_a_run_without_an_entity_is_that_of_the_default_one():
    place = Place("https://wandb.example.com", "e", "p", "i")
    unknown, other = place._replace(entity=""), place._replace(entity="f")
    assert place.is_same(unknown)
    assert unknown.is_same(place)
    assert not place.is_same(other)
    assert not place.is_same(place._replace(run_id="j"))


@pytest.mark.parametrize(
    ("age_of_log_s", "until", "waited_s"),
    [
        (None, math.inf, 0),  # there is no attempt
        (1e9, math.inf, 0),
        (2, math.inf, 4),
        (2, 101, 1),
        (-3600, math.inf, 6),  # the clock was set back since, or is another machine's
    ],
)
def test_opening_waits_until_w_and_b_counts_what_was_sent_last(tmp_path, monkeypatch, age_of_log_s, until, waited_s):
    clock = SimpleNamespace(now=100.0, time=time.time)
    clock.monotonic = lambda: clock.now
    clock.sleep = lambda seconds: setattr(clock, "now", clock.now + seconds)
    monkeypatch.setattr(attempts, "time", clock)
    if age_of_log_s is not None:
        log = tmp_path / "run-20260101_000000-x" / "logs" / "debug-internal.log"
        log.parent.mkdir(parents=True)
        log.touch()
        os.utime(log, (time.time() - age_of_log_s,) * 2)
    attempts.await_count(tmp_path.glob("run-*"), until)
    assert clock.now - 100 == pytest.approx(waited_s, abs=0.2)

"""What an earlier attempt has left is in the run before any row of this one, with the real wandb-core."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.offline_wandb import open_run
from wandb_files import StoredRun, read_run

from flyteplugins_tracking.trackers.base import Uncounted, Unwatched
from flyteplugins_tracking.trackers.journal import files
from flyteplugins_tracking.trackers.journal.files import Journal
from flyteplugins_tracking.trackers.wandb import tail, vendor
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

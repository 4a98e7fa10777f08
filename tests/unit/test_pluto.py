"""Pluto beyond what all trackers have in common: the real client against a server that is as strict as the service."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import sqlite3
import subprocess
import sys
import time
from collections import OrderedDict
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.pluto_server import KEY
from support.users import NOBODY, needs_root

from flyteplugins_tracking import ConfigError, tracking_init
from flyteplugins_tracking.trackers.config import TrackingConfig
from flyteplugins_tracking.trackers.journal import Journal
from flyteplugins_tracking.trackers.pluto import TRACKER, queues, vendor


@pytest.mark.parametrize("run_id", ["42", "ABC-1", "a/b"])
def test_ids_that_pluto_would_misread_are_refused_at_decoration(run_id):
    with pytest.raises(ConfigError, match=re.escape(run_id)):
        tracking_init(tracker="pluto", id=run_id)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"settings": {"_auth": "secret-key"}}, "secret="),
        ({"settings": 3}, "mapping"),
        ({"fork_run_id": 3}, "go together"),
        ({"config": "config.yaml"}, "config= as a mapping"),
        ({"download_logs": True}, "Pluto does not support download_logs=True"),
        ({"entity": "team"}, "no argument 'entity'"),
    ],
)
def test_unsupported_arguments_are_refused_at_decoration_with_the_reason(arguments, reason):
    with pytest.raises(ConfigError, match=re.escape(reason)) as error:
        tracking_init(tracker="pluto", **arguments)
    assert "secret-key" not in str(error.value)


def test_an_id_that_the_library_has_made_gets_a_word_before_it(bare_environment):
    from flyteplugins_tracking.trackers import pluto

    made = _request("7-12345678")
    assert pluto._with_usable_id(made).plan.run_id == "run-7-12345678"
    assert pluto._with_usable_id(_request("job-1a2b")).plan.run_id == "job-1a2b"


def _request(run_id: str) -> Any:
    from flyteplugins_tracking._rank.plan import RunPlan
    from flyteplugins_tracking.trackers.base import RunRequest, Unwatched

    return RunRequest(
        plan=RunPlan(opens=True, run_id=run_id, primary=True, writers=1),
        planned_run_id=run_id,
        config=TrackingConfig(tracker="pluto"),
        info=None,
        has_other_writers=False,
        run_metadata={},
        read_secret=lambda: None,
        may_prompt=False,
        watch=Unwatched(),
        deadline=time.monotonic() + 1,
    )


@pytest.mark.parametrize(
    ("arguments", "address"),
    [
        ({}, "https://pluto.trainy.ai"),
        ({"organization": "team", "project": "a b"}, "https://pluto.trainy.ai/o/team/projects/a%20b"),
        ({"organization": "team"}, "https://pluto.trainy.ai/o/team"),
        ({"settings": {"host": "10.0.0.1"}}, "http://10.0.0.1:3000"),
        ({"settings": {"url_app": "https://pluto.team/"}}, "https://pluto.team"),
    ],
)
def test_pages(bare_environment, arguments, address):
    assert TRACKER.page(TrackingConfig.from_arguments({"tracker": "pluto", **arguments}), None) == address


def test_tasks_of_both_sdks_have_a_link():
    import flyte
    from flytekit import task
    from flytekit.configuration import ImageConfig, SerializationSettings
    from flytekit.tools.translator import get_serializable

    tracked = tracking_init(tracker="pluto", organization="team", project="p")
    address = "https://pluto.trainy.ai/o/team/projects/p"

    @tracked
    @task
    def of_flytekit() -> None: ...

    settings = SerializationSettings(ImageConfig.auto_default_image())
    template = get_serializable(OrderedDict(), settings, of_flytekit).template
    assert template.config == {"link_type": "tracking-pluto", "pluto_page": address}

    @tracked
    @flyte.TaskEnvironment(name="pluto").task
    def of_flyte() -> None: ...

    link = {"run_name": "r1", "project": "p", "domain": "d", "context": {}, "parent_action_name": ""}
    (of_task,) = of_flyte.links
    assert of_task.name == "Pluto"
    assert of_task.get_link(**link, action_name="a0", pod_name="") == address


def plain() -> None: ...


def test_a_decorated_function_is_pickled_without_a_key(monkeypatch):
    monkeypatch.setenv("PLUTO_API_KEY", KEY)
    monkeypatch.setattr(sys.modules[__name__], "plain", tracking_init(tracker="pluto", id="a")(plain))
    assert KEY.encode() not in pickle.dumps(plain)


ROW = "INSERT INTO sync_queue (run_id, record_type, payload_json, timestamp_ms, step, status, created_at) VALUES "
FILE = "INSERT INTO file_uploads (run_id, local_path, file_name, timestamp_ms, status, created_at) VALUES "


def make_queue(directory: Path, *statements: str) -> Path:
    """Make a database with the columns of the client's: `SyncStore._init_schema`."""
    directory.mkdir(parents=True)
    with closing(sqlite3.connect(directory / "sync.db")) as database:
        database.execute(
            "CREATE TABLE sync_queue (id INTEGER PRIMARY KEY, run_id, record_type, payload_json, timestamp_ms, step, "
            "status INTEGER DEFAULT 0, retry_count INTEGER DEFAULT 0, created_at)"
        )
        columns = "file_ext, file_type, file_size, log_name, step, caption, annotations, sample_index"
        database.execute(
            "CREATE TABLE file_uploads (id INTEGER PRIMARY KEY, run_id, local_path, file_name, timestamp_ms, "
            f"{columns}, status INTEGER DEFAULT 0, created_at)"
        )
        for statement in statements:
            database.execute(statement)
        database.commit()
    return directory / "sync.db"


def rows_of(database: Path, query: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(database)) as connection:
        return connection.execute(query).fetchall()


def test_what_another_queue_has_not_sent_is_copied_once_with_the_files_in_its_directory(tmp_path):
    # As on another machine: the rank wrote to `was`, and the directory is `other` now.
    was, own = tmp_path / "was", tmp_path / "own"
    other = make_queue(
        tmp_path / "other",
        ROW + "('x', 0, '{\"a\": 1}', 1001, 1, 2, 1.0)",  # sent
        ROW + "('x', 0, '{\"a\": 2}', 1002, 2, 1, 2.0)",  # on its way when the uploader was killed
        ROW + "('x', 5, '{\"cpu\": 3}', 1003, 3, 0, 3.0)",
        FILE + f"('x', '{was}/files/a.png', 'a', 1, 0, 1.0)",
        FILE + f"('x', '{was}/files/gone.png', 'gone', 1, 0, 1.0)",
        FILE + f"('x', '{tmp_path}/key', 'outside', 1, 0, 1.0)",
        FILE + f"('x', '{was}/files/link.png', 'link', 1, 0, 1.0)",
        FILE + f"('x', '{was}/files/sent.png', 'sent', 1, 2, 1.0)",
    )
    (tmp_path / "other" / "files").mkdir()
    (tmp_path / "other" / "files" / "a.png").write_text("image")
    (tmp_path / "key").write_text("private")
    (tmp_path / "other" / "files" / "link.png").symlink_to(tmp_path / "key")
    mine = make_queue(own, ROW + "('y', 0, '{\"a\": 9}', 1009, 9, 0, 9.0)")
    op = SimpleNamespace(_sync_manager=SimpleNamespace(db_path=str(mine), run_id="y"))
    assert vendor.last_step_in(str(other)) == 2
    assert vendor.move_queue(op, str(other), str(was), str(own)) == 1
    unsent = "SELECT run_id, timestamp_ms, step, status, retry_count FROM sync_queue ORDER BY created_at"
    assert rows_of(mine, unsent) == [("y", 1002, 2, 0, 0), ("y", 1003, 3, 0, 0), ("y", 1009, 9, 0, 0)]
    shutil.rmtree(tmp_path / "other")
    ((run_id, path, status),) = rows_of(mine, "SELECT run_id, local_path, status FROM file_uploads")
    assert (run_id, Path(path).read_text(), status) == ("y", "image", 0)


def test_a_queue_whose_rank_was_killed_at_once_has_nothing(tmp_path):
    mine = make_queue(tmp_path / "own")
    op = SimpleNamespace(_sync_manager=SimpleNamespace(db_path=str(mine), run_id="y"))
    (tmp_path / "empty.db").touch()
    assert vendor.last_step_in(str(tmp_path / "empty.db")) == vendor.last_step_in(str(tmp_path / "none.db")) == 0
    assert vendor.move_queue(op, str(tmp_path / "empty.db"), "", "") == 0
    assert vendor.move_queue(op, str(tmp_path / "none.db"), "", "") == 0
    assert not (tmp_path / "none.db").exists()


@needs_root
@pytest.mark.parametrize("changed", ["sync.db", "sync.db-wal", "."])
def test_what_another_user_has_put_among_the_queues_is_not_sent(tmp_path, changed):
    directory = tmp_path / "i-rank-0-attempt-0-x"
    directory.mkdir()
    journal = Journal(directory, "queue", {"id": "i", "place": "p"})
    journal.add(b"{}")
    journal.close()
    for name in ("sync.db", "sync.db-wal"):
        (directory / name).touch()
    own = SimpleNamespace(directory=str(tmp_path / "own"), _run_id="i", _place="p")
    assert [path for path, _ in queues.Queue._others(own)] == [str(directory)]
    os.chown(directory / changed, NOBODY, NOBODY)
    assert not list(queues.Queue._others(own))


def test_a_fifo_in_the_place_of_a_queues_lock_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "uploader.lock")
    with queues.uploading(str(tmp_path)):
        pass


def test_a_queue_is_free_when_its_uploader_has_ended(tmp_path):
    program = f"""
import sys
from flyteplugins_tracking.trackers.pluto.queues import uploading
with uploading({str(tmp_path)!r}):
    print("locked", flush=True)
    sys.stdin.read()
"""
    uploader = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert uploader.stdout is not None
    assert uploader.stdout.readline() == b"locked\n"
    with queues.uploading(str(tmp_path)) as is_free:
        assert not is_free
    uploader.kill()
    uploader.wait()
    with queues.uploading(str(tmp_path)) as is_free:
        assert is_free

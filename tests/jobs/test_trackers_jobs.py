"""Trackers by name, by entry point and as objects; and what they have in common, without any service."""

from __future__ import annotations

import json
import math
import signal
import sqlite3
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from support import jobs
from support.backends import JsonlBackend

from flyteplugins_tracking import (
    ConfigError,
    TrackerUnavailableError,
    get_run,
    tracking_init,
    tracking_run,
)
from flyteplugins_tracking._commands.send import main as send
from flyteplugins_tracking._runs.sigterm import Sigterm
from flyteplugins_tracking.trackers import registry
from flyteplugins_tracking.trackers.base import Handle, Tracker
from flyteplugins_tracking.trackers.journal import stored
from flyteplugins_tracking.trackers.kept import open_or_keep

BUILT_IN = sorted(registry.BUILT_IN)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> JsonlBackend:
    """The example of a third party's tracker, as pip installs it."""
    return JsonlBackend(tmp_path_factory.mktemp("jsonl"))


@pytest.fixture
def registered(installed, monkeypatch):
    """Have this process find the installed example."""
    monkeypatch.syspath_prepend(installed.environment()["PYTHONPATH"].partition(":")[0])
    monkeypatch.setenv("JSONL_DIR", installed.environment()["JSONL_DIR"])
    registry._registered.cache_clear()
    yield installed
    monkeypatch.delitem(sys.modules, "jsonl_tracker", raising=False)
    registry._registered.cache_clear()


def test_an_unknown_tracker_is_refused_with_the_known_names(registered):
    with pytest.raises(ConfigError) as refused:
        tracking_init(tracker="jsnol")
    for name in [*BUILT_IN, "jsonl"]:
        assert name in str(refused.value)
    assert "did you mean 'jsonl'?" in str(refused.value)


def test_an_entry_point_gives_a_tracker_that_is_its_class(registered, bare_environment):
    @tracking_init(tracker="jsonl", project="p", id="by-name")
    def train():
        get_run("jsonl").log({"a": 1})

    train()
    (run,) = [kept for kept in registered.runs("p") if kept.id == "by-name"]
    assert run.status == "finished"


def test_the_first_row_of_a_later_attempt_has_its_number(registered, bare_environment):
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0"}
    for name, value in {**place, "TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": "2"}.items():
        bare_environment.setenv(name, value)

    @tracking_init(tracker="jsonl", project="p", id="again")
    def train():
        for number in range(3):
            get_run().log({"a": number})

    train()
    lines = Path(registered.environment()["JSONL_DIR"], "p", "again.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "a" in row]
    assert [(row["a"], row.get("restart_count")) for row in rows] == [(0, 2), (1, None), (2, None)]


class Absent(Tracker):
    """The example's, whose service may be away."""

    name = "jsonl"
    title = "JSON lines"

    def open(self, request: Any) -> Handle:
        from jsonl_tracker import JsonlTracker

        def open_run() -> Any:
            raise TrackerUnavailableError("It is away.")

        return open_or_keep(request, JsonlTracker(), open_run)


def test_a_run_of_a_third_party_is_kept_in_files_and_left_to_its_own_documentation(
    registered, bare_environment, monkeypatch, tmp_path, caplog, capsys
):
    monkeypatch.chdir(tmp_path)

    @tracking_init(tracker=Absent, project="sent", id="i", group="g", config={"lr": 0.1}, if_unavailable="degrade")
    def train():
        run = get_run()
        run.log({"a": 1})
        run.log({"a": 2, "nan": math.nan}, step=7)
        run.log({"what JSON cannot hold": object()})
        run.finish()
        assert run._handle.url is None
        raise ValueError("made to fail")

    with pytest.raises(ValueError, match="made to fail"):
        train()
    (directory,) = (tmp_path / "tracking-offline").iterdir()
    how = "as the documentation of JSON lines says"
    said = f"It is away. This run is logged to files in {directory}. Send them when JSON lines answers: {how}"
    assert said in caplog.text
    assert f"jsonl: to look at run i: {how}" in capsys.readouterr().err
    assert send([str(directory)]) == 1
    text = f"{directory} is of tracker='jsonl': its own documentation says how its runs are sent"
    assert text in capsys.readouterr().err
    assert registered.runs("sent") == []
    (journal,) = stored(directory)
    lines = list(journal.lines())
    rows = [(line["row"].get("a"), line["step"]) for line in lines if "row" in line]
    assert rows == [(1, None), (2, 7), (None, None)]
    assert [line["exit_code"] for line in lines if "exit_code" in line] == [1]
    assert send([str(directory / "misspelt")]) == 1


@pytest.fixture(scope="module")
def objects(installed, tmp_path_factory) -> jobs.Done:
    pytest.importorskip("flytekitplugins.kfpytorch")
    pytest.importorskip("trackio")
    directory = tmp_path_factory.mktemp("objects")
    env = {**installed.environment(), "TRACKIO_DIR": str(directory / "trackio")}
    done = jobs.python(directory, jobs.PROGRAMS / "tracker_objects.py", env=env)
    assert done.returncode == 0, done.output
    return done


@pytest.mark.wide
def test_an_object_reaches_the_workers_of_elastic(objects, installed):
    (run,) = installed.runs("elastic")
    assert run.points == {(f"rank{rank}", number): 1 for rank in range(2) for number in range(20)}
    assert (run.status, run.ends) == ("finished", 1)


@pytest.mark.full
def test_two_trackers_on_one_function_both_have_all_rows(objects, installed):
    (path,) = Path(installed.environment()["JSONL_DIR"]).glob("stacked/*.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["a"] for line in lines if "a" in line] == list(range(500))
    with closing(sqlite3.connect(objects.directory / "trackio" / "stacked.db")) as database:
        found = database.execute("SELECT step, metrics FROM metrics ORDER BY id").fetchall()
    assert [(step, json.loads(row)["a"]) for step, row in found] == [(n, n) for n in range(500)]


@pytest.fixture
def posted(tmp_path, bare_environment, monkeypatch) -> Iterator[tuple[Any, list[Any], list[int]]]:
    """The tracker of the example, what its service has taken, and the status that it answers with."""
    taken: list[Any] = []
    status = [200]

    class Service(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            line = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if status[-1] == 200:
                taken.append((self.path, line))
            self.send_response(status[-1])
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    from http_tracker import HttpTracker

    monkeypatch.chdir(tmp_path)
    with ThreadingHTTPServer(("127.0.0.1", 0), Service) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("ROWS_URL", f"http://127.0.0.1:{server.server_port}")
        yield HttpTracker(), taken, status
        server.shutdown()


def test_the_examples_tracker_for_a_service_posts_each_row_and_keeps_a_run_in_an_outage(posted, tmp_path, monkeypatch):
    tracker, taken, status = posted

    def train(run_id: str, then: int, **more: Any) -> None:
        with tracking_run(tracker=tracker, project="p", id=run_id, config={"lr": 0.1}, **more) as run:
            status.append(then)
            run.log({"a": 1}, step=7)
            run.log({"a": 2, "odd": object()})

    def lines(run_id: str) -> list[Any]:
        found = [line for path, line in taken if path == f"/p/{run_id}"]
        return [{key: value for key, value in line.items() if key != "odd"} for line in found]

    expected = [{"config": {"lr": 0.1}}, {"a": 1, "step": 7}, {"a": 2, "step": None}, {"exit_code": 0}]
    train("i", 200)
    assert lines("i") == expected
    train("away-later", 503, kill_after_s=1)  # its end does not wait for ever
    train("away", 200)
    assert send([str(tmp_path / "tracking-offline")]) == 1
    assert lines("away") == []
    (kept,) = stored(tmp_path / "tracking-offline" / "http-away")
    assert [line["row"] for line in kept.lines() if "row" in line] == [{"a": 1}, {"a": 2, "odd": "<object object>"}]
    status.append(403)
    with pytest.raises(TrackerUnavailableError, match="403"):
        train("refused", 200)


class Waiting:
    """Writers that are waited for until a signal comes."""

    def wait(self, *_: object) -> None:
        signal.raise_signal(signal.SIGTERM)

    def leave(self) -> None:
        pass


def test_a_run_that_is_terminated_while_it_waits_for_its_other_ranks_has_not_succeeded(
    registered, bare_environment, monkeypatch
):
    from jsonl_tracker import JsonlHandle

    codes = []
    monkeypatch.setattr(JsonlHandle, "end", lambda _, code: codes.append(code))
    monkeypatch.setattr(Sigterm, "_exit_late", lambda _: None)

    @tracking_init(tracker="jsonl", project="waits", id="i")
    def train():
        get_run()._handle._barrier = Waiting()

    with pytest.raises(SystemExit) as ended:
        train()
    assert (ended.value.code, codes) == (143, [143])


def test_values_that_files_cannot_hold_and_other_calls_do_not_lose_other_rows(
    registered, bare_environment, monkeypatch, tmp_path, caplog
):
    numpy = pytest.importorskip("numpy")
    monkeypatch.chdir(tmp_path)

    @tracking_init(tracker=Absent, project="kept", id="k", if_unavailable="degrade")
    def train() -> None:
        run = get_run()
        run.log({"a": 1, "odd": object()}, step=numpy.int64(7))
        for number in range(2):
            run.nobodys("call", number, key=object())
        run.log({"a": 2})

    train()
    (directory,) = (tmp_path / "tracking-offline").iterdir()
    assert caplog.text.count("calls of nobodys() are lost. Kept are those of: log") == 1
    lines = [line for journal in stored(directory) for line in journal.lines() if "row" in line or "call" in line]
    assert [(line["row"], line["step"]) for line in lines] == [
        ({"a": 1, "odd": "<object object>"}, 7),
        ({"a": 2}, None),
    ]

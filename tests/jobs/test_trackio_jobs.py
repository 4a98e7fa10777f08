"""The real Trackio client on its own files and on its own server: what it is given and what it stored."""

from __future__ import annotations

import fcntl
import json
import shlex
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from support import jobs

pytest.importorskip("trackio", reason='trackio is not installed: pip install "flyteplugins-tracking[trackio]"')

TOKEN = "canary" + "0" * 34

RANK_1 = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "1"}


def environment(directory: Path, **more: str) -> dict[str, str]:
    return {"TRACKIO_DIR": str(directory / "trackio"), **more}


def start(directory: Path, code: str, **env: str) -> subprocess.Popen[str]:
    """Run `code` behind the imports that these tests need."""
    imports = "import logging, os, sys, time\nfrom flyteplugins_tracking import *\nlogging.basicConfig()\n"
    return jobs.start([sys.executable, "-c", imports + textwrap.dedent(code)], directory, environment(directory, **env))


def python(directory: Path, code: str, **env: str) -> jobs.Done:
    return jobs.finish(start(directory, code, **env), directory)


def stored(directory: Path, query: str, project: str = "p") -> list[Any]:
    with closing(sqlite3.connect(directory / "trackio" / f"{project}.db")) as database:
        return database.execute(query).fetchall()


def rows(directory: Path, run_id: str = "i") -> list[tuple[int, dict[str, Any]]]:
    found = stored(directory, f"SELECT step, metrics FROM metrics WHERE run_id = '{run_id}' ORDER BY id")
    return [(step, json.loads(metrics)) for step, metrics in found]


def config(directory: Path, run_id: str = "i") -> dict[str, Any]:
    ((text,),) = stored(directory, f"SELECT config FROM configs WHERE run_id = '{run_id}'")
    return json.loads(text)


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + 60
    while not path.exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < until
        time.sleep(0.05)


@contextmanager
def server(directory: Path, port: int) -> Iterator[str]:
    """Trackio's own."""
    import httpx

    code = f"import trackio; trackio.show(open_browser=False, host='127.0.0.1', server_port={port}, block_thread=True)"
    process = start(directory, code, TRACKIO_WRITE_TOKEN=TOKEN)
    url = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + 60
        while True:
            try:
                httpx.get(f"{url}/version").raise_for_status()
                break
            except httpx.HTTPError:
                assert time.monotonic() < until
                assert process.poll() is None, process.communicate()[0]
                time.sleep(0.1)
        yield url
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    directory = tmp_path_factory.mktemp("one-process")
    command = [sys.executable, str(jobs.PROGRAMS / "trackio_runs.py")]
    env = jobs.environment(directory, **environment(directory))
    done = subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert all("look" in line for line in done.stdout.splitlines()), done.stdout  # an alert is there to be seen
    return directory, json.loads(done.stderr.strip().splitlines()[-1]), done.stderr


def test_the_run_is_trackios_own_and_the_current_one(one_process):
    directory, seen, _ = one_process
    assert seen["own"] == [True, "all", "shown", False, True]
    assert seen["joined"] is True
    assert seen["inner"] == "inner"
    assert [row for _, row in rows(directory, "inner")] == [{"inner": 1}]
    assert seen["left"] == [True, True]
    assert seen["threads"] == []


def test_rows_have_the_steps_that_were_asked_for_or_the_next_one_also_after_a_restart(one_process):
    directory, seen, _ = one_process
    found = rows(directory, "all")
    assert [(step, row["a"]) for step, row in found if "a" in row] == [(0, 1), (1, 2), (10, 3), (14, 4), (16, 5)]
    assert seen["again"] == [True, "shown"]


def test_what_trackio_would_drop_or_misread_is_said_once_for_each_key(one_process):
    directory, _, said = one_process
    odd = [row for _, row in rows(directory, "all") if "bool" in row]
    assert odd == [{"bool": 1, "nan": "NaN", "zero_d": 0.5}] * 2
    for key in ("bool", "none"):
        assert said.count(f"Trackio: '{key}'") == 1


def test_media_alerts_and_system_metrics_are_there(one_process):
    directory, _, _ = one_process
    (row,) = [row for _, row in rows(directory, "all") if "image" in row]
    assert (directory / "trackio" / "media" / row["image"]["file_path"]).is_file()
    assert row["table"]["_type"] == "trackio.table"
    assert stored(directory, "SELECT run_id, title FROM alerts") == [("all", "look")]
    assert {"memory": 1} in [json.loads(m) for (m,) in stored(directory, "SELECT metrics FROM system_metrics")]


def test_the_config_has_what_trackio_has_no_place_for(one_process):
    directory, _, _ = one_process
    found = config(directory, "all")
    assert (found["lr"], found["nan"], found["tags"], found["notes"]) == (0.1, "NaN", ["t"], "no")
    assert (found["_Group"], found["from_framework"]) == ("g", 1)


@pytest.mark.parametrize(
    ("run_id", "status", "exit_code"),
    [
        ("all", "finished", 0),
        ("inner", "finished", 0),
        ("three", "failed", 3),
        ("zero", "finished", 0),
        ("raised", "failed", 1),
        ("interrupted", "killed", 130),
    ],
)
def test_the_status_is_how_the_function_ended(one_process, run_id, status, exit_code):
    found = config(one_process[0], run_id)
    assert (found["status"], found["exit_code"]) == (status, exit_code)


def test_a_run_stays_in_its_process(one_process):
    directory, seen, _ = one_process
    assert "get_run() there" in seen["pickled"]
    assert seen["forked"] == 0
    logged = [key for _, row in rows(directory, "all") for key in row]
    assert "thread" in logged
    assert "child" not in logged


def test_rows_of_the_last_moments_outlive_sigkill(tmp_path):
    process = start(
        tmp_path,
        """
        @tracking_init(tracker="trackio", project="p", id="i")
        def train():
            while True:
                get_run().log({"at": time.time()})
                open("logs", "w").close()
                time.sleep(0.01)
        train()
        """,
    )
    wait_for(tmp_path / "logs", process)
    time.sleep(1.5)
    at = time.time()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    last = max(row["at"] for _, row in rows(tmp_path))
    assert at - last < 1  # 0.2 s, on a machine that is not busy
    assert config(tmp_path)["status"] == "running"


def test_what_cannot_be_written_in_time_is_kept_and_sent_once(tmp_path):
    process = start(
        tmp_path,
        """
        @tracking_init(tracker="trackio", project="p", id="i", finish_timeout_s=2)
        def train():
            get_run().log({"a": 0})
            time.sleep(1)
            open("opened", "w").close()
            while not os.path.exists("locked"):
                time.sleep(0.05)
            for number in range(1, 50):
                get_run().log({"a": number})
            raise ValueError("made to fail")
        train()
        """,
    )
    wait_for(tmp_path / "opened", process)
    with (tmp_path / "trackio" / "p.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (tmp_path / "locked").touch()
        at = time.monotonic()
        done = jobs.finish(process, tmp_path)
        assert time.monotonic() - at < 20
    assert "ValueError: made to fail" in done.output
    assert len(rows(tmp_path)) == 1
    command = done.output.partition("when that is possible: ")[2].splitlines()[0]
    env = jobs.environment(tmp_path, **environment(tmp_path))
    for _ in range(2):
        sent = subprocess.run(
            [sys.executable, *shlex.split(command)[1:]],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert "has no files" in sent.stderr
    assert sorted((step, row["a"]) for step, row in rows(tmp_path)) == [(n, n) for n in range(50)]
    assert (config(tmp_path)["status"], config(tmp_path)["exit_code"]) == ("failed", 1)


def test_a_rank_that_finds_no_run_says_what_several_nodes_need(tmp_path):
    done = python(
        tmp_path,
        """
        @tracking_init(tracker="trackio", project="p", id="i", run_mode="shared", init_timeout_s=1)
        def train(): pass
        train()
        """,
        **RANK_1,
    )
    assert "TrackerUnavailableError: Trackio: run i was not found in" in done.output
    assert "set TRACKIO_DIR to a directory that they all share" in done.output


@pytest.mark.parametrize("chosen", [False, True])
def test_files_that_would_end_with_a_pod_are_named(tmp_path, chosen):
    done = python(
        tmp_path,
        """
        os.environ.pop("HF_HOME", None)
        if not CHOSEN:
            del os.environ["TRACKIO_DIR"]

        @tracking_init(tracker="trackio", project="p", id="i")
        def train():
            return get_run().tracking
        handle = train()
        print("UNSENT", [(each, handle.how_to_send("trackio")) for each in handle.unsent()])
        """.replace("CHOSEN", str(chosen)),
    )
    own = [(str(tmp_path / ".cache/huggingface/trackio"), "TRACKIO_DIR=trackio trackio show")]
    assert f"UNSENT {[] if chosen else own}" in done.output


def test_a_hub_that_does_not_answer_holds_nothing_up(tmp_path):
    """Trackio asks it whose token it is, without a limit."""
    done = python(
        tmp_path,
        """
        import socket
        mute = socket.create_server(("127.0.0.1", 0))
        os.environ.update(HF_TOKEN="hf_none", HF_ENDPOINT=f"http://127.0.0.1:{mute.getsockname()[1]}")

        @tracking_init(tracker="trackio", project="p", id="i")
        def train():
            get_run().log({"a": 1})
        import trackio
        at = time.monotonic()
        train()
        print("TOOK", time.monotonic() - at)
        """,
    )
    assert float(done.output.partition("TOOK ")[2]) < 10
    assert [row for _, row in rows(tmp_path)] == [{"a": 1}]


def test_a_network_file_system_gets_files_that_the_dashboard_takes(tmp_path):
    done = python(
        tmp_path,
        """
        for attempt in range(2):
            @tracking_init(tracker="trackio", project="p", id="i", name="n", config={"lr": 0.1})
            def train():
                get_run().log({"a": attempt})
            train()
            time.sleep(0.05)
        from trackio.fragments import import_inbox_dir
        assert not os.path.exists(os.environ["TRACKIO_DIR"] + "/p.db")
        import_inbox_dir()
        """,
        TRACKIO_STORAGE_MODE="jsonl",
    )
    assert done.returncode == 0, done.output
    assert sorted((step, row["a"]) for step, row in rows(tmp_path)) == [(0, 0), (1, 1)]
    assert (config(tmp_path)["status"], config(tmp_path)["lr"]) == ("finished", 0.1)


def test_a_server_takes_all_and_what_it_misses_is_kept(tmp_path):
    port = jobs.free_port()
    code = f"""
        for token in ("", "wrong", "{TOKEN}"):
            @tracking_init(tracker="trackio", project="p", id="i", server_url="http://127.0.0.1:{port}",
                           secret=lambda: token, finish_timeout_s=3, init_timeout_s=20, config={{"lr": 0.1}})
            def train():
                run = get_run()
                print("URL", run.tracking.url)
                for number in range(100):
                    run.log({{"a": number, "nan": float("nan")}})
                time.sleep(0.5)
                open("opened", "w").close()
                while not os.path.exists("gone"):
                    time.sleep(0.05)
                for number in range(100, 200):
                    run.log({{"a": number}})
            try:
                train()
            except TrackerUnavailableError as error:
                print("REFUSED", error)
        """
    with server(tmp_path, port):
        process = start(tmp_path / "job", code)
        wait_for(tmp_path / "job" / "opened", process)
        assert (config(tmp_path)["status"], len(rows(tmp_path))) == ("running", 100)
    (tmp_path / "job" / "gone").touch()
    done = jobs.finish(process, tmp_path / "job")
    assert done.returncode == 0, done.output
    assert "REFUSED http" in done.output
    assert "does not take the write token" in done.output
    assert f"URL http://127.0.0.1:{port}/?project=p&run_ids=i" in done.output
    command = done.output.partition("when that is possible: ")[2].splitlines()[0]
    with server(tmp_path, port):
        env = jobs.environment(tmp_path, **environment(tmp_path / "job", TRACKIO_WRITE_TOKEN=TOKEN))
        words = [sys.executable, *shlex.split(command)[1:]]
        subprocess.run(words, cwd=tmp_path, env=env, check=True, timeout=60)
        assert sorted((step, row["a"]) for step, row in rows(tmp_path)) == [(n, n) for n in range(200)]
        assert (config(tmp_path)["status"], config(tmp_path)["lr"]) == ("finished", 0.1)
    written = [path.read_bytes() for path in (tmp_path / "job").rglob("*") if path.is_file()]
    assert all(TOKEN.encode() not in text for text in [*written, done.output.encode()])

"""Jobs with the real Trackio client, on its own files and on its own server: what it is given and what it stored."""

from __future__ import annotations

import fcntl
import json
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from support import jobs, kills
from support.kills import (
    journals_left,
    logged_by_killed_training,
    moments,
)
from support.waiting import wait_for_file, wait_until

SCENARIOS = jobs.PROGRAMS / "trackio_scenarios.py"
TOKEN = "canary" + "0" * 34

RANK_1 = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "1"}


def environment(directory: Path, **more: str) -> dict[str, str]:
    """Trackio's files, and a place of its own for the claims of runs: each test has the run "i" of the project "p"."""
    return {"TRACKIO_DIR": str(directory / "trackio"), "TMPDIR": str(directory), **more}


def start(directory: Path, *arguments: str, **env: str) -> jobs.Process:
    """Start a scenario of `trackio_scenarios.py`: its name, and its own arguments."""
    return jobs.start([sys.executable, SCENARIOS, *arguments], directory, environment(directory, **env))


def python(directory: Path, *arguments: str, **env: str) -> jobs.Done:
    return jobs.finish(start(directory, *arguments, **env), directory)


def stored(directory: Path, query: str, project: str = "p") -> list[Any]:
    with closing(sqlite3.connect(directory / "trackio" / f"{project}.db")) as database:
        return database.execute(query).fetchall()


def rows(directory: Path, run_id: str = "i") -> list[tuple[int, dict[str, Any]]]:
    found = stored(directory, f"SELECT step, metrics FROM metrics WHERE run_id = '{run_id}' ORDER BY id")
    return [(step, json.loads(metrics)) for step, metrics in found]


def row_count(directory: Path) -> int:
    try:
        return len(rows(directory))
    except sqlite3.OperationalError:  # the tables are not made yet
        return 0


def config(directory: Path, run_id: str = "i") -> dict[str, Any]:
    ((text,),) = stored(directory, f"SELECT config FROM configs WHERE run_id = '{run_id}'")
    return json.loads(text)


def status_of(directory: Path, run_id: str = "i") -> str:
    status: str = config(directory, run_id)["tracking_init"]["status"]
    return status


@contextmanager
def server(directory: Path, port: int) -> Iterator[str]:
    """Trackio's own."""
    import httpx

    code = f"import trackio; trackio.show(open_browser=False, host='127.0.0.1', server_port={port}, block_thread=True)"
    env = environment(directory, TRACKIO_WRITE_TOKEN=TOKEN)
    process = jobs.start([sys.executable, "-c", code], directory, env)
    url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        try:
            return httpx.get(f"{url}/version").is_success
        except httpx.HTTPError:
            return False

    try:
        wait_until(answers, process)
        yield url
    finally:
        process.kill()
        process.communicate()


def send(command: str, directory: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run the command that a job has printed."""
    words, more = jobs.printed(command)
    words = [str(Path(sys.executable).with_name("flyteplugins-tracking")), *words]
    env = {**env, **more}
    return subprocess.run(words, cwd=directory, env=env, capture_output=True, text=True, timeout=12 * jobs.TIME_SCALE)


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


BESIDE = """
import threading, trackio
from flyteplugins_tracking import get_run, tracking_init

@tracking_init(tracker="trackio", project="p", id="i")
def train():
    run, is_over = get_run(), threading.Event()
    def take():
        while not is_over.is_set():
            run._take_queued_batches()
    thread = threading.Thread(target=take)
    thread.start()
    for number in range(1000):
        trackio.log({"a": number})
    is_over.set()
    thread.join()

train()
"""


def test_the_clients_own_thread_takes_no_row_and_no_step(tmp_path):
    """It looks for rows of its own twice a second: here without a pause, while rows are logged."""
    done = jobs.run([sys.executable, "-c", BESIDE], tmp_path, environment(tmp_path))
    assert done.returncode == 0, done.output
    assert [(step, row["a"]) for step, row in rows(tmp_path)] == [(number, number) for number in range(1000)]


def test_values_are_numbers_and_what_is_left_out_is_told_once(one_process):
    directory, _, said = one_process
    odd = [row for _, row in rows(directory, "all") if "bool" in row]
    assert odd == [{"bool": 1, "nan": "NaN", "zero_d": 0.5}] * 2
    assert said.count("Trackio: 'none'") == 1


def test_media_alerts_and_system_metrics_are_there(one_process):
    directory, _, _ = one_process
    (row,) = [row for _, row in rows(directory, "all") if "image" in row]
    assert (directory / "trackio" / "media" / row["image"]["file_path"]).is_file()
    assert row["table"]["_type"] == "trackio.table"
    assert stored(directory, "SELECT run_id, title FROM alerts") == [("all", "look")]
    assert {"memory": 1} in [json.loads(m) for (m,) in stored(directory, "SELECT metrics FROM system_metrics")]


def test_the_config_has_the_tags_and_notes(one_process):
    directory, _, said = one_process
    found = config(directory, "all")
    assert (found["lr"], found["nan"], found["tracking_init"]["tags"]) == (0.1, "NaN", ["t"])
    assert found["tracking_init"]["notes"] == "no"
    assert (found["_Group"], found["from_framework"], found["status"], "_mine" in found) == ("g", 1, "x", False)
    kept = "config['lr'], config['_mine'], project='another', name='other'"
    assert said.count(f"Without effect: {kept}. Pass these to tracking_init") == 1


def test_the_status_is_how_the_function_ended(one_process):
    ends = [config(one_process[0], run_id)["tracking_init"] for run_id in ("inner", "three", "interrupted")]
    assert [(end["status"], end["exit_code"]) for end in ends] == [("finished", 0), ("failed", 3), ("killed", 130)]


def test_a_run_stays_in_its_process(one_process):
    directory, seen, _ = one_process
    assert seen["forked"] == 0
    logged = [key for _, row in rows(directory, "all") for key in row]
    assert "thread" in logged
    assert "child" not in logged


def assert_each_once(directory: Path, logged: list[int]) -> str:
    """Assert that the files have each row once. Returns the run's status."""
    values = sorted(row["rank0"] for _, row in rows(directory, "killed"))
    assert set(logged) <= set(values)
    assert len(values) == len(set(values))
    return status_of(directory, "killed")


@pytest.mark.parametrize(("when", "longest_s"), [("logged", 1.0), pytest.param("ending", 0.4, marks=pytest.mark.wide)])
def test_every_row_of_a_killed_process_arrives_once(tmp_path, when, longest_s):
    count = 1 if when == "logged" else moments(4)
    logged = logged_by_killed_training(tmp_path, "trackio", "p", environment(tmp_path), count, longest_s, when)
    assert assert_each_once(tmp_path, logged) == "finished"
    assert not journals_left(tmp_path)


def test_rows_that_were_logged_to_files_are_sent_by_the_next_attempt(tmp_path):
    """The directory cannot be used in the first attempt, which `if_unavailable="degrade"` lets go on."""
    (tmp_path / "trackio").touch()
    command = [sys.executable, jobs.PROGRAMS / "killed_training.py", "trackio", "p", "30"]
    env = {**environment(tmp_path), "IF_UNAVAILABLE": "degrade"}
    assert jobs.run(command, tmp_path, env).returncode == 0
    assert len(list(tmp_path.rglob("*.journal.*"))) == 1
    (tmp_path / "trackio").unlink()
    done = jobs.run(command, tmp_path, env)
    assert done.returncode == 0, done.output
    assert "sent 30 rows again" in done.output
    assert len(kills.logged(tmp_path)) == 60
    assert assert_each_once(tmp_path, kills.logged(tmp_path)) == "finished"
    assert not journals_left(tmp_path)


@pytest.mark.full
def test_a_job_that_goes_back_keeps_all_rows(tmp_path):
    python(tmp_path, "goes_back")
    found = [(step, row["attempt"]) for step, row in rows(tmp_path)]
    assert sorted(found, key=lambda row: row[1]) == [*((n, 0) for n in range(10)), *((n, 1) for n in range(6, 9))]


@pytest.mark.full
def test_rows_that_cannot_be_written_in_time_are_kept_and_sent_once(tmp_path):
    process = start(tmp_path, "fails_while_the_files_are_locked")
    wait_for_file(tmp_path / "opened", process)
    wait_until(lambda: row_count(tmp_path) == 1, process)
    with (tmp_path / "trackio" / "p.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (tmp_path / "locked").touch()
        done = jobs.finish(process, tmp_path, timeout_s=2 * jobs.TIME_SCALE)  # kill_after_s=4
    assert "ValueError: made to fail" in done.output
    assert "run i has ended, and Trackio has not taken 49 rows: " in done.output
    assert "They are kept in files." in done.output
    assert len(rows(tmp_path)) == 1
    command = done.output.partition("Send the rest when it answers: ")[2].splitlines()[0]
    for _ in range(2):
        sent = send(command, tmp_path, jobs.environment(tmp_path, **environment(tmp_path)))
    assert "has nothing that is not sent yet" in sent.stdout
    assert sorted((step, row["a"]) for step, row in rows(tmp_path)) == [(n, n) for n in range(50)]
    assert (status_of(tmp_path), config(tmp_path)["tracking_init"]["exit_code"]) == ("failed", 1)


def test_a_rank_that_finds_no_run_raises_with_a_fix(tmp_path):
    done = python(tmp_path, "joins_a_run", **RANK_1)
    assert "TrackerUnavailableError: Trackio: run i was not found in" in done.output
    assert "set TRACKIO_DIR to a directory that they all share" in done.output


@pytest.mark.full
@pytest.mark.parametrize("directory", ["default", "chosen"])
def test_files_that_would_end_with_a_pod_are_named(tmp_path, directory):
    done = python(tmp_path, "names_unsent_files", directory)
    own = [(str(tmp_path / ".cache/huggingface/trackio"), "TRACKIO_DIR=trackio trackio show")]
    assert f"UNSENT {own if directory == 'default' else []}" in done.output


@pytest.mark.full
def test_a_hub_that_does_not_answer_holds_nothing_up(tmp_path):
    """Trackio asks the hub whose token it is, and waits for the answer without a limit: the job would not end."""
    done = python(tmp_path, "meets_a_mute_hub")
    assert done.returncode == 0, done.output
    assert [row for _, row in rows(tmp_path)] == [{"a": 0}]


@pytest.mark.full
def test_a_job_that_is_to_keep_its_runs_in_files_of_json_lines_is_refused(tmp_path):
    done = python(tmp_path, "meets_a_mute_hub", TRACKIO_STORAGE_MODE="jsonl")
    assert (
        "ConfigError: TRACKIO_STORAGE_MODE=jsonl is set, and runs are kept in databases here: unset it" in done.output
    )


@pytest.mark.full
def test_a_server_gets_all_rows_and_those_it_misses_are_kept(tmp_path):
    port = jobs.free_port()
    with server(tmp_path, port) as url:
        process = start(tmp_path / "job", "tries_tokens", url, TOKEN)
        wait_for_file(tmp_path / "job" / "opened", process)
        wait_until(lambda: row_count(tmp_path) == 100, process)
        assert (status_of(tmp_path), config(tmp_path)["late"]) == ("running", 1)
    (tmp_path / "job" / "gone").touch()
    done = jobs.finish(process, tmp_path / "job")
    assert done.returncode == 0, done.output
    assert "REFUSED http" in done.output
    assert "does not take the write token" in done.output
    assert f"URL http://127.0.0.1:{port}/?project=p&run_ids=i" in done.output
    command = done.output.partition("Send the rest when it answers: ")[2].splitlines()[0]
    with server(tmp_path, port):
        env = jobs.environment(tmp_path, **environment(tmp_path / "job", TRACKIO_WRITE_TOKEN=TOKEN))
        sent = send(command, tmp_path, env)
        assert sent.returncode == 0, sent.stderr
        assert sorted((step, row["a"]) for step, row in rows(tmp_path)) == [(n, n) for n in range(200)]
        assert (status_of(tmp_path), config(tmp_path)["lr"]) == ("finished", 0.1)
    written = [path.read_bytes() for path in (tmp_path / "job").rglob("*") if path.is_file()]
    assert all(TOKEN.encode() not in text for text in [*written, done.output.encode()])

"""The real W&B client, offline or against a server that is not there: what it is given and what it stored."""

from __future__ import annotations

import base64
import inspect
import json
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import wandb_files
from support import jobs
from support.loopback import Fault
from support.wandb_server import WandbServer
from wandb_files import read_runs

import flyteplugins_tracking
from flyteplugins_tracking._rank.plan import NodeRequest, pages
from flyteplugins_tracking.trackers.config import OWN_ARGUMENTS, TrackingConfig
from flyteplugins_tracking.trackers.wandb import INIT_ARGUMENTS, TRACKER

KEY = "canary" + "0" * 34
TRAINING, RUNS = jobs.PROGRAMS / "wandb_training.py", jobs.PROGRAMS / "wandb_runs.py"
WANDBS_INIT_TIMEOUT_S = 90
ONLINE = {"WANDB_MODE": "online", "WANDB_SILENT": "false"}


def train(directory: Path, tracking: Mapping[str, Any] | None = None, **env: str) -> jobs.Done:
    """`wandb_training.py` with the decorator's arguments."""
    return jobs.python(directory, TRAINING, json.dumps(tracking or {}), env=env)


def runs(directory: Path, *arguments: str, **env: str) -> jobs.Done:
    """A function of `wandb_runs.py`."""
    path = jobs.search_path(Path(wandb_files.__file__).parent)
    return jobs.python(directory, RUNS, *arguments, env={"PYTHONPATH": path, **env})


@contextmanager
def failing_server(status: int) -> Iterator[tuple[str, list[str]]]:
    """A server on loopback that answers every request with `status`. Gives its URL and the credentials it saw."""
    seen: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            seen.append(self.headers.get("Authorization", ""))
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(status)
            self.end_headers()

        do_GET = do_POST  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", seen
    finally:
        server.shutdown()
        server.server_close()


def test_the_decorator_takes_every_argument_of_wandb_init():
    import wandb

    by_name = {"id", "project", "group", "name", "tags", "notes", "config"}
    assert by_name <= OWN_ARGUMENTS
    assert set(inspect.signature(wandb.init).parameters) == INIT_ARGUMENTS | by_name


def test_arguments_reach_wandb_init(tmp_path):
    done = runs(tmp_path, "arguments")
    assert done.returncode == 0, done.output
    assert len(list((tmp_path / "elsewhere").rglob("*.wandb"))) == 1


@pytest.mark.full
def test_the_users_settings_take_precedence_over_ours(tmp_path):
    done = runs(tmp_path, "settings")
    assert done.returncode == 0, done.output
    assert [run.exit_code for run in done.runs] == [0, 0]


def test_a_config_file_is_read_by_wandb_and_gains_the_run_metadata(tmp_path):
    (tmp_path / "config.yaml").write_text("lr:\n  value: 0.5\n")
    done = train(tmp_path, {"config": "config.yaml"}, **TWO_RANKS)
    assert done.returncode == 0, done.output
    (run,) = done.runs
    assert run.config["lr"] == 0.5
    assert run.config["tracking_init"]["world_size"] == 2


TWO_RANKS = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}


def test_wandbs_variables_are_respected(tmp_path):
    done = train(tmp_path, WANDB_RUN_GROUP="g", WANDB_NAME="n", WANDB_PROJECT="q", WANDB_RUN_ID="i")
    (run,) = done.runs
    assert (run.id, run.group, run.name, run.project) == ("i", "g", "n", "q"), done.output


@pytest.mark.full
def test_a_group_in_the_environment_takes_precedence_over_the_planned_one(tmp_path):
    done = train(tmp_path, {"run_mode": "new", "id": "b"}, WANDB_RUN_GROUP="g", **TWO_RANKS)
    assert [(run.id, run.group) for run in done.runs] == [("b-rank-0", "g")], done.output


def test_disabled_stays_disabled(tmp_path):
    done = train(tmp_path, WANDB_MODE="disabled")
    assert done.returncode == 0, done.output
    assert "RUN" in done.output
    assert done.runs == []


def test_only_the_function_ends_the_run(tmp_path):
    done = runs(tmp_path, "user_finishes")
    assert "ValueError: made to fail" in done.output
    (run,) = done.runs
    assert run.exit_code == 1
    assert [row["x"] for row in run.rows] == [1, 2]


@pytest.mark.full
def test_trainings_in_several_threads_open_their_runs(tmp_path):
    """wandb's settings, read by the first thread, are seen half read by a second."""
    done = runs(tmp_path, "in_threads")
    assert done.returncode == 0, done.output
    assert sorted(row["number"] for run in done.runs for row in run.rows) == [0, 1, 2]
    assert {run.exit_code for run in done.runs} == {0}


@pytest.mark.full
def test_a_child_of_a_process_with_a_wandb_service_keeps_its_rows(tmp_path):
    """A child that used it would lose its rows when the parent's ends."""
    done = runs(tmp_path, "child_outlives_service")
    assert done.returncode == 0, done.output
    assert {run.id: (run.exit_code, len(run.rows)) for run in done.runs} == {"parent": (0, 0), "child": (0, 1)}


@pytest.mark.full
def test_the_variable_of_a_wandb_service_that_has_ended_is_ignored(tmp_path):
    done = train(tmp_path, WANDB_SERVICE="3-1-tcp-localhost-9")
    assert done.returncode == 0, done.output
    assert [run.exit_code for run in done.runs] == [0]


def test_a_missing_key_raises_and_opens_no_run(tmp_path):
    done = train(tmp_path, {"if_unavailable": "degrade"}, **ONLINE)
    assert "TrackerUnavailableError: W&B: there is no API key for this process. Run `wandb login`" in done.output
    assert done.returncode == 1
    assert done.runs == []


@pytest.mark.parametrize("if_unavailable", [pytest.param("raise", marks=pytest.mark.full), "degrade"])
def test_an_unreachable_server_is_reported_before_wandbs_own_timeout(tmp_path, if_unavailable):
    tracking = {"init_timeout_s": 2, "if_unavailable": if_unavailable}
    url = f"http://127.0.0.1:{jobs.free_port()}"
    began = time.monotonic()
    done = train(tmp_path, tracking, **ONLINE, WANDB_BASE_URL=url, WANDB_API_KEY=KEY)
    assert time.monotonic() - began < min(7 * jobs.TIME_SCALE, WANDBS_INIT_TIMEOUT_S)
    assert not (tmp_path / ".config" / "wandb" / "settings").exists()  # the user's own, which wandb.login changes
    assert not (tmp_path / ".netrc").exists()
    if if_unavailable == "raise":
        assert done.returncode == 1
        assert "TrackerUnavailableError: W&B cannot be used:" in done.output
        assert "Check WANDB_BASE_URL, the API key and the network; or log offline with" in done.output
    else:
        assert done.returncode == 0, done.output
        (directory,) = re.findall(r"W&B is available, run: flyteplugins-tracking send (\S+)", done.output)
        assert Path(directory).samefile(done.runs[0].path.parent)
        assert "if_unavailable='degrade'" not in done.output  # is set already
        assert [(len(run.rows), run.exit_code) for run in done.runs] == [(1, 0)]
        assert_only_offline(tmp_path / "wandb", runs=1)


def assert_only_offline(directory: Path, runs: int) -> None:
    """There are `runs` run directories, all of them offline ones, and W&B's links lead to the latest."""
    directories = sorted(path.name for path in directory.iterdir() if path.is_dir() and not path.is_symlink())
    assert len(directories) == runs
    assert all(name.startswith("offline-run-") for name in directories)
    latest = (directory / "latest-run").resolve(strict=True)
    assert latest.name in directories
    for log in ("debug.log", "debug-internal.log"):
        assert (directory / log).resolve(strict=True) == latest / "logs" / log


@pytest.mark.full
def test_what_follows_wandb_cores_death_is_kept_if_the_server_is_gone_too_and_sent_by_the_printed_command(tmp_path):
    with WandbServer() as server:
        process = jobs.start([sys.executable, RUNS, "dies_when_the_server_is_gone"], tmp_path, server.environment)
        while not any(run.rows for run in read_runs(tmp_path / "wandb")) and process.poll() is None:
            time.sleep(0.05)  # wandb-core writes a row within 0.1 s
        with server.failing(Fault.refuse()):
            (tmp_path / "refusing").touch()
            done = jobs.finish(process, tmp_path, timeout_s=120)
        assert done.returncode == 0, done.output
        assert sent_as_printed(done, tmp_path, server).returncode == 0
        (run,) = server.runs
        assert [row["x"] for row in run.rows] == list(range(1, 200)), done.output
        assert (run.exit_codes, run.state) == ([0], "finished")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("is_stop_wanted", "status", "exit_code"), [(False, 0, 0), (True, -signal.SIGINT, 130)])
def test_rows_that_the_server_refuses_are_told_at_once_and_sent_by_the_printed_command(
    tmp_path, is_stop_wanted, status, exit_code
):
    """A key that is revoked meanwhile: wandb-core gives up. The function goes on, unless the user wants a stop."""
    asked = {"WANDB_STOP_ON_FATAL_ERROR": "true"} if is_stop_wanted else {}
    with WandbServer() as server:
        process = jobs.start([sys.executable, RUNS, "loses_its_key"], tmp_path, {**server.environment, **asked})
        while not (tmp_path / "logged").exists() and process.poll() is None:
            time.sleep(0.05)
        with server.failing(Fault.status(401)):
            (tmp_path / "refusing").touch()
            done = jobs.finish(process, tmp_path)
        assert done.returncode == status, done.output
        assert "run revoked was not sent completely: the server has refused its rows with error 401." in done.output
        early = "run revoked: the server has refused its rows with error 401. What it logs is kept in"
        assert ("told: True" in done.output, early in done.output) == (not is_stop_wanted, not is_stop_wanted)
        assert sent_as_printed(done, tmp_path, server).returncode == 0
        (run,) = server.runs
        assert [row["x"] for row in run.rows] == ([1, 2] if is_stop_wanted else [1, 2, 3])
        assert run.exit_codes == [exit_code]


def sent_as_printed(done: jobs.Done, directory: Path, server: WandbServer) -> jobs.Done:
    """Run the command that a job has printed at its end."""
    (command,) = re.findall(r"To send (?:what W&B lacks of )?the rest, run: (.+)", done.output)
    words, more = jobs.printed(command)
    return jobs.run([sys.executable, "-m", "flyteplugins_tracking", *words], directory, {**server.environment, **more})


@pytest.mark.full
def test_a_process_ends_though_its_wandb_core_does_not_read_that_it_is_to_end(tmp_path):
    """wandb itself waits for it without a limit."""
    done = runs(tmp_path, "loses_the_request_to_end")
    assert done.returncode == 0, done.output
    assert not Path("/proc", (tmp_path / "core").read_text()).exists()
    (run,) = read_runs(tmp_path)
    assert (len(run.rows), run.exit_code) == (1, 0)


@pytest.mark.full
def test_a_run_that_could_not_be_opened_can_be_when_the_server_is_back(tmp_path):
    with WandbServer() as server:
        with server.failing(Fault.refuse()):
            env = {**server.environment, "INIT_TIMEOUT_S": "3"}
            process = jobs.start([sys.executable, RUNS, "opened_again"], tmp_path, env)
            while not (tmp_path / "refused").exists() and process.poll() is None:
                time.sleep(0.05)
        (tmp_path / "back").touch()
        done = jobs.finish(process, tmp_path)
        (run,) = server.runs
        assert (run.id, run.exit_codes, len(run.rows)) == ("again", [0], 1), done.output


def test_a_secret_reaches_the_server_and_nothing_else(tmp_path):
    with failing_server(500) as (url, seen):
        tracking = {"init_timeout_s": 2, "if_unavailable": "degrade"}
        done = train(tmp_path, tracking, **ONLINE, WANDB_BASE_URL=url, SECRET_FROM="MY_KEY", MY_KEY=KEY)
    assert done.returncode == 0, done.output
    assert {base64.b64decode(value.removeprefix("Basic ")) for value in seen if value} == {f"api:{KEY}".encode()}
    assert KEY not in done.output
    stored = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert stored
    assert [path for path in stored if KEY.encode() in path.read_bytes()] == []


@pytest.mark.full
def test_a_secret_that_raises_is_reported(tmp_path):
    done = train(tmp_path, **ONLINE, SECRET_FROM="NOT_THERE")
    assert "TrackerUnavailableError: secret= raised KeyError and returned no API key" in done.output
    assert done.runs == []


def test_a_missing_wandb_is_reported_with_the_command_that_installs_it(tmp_path):
    root = Path(flyteplugins_tracking.__file__).parent.parent
    done = jobs.run([sys.executable, "-S", TRAINING], tmp_path, {"PYTHONPATH": str(root)})
    assert 'TrackerNotInstalledError: pip install "flyteplugins-tracking[wandb]"' in done.output


@pytest.mark.full
def test_a_child_of_lightnings_own_launcher_gets_no_run(tmp_path):
    """Lightning's ddp starts the script again with LOCAL_RANK, WORLD_SIZE and the parent's service, and no RANK."""
    done = runs(tmp_path, "lightning_child")
    assert "RANK parent True" in done.output
    assert "RANK 1 False" in done.output
    assert [run.exit_code for run in done.runs] == [0]


@pytest.mark.full
def test_a_directory_that_cannot_be_written_is_reported(tmp_path):
    (tmp_path / "wandb").write_text("a file where the directory should be")
    done = train(tmp_path)
    assert "TrackerUnavailableError: W&B cannot write its local files" in done.output
    assert "set WANDB_DIR" in done.output


@pytest.mark.full
def test_a_run_that_the_user_has_open_beside_wandbs_global_one_is_left_alone(tmp_path):
    done = runs(tmp_path, "separate_run_before")
    assert done.returncode == 0, done.output
    assert {run.id: [row["x"] for row in run.rows] for run in done.runs} == {"mine": [2], "ours": [1]}


def test_the_run_is_wandbs_own_object_and_can_be_pickled(tmp_path):
    done = runs(tmp_path, "vendors_object")
    assert done.returncode == 0, done.output
    assert done.output.count("run ours is not open in this process: its function has ended") == 1
    assert "join it before the function returns, or have both in one `with tracking_run():`" in done.output


@pytest.mark.full
def test_a_run_that_a_child_has_ended_is_waited_for_as_long_as_one_that_nothing_moves_in(tmp_path):
    with WandbServer() as server:
        done = runs(tmp_path, "ended_by_child", **server.environment)
        assert done.returncode == 0, done.output
        assert "nothing has moved for 5 s (kill_after_s=10). Nothing is lost" in done.output


def test_the_client_reports_no_errors_of_its_own(tmp_path):
    """A process whose server does not answer, or is not to be reached from its network, would end 20 s later."""
    done = runs(tmp_path, "arguments_of_wandb_core")
    assert done.returncode == 0, done.output
    (of_core,) = (line for line in done.output.splitlines() if "--port-filename" in line)
    assert "--no-observability" in of_core


@pytest.mark.full
def test_a_wandb_core_that_dies_does_not_end_the_training(tmp_path):
    """What is logged then is kept, and sent when the function ends."""
    with WandbServer() as server:
        done = runs(tmp_path, "core_dies", **server.environment)
        assert done.returncode == 0, done.output
        assert "wandb-core has died" in done.output
        (run,) = server.runs
        assert [row["x"] for row in run.rows] == [0, 1, 2, 3, 4], done.output
        assert (run.exit_codes[-1], run.state) == (0, "finished")
        assert run.summary["best"] == 5


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("run_mode", "rank_scope", "link_type"),
    [
        ("auto", "global", "tracking-wandb"),
        ("shared", "global", "tracking-wandb"),
        ("shared", "worker", "tracking-wandb-worker-0,tracking-wandb-worker-1"),
        ("new", "global", "tracking-wandb-group"),
        ("new", "worker", "tracking-wandb-group-worker-0,tracking-wandb-group-worker-1"),
    ],
)
def test_flytekits_links_lead_to_the_runs_that_are_planned(run_mode, rank_scope, link_type):
    config = TrackingConfig(run_mode=run_mode, rank_scope=rank_scope, project="p", options={"entity": "e"})
    assert TRACKER.link(config, pages(NodeRequest(2, 2, 8), run_mode, rank_scope, ""))["link_type"] == link_type
    assert TRACKER.link(config, None)["link_type"] == "tracking-wandb-project"


def test_flytekits_link_leads_to_the_users_group():
    config = TrackingConfig(run_mode="new", rank_scope="worker", project="p", group="g", options={"entity": "e"})
    link = TRACKER.link(config, pages(NodeRequest(2, 2, 8), "new", "worker", ""))
    assert (link["link_type"], link["wandb_group"]) == ("tracking-wandb-group-id", "g")


def test_empty_variables_of_wandb_count_as_not_set(tmp_path):
    empty = ("RUN_ID", "NAME", "TAGS", "NOTES", "RUN_GROUP", "RESUME", "BASE_URL", "PROJECT", "ENTITY", "SWEEP_ID")
    done = train(tmp_path, **{f"WANDB_{name}": "" for name in empty})
    assert done.returncode == 0, done.output
    assert len(done.runs) == 1


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"WANDB_MODE": "ofline"}, "mode='ofline': Input should be 'online', 'offline'"),
        ({"WANDB_PROJECT": "a/b"}, "Invalid project name 'a/b'"),
        ({"WANDB_RUN_ID": ".."}, "WANDB_RUN_ID='..' cannot be a run id"),
        ({"WANDB_TAGS": ","}, "run_tags"),
    ],
)
def test_a_variable_that_wandb_does_not_accept_is_an_error_of_ours_that_names_it(tmp_path, variables, named):
    done = train(tmp_path, **variables)
    assert done.returncode == 1
    last = [line for line in done.output.splitlines() if line.startswith("flyteplugins_tracking.errors.ConfigError: ")]
    assert named in "".join(last), done.output


@pytest.mark.full
def test_a_decorated_function_in_a_forked_child_has_a_run_of_its_own(tmp_path):
    """W&B's client would attach the child to the parent's run, which is `wandb.run` there."""
    with WandbServer() as server:
        done = runs(tmp_path, "forked_child", **server.environment)
        assert done.returncode == 0, done.output
        found = {run.id: ([row["row"] for row in run.rows], run.state) for run in server.runs}
    assert found == {"parent": ([0, 0], "finished"), "child": ([1], "finished")}

"""The real W&B client, offline or against a server that is not there: what it is given and what it stored."""

from __future__ import annotations

import base64
import inspect
import re
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from support import jobs
from support.loopback import Fault
from support.wandb_server import WandbServer

import flyteplugins_tracking
from flyteplugins_tracking._config.config import OWN_ARGUMENTS, TrackingConfig
from flyteplugins_tracking._job.plan import Workers, pages
from flyteplugins_tracking.trackers.wandb import INIT_ARGUMENTS, TRACKER

pytest.importorskip("wandb", reason='wandb is not installed: pip install "flyteplugins-tracking[wandb]"')
KEY = "canary" + "0" * 34
ONLINE = {"WANDB_MODE": "online", "WANDB_SILENT": "false"}


def python(directory: Path, code: str, **env: str) -> jobs.Done:
    """Run `code` behind the imports that each of these tests needs."""
    imports = "import json, os, sys, wandb\nfrom flyteplugins_tracking import *\n"
    return jobs.python(directory, "-c", imports + textwrap.dedent(code), env=env)


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
    done = python(
        tmp_path,
        """
        settings = wandb.Settings(run_job_type="from-settings")
        arguments = dict(project="p", entity="e", id="i", group="g", name="n", tags=["t"], notes="no", job_type="j",
                         dir="elsewhere", settings=settings, config={"a": {"b": 1}})

        @tracking_init(**arguments)
        def train():
            run = get_run()
            assert wandb.run is run
            seen = (run.project, run.entity, run.id, run.group, run.name, run.tags, run.notes, run.job_type)
            assert seen == ("p", "e", "i", "g", "n", ("t",), "no", "j"), seen
            assert run.config["a"] == {"b": 1}
            assert (run.settings.init_timeout, run.settings.finish_timeout) == (30, 25)
            wandb.log({"x": 1})

        os.mkdir("elsewhere")
        train()
        assert settings.run_id is None
        """,
    )
    assert done.returncode == 0, done.output
    assert len(list((tmp_path / "elsewhere").rglob("*.wandb"))) == 1


def test_settings_of_the_user_go_before_ours(tmp_path):
    done = python(
        tmp_path,
        """
        for settings in ({"init_timeout": 7, "finish_timeout": 8}, wandb.Settings(init_timeout=7, finish_timeout=8)):
            @tracking_init(settings=settings)
            def train():
                run = get_run()
                assert (run.settings.init_timeout, run.settings.finish_timeout) == (7, 8)
            train()
        """,
    )
    assert done.returncode == 0, done.output
    assert [run.exit_code for run in done.runs] == [0, 0]


def test_a_config_file_is_read_by_wandb_and_gains_the_facts(tmp_path):
    (tmp_path / "config.yaml").write_text("lr:\n  value: 0.5\n")
    done = python(
        tmp_path,
        """
        @tracking_init(config="config.yaml")
        def train():
            pass
        train()
        """,
        **{"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"},
    )
    assert done.returncode == 0, done.output
    (run,) = done.runs
    assert run.config["lr"] == 0.5
    assert run.config["distributed"]["world_size"] == 2


TRAIN = """
@tracking_init
def train():
    run = get_run()
    if run is not None:
        run.log({"x": 1})
        print("RUN", json.dumps([run.id, run.group, run.name, run.project, run.disabled]))
train()
"""
TWO_RANKS = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"WANDB_RUN_ID": "mine"}, ["mine", "", None, "uncategorized", False]),
        (
            {"WANDB_RUN_GROUP": "g", "WANDB_NAME": "n", "WANDB_PROJECT": "q", "WANDB_RUN_ID": "i"},
            ["i", "g", "n", "q", False],
        ),
    ],
)
def test_wandbs_variables_are_respected(tmp_path, variables, expected):
    done = python(tmp_path, TRAIN, **variables)
    (stored,) = done.runs
    seen = [stored.id, stored.group, stored.name or None, stored.project, False]
    assert seen == expected, done.output


def test_a_group_in_the_environment_goes_before_the_planned_one(tmp_path):
    code = TRAIN.replace("@tracking_init", "@tracking_init(run_mode='new', id='b')")
    done = python(tmp_path, code, WANDB_RUN_GROUP="g", **TWO_RANKS)
    assert [(run.id, run.group) for run in done.runs] == [("b-rank-0", "g")], done.output


def test_disabled_stays_disabled(tmp_path):
    done = python(tmp_path, TRAIN, WANDB_MODE="disabled")
    assert done.returncode == 0, done.output
    assert "RUN" in done.output
    assert done.runs == []


@pytest.mark.parametrize("ending", ["run.finish()", "wandb.finish()", "run.finish(exit_code=0)", "with run: pass"])
def test_nobody_but_the_function_ends_the_run(tmp_path, ending):
    done = python(
        tmp_path,
        f"""
        @tracking_init
        def train():
            run = get_run()
            run.log({{"x": 1}})
            {ending}
            assert wandb.run is run
            run.log({{"x": 2}})
            raise ValueError("made to fail")
        train()
        """,
    )
    assert "ValueError: made to fail" in done.output
    (run,) = done.runs
    assert run.exit_code == 1
    assert [row["x"] for row in run.rows] == [1, 2]


def test_explicit_steps_keep_all_rows(tmp_path):
    """Accelerate and Lightning pass `step=`: a row of our own would cost one of theirs."""
    done = python(
        tmp_path,
        """
        @tracking_init
        def train():
            for step in range(4):
                get_run().log({"x": step}, step=step)
        train()
        """,
    )
    assert [(row["_step"], row["x"]) for row in done.runs[0].rows] == [(0, 0), (1, 1), (2, 2), (3, 3)], done.output


def test_a_new_run_inside_a_run_leaves_the_outer_one_open(tmp_path):
    done = python(
        tmp_path,
        """
        @tracking_init(run_mode="new", id="inner")
        def inner():
            wandb.log({"inner": 1})

        @tracking_init(id="outer")
        def outer():
            inner()
            assert wandb.run is get_run()
            wandb.log({"outer": 1})
        outer()
        assert wandb.run is None
        """,
    )
    assert done.returncode == 0, done.output
    stored = {run.id: run for run in done.runs}
    assert [row["inner"] for row in stored["inner"].rows] == [1]
    assert [row["outer"] for row in stored["outer"].rows] == [1]


def test_trainings_in_several_threads_open_their_runs(tmp_path):
    """wandb's settings, read by the first thread, are seen half read by a second."""
    done = python(
        tmp_path,
        """
        from concurrent.futures import ThreadPoolExecutor

        @tracking_init(id="given")
        def train(number):
            get_run().log({"number": number})
            return get_run().id

        with ThreadPoolExecutor(3) as pool:
            assert len(set(pool.map(train, range(3)))) >= 1
        """,
    )
    assert done.returncode == 0, done.output
    assert sorted(row["number"] for run in done.runs for row in run.rows) == [0, 1, 2]
    assert {run.exit_code for run in done.runs} == {0}


def test_a_run_that_the_user_opened_before_is_left_alone(tmp_path):
    done = python(
        tmp_path,
        """
        mine = wandb.init(id="mine")

        @tracking_init(id="ours")
        def train():
            assert get_run().id == wandb.run.id == "ours"
        train()
        assert wandb.run is mine
        mine.log({"x": 1})
        mine.finish(exit_code=5)
        """,
    )
    assert done.returncode == 0, done.output
    assert {run.id: run.exit_code for run in done.runs} == {"mine": 5, "ours": 0}


def test_a_service_of_the_parent_does_no_harm(tmp_path):
    """A child that used it would lose its rows when the parent's ends."""
    (tmp_path / "child.py").write_text(f"import json, wandb\nfrom flyteplugins_tracking import *\n{TRAIN}")
    done = python(
        tmp_path,
        """
        import subprocess
        run = wandb.init(id="parent")
        assert "WANDB_SERVICE" in os.environ
        child = subprocess.Popen([sys.executable, "child.py"], env={**os.environ, "WANDB_RUN_ID": "child"},
                                 stdout=subprocess.PIPE, text=True)
        run.finish()
        wandb.teardown()
        assert child.wait(60) == 0
        """,
    )
    assert done.returncode == 0, done.output
    assert {run.id: (run.exit_code, len(run.rows)) for run in done.runs} == {"parent": (0, 0), "child": (0, 1)}


def test_a_service_that_is_gone_does_no_harm(tmp_path):
    done = python(tmp_path, TRAIN, WANDB_SERVICE="3-1-tcp-localhost-9")
    assert done.returncode == 0, done.output
    assert [run.exit_code for run in done.runs] == [0]


def test_a_missing_key_is_told_and_nothing_is_opened(tmp_path):
    done = python(tmp_path, TRAIN, **ONLINE)
    assert "TrackerUnavailableError: W&B: there is no API key for this process. Run `wandb login`" in done.output
    assert done.returncode == 1
    assert done.runs == []


def test_a_missing_key_degrades_to_offline_with_the_command_to_sync(tmp_path):
    done = python(tmp_path, TRAIN.replace("@tracking_init", "@tracking_init(if_unavailable='degrade')"), **ONLINE)
    assert done.returncode == 0, done.output
    (run,) = done.runs
    assert (run.exit_code, len(run.rows)) == (0, 1)
    (directory,) = re.findall(r"To send it when W&B is available, run: wandb sync (\S+)", done.output)
    assert Path(directory).samefile(run.path.parent)


@pytest.mark.parametrize("if_unavailable", ["raise", "degrade"])
def test_an_unreachable_server_is_told_in_time(tmp_path, if_unavailable):
    arguments = f"@tracking_init(init_timeout_s=2, if_unavailable={if_unavailable!r})"
    url = f"http://127.0.0.1:{jobs.free_port()}"
    began = time.monotonic()
    done = python(tmp_path, TRAIN.replace("@tracking_init", arguments), **ONLINE, WANDB_BASE_URL=url, WANDB_API_KEY=KEY)
    assert time.monotonic() - began < 25
    assert not (tmp_path / ".config" / "wandb" / "settings").exists()  # the user's own, which wandb.login changes
    assert not (tmp_path / ".netrc").exists()
    if if_unavailable == "raise":
        assert done.returncode == 1
        assert "TrackerUnavailableError: W&B cannot be used:" in done.output
        assert "Check WANDB_BASE_URL, the API key and the network" in done.output
    else:
        assert done.returncode == 0, done.output
        assert done.output.count("wandb sync") >= 1
        assert [(len(run.rows), run.exit_code) for run in done.runs if "offline-run" in str(run.path)] == [(1, 0)]


AGAIN = """
    import os, pathlib, time
    from flyteplugins_tracking import TrackerUnavailableError, get_run, tracking_init

    @tracking_init(project="tests", id="again", init_timeout_s=3)
    def train():
        get_run().log({"x": 1})

    try:
        train()
    except TrackerUnavailableError:
        pathlib.Path("refused").touch()
    while not pathlib.Path("back").exists():
        time.sleep(0.05)
    train()
"""


def test_a_run_that_could_not_be_opened_can_be_when_the_server_is_back(tmp_path):
    with WandbServer() as server:
        with server.failing(Fault.refuse()):
            process = jobs.start([sys.executable, "-c", textwrap.dedent(AGAIN)], tmp_path, server.environment)
            while not (tmp_path / "refused").exists() and process.poll() is None:
                time.sleep(0.05)
        (tmp_path / "back").touch()
        done = jobs.finish(process, tmp_path, timeout_s=60)
        (run,) = server.runs
        assert (run.id, run.exit_codes, len(run.rows)) == ("again", [0], 1), done.output


def test_a_secret_reaches_the_server_and_nothing_else(tmp_path):
    with failing_server(500) as (url, seen):
        done = python(
            tmp_path,
            f"""
            import pickle
            @tracking_init(secret=lambda: {KEY!r} + "\\n", init_timeout_s=2, if_unavailable="degrade")
            def train():
                assert "WANDB_API_KEY" not in os.environ
                get_run().log({{"x": 1}})
            train()
            """,
            **ONLINE,
            WANDB_BASE_URL=url,
        )
    assert done.returncode == 0, done.output
    assert {base64.b64decode(value.removeprefix("Basic ")) for value in seen if value} == {f"api:{KEY}".encode()}
    assert KEY not in done.output
    stored = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert stored
    assert [path for path in stored if KEY.encode() in path.read_bytes()] == []


def test_a_secret_that_raises_is_told(tmp_path):
    code = TRAIN.replace("@tracking_init", "@tracking_init(secret=lambda: os.environ['NOT_THERE'])")
    done = python(tmp_path, code, **ONLINE)
    assert "TrackerUnavailableError: secret= raised KeyError and gave no API key" in done.output
    assert done.runs == []


def test_wandb_that_is_not_installed_is_told_with_the_command(tmp_path):
    root = Path(flyteplugins_tracking.__file__).parent.parent
    code = f"import sys; sys.path.insert(0, {str(root)!r}); from flyteplugins_tracking import *\n{TRAIN}"
    done = jobs.run([sys.executable, "-S", "-c", code], tmp_path)
    assert 'TrackerNotInstalledError: pip install "flyteplugins-tracking[wandb]"' in done.output


def test_an_id_that_wandb_would_refuse_is_told_before_it_is_used(tmp_path):
    done = python(tmp_path, TRAIN, WANDB_RUN_ID="a/b")
    assert "ConfigError: run id 'a/b' contains /, which W&B does not accept in an id" in done.output
    assert done.runs == []


def test_a_child_of_lightnings_own_launcher_gets_no_run(tmp_path):
    """Lightning's ddp starts the script again with LOCAL_RANK, WORLD_SIZE and the parent's service, and no RANK."""
    (tmp_path / "script.py").write_text(
        textwrap.dedent(
            """
            import os, subprocess, sys
            from flyteplugins_tracking import get_run, tracking_init

            @tracking_init
            def train():
                print("RANK", os.environ.get("LOCAL_RANK", "parent"), get_run() is not None, flush=True)
                if "LOCAL_RANK" not in os.environ:
                    shape = {"LOCAL_RANK": "1", "WORLD_SIZE": "2", "NODE_RANK": "0"}
                    subprocess.run([sys.executable, *sys.argv], env={**os.environ, **shape}, check=True)
            train()
            """
        )
    )
    done = jobs.python(tmp_path, "script.py")
    assert "RANK parent True" in done.output
    assert "RANK 1 False" in done.output
    assert [run.exit_code for run in done.runs] == [0]


def test_a_directory_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "wandb").write_text("a file where the directory should be")
    done = python(tmp_path, TRAIN)
    assert "TrackerUnavailableError: W&B cannot write its local files" in done.output
    assert "set WANDB_DIR" in done.output


def test_a_run_that_the_user_has_open_is_left_alone(tmp_path):
    script = """
        import wandb
        from flyteplugins_tracking import get_run, tracking_init
        mine = wandb.init(id="mine", project="p", reinit="create_new")

        @tracking_init(id="ours")
        def train():
            assert get_run().id == "ours"
            get_run().log({"x": 1})

        train()
        mine.log({"x": 2})
        mine.finish()
    """
    done = python(tmp_path, textwrap.dedent(script))
    assert done.returncode == 0, done.output
    assert {run.id: [row["x"] for row in run.rows] for run in done.runs} == {"mine": [2], "ours": [1]}


def test_the_run_is_the_vendors_own_to_look_at_and_to_pickle(tmp_path):
    script = """
        import pickle, wandb
        from flyteplugins_tracking import get_run, tracking_init

        @tracking_init(id="ours")
        def train():
            run = get_run()
            assert isinstance(run, wandb.Run) and wandb.run is run and type(run).__name__ == "Run"
            assert pickle.dumps(run)
            return run

        run = train()
        assert type(run) is wandb.Run
        try:
            run.log({"x": 1})
        except wandb.errors.UsageError as error:
            assert "is finished" in str(error)
        else:
            raise SystemExit("a finished run took a row")
    """
    done = python(tmp_path, textwrap.dedent(script))
    assert done.returncode == 0, done.output


def test_a_wandb_core_that_dies_takes_no_training_down(tmp_path):
    script = """
        import os, signal, time
        from pathlib import Path
        from flyteplugins_tracking import get_run, tracking_init

        @tracking_init(id="ours")
        def train():
            get_run().log({"x": 0})
            time.sleep(0.5)
            for task in Path("/proc/self/task").iterdir():
                for pid in (task / "children").read_text().split():
                    os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.5)
            for x in range(1, 4):
                get_run().log({"x": x})

        train()
    """
    done = python(tmp_path, textwrap.dedent(script))
    assert done.returncode == 0, done.output
    assert "wandb-core has died" in done.output
    assert sorted(row["x"] for run in done.runs for row in run.rows) == [0, 1, 2, 3]
    assert [run.exit_code for run in done.runs] == [None, 0]


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
    assert TRACKER.link(config, pages(Workers(2, 2, 8), run_mode, rank_scope, ""))["link_type"] == link_type
    assert TRACKER.link(config, None)["link_type"] == "tracking-wandb-project"


def test_a_group_of_the_users_is_what_flytekits_link_leads_to():
    config = TrackingConfig(run_mode="new", rank_scope="worker", project="p", group="g", options={"entity": "e"})
    link = TRACKER.link(config, pages(Workers(2, 2, 8), "new", "worker", ""))
    assert (link["link_type"], link["wandb_group"]) == ("tracking-wandb-group-id", "g")

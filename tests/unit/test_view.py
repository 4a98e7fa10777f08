"""`python -m flyteplugins_tracking view`: which runs it finds, what it asks, and which viewer it becomes."""

from __future__ import annotations

import os
import shlex
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import wandb
from support import offline_wandb

from flyteplugins_tracking import tracking_init
from flyteplugins_tracking._commands import view
from flyteplugins_tracking.trackers.journal.files import Journal
from flyteplugins_tracking.trackers.mlflow.links import ID_TAG
from flyteplugins_tracking.trackers.mlflow.view import how_to_view
from flyteplugins_tracking.trackers.pluto.view import keep_page
from flyteplugins_tracking.trackers.viewing import view_command


@pytest.fixture
def directory(tmp_path: Path, bare_environment: pytest.MonkeyPatch) -> Path:
    """The working directory. No tracker has runs anywhere."""
    bare_environment.setenv("HOME", str(tmp_path / "home"))
    for name in ("HF_HOME", "XDG_CACHE_HOME", "TRACKIO_DIR"):
        bare_environment.delenv(name, raising=False)
    bare_environment.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], dict[str, str]]]:
    """The programs that this process would have become, with their environments."""
    programs: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr(os, "execvpe", lambda _, command, env: programs.append((command, env)))
    return programs


def wandb_run(
    place: Path, run_id: str, started: str = "20261122_120000", offline: bool = True, suffix: str = ""
) -> Path:
    """A directory as W&B's client names it. Returns the file in it."""
    folder = place / "wandb" / f"{'offline-' if offline else ''}run-{started}-{run_id}{suffix}"
    folder.mkdir(parents=True)
    file = folder / f"run-{run_id}.wandb"
    file.touch()
    return file


def trackio_run(store: Path, project: str, run_id: str) -> None:
    store.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(store / f"{project}.db")) as database, database:
        database.execute("CREATE TABLE IF NOT EXISTS configs (run_id TEXT, created_at TEXT)")
        database.execute("INSERT INTO configs VALUES (?, '2026-11-22T12:00:00+00:00')", (run_id,))


def mlflow_run(file: Path, run_id: str) -> None:
    with closing(sqlite3.connect(file)) as database, database:
        database.execute("CREATE TABLE experiments (experiment_id INT, name TEXT)")
        database.execute("CREATE TABLE runs (run_uuid TEXT, experiment_id INT, start_time INT, lifecycle_stage TEXT)")
        database.execute("CREATE TABLE tags (run_uuid TEXT, key TEXT, value TEXT)")
        database.execute("INSERT INTO experiments VALUES (1, 'llm')")
        database.execute("INSERT INTO runs VALUES ('0123abcd', 1, 1795348800000, 'active')")
        database.execute("INSERT INTO tags VALUES ('0123abcd', ?, ?)", (ID_TAG, run_id))


def test_the_only_run_is_shown_at_once(directory, started):
    file = wandb_run(directory, "llm-7b")
    view.main([])
    assert started[0][0] == [sys.executable, "-m", "wandb", "leet", os.path.relpath(file)]


def test_the_directories_of_all_nodes_are_shown_as_one_run(directory, started):
    for node in ("node-0", "node-1"):
        wandb_run(directory / node, "llm-7b")
    view.main([])
    shown = Path(started[0][0][-1])
    assert sorted(path.name for path in shown.iterdir()) == [
        "run-20261122_120000-llm-7b-node-0",
        "run-20261122_120000-llm-7b-node-1",
    ]
    assert [path.resolve() for path in sorted(shown.glob("*/run-llm-7b-*.wandb"))] == [
        next((directory / node).glob("wandb/*/*.wandb")) for node in ("node-0", "node-1")
    ]


def test_the_directories_of_nodes_that_share_a_file_system_are_one_run(directory, started):
    """All ranks of a shared run have one id. The directories of other nodes than the first have the node's name too."""
    wandb_run(directory, "llm-7b")
    wandb_run(directory, "llm-7b", suffix="-worker-1")
    view.main([])
    assert sorted(path.name for path in Path(started[0][0][-1]).glob("*/*")) == [
        "run-llm-7b-worker-1.wandb",
        "run-llm-7b.wandb",
    ]


def test_several_runs_are_listed_with_how_to_choose_one(directory, started, capsys):
    wandb_run(directory, "first", "20261121_120000")
    wandb_run(directory, "second", "20261122_120000", offline=False)
    assert view.main([]) == 0
    assert not started
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["run", "tracker", "started", "files"]
    assert [line.split()[0] for line in lines[1:3]] == ["second", "first"]
    assert "  python -m flyteplugins_tracking view --run second" in lines
    assert "  python -m flyteplugins_tracking view --tracker wandb" in lines


def test_a_run_is_chosen_by_its_id_and_all_runs_by_their_tracker(directory, started):
    wandb_run(directory, "first", "20261121_120000")
    second = wandb_run(directory, "second")
    view.main(["--run", "second"])
    assert started[0][0][-1] == os.path.relpath(second)
    view.main(["--tracker", "wandb"])
    assert len(list(Path(started[1][0][-1]).iterdir())) == 2


def test_a_run_of_several_trackers_is_listed_once_for_each(directory, started, capsys):
    wandb_run(directory, "llm-7b")
    mlflow_run(directory / "mlflow.db", "llm-7b")
    assert view.main(["--run", "llm-7b"]) == 0
    out = capsys.readouterr().out
    assert not started
    assert "view --run llm-7b --tracker" in out
    view.main(["--run", "llm-7b", "--tracker", "mlflow"])
    assert started[0][0][1:] == ["-m", "mlflow", "ui", "--backend-store-uri", f"sqlite:///{directory / 'mlflow.db'}"]


def test_a_directory_is_searched_with_those_in_it_and_no_other(directory, started, capsys):
    wandb_run(directory, "elsewhere")
    wandb_run(directory / "jobs" / "node-0", "llm-7b")
    view.main(["jobs"])
    assert "llm-7b" in started[0][0][-1]
    assert view.main(["jobs", "--run", "elsewhere"]) == 1
    assert "No run for --run elsewhere" in capsys.readouterr().err


def test_trackios_default_directory_is_searched_if_no_such_run_is_here(directory, started):
    store = directory / "home/.cache/huggingface/trackio"
    trackio_run(store, "llm", "kept-there")
    view.main([])
    command, env = started[0]
    assert command[1:] == ["-m", "trackio.cli", "show", "--project", "llm"]
    assert env["TRACKIO_DIR"] == str(store)
    here = wandb_run(directory, "kept-here")
    view.main([])
    assert started[1][0][-1] == os.path.relpath(here)
    view.main(["--run", "kept-there"])
    assert started[2] == started[0]


@pytest.mark.parametrize(
    ("variable", "write"),
    [
        ("WANDB_DIR", lambda place: wandb_run(place, "llm-7b")),
        ("TRACKIO_DIR", lambda place: trackio_run(place, "llm", "llm-7b")),
    ],
)
def test_the_trackers_own_variables_say_where_else_to_look(directory, started, monkeypatch, variable, write):
    place = directory / "far" / "away"
    write(place)
    monkeypatch.setenv(variable, str(place))
    view.main(["--run", "llm-7b"])
    assert len(started) == 1


def test_the_store_of_mlflows_variable_is_searched(directory, started, monkeypatch):
    (directory / "far" / "away").mkdir(parents=True)
    mlflow_run(directory / "far" / "away" / "store.db", "llm-7b")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///far/away/store.db")
    view.main([])
    assert started[0][0][-1] == f"sqlite:///{directory}/far/away/store.db"


def test_mlflows_runs_in_files_are_found(directory, started):
    run = directory / "mlruns" / "1" / "0123abcd"
    (run / "tags").mkdir(parents=True)
    (run / "meta.yaml").write_text("artifact_uri: x\nstart_time: 1795348800000\n")
    (run / "tags" / ID_TAG).write_text("llm-7b")
    view.main(["--run", "llm-7b"])
    assert started[0][0][-1] == str(directory / "mlruns")


def test_stores_that_one_viewer_cannot_show_together_are_listed(directory, started, capsys):
    trackio_run(directory / "a", "llm", "one")
    trackio_run(directory / "b", "llm", "two")
    assert view.main(["--tracker", "trackio"]) == 0
    assert not started
    assert "view --run" in capsys.readouterr().out


def test_for_pluto_it_says_where_the_runs_page_is(directory, started, capsys):
    folder = directory / ".pluto" / "llm-7b-rank-0-attempt-0-0a1b2c"
    folder.mkdir(parents=True)
    assert view.main([]) == 0
    assert "Its pages are on its server" in capsys.readouterr().err
    keep_page(str(folder), "https://pluto.example.com/o/me/projects/llm/7")
    assert view.main([]) == 0
    assert "The run is at https://pluto.example.com/o/me/projects/llm/7" in capsys.readouterr().err
    assert not started


def test_for_a_run_that_is_kept_in_journals_it_says_how_to_send_it(directory, started, capsys):
    journal = Journal(directory / "tracking-offline" / "pluto-llm-7b", "0", {"tracker": "pluto", "id": "llm-7b"})
    journal.add(b"row")
    journal.close()
    assert view.main([]) == 0
    assert "python -m flyteplugins_tracking.send tracking-offline/pluto-llm-7b" in capsys.readouterr().err
    assert not started


def test_without_runs_it_says_so(directory, capsys):
    assert view.main([]) == 1
    assert "There are no runs in the working directory" in capsys.readouterr().err


def test_a_directory_that_is_not_there_is_refused(directory, capsys):
    with pytest.raises(SystemExit, match="2"):
        view.main(["nowhere"])
    assert "nowhere is not a directory" in capsys.readouterr().err


def test_a_viewer_that_cannot_be_started_is_named(directory, monkeypatch, capsys):
    wandb_run(directory, "llm-7b")

    def missing(*_: object) -> None:
        raise FileNotFoundError("no such file")

    monkeypatch.setattr(os, "execvpe", missing)
    assert view.main([]) == 1
    assert "leet" in capsys.readouterr().err


def test_the_command_is_right_in_the_working_directory(directory):
    assert view_command("wandb", "r") == "python -m flyteplugins_tracking view --tracker wandb --run r"
    assert view_command("wandb", "r", str(directory)) == view_command("wandb", "r")
    assert view_command("wandb", "r", str(directory / "node-0")) == view_command("wandb", "r")
    assert " view 'my jobs/llm' --tracker" in view_command("wandb", "r", str(directory / "my jobs" / "llm"))
    assert f" view {directory.parent} --tracker" in view_command("wandb", "r", str(directory.parent))
    assert how_to_view("sqlite:///mlflow.db", "r") == view_command("mlflow", "r")
    assert " view a/b --tracker mlflow" in how_to_view("sqlite:///a/b/store.db", "r")
    assert how_to_view("postgresql://me:secret@host/db", "r") == "mlflow ui --backend-store-uri postgresql://host/db"


def shown_by(line: str, started: list[Any]) -> str:
    """Follow the last line of a run. Returns the last argument of the viewer."""
    words = shlex.split(line.partition(": to look at run ")[2].partition(": ")[2])
    assert words[:4] == ["python", "-m", "flyteplugins_tracking", "view"]
    view.main(words[4:])
    return str(started[-1][0][-1])


def test_the_last_line_of_a_run_leads_to_it(directory, started, capfd):
    # Whatever W&B has read of the environment of an earlier test.
    settings = wandb.Settings(mode="offline", silent=False)

    @tracking_init(tracker="wandb", project="llm", id="viewed", dir="logs/llm", settings=settings)
    def train() -> None:
        pass

    (directory / "logs" / "llm").mkdir(parents=True)
    train()
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("wandb: to look at run")]
    assert (
        line
        == "wandb: to look at run viewed: python -m flyteplugins_tracking view logs/llm --tracker wandb --run viewed"
    )
    assert shown_by(line, started).startswith("logs/llm/wandb/offline-run-")


def test_a_run_that_w_and_b_is_writing_is_found(directory, started, monkeypatch):
    run = offline_wandb.open_run("open", directory, monkeypatch)
    try:
        view.main(["--run", "open"])
    finally:
        run.finish()
    assert Path(started[0][0][-1]).resolve().parent == Path(run.dir).parent.resolve()

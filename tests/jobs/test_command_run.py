"""`flyteplugins-tracking run`: a script runs as without it. What its run has is in test_blocks.py too."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections import defaultdict
from contextlib import closing
from pathlib import Path

import pytest
from support import jobs
from support.backends import BACKENDS
from support.wandb_server import WandbServer

from flyteplugins_tracking._commands import run as command
from flyteplugins_tracking.trackers.config import OWN_ARGUMENTS, TrackingConfig

UNDER = ("-m", "flyteplugins_tracking", "run")


def outcome(directory: Path, *words: str, text: str = "", **variables: str) -> tuple[int, str, str]:
    """What a real interpreter does in the directory of a script, without any run."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=directory,
        env=jobs.environment(directory, FLYTE_TRACKING_MODE="disabled", PYTHONPATH=ROOT, **variables),
        input=text,
        capture_output=True,
        text=True,
        timeout=100,
    )
    return done.returncode, done.stdout, done.stderr


ROOT = str(jobs.PACKAGE.parent)


def as_python(directory: Path, *words: str, options: tuple[str, ...] = (), text: str = "", **variables: str) -> str:
    """Compare the command with Python, and return what Python prints."""
    plain, under = (outcome(directory, *options, *before, *words, text=text, **variables) for before in ((), UNDER))
    assert under == plain
    return "".join(plain[1:])


SEEN = """
import inspect, os, pickle, sys
from dataclasses import dataclass
@dataclass
class Point:
    x: int
if __name__ == "__main__":
    main = sys.modules["__main__"]
    print(sys.path[0], sys.argv, __file__, __spec__ and __spec__.name, __package__, __cached__)
    print(sorted({*globals()} - {"__annotations__"}), type(__builtins__), type(__loader__), main.__dict__ is globals())
    print(Point.__annotations__, pickle.loads(pickle.dumps(Point(1))), sys.flags)
"""
ENDING = """
import sys
print("begun", flush=True)
def end():
    {}
end()
"""


@pytest.mark.sampled_full(4)
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("form", "name"),
    [
        ("file", "./sub/../script.py"),
        ("module", "script"),
        ("link", "link.py"),
        ("package", "package"),
    ],
)
def test_a_script_of_each_form_sees_what_it_sees_without_the_command(tmp_path, form, name):
    (tmp_path / "sub").mkdir()
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    for path in ("script.py", "sub/linked.py", "package/__main__.py"):
        (tmp_path / path).write_text(SEEN)
    (tmp_path / "link.py").symlink_to("sub/linked.py")
    words = [*(["-m"] if form in ("module", "package") else []), name, "--", "--x", "-m"]
    assert "'--', '--x', '-m'" in as_python(tmp_path, *words, text="")
    if form in ("link", "module"):
        before = (("-P",) if sys.version_info >= (3, 11) else ("-I",)) if form != "module" else ()
        as_python(tmp_path, *words, options=before, PYTHONSAFEPATH="1" if form != "module" else "")


CHILDREN = """
import multiprocessing, sys
class Point:
    x = 1
def work(queue, point):
    queue.put((point.x, __name__, sys.argv))
if __name__ == "__main__":
    for method in ("fork", "spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        child = context.Process(target=work, args=(queue, Point()))
        child.start()
        print(queue.get(), child.join(), child.exitcode)
"""


@pytest.mark.full
def test_processes_of_each_kind_find_the_script_again(tmp_path):
    (tmp_path / "script.py").write_text(CHILDREN)
    assert as_python(tmp_path, "script.py", "a").count("'a'") == 3
    assert as_python(tmp_path, "-m", "script", "a").count("'a'") == 3


def test_a_pipe_can_be_the_script(tmp_path):
    text = "import sys\nprint('here', __name__, sys.argv)"
    assert outcome(tmp_path, *UNDER, "/dev/stdin", "a", text=text) == (0, "here __main__ ['/dev/stdin', 'a']\n", "")


def test_the_clients_question_for_a_terminal_finds_the_standard_input_open(tmp_path):
    """The script came through the standard input, and the client asks whether somebody can type a key there."""
    variables = {"WANDB_MODE": "offline", "PYTHONPATH": ROOT}
    done = subprocess.run(
        [sys.executable, *UNDER, "--project", "p", "/dev/stdin"],
        cwd=tmp_path,
        env=jobs.environment(tmp_path, **variables),
        input="import sys, wandb; wandb.init(); wandb.log({'x': 1}); print('HERE', repr(sys.stdin.read()))",
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, "HERE ''" in done.stdout) == (0, True), done


def test_two_dashes_behind_the_script_are_dropped_under_torchrun_as_torchrun_does(tmp_path):
    (tmp_path / "script.py").write_text("import sys; print(sys.argv)")
    words = ("script.py", "--", "--x", "--", "1")
    assert as_python(tmp_path, *words) == "['script.py', '--', '--x', '--', '1']\n"
    code, printed, told = outcome(
        tmp_path, *UNDER, *words, RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", TORCHELASTIC_RUN_ID="r"
    )
    assert (code, printed) == (0, "['script.py', '--x', '--', '1']\n"), told


@pytest.mark.sampled_full(3)
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "end",
    [
        "1 / 0",
        "import wrong",
        "raise KeyboardInterrupt",
        "try: 1 / 0\n    except ZeroDivisionError as error: raise ValueError('a value') from error",
        "try: 1 / 0\n    except ZeroDivisionError: {}['a key']",
        "from flyteplugins_tracking import ConfigError; raise ConfigError('of the script')",
        "sys.exit(2**70)",
        "sys.exit(['a', 'list'])",
        "sys.excepthook = lambda *error: print('shown by', *error[:2], error[2].tb_lineno); 1 / 0",
        "sys.excepthook = lambda *_: sys.exit(4); 1 / 0",
    ],
)
def test_a_script_ends_and_tells_why_as_without_the_command(tmp_path, end):
    directory = tmp_path / "of runpy's"  # the name of the directory has nothing to say
    directory.mkdir()
    (directory / "script.py").write_text(ENDING.format(end))
    (directory / "wrong.py").write_text("x = (")
    assert as_python(directory, "script.py").startswith("begun\n")
    assert as_python(directory, "-m", "script").startswith("begun\n")


@pytest.mark.sampled_full(2)
@pytest.mark.sampled(1)
@pytest.mark.parametrize("words", [["wrong.py"], ["nothing.py"], ["-m", "nothing"], ["-m", "package.nothing"]])
def test_a_script_that_is_not_there_is_told_as_python_tells_it(tmp_path, words):
    (tmp_path / "wrong.py").write_text("x = (")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    as_python(tmp_path, *words)


THREADS = """
import sys, threading, time
import wandb
from concurrent.futures import ThreadPoolExecutor
main, run = threading.main_thread(), wandb.init(project="of-the-script")
pool, go = ThreadPoolExecutor(1), threading.Event()
def later(x):
    if x == 1:
        go.wait()
    time.sleep(0.2)
    run.log({"x": x})
    sys.stderr.write(f"logged {x} {sys.modules['__main__'].run is run}\\n")
def as_long_as_main():
    while main.is_alive():
        time.sleep(0.01)
    go.set()
threading.Thread(target=later, args=[1]).start()
threading.Thread(target=as_long_as_main).start()
threading.Thread(target=main.join).start()
threading.Thread(target=threading.Event().wait, daemon=True).start()
pool.submit(later, 2)
"""


@pytest.mark.sampled_full(2)
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("end", "code", "status", "told"),
    [
        ("sys.exit('a text')", 1, 1, "a text"),
        ("", 0, 0, ""),
        ("1 / 0", 1, 1, "ZeroDivisionError"),
        ("sys.exit(2**70)", 255, 255, ""),
        ("raise KeyboardInterrupt", -2, 130, "\nKeyboardInterrupt\n"),
    ],
)
def test_the_run_ends_after_the_threads_of_the_script_and_with_its_status(tmp_path, end, code, status, told):
    (tmp_path / "script.py").write_text(THREADS + end)
    done = jobs.finish(jobs.start([sys.executable, *UNDER, "script.py"], tmp_path, cold=True), tmp_path)
    (run,) = done.runs
    assert (done.returncode, run.exit_code, sorted(row["x"] for row in run.rows)) == (code, status, [1, 2]), done
    assert "logged 1 True\n" in done.output
    if told:
        assert done.output.count(told) == 1
        assert done.output.index(told) < done.output.index("logged")


MISSPELT = [
    (["-m", "nothing"], "No module named nothing"),
    (["nothing.py"], "can't open file"),
    (["--run-mode", "nwe", "script.py"], "argument --run-mode: invalid choice: 'nwe'"),
    (["--pulse-s", "-1", "script.py"], "flyteplugins-tracking run: error: pulse_s must be a positive number"),
    (["--option", "projekt=p", "script.py"], "has no argument 'projekt'; did you mean 'project'?"),
    (["--config", "lr", "script.py"], "argument --config: 'lr' is not NAME=VALUE"),
    (["--entity", "team", "script.py"], "--option"),
    ([], "the following arguments are required: SCRIPT"),
]


def test_what_is_misspelt_opens_no_run_and_is_told_in_the_words_of_the_command(tmp_path, monkeypatch, capfd, subtests):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    Path("script.py").write_text("print('ran')")
    for words, message in MISSPELT:
        with subtests.test(message):
            try:
                status = command.main(words)
            except SystemExit as ended:  # of the options
                status = ended.code
            assert message in capfd.readouterr().err
            assert status in (1, 2)
            assert os.listdir(tmp_path) == ["script.py"]


def test_each_argument_has_an_option_or_is_said_to_have_none(capsys):
    with pytest.raises(SystemExit):
        command.main(["--help"])
    shown = capsys.readouterr().out
    without = {name for name in OWN_ARGUMENTS if f"--{name.replace('_', '-')} " not in shown.replace("\n", " ")}
    assert without == {"secret", "download_logs"}
    assert {"Any"} == {TrackingConfig.__annotations__[name] for name in without} - {"bool"}


OPENING = """
import os, sys, wandb
os.chdir("elsewhere")
said = {"project": "theirs", "name": "theirs", "tags": ["theirs"], "config": {"lr": 5, "own": 1}, "job_type": "theirs"}
run = wandb.init(**said, reinit=True)
assert run is wandb.run and sys.argv[1:] == ["--help"]
run.log({"x": 1})
print(run.project, run.entity, run.job_type)
"""


def test_the_options_take_precedence_over_what_the_script_says(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "script.py").write_text(OPENING)
    options = ["--tags", "a", "--tags", "b,c", "--config", "lr=1e-3", "--config", "model=gpt", "--config", "deep=true"]
    options += ["--option", "entity=team", "--option", "job_type=sweep", "--name", "named", "--rank-prefix"]
    options += ["--run-file", "run.json"]
    done = jobs.run([sys.executable, *UNDER, *options, "--", "script.py", "--help"], tmp_path)
    (run,) = done.runs
    assert (run.exit_code, run.name, len(run.rows)) == (0, "named", 1), done
    assert sorted(run.tags) == ["a", "b,c"]
    assert "theirs team sweep\n" in done.output
    assert (tmp_path / "run.json").exists()
    assert {key: run.config[key] for key in ("lr", "model", "deep", "own")} == {
        "lr": 0.001,
        "model": "gpt",
        "deep": True,
        "own": 1,
    }


OPENS_NONE = {
    "a wrong argument": "import argparse, wandb; argparse.ArgumentParser().parse_args(['--wrong'])",
    "a launcher": "import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', 'raise SystemExit(2)']))",
    "a disabled run": "import sys, wandb; run = wandb.init(mode='disabled'); run.log({}); sys.exit(1 + run.disabled)",
}


@pytest.mark.sampled_full(2)
@pytest.mark.sampled(1)
@pytest.mark.parametrize("script", OPENS_NONE.values(), ids=OPENS_NONE)
def test_a_script_that_opens_no_run_has_none(tmp_path, script):
    (tmp_path / "script.py").write_text(script)
    done = jobs.run([sys.executable, *UNDER, "--project", "p", "script.py"], tmp_path)
    assert (done.returncode, done.runs, (tmp_path / "wandb").exists()) == (2, [], False), done.output


ON_RANKS = """
import json, os, sys, time, wandb
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
mode = json.loads(sys.argv[1]).get(str(rank))
if mode is not None:
    run = wandb.init(project="p", name="of the script", mode=mode)
    for x in range(3):
        run.log({"x": x, "rank": rank, "attempt": attempt})
    if len(sys.argv) > 2 and attempt == 0 and not run.disabled:
        sys.exit(int(sys.argv[2]))
"""


@pytest.mark.sampled_full(3)
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("options", "modes", "arguments", "owners", "is_told"),
    [
        ([], {1: "offline"}, ["3"], [1, 1], False),  # torchtitan, Megatron-LM; with a restart
        ([], {0: "offline", 1: "offline"}, [], [0], True),
        (["--primary-rank=0"], {1: "offline"}, [], [], True),
        ([], {0: "offline", 1: "disabled"}, [], [0], False),
        (["--run-mode=new"], {1: "offline"}, [], [1], False),
        (["--rank-scope=worker"], {1: "offline"}, [], [1], False),
    ],
)
def test_the_run_is_on_rank_0_or_else_on_the_rank_that_asks_for_it(
    tmp_path, options, modes, arguments, owners, is_told
):
    (tmp_path / "script.py").write_text(ON_RANKS)
    launcher = jobs.torchrun("--standalone", "--nproc-per-node=2", "--max-restarts=1", "--monitor-interval=0.1")
    done = jobs.run([*launcher, *UNDER, *options, "script.py", json.dumps(modes), *arguments], tmp_path)
    assert done.returncode == 0, done.output
    assert [[row["rank"] for row in run.rows] for run in done.runs] == [[rank] * 3 for rank in owners], done.output
    assert len({run.id for run in done.runs}) == len(set(owners))
    assert sorted(run.exit_code for run in done.runs) == ([0, 3] if arguments else [0] * len(owners))
    assert ("logs to a run that does nothing" in done.output) == is_told


JOINING = """
import threading, wandb
from flyteplugins_tracking import get_run, tracking_init
assert get_run() is None
@tracking_init(project="of-the-function", name="function")
def train():
    get_run().log({"x": 1})
def log(x):
    wandb.init(project="of-a-thread").log({"x": x})
threads = [threading.Thread(target=log, args=[x]) for x in (2, 3)]
for part in (FIRST):
    part.start() if part in threads else part()
    part.join() if part in threads else None
print(get_run().project)
"""


@pytest.mark.sampled_full(1)
@pytest.mark.full
@pytest.mark.parametrize(
    ("first", "project"), [("[train, *threads]", "of-the-function"), ("[*threads, train]", "of-a-thread")]
)
def test_functions_and_threads_of_the_script_have_one_run(tmp_path, first, project):
    (tmp_path / "script.py").write_text(JOINING.replace("(FIRST)", first))
    done = jobs.run([sys.executable, *UNDER, "--name", "named", "script.py"], tmp_path)
    (run,) = done.runs
    assert (done.returncode, run.name, run.exit_code) == (0, "named", 0), done.output
    assert (sorted(row["x"] for row in run.rows), f"{project}\n" in done.output) == ([1, 2, 3], True)


OF_OTHERS = {
    "trackio": "log = trackio.init('theirs', name='n', config={'t': 1}).log",
    "mlflow": "mlflow.set_experiment('theirs'); mlflow.start_run(run_name='n'); log = mlflow.log_metrics",
    "pluto": "log = pluto.init(project='theirs', name='n', config={'t': 1}).log",
}


@pytest.mark.sampled_full(1)
@pytest.mark.full
@pytest.mark.parametrize("tracker", OF_OTHERS)
def test_each_client_opens_the_run_where_the_script_does(tmp_path, tracker):
    lines = ["import os", "if os.environ['RANK'] == '1':", f"    import {tracker}; {OF_OTHERS[tracker]}"]
    (tmp_path / "script.py").write_text("\n".join([*lines, "    for x in range(3): log({'rank': x})", ""]))
    launcher = jobs.torchrun("--standalone", "--nproc-per-node=2", "--monitor-interval=0.1")
    with BACKENDS[tracker](tmp_path) as backend:
        done = jobs.run([*launcher, *UNDER, "script.py"], tmp_path, backend.environment())
        assert done.returncode == 0, done.output
        assert "opens no other run after the end of one" not in done.output
        (run,) = backend.runs("theirs")
        assert (run.points, run.status) == ({("rank", x): 1 for x in range(3)}, "finished"), done.output


OF_ALL_RANKS = """
import os, time, wandb
if os.environ["RANK"] == "0":
    time.sleep(12)  # it downloads what the other ranks wait for
run = wandb.init(project="p")
if os.environ["RANK"] == "0":
    run.log({"x": 1})
"""


@pytest.mark.full
def test_rank_0_has_a_run_though_it_comes_late(tmp_path):
    (tmp_path / "script.py").write_text(OF_ALL_RANKS)
    launcher = jobs.torchrun("--standalone", "--nproc-per-node=2", "--monitor-interval=0.1")
    done = jobs.run([*launcher, *UNDER, "script.py"], tmp_path)
    assert done.returncode == 0, done.output
    assert sorted((len(run.rows), run.exit_code) for run in done.runs) == [(0, 0), (1, 0)]


@pytest.mark.full
def test_a_run_that_the_ranks_of_a_script_share_by_themselves_is_their_own(tmp_path):
    settings = "wandb.Settings(mode='shared', x_label=RANK, x_primary=RANK == '0')"
    lines = ["import os, wandb", "RANK = os.environ['RANK']", f"run = wandb.init(id='own', settings={settings})"]
    (tmp_path / "script.py").write_text("\n".join([*lines, "run.log({'rank': int(RANK)})", "run.finish()", ""]))
    launcher = jobs.torchrun("--standalone", "--nproc-per-node=2", "--monitor-interval=0.1")
    with WandbServer() as server:
        done = jobs.run([*launcher, *UNDER, "script.py"], tmp_path, server.environment)
        assert done.returncode == 0, done.output
        (run,) = server.runs
    assert (run.id, sorted(row["rank"] for row in run.rows)) == ("own", [0, 1])


SAYS_BEFORE = """
import os, wandb
try:
    wandb.init(project="first", name="first")  # online, and there is no key
except Exception as error:
    print("REFUSED", type(error).__name__)
os.environ.update(WANDB_NAME="late", WANDB_TAGS="b,c", WANDB_NOTES="noted", WANDB_PROJECT="mine", WANDB_RUN_GROUP="g")
os.environ.update(WANDB_JOB_TYPE="j", WANDB_MODE="offline")
settings = wandb.Settings(init_timeout=33, api_key="k" * 40)
run = wandb.init(settings=settings, dir="elsewhere", id="chosen")
run.log({"x": 1})
print("HERE", run.project, run.group, run.job_type, run.notes)
os.environ["WANDB_MODE"] = "disabled"
off = wandb.init()
wandb.log({"x": 2})
print("OFF", off.disabled, off is wandb.run)
"""


def test_what_the_script_says_before_its_run_counts(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "script.py").write_text(SAYS_BEFORE)
    done = jobs.run([sys.executable, *UNDER, "script.py"], tmp_path, {"WANDB_MODE": "online"})
    assert "REFUSED TrackerUnavailableError" in done.output, done.output
    assert "HERE mine g j noted" in done.output, done.output
    assert "OFF True True" in done.output
    (run,) = jobs.Done(0, "", tmp_path / "elsewhere").runs
    assert (run.id, run.exit_code, run.name, sorted(run.tags)) == ("chosen", 0, "late", ["b", "c"])
    assert [row["x"] for row in run.rows] == [1]
    assert "Without effect" not in done.output
    assert "k" * 40 not in done.output


IN_TURN = {
    "wandb": "import wandb\nfor x in range(3):\n  with wandb.init(name=f'run {x}') as run: run.log({'x': x})",
    "mlflow": """import mlflow, os
os.environ["MLFLOW_TRACKING_URI"] = "sqlite:///variable.db"
mlflow.set_tracking_uri("sqlite:///other.db")
mlflow.set_experiment("other")
for x in range(3):
  with mlflow.start_run() as run:
    mlflow.log_metric("x", x, step=x), mlflow.log_param("p", x), mlflow.log_params({"q": x})
  with mlflow.start_run(nested=True): mlflow.log_metric("x", x)
mlflow.start_run(run_id=run.info.run_id)""",
    "trackio": "import trackio\nfor x in range(3): trackio.init(project='p').log({'x': x}), trackio.finish()",
}


@pytest.mark.sampled_full(2)
@pytest.mark.sampled(1)
@pytest.mark.parametrize("tracker", IN_TURN)
def test_runs_that_a_script_opens_in_turn_are_one_with_a_warning(tmp_path, tracker):
    (tmp_path / "script.py").write_text(IN_TURN[tracker])
    variables = {"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db", "TRACKIO_DIR": str(tmp_path)}
    done = jobs.run([sys.executable, *UNDER, "--tracker", tracker, "script.py"], tmp_path, variables)
    assert done.returncode == 0, done.output
    assert done.output.count("opens no other run after the end of one") == 1, done.output
    if tracker == "mlflow":
        assert not (tmp_path / "mlflow.db").exists()
        data = mlflow_runs(tmp_path)
        assert data["p"] == data["q"] == ["0"]
        assert data["tracking_init.params.p"] == ["2"]
        assert data["status"] == ["FINISHED"] * 4
        assert len(data["experiment"]) == 1


def mlflow_runs(directory: Path) -> dict[str, list[str]]:
    """Return the params and tags of all runs, their states and their experiments."""
    found: dict[str, list[str]] = defaultdict(list)
    with closing(sqlite3.connect(directory / "other.db")) as store:
        for key, value in store.execute("SELECT key, value FROM params UNION ALL SELECT key, value FROM tags"):
            found[key].append(value)
        found["status"] = [status for (status,) in store.execute("SELECT status FROM runs")]
        found["experiment"] = [str(one) for (one,) in store.execute("SELECT DISTINCT experiment_id FROM runs")]
    return found

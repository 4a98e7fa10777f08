"""`with tracking_run(...)`: the run of a block that is in no function."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import jobs
from support.waiting import wait_until
from wandb_files import StoredRun

from flyteplugins_tracking import ConfigError, get_run, tracking_run
from flyteplugins_tracking.testing import RecordingTracker, simulate

PROGRAM = jobs.PROGRAMS / "blocks.py"
TWO_RANKS = jobs.torchrun("--standalone", "--nproc-per-node=2", "--monitor-interval=0.1")


def run(directory: Path, how: str, **settings: Any) -> jobs.Done:
    return jobs.run([sys.executable, PROGRAM, json.dumps({"how": how, **settings})], directory)


def rows(run: StoredRun) -> list[int]:
    return [row["row"] for row in run.rows]


@pytest.mark.sampled_full(5)
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("how", "runs"),
    [
        ("with", 1),
        ("in_async", 1),
        ("in_threads", 2),
        ("in_a_generator", 1),
        ("around_a_function", 1),
        ("in_a_function", 1),
        ("one_after_the_other", 2),
    ],
)
def test_each_block_has_its_run_with_its_rows_and_status(tmp_path: Path, how: str, runs: int) -> None:
    done = run(tmp_path, how)
    assert done.returncode == 0, done.output
    assert [(one.exit_code, rows(one)) for one in done.runs] == [(0, [0, 1, 2, 3, 4])] * runs


@pytest.mark.sampled_full(5)
@pytest.mark.sampled(2)
@pytest.mark.parametrize(("end", "code", "status"), [("raise", 1, 1), ("exit", 5, 5)])
@pytest.mark.parametrize("how", ["with", "in_async", "in_a_generator", "in_a_function"])
def test_the_run_has_the_status_of_the_block(tmp_path: Path, how: str, end: str, code: int, status: int) -> None:
    done = run(tmp_path, how, end={"0": end})
    (one,) = done.runs
    assert (done.returncode, one.exit_code, len(one.rows)) == (code, status, 5), done.output


@pytest.mark.full
def test_a_generator_that_is_left_in_its_block_fails_and_says_so(tmp_path: Path) -> None:
    done = run(tmp_path, "in_a_generator_that_is_left")
    (one,) = done.runs
    assert (done.returncode, one.exit_code, len(one.rows)) == (0, 1, 5)
    assert "the generator with this block was closed before its end" in done.output


def test_a_generator_is_named_where_there_is_one(caplog: pytest.LogCaptureFixture) -> None:
    def rows() -> Iterator[None]:
        with tracking_run(tracker=tracker):
            yield

    tracker = RecordingTracker()
    with pytest.raises(GeneratorExit), tracking_run(tracker=tracker):
        raise GeneratorExit
    assert "generator" not in caplog.text
    left = rows()
    next(left)
    left.close()
    assert "the generator with this block was closed before its end" in caplog.text
    assert [run.status for run in tracker.runs] == ["failed"] * 2


@pytest.mark.full
def test_a_block_cannot_be_entered_again(tmp_path: Path) -> None:
    done = run(tmp_path, "again")
    assert done.returncode == 1
    assert "this tracking_run(...) has had its block: make another one for the next block" in done.output
    assert [one.exit_code for one in done.runs] == [0]


def test_sigterm_ends_the_block_with_143_and_all_rows(tmp_path: Path) -> None:
    settings = {"how": "with", "end": {"0": "hang", "1": "hang"}}
    process = jobs.start([*TWO_RANKS, PROGRAM, json.dumps(settings)], tmp_path)
    wait_until(lambda: len(list(tmp_path.glob("logged-*"))) == 2, process)
    os.kill(process.pid, signal.SIGTERM)
    done = jobs.finish(process, tmp_path)
    (one,) = done.runs
    assert (one.exit_code, len(one.rows)) == (143, 5), done.output


def test_a_child_that_imports_the_script_is_told_where_the_block_belongs(tmp_path: Path) -> None:
    script = tmp_path / "spawning.py"
    script.write_text(
        "import multiprocessing\n"
        "from flyteplugins_tracking import tracking_run\n"
        "with tracking_run(project='p'):\n"
        "    process = multiprocessing.get_context('spawn').Process(target=print)\n"
        "    process.start()\n"
        "    process.join()\n"
        "    print('child', process.exitcode)\n"
    )
    done = jobs.run([sys.executable, script], tmp_path)
    assert "below `if __name__ == '__main__':`" in done.output
    assert "child 1" in done.output
    assert [one.exit_code for one in done.runs] == [0]


def test_it_is_no_decorator() -> None:
    with pytest.raises(ConfigError, match="is for `with`: put @tracking_init"):

        @tracking_run(project="p")
        def train() -> None: ...


def test_a_misspelt_argument_is_refused_where_the_object_is_made() -> None:
    with pytest.raises(ConfigError, match="has no argument 'projekt'; did you mean 'project'"):
        tracking_run(projekt="p")


def test_the_test_kit_records_a_block() -> None:
    def train() -> None:
        with tracking_run(project="p") as run:
            assert run is get_run()
            if run is not None:
                run.log({"x": 1})

    (run,) = simulate(train, 1, 2).runs
    assert [row.values["x"] for row in run.rows] == [1]


CELLS = """
from jupyter_client.manager import start_new_kernel

manager, client = start_new_kernel(kernel_name="python3")
def cell(code, interrupt=False):
    # A kernel may abort a cell that comes right behind one that failed.
    asked = client.execute(code, stop_on_error=False)
    if interrupt:
        while "inside" not in client.get_iopub_msg(timeout=60)["content"].get("text", ""):
            pass
        manager.interrupt_kernel()
    reply = client.get_shell_msg(timeout=60)
    while reply["parent_header"].get("msg_id") != asked:  # of the kernel's start, on a busy machine
        reply = client.get_shell_msg(timeout=60)
    print(reply["content"]["status"], reply["content"].get("ename", ""))
cell("%load_ext autoreload\\n%autoreload 2\\nfrom flyteplugins_tracking import get_run, tracking_run")
block = "with tracking_run(project='p', name='{}') as run:\\n    run.log({{'x': 1}})\\n    {}"
cell(block.format("good", "pass"))
cell(block.format("bad", "1 / 0"))
cell(block.format("stopped", "print('inside'); import time; time.sleep(60)"), interrupt=True)
cell("assert get_run() is None")
cell(block.format("again", "pass"))
client.stop_channels()
manager.shutdown_kernel()
"""


@pytest.mark.full
def test_cells_of_a_notebook(tmp_path: Path) -> None:
    pytest.importorskip("ipykernel", reason="ipykernel is not installed: pip install ipykernel")
    (tmp_path / "cells.py").write_text(CELLS)
    done = subprocess.run(
        [sys.executable, "cells.py"],
        cwd=tmp_path,
        env=jobs.environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=200,
    )
    replies = [line.split() for line in done.stdout.splitlines()]
    assert replies == [
        ["ok"],
        ["ok"],
        ["error", "ZeroDivisionError"],
        ["error", "KeyboardInterrupt"],
        ["ok"],
        ["ok"],
    ], done
    codes = {one.name: (one.exit_code, len(one.rows)) for one in jobs.Done(0, "", tmp_path).runs}
    assert codes == {"good": (0, 1), "bad": (1, 1), "stopped": (130, 1), "again": (0, 1)}


@pytest.mark.wide
def test_a_script_that_imports_flytekit_is_no_task(tmp_path: Path) -> None:
    script = tmp_path / "imports.py"
    script.write_text(
        "import flytekit\n"
        "from flyteplugins_tracking import tracking_run\n"
        "with tracking_run(project='p') as run:\n"
        "    run.log({'a': 1})\n"
    )
    done = jobs.run([sys.executable, script], tmp_path)
    assert done.returncode == 0, done.output
    assert [run.exit_code for run in done.runs] == [0]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "script",
    [
        "from flytekit import task\n@task\ndef train() -> None:\n{}train()\n",
        "import flyte\nenv = flyte.TaskEnvironment(name='e')\n@env.task\ndef train() -> None:\n{}"
        "flyte.with_runcontext(mode='local').run(train)\n",
    ],
    ids=["flytekit", "flyte"],
)
def test_a_task_is_told_to_take_the_decorator(tmp_path: Path, script: str) -> None:
    path = tmp_path / "task.py"
    body = (
        "    from flyteplugins_tracking import tracking_run\n"
        "    with tracking_run(project='p'):\n"
        "        print('INSIDE')\n"
    )
    path.write_text(script.format(body))
    done = jobs.run([sys.executable, path], tmp_path)
    assert "tracking_run(...) is not for Flyte tasks: put @tracking_init(...) on the task" in done.output
    assert "INSIDE" not in done.output
    assert done.runs == []

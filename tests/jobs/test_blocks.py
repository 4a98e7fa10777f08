"""`with tracking_run(...)`: the run of a block that is in no function."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support import jobs
from support.waiting import wait_until

from flyteplugins_tracking import ConfigError, tracking_run

PROGRAM = jobs.PROGRAMS / "blocks.py"
TWO_RANKS = jobs.torchrun("--standalone", "--nproc-per-node=2", "--monitor-interval=0.1")


def run(directory: Path, how: str, **settings: Any) -> jobs.Done:
    return jobs.run([sys.executable, PROGRAM, json.dumps({"how": how, **settings})], directory)


def test_each_block_of_a_process_has_its_run_with_its_rows_and_status(tmp_path: Path) -> None:
    done = run(tmp_path, "each")
    assert done.returncode == 0, done.output
    assert Counter(one.name for one in done.runs) == {
        **{"in_async": 1, "in_threads": 2, "in_a_generator": 1},
        **{"around_a_function": 1, "in_a_function": 1, "one_after_the_other": 2},
    }
    for one in done.runs:
        assert (one.exit_code, [row["row"] for row in one.rows]) == (0, [0, 1, 2, 3, 4])


@pytest.mark.sampled_full(5)
@pytest.mark.sampled(2)
@pytest.mark.parametrize(("end", "code", "status"), [("raise", 1, 1), ("exit", 5, 5)])
@pytest.mark.parametrize("how", ["with", "in_async", "in_a_generator", "in_a_function"])
def test_the_run_has_the_status_of_the_block(tmp_path: Path, how: str, end: str, code: int, status: int) -> None:
    done = run(tmp_path, how, end={"0": end})
    (one,) = done.runs
    assert (done.returncode, one.exit_code, len(one.rows)) == (code, status, 5), done.output


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


def test_it_is_no_decorator_and_refuses_a_misspelt_argument() -> None:
    with pytest.raises(ConfigError, match="is for `with`: put @tracking_init"):

        @tracking_run(project="p")
        def train() -> None: ...

    with pytest.raises(ConfigError, match="has no argument 'projekt'; did you mean 'project'"):
        tracking_run(projekt="p")


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


@pytest.mark.wide
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


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "script",
    [
        "import flyte\nenv = flyte.TaskEnvironment(name='e')\n@env.task\ndef train() -> None:\n{}"
        "flyte.with_runcontext(mode='local').run(train)\n",
        "from flytekit import task\n@task\ndef train() -> None:\n{}train()\n",
    ],
    ids=["flyte", "flytekit"],
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

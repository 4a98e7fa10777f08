"""The arguments of `tracking_config` reach the threads and processes that are started in its block."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
from support import jobs
from support.requests import RequestRecorder

from flyteplugins_tracking import get_run, tracking_config, tracking_init


@tracking_init(tracker=RequestRecorder())
def train():
    return get_run().request.config


def test_a_block_reaches_threads_and_processes_that_are_started_in_it(bare_environment):
    found = []
    code = "from flyteplugins_tracking._runs.propagation import *; print(read(CONFIG, None)['project'])"
    with tracking_config(project="block"):
        thread = threading.Thread(target=lambda: found.append(train().project))
        thread.start()
        thread.join()
        child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (found, child.stdout.strip()) == (["block"], "block")


@pytest.mark.full
def test_the_variable_reaches_all_ranks_of_a_torchrun_job(tmp_path):
    given = tracking_config(project="variable", run_mode="new", config={"lr": 1})  # its own project is "tests"
    done = jobs.run([*jobs.torchrun("--standalone", "--nproc-per-node=2"), *jobs.train()], tmp_path, given)
    assert done.returncode == 0, done.output
    assert [(run.project, run.config["lr"]) for run in done.runs] == [("tests", 1)] * 2

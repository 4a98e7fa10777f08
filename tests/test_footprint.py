"""What tracking adds to a process: nothing on a rank without a run, and one client on the rank that has it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from support import jobs
from support.wandb_server import WandbServer

PACKAGE = Path(__file__).parent.parent
VENDORS = ("wandb", "mlflow", "trackio", "pluto", "flytekit", "flyte", "torch")
# Slow to load, or for what a rank without a run does not do. See docs/performance.md.
NEVER_LOADED = (
    "asyncio",
    "dataclasses",
    "enum",
    "hashlib",
    "importlib.metadata",
    "inspect",
    "json",
    "logging",
    "multiprocessing",
    "pathlib",
    "random",
    "re",
    "signal",
    "socket",
    "sqlite3",
    "subprocess",
    "tempfile",
    "typing",
    "urllib",
    "uuid",
    *(
        f"flyteplugins_tracking.{name}"
        for name in ("opening", "ending", "identity", "claims", "_runs.sigterm", "sweeps")
    ),
)
INERT = """
import sys
sys.path.insert(0, {path!r})
import os, threading
from flyteplugins_tracking import get_run, tracking_init

def footprint():
    children = open("/proc/self/task/%d/children" % os.getpid()).read()
    return sorted(os.listdir("/proc/self/fd")), [t.name for t in threading.enumerate()], children

@tracking_init(tracker={tracker!r}, project="p", id="never", config={{"lr": 1e-3, "sizes": [1, 2]}})
def train():
    return get_run(), footprint()

before = footprint()
run, inside = train()
print([run is None, [before, inside, footprint()], sorted(sys.modules)])
"""
PRIMARY = """
from pathlib import Path
from flyteplugins_tracking import get_run, tracking_init
import sys, time

@tracking_init(project="p", id="one")
def train():
    get_run().log({"x": 1})
    Path("ready").touch()
    sys.stdin.read()

train()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="it looks into /proc")
@pytest.mark.parametrize("tracker", ["wandb", "pluto", "mlflow", "trackio"])
def test_a_rank_without_a_run_starts_and_opens_nothing(tmp_path, tracker):
    place = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "0"}
    # Isolated and without `site`, which may load anything.
    command = [sys.executable, "-I", "-S", "-c", INERT.format(path=str(PACKAGE), tracker=tracker)]
    done = subprocess.run(command, env=place, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60)
    found: list[Any] = ast.literal_eval(done.stdout)
    is_inert, (before, inside, after), modules = found
    assert is_inert
    assert before == inside == after
    assert (after[1:], list(tmp_path.iterdir())) == ((["MainThread"], ""), [])
    assert {*modules} & {*VENDORS, *NEVER_LOADED} == set()


def test_the_rank_that_has_the_run_has_one_client_with_one_connection(tmp_path):
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "0"}
    with WandbServer() as server:
        process = subprocess.Popen(
            [sys.executable, "-c", PRIMARY],
            cwd=tmp_path,
            env=jobs.environment(tmp_path, **server.environment, **place),
            stdin=subprocess.PIPE,
        )
        try:
            run = server.wait_for(lambda: (tmp_path / "ready").exists() and server.run("one"))
            started = [child.name() for child in psutil.Process(process.pid).children(recursive=True)]
            process.communicate(timeout=60)
        finally:
            process.kill()
        assert (process.returncode, run.connections, len(run.rows), run.exit_codes) == (0, 1, 1, [0])
        assert sum(name.startswith("wandb-core") for name in started) == 1, started
        assert len(started) <= 2, started  # it has a monitor beside it

"""What tracking adds to a process: nothing on a rank without a run, and one client on the rank that has it."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
from support import jobs
from support.wandb_server import WandbServer

PACKAGE = Path(__file__).parents[2]
# Where the vendors are: the interpreter below is started without `site`, which would add these folders.
INSTALLED = [sysconfig.get_path("purelib"), str(Path(sys.prefix) / "pluto")]
# For what a rank without a run does not do.
NEVER_LOADED = [
    f"flyteplugins_tracking.{name}"
    for name in (
        "_runs.run",
        "_runs.opening",
        "_runs.identity",
        "_job.identity",
        "_util.lock",
        "_runs.sigterm",
        "_sweeps.sweep",
    )
]


@pytest.mark.sampled_full(2)
@pytest.mark.sampled(1)
@pytest.mark.skipif(sys.platform != "linux", reason="it looks into /proc")
@pytest.mark.parametrize(
    ("tracker", "first"),
    [("wandb", []), ("wandb", ["torch.distributed"]), ("pluto", []), ("mlflow", []), ("trackio", [])],
)
def test_a_rank_without_a_run_starts_and_opens_nothing(tmp_path, tracker, first):
    place = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "0"}
    # Isolated and without `site`, which may load anything.
    paths = os.pathsep.join([str(PACKAGE), *INSTALLED])
    command = [sys.executable, "-I", "-S", str(jobs.PROGRAMS / "inert_rank.py"), paths, tracker, *first]
    done = subprocess.run(command, env=place, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=240)
    found: list[Any] = ast.literal_eval(done.stdout)
    is_inert, (before, inside, after), modules = found
    assert is_inert
    assert before == inside == after
    assert (after[1:], list(tmp_path.iterdir())) == ((["MainThread"], ""), [])
    assert {name.partition(".")[0] for name in modules} <= {"flyteplugins_tracking", *sys.stdlib_module_names}
    assert all(find_spec(name) for name in NEVER_LOADED)
    assert {*modules}.isdisjoint(NEVER_LOADED)


def test_the_rank_that_has_the_run_has_one_client_with_one_connection(tmp_path):
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "0"}
    with WandbServer() as server:
        process = subprocess.Popen(
            [sys.executable, str(jobs.PROGRAMS / "primary_rank.py")],
            cwd=tmp_path,
            env=jobs.environment(tmp_path, **server.environment, **place),
            stdin=subprocess.PIPE,
        )
        try:
            run = server.wait_for(lambda: (tmp_path / "ready").exists() and server.run("one"), 240)
            started = [child.name() for child in psutil.Process(process.pid).children(recursive=True)]
            process.communicate(timeout=240)
        finally:
            process.kill()
        assert (process.returncode, len(run.senders), len(run.rows), run.exit_codes) == (0, 1, 1, [0])
        assert sum(name.startswith("wandb-core") for name in started) == 1, started
        assert len(started) <= 2, started  # it has a monitor beside it

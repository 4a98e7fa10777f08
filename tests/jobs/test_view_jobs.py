"""`python -m flyteplugins_tracking view` starts the trackers' real viewers, on what real jobs have written."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import urllib.request
from contextlib import suppress

import pytest
from support import jobs
from support.terminal import Terminal
from support.waiting import wait_until

# Short: the viewer's list has room for 13 characters of it, with the node.
RUN_ID = f"v-{os.getpid()}"
VIEW = f"{shlex.quote(sys.executable)} -m flyteplugins_tracking view"


def lines_how_to_view(output: str) -> list[str]:
    """The arguments of `view` in the last lines of runs."""
    return re.findall(r": to look at run .*: python -m flyteplugins_tracking view (.*)", output)


def test_wandbs_viewer_shows_the_rows_of_all_nodes(tmp_path):
    """Two nodes with a directory each, in the one that the job is started in: the primary's last line leads to both."""
    tracking = {"project": "p", "id": RUN_ID, "run_mode": "shared"}
    command = [
        *jobs.torchrun("--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d"),
        f"--rdzv-endpoint=127.0.0.1:{jobs.free_port()}",
        *jobs.train(tracking=tracking, rows=7),
    ]
    places = [tmp_path / "a", tmp_path / "b"]
    for place in places:
        place.mkdir()  # W&B would write elsewhere without it
    nodes = [jobs.start(command, tmp_path, {"WANDB_SILENT": "false", "WANDB_DIR": str(place)}) for place in places]
    done = [jobs.finish(node, tmp_path) for node in nodes]
    assert [node.returncode for node in done] == [0, 0], done
    (arguments,) = lines_how_to_view("\n".join(node.output for node in done))
    assert arguments == f"--tracker wandb --run {RUN_ID}"
    with Terminal(f"{VIEW} {arguments}", tmp_path) as viewer:
        names = [f"{RUN_ID}-{place.name}" for place in places]
        viewer.wait_for(re.escape("[2 items]"), *names, f"ID: {RUN_ID}", "row", "attempt")


@pytest.mark.full
def test_the_viewers_of_trackio_and_mlflow_serve_the_run(tmp_path):
    """Stacked decorators: each prints its line, and what it says opens that tracker's run of the id that both have."""
    for package in ("trackio", "mlflow", "sqlalchemy"):
        pytest.importorskip(package, reason=f"{package} is not installed: pip install -e '.[dev]'")
    env = {"TRACKIO_DIR": str(tmp_path / "kept"), "MLFLOW_TRACKING_URI": "sqlite:///mlflow.db"}
    done = jobs.run([sys.executable, jobs.PROGRAMS / "viewed_runs.py"], tmp_path, env)
    assert done.returncode == 0, done.output
    mlflow, trackio = sorted(lines_how_to_view(done.output))
    assert (mlflow, trackio) == ("--tracker mlflow --run viewed", "--tracker trackio --run viewed")
    port = jobs.free_port()
    with Terminal(f"env GRADIO_SERVER_PORT={port} BROWSER=true {VIEW} {trackio}", tmp_path) as viewer:
        viewer.wait_for(rf"http://[\w.]+:{port}", timeout_s=60 * jobs.TIME_SCALE)
        assert "api_version" in get(f"http://127.0.0.1:{port}/version")
    port = jobs.free_port()
    with Terminal(f"env MLFLOW_PORT={port} {VIEW} {mlflow}", tmp_path) as viewer:
        viewer.wait_for(rf"http://[\w.]+:{port}", timeout_s=60 * jobs.TIME_SCALE)
        viewer.wait_for("startup complete", timeout_s=60 * jobs.TIME_SCALE)
        address = f"http://127.0.0.1:{port}/api/2.0/mlflow/experiments/get-by-name?experiment_name=p"
        assert json.loads(get(address))["experiment"]["name"] == "p"


def get(address: str) -> str:
    """What a server answers that may not listen yet: a viewer prints its address before."""

    def answer() -> str:
        with suppress(OSError), urllib.request.urlopen(address, timeout=30) as response:
            text: str = response.read().decode()
            return text
        return ""

    return wait_until(answer, timeout_s=60 * jobs.TIME_SCALE)

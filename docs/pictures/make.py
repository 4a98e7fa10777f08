"""Makes the pictures of the docs from real jobs: `make pictures`, or `python docs/pictures/make.py leet doctor`.

It needs Chromium. Each picture is a function of this file, which writes `NAME.svg`, or PNG files for the light and the
dark page, and for a phone.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import browser
import terminal
from support import flyte1_pods, jobs
from support.wandb_server import WandbServer

FOLDER = Path(__file__).parent
# Terminals for a page of 1280 pixels, which has 688 for a picture, and for a phone, in columns and rows.
SIZES = {"": (98, 27), "-phone": (50, 28)}
# Windows for the same.
WINDOWS = {"": (760, 500), "-phone": (390, 500)}
# The endings of the names of their files.
BOTH_SCHEMES: Mapping[browser.Scheme, str] = {"light": "-light", "dark": "-dark"}
# As srun and a usual sbatch script set them, for rank 0 of 2 nodes with 4 ranks each.
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_NNODES": "2",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "MASTER_ADDR": "node-0",
    "MASTER_PORT": "29500",
}


def main(names: list[str]) -> None:
    """Make these pictures, or all of them."""
    for name in names or PICTURES:
        with tempfile.TemporaryDirectory(prefix=f"{name}-") as directory:
            PICTURES[name](Path(directory))
        sizes = ", ".join(f"{path.name} {path.stat().st_size // 1024} KB" for path in sorted(FOLDER.glob(f"{name}*g")))
        print(sizes, flush=True)


def leet(directory: Path) -> None:
    """W&B's viewer on a shared run of two nodes, each with two ranks."""
    rendezvous = f"127.0.0.1:{jobs.free_port()}"
    command = [
        *jobs.torchrun("--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d", f"--rdzv-endpoint={rendezvous}"),
        str(FOLDER / "job.py"),
        "wandb",
    ]
    places = [directory / f"node-{node}" for node in range(2)]
    for place in places:
        place.mkdir()  # W&B would write elsewhere without it
    nodes = [jobs.start(command, directory, {"WANDB_DIR": str(place)}, cold=True) for place in places]
    for node in nodes:
        done = jobs.finish(node, directory)
        assert done.returncode == 0, done.output
    view, env = [sys.executable, "-m", "flyteplugins_tracking", "view", "--run", "llm-7b"], jobs.environment(directory)
    for suffix, size in SIZES.items():
        keys = "" if suffix else "s "  # the second node's rows too, where its name is shown

        def record(theme: terminal.Theme, size: tuple[int, int] = size, keys: str = keys) -> Any:
            return terminal.record(view, directory, env, size, theme, lambda text: "accuracy" in text, keys)

        _draw(f"leet{suffix}", "wandb leet on a shared run of two nodes", record)


def doctor(directory: Path) -> None:
    """The doctor, as rank 0 of a job of Slurm whose environment has no key. A phone shows the diagnostics."""
    line = "srun python -m flyteplugins_tracking"
    command = ["sh", "-c", f"echo '$ {line}'; exec {sys.executable} -m flyteplugins_tracking --tracker wandb --offline"]
    env = jobs.environment(directory, **SLURM, WANDB_MODE="online")
    for suffix, columns in (("", 104), ("-phone", SIZES["-phone"][0])):  # the table of runs has that many

        def record(theme: terminal.Theme, columns: int = columns) -> Any:
            return terminal.record(command, directory, env, (columns, 80), theme, lambda text: "->" in text)

        _draw(f"doctor{suffix}", f"The output of {line}", record, "Diagnostics" if suffix else "$")


def trackio(directory: Path) -> None:
    """Trackio's dashboard on two runs."""
    env = {"TRACKIO_DIR": str(directory / "trackio")}
    done = jobs.finish(jobs.start([sys.executable, FOLDER / "job.py", "trackio"], directory, env, cold=True), directory)
    assert done.returncode == 0, done.output
    command = [sys.executable, "-m", "flyteplugins_tracking", "view", "trackio"]
    with _served([*command, "--tracker", "trackio"], directory, r"http://[\w.:]+/\S*") as address:
        _photograph("trackio", address, lambda page: page.get_by_text("accuracy").first.wait_for())


def flyte(directory: Path) -> None:
    """The tab "Tracking" in the deck of a Flyte task with four ranks."""
    with WandbServer() as server:
        env = {**server.environment, "PYTHONPATH": jobs.search_path(FOLDER)}
        done = flyte1_pods.run("train_in_flyte", directory, module="flyte_job", **env)
        assert done.returncode == 0, done.output
    deck = directory / "out" / "deck.html"

    def tab(page: Any) -> Any:
        page.get_by_text("Tracking", exact=True).first.click()
        page.get_by_text("llm-7b-rank-3").wait_for()
        return page.locator("body")

    _photograph("flyte", deck.as_uri(), tab, {"light": ""})  # Flyte's page has no dark colours


def _draw(name: str, title: str, record: Callable[[terminal.Theme], Any], begin: str = "") -> None:
    screens = {theme.name: (record(theme), theme) for theme in (terminal.LIGHT, terminal.DARK)}
    (FOLDER / f"{name}.svg").write_text(terminal.svg(title, screens, begin))


def _photograph(
    name: str, address: str, prepare: Callable[[Any], Any], schemes: Mapping[browser.Scheme, str] = BOTH_SCHEMES
) -> None:
    for suffix, size in WINDOWS.items():
        for scheme, ending in schemes.items():
            browser.picture(address, FOLDER / f"{name}{suffix}{ending}.png", size, scheme, prepare)


@contextmanager
def _served(command: list[str], directory: Path, address: str) -> Iterator[str]:
    """The first address that a server prints, while it runs."""
    log = directory / "server.log"
    env = jobs.environment(directory, BROWSER="true", WANDB_MODE="offline")
    with log.open("w") as output:
        server = subprocess.Popen(command, cwd=directory, env=env, stdout=output, stderr=output, start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        while (found := re.search(address, log.read_text())) is None:
            if time.monotonic() > deadline:
                raise SystemExit(f"the server has not printed its address, but:\n{log.read_text()}")
            time.sleep(0.2)
        yield found[0]
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


PICTURES: dict[str, Callable[[Path], None]] = {"leet": leet, "doctor": doctor, "trackio": trackio, "flyte": flyte}

if __name__ == "__main__":
    main(sys.argv[1:])

"""Makes the pictures of the docs from real jobs: `make pictures`, or `python docs/pictures/make.py doctor`.

Each picture is a function of this file, which writes `NAME.svg`, and `NAME-phone.svg` for a phone; or `NAME.png`, of a
page in a browser, which needs `apt-get install chromium`.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import terminal
from support import jobs
from support.waiting import wait_until

FOLDER = Path(__file__).parent
# Terminals for a page of 1280 pixels, which has 688 for a picture, and for a phone, in columns and rows.
SIZES = {"": (98, 27), "-phone": (50, 28)}
# As srun and a usual sbatch script set them, for rank 0 of 2 nodes with 4 ranks each.
SLURM = {
    "SLURM_CLUSTER_NAME": "gpu",
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
# Each line is shown and run. The job's second start finds the file of the first one's run.
KILL_AND_RESTART = r"""
show() { echo "$ $1"; eval "$1"; }
show "grep run_file train.py"
show "torchrun --nproc-per-node=2 train.py 2>job.log &"
until [ "$(cat checkpoint 2>/dev/null || echo 0)" -ge 101 ]; do sleep 0.02; done
show 'kill -9 $(cat pid)'
wait
show "torchrun --nproc-per-node=2 train.py 2>>job.log"
show 'trackio query project --project llm --sql \
  "SELECT run_name, count(DISTINCT step) AS steps
   FROM metrics GROUP BY run_name"'
"""


def main(names: list[str]) -> None:
    """Make these pictures, or all of them."""
    for name in names or PICTURES:
        with tempfile.TemporaryDirectory(prefix=f"{name}-") as directory:
            PICTURES[name](Path(directory))
        sizes = ", ".join(f"{path.name} {path.stat().st_size // 1024} KB" for path in sorted(FOLDER.glob(f"{name}*g")))
        print(sizes, flush=True)


def doctor(directory: Path) -> None:
    """The doctor, as rank 0 of a job of Slurm whose environment has no key. A phone shows the diagnostics."""
    line = "srun python -m flyteplugins_tracking"
    command = ["sh", "-c", f"echo '$ {line}'; exec {sys.executable} -m flyteplugins_tracking --tracker wandb --offline"]
    env = jobs.environment(directory, **SLURM, WANDB_MODE="online")
    for suffix, columns in (("", 104), ("-phone", SIZES["-phone"][0])):  # the table of runs has that many

        def record(theme: terminal.Theme, columns: int = columns) -> Any:
            return terminal.record(command, directory, env, (columns, 80), theme, lambda text: "->" in text)

        _draw(f"doctor{suffix}", f"The output of {line}", record, "Diagnostics" if suffix else "$")


def failed(directory: Path) -> None:
    """What the log of a torchrun job says of the rank that has failed."""
    env = {**jobs.environment(directory), "PYTHONPATH": jobs.search_path(FOLDER)}
    (directory / "train.py").write_text((FOLDER / "failing_job.py").read_text())
    done = jobs.run([*jobs.torchrun("--standalone", "--nproc-per-node=4"), "train.py"], directory, env)
    (directory / "job.log").write_text(done.output)
    shown = "$ torchrun --standalone --nproc-per-node=4 train.py > job.log 2>&1"
    line = "grep -A 6 'the run has failed' job.log"
    command = ["sh", "-c", f"echo '{shown}'; echo \"$ {line}\"; {line} | sed 's|{directory}/||g'"]

    for suffix, columns in (("", 100), ("-phone", SIZES["-phone"][0])):

        def record(theme: terminal.Theme, columns: int = columns) -> Any:
            return terminal.record(command, directory, env, (columns, 30), theme, lambda text: "raise Value" in text)

        _draw(f"failed{suffix}", "A job of four ranks fails, and its log names the rank", record, "$")


def restart(directory: Path) -> None:
    """The curves of a run whose rank 0 was killed and restarted, on Trackio's page in a browser."""
    port = str(jobs.free_port())
    env = {"TRACKIO_DIR": str(directory / "trackio"), "GRADIO_SERVER_PORT": port, "KILL_AT": "100"}
    done = jobs.run(
        [*jobs.torchrun("--standalone", "--nproc-per-node=2", "--max-restarts=1"), FOLDER / "killed_job.py"],
        directory,
        env,
    )
    assert done.returncode == 0, done.output
    page = jobs.start([Path(sys.executable).with_name("trackio"), "show", "--project", "llm"], directory, env)
    try:
        wait_until(lambda: _answers(int(port)), page)
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-background-networking",
            "--hide-scrollbars",
        ]
        options += [f"--user-data-dir={directory / 'chromium'}", "--window-size=1400,500", "--virtual-time-budget=8000"]
        url = f"http://127.0.0.1:{port}/?project=llm"
        command = ["chromium", *options, f"--screenshot={FOLDER / 'restart.png'}", url]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
    finally:
        jobs.kill(page)


def recording(directory: Path) -> None:
    """Rank 0 is killed, and a second job continues its run."""
    (directory / "train.py").write_text((FOLDER / "killed_job.py").read_text())
    env = jobs.environment(directory, TRACKIO_DIR=str(directory / "trackio"))
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    command = ["bash", "-c", KILL_AND_RESTART]
    screen = terminal.record(command, directory, env, (54, 30), terminal.LIGHT, lambda text: "| 240" in text)
    _draw("recording", "Rank 0 is killed, and the next job continues its run", lambda _: screen, prompt="$ ")


def _answers(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def _draw(name: str, title: str, record: Callable[[terminal.Theme], Any], begin: str = "", prompt: str = "") -> None:
    screens = {theme.name: (record(theme), theme) for theme in (terminal.LIGHT, terminal.DARK)}
    (FOLDER / f"{name}.svg").write_text(terminal.svg(title, screens, begin, prompt))


PICTURES: dict[str, Callable[[Path], None]] = {
    "doctor": doctor,
    "failed": failed,
    "restart": restart,
    "recording": recording,
}

if __name__ == "__main__":
    main(sys.argv[1:])

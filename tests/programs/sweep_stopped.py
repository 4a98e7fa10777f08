"""As W&B's agent: stops a trial, and is terminated together with the next one."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from flyteplugins_tracking import get_run, tracking_init


def start(run_id: str) -> subprocess.Popen[bytes]:
    """Start a trial, and return when it has logged."""
    env = {"WANDB_SWEEP_ID": "s", "WANDB_SWEEP_PARAM_PATH": "parameters", "WANDB_RUN_ID": run_id}
    trial = subprocess.Popen([sys.executable, __file__, "trial"], env={**os.environ, **env})
    while trial.poll() is None and not Path(run_id).exists():
        time.sleep(0.05)
    return trial


@tracking_init
def train() -> None:
    get_run().log({"x": 1})
    Path(os.environ["WANDB_RUN_ID"]).touch()
    time.sleep(300)


if sys.argv[1:] == ["trial"]:
    train()
else:
    Path("parameters").write_text("x: {value: 1}")
    stopped = start("stopped")
    stopped.terminate()
    assert stopped.wait() == 143
    start("preempted")
    os.killpg(0, signal.SIGTERM)

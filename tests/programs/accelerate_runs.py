"""Accelerate in decorated functions, by the argument.

"ended", under a launcher: it has ended its training, and with it the process group, when the function fails.
"notebook", with two free ports: a decorated function that `notebook_launcher` starts, and one that calls it.
What a process saw is written to TRAIN_DIR/seen-{function}-{rank}.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import accelerate_training
from accelerate import notebook_launcher

from flyteplugins_tracking import get_run, tracking_init


@tracking_init(id="ended", project="ended", name="ours", config={"lr": "ours", "mine": 1})
def ended() -> None:
    accelerate_training.train(steps=4)  # which joins this run
    run = get_run()
    if run is not None:
        run.log({"after": 1})
    see("ended")
    raise ValueError("made to fail")


@tracking_init(id="launched", project="launched")
def launched() -> None:
    see("launched")
    accelerate_training.train(steps=3)


@tracking_init(id="launching", project="launching")
def launching() -> None:
    get_run().log({"before": 1})
    notebook_launcher(forked, num_processes=2, use_port=sys.argv[2])
    get_run().log({"after": 1})


def forked() -> None:
    """Runs in a forked child of the process with the open run."""
    import wandb

    see("forked")
    wandb.finish()


def see(function: str) -> None:
    seen = Path(os.environ["TRAIN_DIR"], f"seen-{function}-{os.environ['RANK']}")
    seen.write_text(str(getattr(get_run(), "id", None)))


if __name__ == "__main__":
    if sys.argv[1] == "ended":
        try:
            ended()
        except ValueError as error:
            print("raised:", error, flush=True)
    else:
        notebook_launcher(launched, num_processes=2, use_port=sys.argv[3])
        launching()

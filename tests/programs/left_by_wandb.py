"""A W&B run that logs what its first argument says, and is killed, or ends as its second one says. A third: `number`.

Each row has a number that no other row of the program has: its number as an argument, times 1,000, and its place.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import wandb
from wandb.sdk.interface import interface

from flyteplugins_tracking import get_run, tracking_init

WHAT, END, NUMBER = sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 0
ROWS = 10


def rows() -> Iterator[dict[str, int]]:
    yield from ({"row": 1000 * NUMBER + place} for place in range(ROWS))


def log_rows() -> None:
    for row in rows():
        get_run().log(row)


def log_tail() -> None:
    """W&B's file gets rows each 0.1 s: it lacks the last ones."""
    run = get_run()
    run.define_metric("least", summary="min")
    for place, row in enumerate(rows()):
        if place == ROWS - 2:
            time.sleep(1)
        run.log({**row, "least": ROWS - place if place < ROWS - 1 else ROWS})


def log_axis() -> None:
    """As the callback of Hugging Face's Trainer does."""
    run = get_run()
    run.define_metric("train/global_step")
    run.define_metric("*", step_metric="train/global_step", step_sync=True)
    run.define_metric("hidden", hidden=True)
    for place, row in enumerate(rows()):
        run.log({"train/global_step": 5 * place, **row})
        run.log({"loss": 1 / (1 + place), "hidden": place})
    time.sleep(1)  # W&B's file gets rows each 0.1 s


def log_tensorboard() -> None:
    from torch.utils.tensorboard import SummaryWriter

    wandb.init(sync_tensorboard=True)
    writer = SummaryWriter("events")
    for place, row in enumerate([*rows(), {"row": -1}]):  # W&B's client keeps the last one back
        writer.add_scalar("row", row["row"], place)
    writer.flush()
    while not any(path.stat().st_size > 5_000 for path in Path("wandb").rglob("*.wandb")):
        time.sleep(0.1)
    time.sleep(0.5)


def log_simultaneous() -> None:
    """Two rows of one time each."""
    for row in rows():
        get_run().log({**row, "_timestamp": 1_700_000_000.5 + row["row"] // 2})
    time.sleep(1)


def log_forked() -> None:
    """Rows of a forked child, which W&B's client attaches to the run: they have no number in a shared run."""
    log_rows()
    if os.environ.get("RANK", "0") == "0":
        if os.fork() == 0:
            for row in rows():
                wandb.run.log({"row": row["row"] + 500})
            time.sleep(1)
            os._exit(0)
        os.wait()
    time.sleep(1)


def log_summary() -> None:
    summary = get_run().summary
    summary["accuracy"] = 0.1
    del summary["accuracy"]
    summary["accuracy"] = 0.5
    time.sleep(1)


def log_files() -> None:
    """Rows with an image and a table each, and a saved file."""
    run = get_run()
    for place, row in enumerate(rows()):
        if place < 3:
            image = wandb.Html(f"<p>{row}</p>", inject=False)
            run.log({**row, "page": image})
        else:
            run.log(row)
    Path("saved.txt").write_text("saved")
    run.save("saved.txt", policy="now")


def log_saved() -> None:
    log_rows()
    Path(f"saved-{NUMBER}.txt").write_text("saved")
    get_run().save(f"saved-{NUMBER}.txt", policy="now")


def log_resaved() -> None:
    """A file that each attempt saves under one name. It lies in the run's directory: each attempt has its own."""
    run = get_run()
    log_rows()
    path = Path(run.dir, "checkpoint.txt")
    path.write_text(f"of attempt {NUMBER}")
    run.save(str(path), base_path=run.dir, policy="now")
    time.sleep(1)


def log_named() -> None:
    log_rows()
    if os.environ.get("RANK", "0") == "0":
        get_run().name = "renamed"
        get_run().config["late"] = 1
        get_run().alert("title", f"of attempt {NUMBER}")
    time.sleep(1)


def log_dead() -> None:
    """wandb-core is killed behind the rows."""
    kill_core_behind_rows()
    get_run().log({"row": 1000 * NUMBER + ROWS})


def kill_core_behind_rows() -> None:
    log_rows()
    for child in psutil.Process().children():
        if "wandb-core" in child.name():
            child.kill()
            with suppress(psutil.NoSuchProcess):  # not `wait`: W&B's client asks for its status
                while child.status() != psutil.STATUS_ZOMBIE:
                    time.sleep(0.01)


def log_artifact_when_dead() -> None:
    kill_core_behind_rows()
    log_weights()
    get_run().log({"row": ROWS})


def log_image_when_dead() -> None:
    get_run().define_metric("least", summary="min")
    for value in (5, 1, 4):
        get_run().log({"least": value})
    time.sleep(0.5)  # W&B's file gets rows each 0.1 s
    kill_core_behind_rows()
    get_run().log({"row": ROWS, "image": wandb.Image(np.zeros((4, 4, 3), np.uint8))})


def log_set_when_dead() -> None:
    """What a function sets, and a file that it saves, when wandb-core has been killed."""
    log_dead()
    run = get_run()
    run.summary["best"] = 5
    run.config["late"] = 1
    run.name, run.tags = "renamed", ("tagged",)
    run.alert("title", "text")
    Path("saved.txt").write_text("saved")
    run.save("saved.txt", policy="now")
    run.log({"row": 1000 * NUMBER + ROWS + 1})


def log_listed() -> None:
    """An artifact with many files, which a file lists."""
    interface.MANIFEST_FILE_SIZE_THRESHOLD = 2
    log_rows()
    artifact = wandb.Artifact("weights", "model")
    for place in range(3):
        Path(f"weights-{place}.txt").write_text(f"weights {place}")
        artifact.add_file(f"weights-{place}.txt")
    get_run().log_artifact(artifact)
    time.sleep(1)


def log_weights(policy: str = "mutable") -> None:
    Path("weights.txt").write_text("weights" * 1000)
    artifact = wandb.Artifact("weights", "model")
    artifact.add_file("weights.txt", policy=policy)
    get_run().log_artifact(artifact)


def log_artifact() -> None:
    log_rows()
    log_weights()


def log_immutable() -> None:
    """An artifact of which W&B's client makes no copy."""
    log_rows()
    log_weights("immutable")
    time.sleep(1)


@tracking_init(project="p", id=os.environ.get("RUN", "run"), run_mode=os.environ.get("RUN_MODE", "auto"))
def train() -> None:
    run = get_run()
    if run is not None:
        globals()[f"log_{WHAT}"]() if WHAT != "nothing" else None
        Path(f"logged-{NUMBER}-{os.environ.get('RANK', '0')}").touch()
    while END == "kill" or (END == "wait" and not Path("go").exists()):
        time.sleep(0.05)
    if END == "raise":
        raise ValueError("made to fail")
    if END == "term":
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)


train()

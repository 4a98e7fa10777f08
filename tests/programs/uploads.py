"""A function that logs three rows and files, and ends; with W&B's client alone if `bare`. Argument: JSON.

- files: which of `FILES` it logs.
- ends: "return", "raise", or "later": "raise" as soon as there is a file `end`.
- place: "main", or "thread" (of a main thread that runs an asyncio loop).
- bare: whether W&B's client is used without the library.
- The rest are arguments of `tracking_init`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import wandb

from flyteplugins_tracking import tracking_init

CONTENT = "weights " * 25_000  # 200 kB


def artifact(run: Any) -> None:
    model = wandb.Artifact("weights", "dataset", description="of the test", metadata={"a": 1})
    model.add_file(_file("weights.txt"))
    run.log_artifact(model, aliases=["best"])


def model(run: Any) -> None:
    run.log_model(_file("model.txt"), "network")


def save(run: Any) -> None:
    run.save(_file("saved.txt"), policy="now")


def media(run: Any) -> None:
    run.log({"page": wandb.Html("<p>hello</p>", inject=False)})


def table(run: Any) -> None:
    run.log({"table": wandb.Table(columns=["c"], data=[[1], [2]])})


FILES = {one.__name__: one for one in (artifact, model, save, media, table)}


def _file(name: str) -> str:
    Path(name).write_text(CONTENT)
    return name


def train(run: Any, files: list[str], ends: str) -> None:
    for x in range(3):
        run.log({"x": x})
    for name in files:
        FILES[name](run)
    print("logged", flush=True)
    while ends == "later" and not Path("end").exists():
        time.sleep(0.05)
    if ends in ("raise", "later"):
        raise ValueError("made to fail")


def main(files: list[str], ends: str = "return", place: str = "main", bare: bool = False, **arguments: Any) -> None:
    tracked = tracking_init(project="p", id="r", **arguments)
    if os.environ.get("RANK", "0") != "0":  # of a shared run, one rank uploads
        files = files or ["artifact"]
    if bare:
        train(wandb.init(project="p", id="r"), files, ends)
    elif place == "thread":
        asyncio.run(in_thread(tracked(lambda: train(wandb.run, files, ends))))
    else:
        tracked(lambda: train(wandb.run, files, ends))()
    print("returned", flush=True)


async def in_thread(function: Callable[[], object]) -> None:
    await asyncio.get_running_loop().run_in_executor(None, function)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))

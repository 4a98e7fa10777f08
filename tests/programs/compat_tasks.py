"""Flyte 2 programs as they are written for flyteplugins-wandb; only the module of the import is another."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import flyte

from flyteplugins_tracking.compat.wandb import (
    download_wandb_run_dir,
    download_wandb_run_logs,
    download_wandb_sweep_dirs,
    get_wandb_context,
    get_wandb_run,
    get_wandb_run_dir,
    wandb_config,
    wandb_init,
)

DIRECTORY = Path(os.environ.get("TRAIN_DIR", "."))
env = flyte.TaskEnvironment(name="compat")


def seen(tag: str, **more: Any) -> None:
    Path(DIRECTORY, f"{tag}-{os.environ.get('RANK', 0)}.json").write_text(json.dumps(more))


def told() -> list[Any]:
    run, context = get_wandb_run(), get_wandb_context()
    assert get_wandb_run_dir() == run.dir
    return [run.id, run.project, list(run.tags or ()), context and [context.project, context.tags, context.run_mode]]


@wandb_init
@env.task
async def child(n: int) -> str:
    get_wandb_run().log({"child": n})
    return json.dumps(told())


@wandb_init(run_mode="new", tags=["decorated"])
@env.task
async def independent(n: int) -> str:
    return json.dumps(told())


@wandb_init
@env.task
async def parent(n: int) -> str:
    get_wandb_run().log({"parent": n})
    joined = json.loads(await child(n))
    with wandb_config(project="override-project", tags=["overridden"]):
        own = json.loads(await independent(n))
    return json.dumps([told(), joined, own])


@wandb_init(download_logs=True)
@env.task
def logged(n: int) -> int:
    get_wandb_run().log({"n": n})
    return n


@wandb_init(project="p", entity="e", id="d")
@env.task
async def trained(n: int) -> str:
    get_wandb_run().log({"n": n})
    return get_wandb_run().id


@env.task
async def downloads(n: int) -> str:
    """Returns what another task has logged, as the output of a trace."""
    run_id = await trained(n)
    with wandb_config(project="p", entity="e"):
        directory = await download_wandb_run_logs(run_id)
    return directory.path


def download_everything() -> None:
    """Outside of Flyte: the errors, the run that is open, and one that is over."""
    errors = {}
    for name, download, given in (
        ("none", download_wandb_run_dir, None),
        ("unknown run", download_wandb_run_dir, "nobody"),
        ("no sweep", download_wandb_sweep_dirs, None),
        ("unknown sweep", download_wandb_sweep_dirs, "nobody"),
    ):
        try:
            with wandb_config(project="p", entity="e"):
                download(given)
        except RuntimeError as error:
            errors[name] = [str(error), type(error.__cause__).__name__]

    @wandb_init(project="p", entity="e", id="r", config={"a": 1})
    def train() -> str:
        run = get_wandb_run()
        for x in range(600):
            run.log({"x": x, "nested": {"y": x}})
        return download_wandb_run_dir(path="while-open", include_history=False)

    errors["open"] = sorted(os.listdir(train()))
    with wandb_config(project="p", entity="e"):
        path = download_wandb_run_dir("r", path="after")
        directory = asyncio.run(download_wandb_run_logs("r"))
    seen("downloads", path=path, directory=sorted(os.listdir(directory.path)), **errors)


if __name__ == "__main__":
    download_everything()

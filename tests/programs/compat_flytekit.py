"""Flyte 1 programs as they are written for flytekitplugins-wandb; only the module of the import is another."""

import json
import os
import sys
from pathlib import Path
from typing import Any

from flytekit import Secret, task, workflow
from flytekit.types.directory import FlyteDirectory

from flyteplugins_tracking.compat.wandb import get_wandb_run, wandb_init

DIRECTORY = Path(os.environ.get("TRAIN_DIR", "."))
KEY = Secret(group="wandb", key="api_key")
WHERE = {"project": "tests", "entity": "team"}


def only_on_the_cluster() -> str:
    Path(DIRECTORY, "secret-was-read").touch()
    raise RuntimeError("there is no vault here")


def training(tag: str) -> str:
    run = get_wandb_run()
    seen: dict[str, Any] = {"tag": tag, "id": run and run.id, "dir": run and run.dir}
    if run is not None:
        run.log({"row": 1})
    Path(DIRECTORY, f"{tag}-{os.environ.get('RANK', 0)}.json").write_text(json.dumps(seen))
    return run.id if run else ""


@task(secret_requests=[KEY])
@wandb_init(secret=KEY, tags=["below"], **WHERE)
def below(n: int) -> str:
    return training("below")


@wandb_init(secret=only_on_the_cluster, id="chosen", host="https://wandb.example.com", **WHERE)
@task
def above(n: int) -> str:
    return training("above")


@task
@wandb_init(secret=KEY, dir="directory", **WHERE)
def in_a_directory(directory: FlyteDirectory, n: int) -> str:
    return training("in_a_directory")


@task
@wandb_init(secret=KEY, dir="directory", **WHERE)
async def async_in_a_directory(directory: FlyteDirectory) -> str:
    return training("async_in_a_directory")


@workflow
def pipeline(directory: FlyteDirectory) -> str:
    below(n=1)
    above(n=1)
    return in_a_directory(directory=directory, n=1)


@wandb_init(dir="directory", **WHERE)
def lazily(directory: FlyteDirectory) -> None:
    training("lazily")


def download_where_there_is_a_run() -> None:
    """Rank 0 of two downloads the directory, rank 1 does not."""
    for rank in ("0", "1"):
        os.environ.update(RANK=rank, WORLD_SIZE="2", LOCAL_RANK=rank, LOCAL_WORLD_SIZE="2", GROUP_RANK="0")
        os.environ.update(WANDB_RUN_ID="lazy")
        path = Path(DIRECTORY, f"downloaded-{rank}")
        lazily(FlyteDirectory(str(path), downloader=path.mkdir))


def to_another_server() -> None:
    @wandb_init(secret=lambda: os.environ["THE_KEY"], api_host=os.environ["THE_SERVER"], id="there", **WHERE)
    def train() -> None:
        training("there")

    train()


def main() -> None:
    import asyncio

    for name in ("given", "async"):
        Path(DIRECTORY, name).mkdir()
    pipeline(directory=FlyteDirectory(str(DIRECTORY / "given")))
    asyncio.run(async_in_a_directory(directory=FlyteDirectory(str(DIRECTORY / "async"))))
    download_where_there_is_a_run()


if __name__ == "__main__":
    {"all": main, "server": to_another_server}[sys.argv[1]]()

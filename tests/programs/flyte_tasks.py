"""Flyte 1 tasks of every kind that the decorator meets, of one process. Each logs its rows and returns its run's id.

Those with workers are in `flyte_workers.py`: torch, which they need, takes a pod two seconds to import.
"""

import asyncio
import json
import os
import time
from collections import OrderedDict
from datetime import timedelta
from pathlib import Path
from typing import Any

from flytekit import Secret, dynamic, map_task, task, workflow
from flytekit.core.base_task import IgnoreOutputs
from flytekit.core.utils import ClassDecorator
from flytekitplugins.kfpytorch import PyTorch, Worker

from flyteplugins_tracking import get_distributed_info, get_run, should_stop, tracking_init

DIRECTORY = Path(os.environ.get("TRAIN_DIR", "."))


def training(tag: str) -> str:
    run, info = get_run(), get_distributed_info()
    if run is not None:
        for row in range(3):
            run.log({"row": row})
    seen = {"tag": tag, "rank": info.rank if info else None, "run_id": run.id if run else None, "pid": os.getpid()}
    Path(DIRECTORY, f"{tag}-{os.getpid()}-{len(list(DIRECTORY.iterdir()))}.json").write_text(json.dumps(seen))
    return run.id if run is not None else ""


class InnerLinks(ClassDecorator):
    """Another class decorator, as flytekit's own are."""

    def execute(self, *args: Any, **kwargs: Any) -> Any:
        return self.task_function(*args, **kwargs)

    def get_extra_config(self) -> dict[str, str]:
        return {self.LINK_TYPE_KEY: "inner", "port": "1234"}


@tracking_init(project="tests", entity="team", stop_before_s=3599)
@task(timeout=timedelta(hours=1))
def limited(n: int) -> str:
    """Stops a second after the pod's start."""
    while not should_stop():
        time.sleep(0.05)
    return training("limited")


@task
@tracking_init(project="tests", entity="team")
def below(n: int) -> str:
    """What this task is for."""
    return training("below")


@tracking_init(project="tests", entity="team")
@task
def above(n: int) -> str:
    return training("above")


@task
@tracking_init(project="tests", entity="team", id="chosen")
@InnerLinks
def inner_links(n: int) -> str:
    return training("inner_links")


@task
@tracking_init(project="tests", entity="team")
async def async_below(n: int) -> str:
    await asyncio.sleep(0)
    return training("async_below")


@tracking_init(project="tests")
@task
async def async_above(n: int) -> str:
    await asyncio.sleep(0)
    return training("async_above")


@tracking_init(project="tests")
@task(cache=True, cache_version="1")
def cached(n: int) -> str:
    return training("cached")


@tracking_init(project="tests")
@dynamic
def dynamically(n: int) -> str:
    training("dynamic")
    return plain(n=n)


@task
def plain(n: int) -> str:
    return str(n)


@task(task_config=PyTorch(worker=Worker(replicas=1), increase_shared_mem=False))
@tracking_init(project="tests", run_mode="new", rank_scope="worker")
def pytorch_job(n: int) -> str:
    return training("pytorch_job")


@tracking_init(project="tests")
@task
def ignored(n: int) -> str:
    if training("ignored"):
        raise IgnoreOutputs
    return ""


@tracking_init(project="tests", secret=Secret(group="wandb", key="api_key"))
@task(secret_requests=[Secret(group="wandb", key="api_key")])
def with_secret(n: int) -> str:
    return training("with_secret")


@tracking_init(download_logs=True)
@task
def files_kept(n: int) -> str:
    return training("files_kept")


@workflow
def all_in_process(n: int) -> str:
    below(n=n)
    above(n=n)
    inner_links(n=n)
    cached(n=n)
    cached(n=n)
    pytorch_job(n=n)
    ignored_elements = map_task(above)(n=[1, 2])
    map_task(below)(n=[1, 2])
    dynamically(n=n)
    return ignored_elements[0]


def serialized(entity: Any) -> dict[str, str]:
    """The task template's config, as registration would send it."""
    from flytekit.configuration import Image, ImageConfig, SerializationSettings
    from flytekit.tools.translator import get_serializable

    image = ImageConfig(default_image=Image("name", "registry/image", "tag"))
    settings = SerializationSettings(project="p", domain="d", version="v", image_config=image)
    spec = get_serializable(OrderedDict(), settings, entity)
    return dict(spec.template.config)


if __name__ == "__main__":
    all_in_process(n=1)
    asyncio.run(async_below(n=1))
    asyncio.run(async_above(n=1))

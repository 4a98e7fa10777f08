"""Calls tracked Flyte 2 tasks as functions. Prints for each whether its run is also the current one of W&B."""

import asyncio

import flyte2_tracked
import flyte2_workers
import wandb

from flyteplugins_tracking import get_run


def training(tag: str) -> str:
    print(tag, wandb.run is get_run() is not None)
    get_run().log({tag: 1})
    return get_run().id


flyte2_tracked.training = flyte2_workers.training = training
flyte2_tracked.plain(n=1)
flyte2_workers.workers(n=1)
asyncio.run(flyte2_tracked.coroutine(n=1))

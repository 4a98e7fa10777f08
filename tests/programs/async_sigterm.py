"""Sends SIGTERM to itself in a coroutine that goes on in a run when the function that opened the run has returned."""

import asyncio
import os
import signal

from flyteplugins_tracking import get_run, tracking_init

joined, outer_is_over = asyncio.Event(), asyncio.Event()


@tracking_init
async def inner() -> None:
    joined.set()
    await outer_is_over.wait()
    get_run().log({"x": 1})
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(120)


@tracking_init(id="outer")
async def outer() -> "asyncio.Future[None]":
    get_run().log({"x": 0})
    started = asyncio.ensure_future(inner())
    await joined.wait()
    return started


async def main() -> None:
    started = await outer()
    outer_is_over.set()
    await started


asyncio.run(main())

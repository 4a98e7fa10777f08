"""Coroutines that go on when the tracked function around them has failed: one has joined its run, one starts later.

Logs 0 in the function, 1 in the coroutine that joined, 2 in the later one. Prints the current run of W&B at the end.
"""

import asyncio
from contextlib import suppress

import wandb

from flyteplugins_tracking import get_run, tracking_init

joined, outer_is_over = asyncio.Event(), asyncio.Event()


@tracking_init
async def inner(x: int) -> None:
    joined.set()
    await outer_is_over.wait()
    get_run().log({"x": x})


async def later(first: asyncio.Future[None]) -> None:
    await first
    await inner(2)


@tracking_init(id="outer", config={"clip": float("inf")})
async def outer(started: list[asyncio.Future[None]]) -> None:
    get_run().log({"x": 0})
    first = asyncio.ensure_future(inner(1))
    started += [first, asyncio.ensure_future(later(first))]
    await joined.wait()
    raise ValueError


async def main() -> None:
    started: list[asyncio.Future[None]] = []
    with suppress(ValueError):
        await outer(started)
    outer_is_over.set()
    await asyncio.gather(*started)
    print("GLOBAL", wandb.run)


asyncio.run(main())

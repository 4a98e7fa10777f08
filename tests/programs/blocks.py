"""A script without a function, whose training is in a `with tracking_run(...)`: its last argument is a JSON object.

Keys: `how`: "with", a way in which `WAYS` enters the block, or "each": one way after the other. `end`: {rank: "raise",
"exit" or "hang"}.
"""

import asyncio
import contextlib
import json
import os
import sys
import threading
import time
from pathlib import Path

from flyteplugins_tracking import get_distributed_info, get_run, tracking_init, tracking_run

SETTINGS = json.loads(sys.argv[-1])
ARGUMENTS = {"project": "p"}  # and the name of the way


def body(run):
    assert run is get_run()
    info = get_distributed_info()
    rank = info.rank if info else 0
    for row in range(5):
        if run is not None:
            run.log({"row": row})
    Path(os.environ["TRAIN_DIR"], f"logged-{rank}").touch()
    how = SETTINGS.get("end", {}).get(str(rank))
    if how == "raise":
        raise ValueError("made to fail")
    if how == "exit":
        sys.exit(5)
    if how == "hang":
        time.sleep(60)


def in_async():
    async def train():
        async with tracking_run(**ARGUMENTS) as run:
            body(run)

    asyncio.run(train())


def in_threads():
    """Two blocks at the same time are two runs."""

    def train():
        with tracking_run(**ARGUMENTS) as run:
            barrier.wait()
            body(run)

    barrier = threading.Barrier(2)
    threads = [threading.Thread(target=train) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def in_a_generator():
    @contextlib.contextmanager
    def trained():
        with tracking_run(**ARGUMENTS) as run:
            yield run

    with trained() as run:
        body(run)


def around_a_function():
    @tracking_init(**ARGUMENTS)
    def train():
        body(get_run())

    with tracking_run(**ARGUMENTS) as run:
        train()
        assert get_run() is run


def in_a_function():
    @tracking_init(**ARGUMENTS)
    def train():
        with tracking_run(**ARGUMENTS) as run:
            body(run)

    train()


def one_after_the_other():
    for _ in range(2):
        with tracking_run(**ARGUMENTS) as run:
            body(run)


WAYS = (in_async, in_threads, in_a_generator, around_a_function, in_a_function, one_after_the_other)
for way in WAYS:
    if SETTINGS["how"] in ("each", way.__name__):
        ARGUMENTS["name"] = way.__name__
        way()
if SETTINGS["how"] == "with":
    with tracking_run(**ARGUMENTS) as the_run:
        body(the_run)

"""Decorated functions in threads beside an asyncio loop, for `test_loop_watch.py`.

Arguments: a function's name, and the function's own. Each writes its process id to `ready-0` when it has logged.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import sys
import threading
import time
from multiprocessing.queues import Queue
from pathlib import Path

from flyteplugins_tracking import get_run, should_stop, tracking_init

PATIENCE_S = 120
ENDLESS_S = 600  # longer than any test waits


def ready() -> None:
    Path("ready-0").write_text(str(os.getpid()))


def handled(installer: str) -> None:
    """The user's handler is installed by the "loop" or by "signal"; the function logs once more after it."""
    told = threading.Event()

    def handler(*_: object) -> None:
        print("told")
        told.set()

    @tracking_init(project="tests")
    def train() -> None:
        get_run().log({"row": 0})
        ready()
        assert told.wait(PATIENCE_S)
        get_run().log({"row": 1})

    async def main() -> None:
        loop = asyncio.get_running_loop()
        if installer == "loop":
            loop.add_signal_handler(signal.SIGTERM, handler)
        else:
            signal.signal(signal.SIGTERM, handler)
        await loop.run_in_executor(None, train)

    asyncio.run(main())


def stops() -> None:
    """The function leaves its loop by itself, and saves."""

    @tracking_init(project="tests")
    def train() -> None:
        row = 0
        while not should_stop():
            get_run().log({"row": row})
            row += 1
            ready()
            time.sleep(0.01)
        time.sleep(0.5)
        Path("saved").touch()

    async def main() -> None:
        await asyncio.get_running_loop().run_in_executor(None, train)

    asyncio.run(main())


def exits() -> None:
    """The handler unwinds the main thread, which takes a second, while a daemon thread logs on."""

    @tracking_init(project="tests")
    def train() -> None:
        while True:
            get_run().log({"row": 0})
            ready()

    async def main() -> None:
        threading.Thread(target=train, daemon=True).start()
        await asyncio.sleep(ENDLESS_S)

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
    try:
        asyncio.run(main())
    finally:
        time.sleep(1)


def two_threads(first_is: str) -> None:
    """Two functions with a run each; at the signal, the first one has "returned" or is "running"."""
    both = threading.Barrier(2)

    @tracking_init(project="tests", id="first")
    def first() -> None:
        get_run().log({"row": 0})
        both.wait(PATIENCE_S)
        if first_is == "running":
            time.sleep(ENDLESS_S)

    @tracking_init(project="tests", id="second")
    def second() -> None:
        get_run().log({"row": 0})
        both.wait(PATIENCE_S)
        if first_is == "running":
            ready()
        time.sleep(ENDLESS_S)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        futures = [loop.run_in_executor(None, function) for function in (first, second)]
        await asyncio.wait(futures, return_when="FIRST_COMPLETED")
        ready()
        await asyncio.wait(futures)

    asyncio.run(main())


def forks() -> None:
    """51 forked children are told to end; the first one tells first whether SIGTERM has its default there."""

    def tell(seen: Queue[bool]) -> None:
        seen.put(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)
        signal.pause()

    @tracking_init(project="tests", id="forks")
    def train() -> None:
        fork = multiprocessing.get_context("fork")
        assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
        seen = fork.Queue()
        process = fork.Process(target=tell, args=(seen,))
        process.start()
        assert seen.get(timeout=PATIENCE_S)
        for n in range(50):
            process.terminate()
            process.join(PATIENCE_S)
            assert process.exitcode == -signal.SIGTERM, process.exitcode
            get_run().log({"n": n})
            process = fork.Process(target=signal.pause)
            process.start()
        process.terminate()

    async def main() -> None:
        await asyncio.get_running_loop().run_in_executor(None, train)

    asyncio.run(main())


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])

"""Trainings that SIGTERM meets, for `test_signals.py`. Arguments: a function's name, and the function's own."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.queues import Queue
from pathlib import Path

from flyteplugins_tracking import get_distributed_info, get_run, should_stop, tracking_init

PATIENCE_S = 120
ENDLESS_S = 600  # longer than any test waits


def children() -> None:
    """Two children are told to end, one forked and one executed; the parent logs after that."""

    def child(seen: Queue[tuple[bool, bool]]) -> None:
        seen.put((get_run() is None, signal.getsignal(signal.SIGTERM) == signal.SIG_DFL))
        time.sleep(PATIENCE_S)

    @tracking_init(project="tests", id="parent")
    def train() -> None:
        fork = multiprocessing.get_context("fork")
        seen = fork.Queue()
        process = fork.Process(target=child, args=(seen,))
        process.start()
        print(*seen.get(timeout=PATIENCE_S))
        process.terminate()
        process.join()
        print(process.exitcode)
        other = subprocess.Popen(["sleep", str(PATIENCE_S)])
        other.terminate()
        print(other.wait())
        time.sleep(0.5)
        get_run().log({"after": 1})

    train()


def ignored() -> None:
    """The process ignores SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

    @tracking_init(project="tests")
    def train() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN

    train()


def core_first() -> None:
    """wandb-core is ended before the rank, as by DeepSpeed's launcher."""

    @tracking_init(project="tests", id="ours")
    def train() -> None:
        import wandb

        run = get_run()
        for x in range(200):
            run.log({"x": x})
        run.config.update({"a": 1, "nested": {"b": 2}})
        run.config["c"] = 3
        run.summary["best"] = 3.5
        run.summary.update({"x": -1, "late": 1})
        run.log({"late": 2})
        run.name, run.notes, run.tags = "named", "noted", ("tagged",)
        Path("checkpoint.txt").write_text("x")
        run.save("checkpoint.txt")
        core = wandb.sdk.wandb_setup.singleton().ensure_service()._proc._process
        core.terminate()
        core.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(PATIENCE_S)

    train()


def left_behind() -> None:
    """The process ends while a decorated function still runs, in a thread."""
    begun = threading.Event()

    @tracking_init(project="tests", id="ours")
    def train() -> None:
        for x in range(1_000_000):
            get_run().log({"x": x})
            begun.set()
            time.sleep(0.01)

    threading.Thread(target=train, daemon=True).start()
    assert begun.wait(PATIENCE_S)


def interrupted_async() -> None:
    """Ctrl-C in an async function."""

    @tracking_init(project="tests", id="ours")
    async def train() -> None:
        get_run().log({"x": 0})
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(PATIENCE_S)

    asyncio.run(train())


def cancelled_async() -> None:
    """A function that its caller cancels."""

    @tracking_init(project="tests", id="ours")
    async def train() -> None:
        get_run().log({"x": 0})
        await asyncio.sleep(PATIENCE_S)

    async def main() -> None:
        await asyncio.wait_for(train(), 0.5)

    asyncio.run(main())


def fork_race() -> None:
    """50 children are told to end as soon as they are forked."""

    @tracking_init(project="tests", id="parent")
    def train() -> None:
        fork = multiprocessing.get_context("fork")
        for n in range(50):
            process = fork.Process(target=signal.pause)
            process.start()
            process.terminate()
            process.join(PATIENCE_S)
            assert process.exitcode == -signal.SIGTERM, process.exitcode
            get_run().log({"n": n})

    train()


def with_a_thread() -> None:
    """A thread would go on for longer than a test waits."""

    @tracking_init(project="tests")
    def train() -> None:
        threading.Thread(target=time.sleep, args=(600,)).start()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(600)

    train()


def asyncio_handler() -> None:
    """The loop's handler is set inside the function."""

    @tracking_init(project="tests")
    async def train() -> None:
        told = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
        await asyncio.sleep(0.2)
        get_run().log({"x": 1})
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(told.wait(), PATIENCE_S)
        get_run().log({"x": 2})

    asyncio.run(train())


def many_runs() -> None:
    """33 runs; prints True if 30 of them have left no file descriptor and no thread."""

    @tracking_init(project="tests")
    def train() -> None:
        get_run().log({"x": 1})

    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    for _ in range(3):
        train()
    before = held()
    for _ in range(30):
        train()
    print(before == held() or (before, held()))


def loader(is_persistent: str) -> None:
    """Batches come from a DataLoader until a signal ends it. Writes `ready-0` after some."""
    from torch.utils.data import DataLoader

    data = DataLoader(
        range(64),  # type: ignore[arg-type]
        batch_size=4,
        num_workers=4,
        persistent_workers=is_persistent == "True",
        multiprocessing_context="fork",
    )

    @tracking_init(project="tests")
    def train() -> None:
        batches = 0
        while True:
            for _ in data:
                batches += 1
                get_run().log({"n": batches})
                if batches == 20:
                    Path("ready-0").touch()

    train()


def opening(settings: str) -> None:
    """A run is opened at a service that is slow. `settings` are the decorator's arguments as JSON, and one more:

    `failing_rank`: raises when the file `go` is there.
    """
    arguments = json.loads(settings)
    failing_rank = arguments.pop("failing_rank", None)

    @tracking_init(id="ours", **arguments)
    def train() -> None:
        info = get_distributed_info()
        while failing_rank is not None and not Path("go").exists():
            time.sleep(0.02)
        if info is not None and info.rank == failing_rank:
            raise ValueError("made to fail")
        print("called")

    train()


def survived() -> None:
    """A signal comes in a nested function. Both go on, the handler logs, and another run follows."""
    import wandb

    handled = threading.Event()

    def handler(*_: object) -> None:
        get_run().log({"n": 1})
        handled.set()

    @tracking_init(project="tests", id="inner", run_mode="new")
    def inner() -> None:
        get_run().log({"n": 0})
        os.kill(os.getpid(), signal.SIGTERM)
        assert handled.wait(PATIENCE_S)
        get_run().log({"n": 2})

    @tracking_init(project="tests", id="outer")
    def train() -> None:
        get_run().log({"n": 0})
        inner()
        get_run().log({"n": 2})
        wandb.log({"n": 3})

    @tracking_init(project="tests", id="evaluation")
    def evaluate() -> None:
        get_run().log({"n": 0})

    signal.signal(signal.SIGTERM, handler)
    train()
    evaluate()


def closed_loop() -> None:
    """A loop is closed inside the function, and its wakeup fd's number is another file's when the signal comes."""
    handled = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: handled.set())

    async def inside() -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, print)
        await asyncio.sleep(0.2)
        get_run().log({"n": 0})

    @tracking_init(project="tests")
    def train() -> None:
        asyncio.run(inside())
        files = [open(f"file-{n}", "wb", buffering=0) for n in range(10)]  # noqa: SIM115 closed below
        handled.clear()
        os.kill(os.getpid(), signal.SIGTERM)
        assert handled.wait(PATIENCE_S)
        for file in files:
            file.close()

    train()
    assert signal.set_wakeup_fd(-1) == -1
    train()


def joined_async() -> None:
    """The signal comes in a coroutine that goes on in a run when the function that has opened it has returned."""

    @tracking_init(project="tests")
    async def inner() -> None:
        joined.set()
        await outer_is_over.wait()
        get_run().log({"x": 1})
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(PATIENCE_S)

    @tracking_init(project="tests", id="outer")
    async def outer() -> asyncio.Future[None]:
        get_run().log({"x": 0})
        started = asyncio.ensure_future(inner())
        await joined.wait()
        return started

    async def main() -> None:
        started = await outer()
        outer_is_over.set()
        await started

    joined, outer_is_over = asyncio.Event(), asyncio.Event()
    asyncio.run(main())


# Functions in threads beside an asyncio loop. Each writes the process's id to `ready-0` when it has logged.


def ready() -> None:
    Path("ready-0").write_text(str(os.getpid()))


def handled_in_thread() -> None:
    """The user's handler is installed by the loop; the function logs once more after it."""
    told = threading.Event()

    def handler() -> None:
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
        loop.add_signal_handler(signal.SIGTERM, handler)
        await loop.run_in_executor(None, train)

    asyncio.run(main())


def stops_in_thread() -> None:
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


def two_threads() -> None:
    """Two functions with a run each, of which the first one has returned when the signal comes."""
    both = threading.Barrier(2)

    @tracking_init(project="tests", id="first")
    def first() -> None:
        get_run().log({"row": 0})
        both.wait(PATIENCE_S)

    @tracking_init(project="tests", id="second")
    def second() -> None:
        get_run().log({"row": 0})
        both.wait(PATIENCE_S)
        time.sleep(ENDLESS_S)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        futures = [loop.run_in_executor(None, function) for function in (first, second)]
        await asyncio.wait(futures, return_when="FIRST_COMPLETED")
        ready()
        await asyncio.wait(futures)

    asyncio.run(main())


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])

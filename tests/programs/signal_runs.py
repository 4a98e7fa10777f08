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


def core_first(rows: str, signals_rank: str) -> None:
    """wandb-core is ended before the rank, as by DeepSpeed's launcher. Without a signal, the function returns."""

    @tracking_init(project="tests", id="ours")
    def train() -> None:
        import wandb

        run = get_run()
        for x in range(int(rows)):
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
        if signals_rank == "True":
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(PATIENCE_S)

    train()


def left_behind(where: str) -> None:
    """The process ends while a decorated function still runs."""

    @tracking_init(project="tests", id="ours")
    def train() -> None:
        for x in range(1_000_000):
            get_run().log({"x": x})
            begun.set()
            time.sleep(0.01)

    @tracking_init(project="tests", id="ours")
    async def train_async() -> None:
        for x in range(1_000_000):
            get_run().log({"x": x})
            begun.set()
            await asyncio.sleep(0.01)

    begun = threading.Event()
    if where == "thread":
        threading.Thread(target=train, daemon=True).start()
        assert begun.wait(PATIENCE_S)
    else:
        loop = asyncio.new_event_loop()
        task = loop.create_task(train_async())
        while not begun.is_set():
            loop.run_until_complete(asyncio.sleep(0.05))
        print(task.done())


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


def fetched_log(which: str) -> None:
    """`wandb.log`, or the run's method in a variable ("hoisted"), is called before the signal and after it."""
    import wandb

    flag = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: flag.set())

    @tracking_init(project="tests")
    def train() -> None:
        hoisted = get_run().log
        for n in range(500):
            wandb.log({"n": n}) if which == "wandb.log" else hoisted({"n": n})
            if n == 100:
                os.kill(os.getpid(), signal.SIGTERM)
        assert flag.wait(PATIENCE_S)

    train()


def with_a_thread() -> None:
    """A thread would go on for longer than a test waits."""

    @tracking_init(project="tests")
    def train() -> None:
        threading.Thread(target=time.sleep, args=(600,)).start()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(600)

    train()


def asyncio_handler(place: str) -> None:
    """The loop's handler is set "before" the function or "inside" it."""

    def install(told: asyncio.Event) -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)

    @tracking_init(project="tests")
    async def train(told: asyncio.Event) -> None:
        if place == "inside":
            install(told)
        await asyncio.sleep(0.2)
        get_run().log({"x": 1})
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(told.wait(), PATIENCE_S)
        get_run().log({"x": 2})

    async def main() -> None:
        told = asyncio.Event()
        if place == "before":
            install(told)
        await train(told)

    asyncio.run(main())


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


def data_loader() -> None:
    """Batches come from the forked workers of a DataLoader, twice."""
    from torch.utils.data import DataLoader, Dataset

    parent = os.getpid()

    class Squares(Dataset[int]):
        def __len__(self) -> int:
            return 40

        def __getitem__(self, index: int) -> int:
            assert get_run() is None
            assert os.getpid() != parent
            return index * index

    @tracking_init(project="tests")
    def train() -> None:
        for _ in range(2):
            for batch in DataLoader(Squares(), batch_size=4, num_workers=2, multiprocessing_context="fork"):
                get_run().log({"sum": int(batch.sum())})

    train()


def loader(workers: str, context: str, is_persistent: str, raising_rank: str = "") -> None:
    """Batches come from a DataLoader until a signal ends it, or a rank raises when rank 0 has logged.

    Writes `ready-RANK` after some.
    """
    from torch.utils.data import DataLoader

    data = DataLoader(
        range(64),  # type: ignore[arg-type]
        batch_size=4,
        num_workers=int(workers),
        persistent_workers=is_persistent == "True",
        multiprocessing_context=context,
    )

    @tracking_init(project="tests")
    def train() -> None:
        info, batches = get_distributed_info(), 0
        rank = info.rank if info else 0
        while True:
            for _ in data:
                batches += 1
                if run := get_run():
                    run.log({"n": batches})
                if batches == 20:
                    Path(f"ready-{rank}").touch()
                if str(rank) == raising_rank and Path("ready-0").exists():
                    raise ValueError("made to fail")

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


def survived(case: str) -> None:
    """The function goes on after the signal, and another follows.

    `case` is what happens after it: "log"; "handler logs", and the function then; "summary" is written; or "nested":
    the signal comes in a nested function.
    """
    import wandb

    handled = threading.Event()

    def handler(*_: object) -> None:
        if case == "handler logs":
            get_run().log({"n": 1})
        handled.set()

    def tell_to_end() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        assert handled.wait(PATIENCE_S)

    @tracking_init(project="tests", id="inner", run_mode="new")
    def inner() -> None:
        get_run().log({"n": 0})
        tell_to_end()
        get_run().log({"n": 1})

    @tracking_init(project="tests", id="outer")
    def train() -> None:
        get_run().log({"n": 0})
        inner() if case == "nested" else tell_to_end()
        if case == "summary":
            get_run().summary["best"] = 3
        elif case == "log":
            get_run().log({"n": 1})
        else:
            wandb.log({"n": 2 if case == "handler logs" else 1})

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


def handled_in_thread(installer: str) -> None:
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


def exits_beside_thread() -> None:
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


def forks_in_thread() -> None:
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

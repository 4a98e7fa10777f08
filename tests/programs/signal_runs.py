"""Trainings that SIGTERM meets, for `test_signals.py`. Arguments: a function's name, and the function's own."""

from __future__ import annotations

import asyncio
import hashlib
import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.queues import Queue
from pathlib import Path

from flyteplugins_tracking import get_distributed_info, get_run, tracking_init

PATIENCE_S = 120


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
    """150 children are told to end as soon as they are forked."""

    @tracking_init(project="tests", id="parent")
    def train() -> None:
        fork = multiprocessing.get_context("fork")
        for n in range(150):
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


def in_closing(case: str) -> None:
    """Signals come while the run is closed, which a row that the server does not take makes long: see the test."""
    from flyteplugins_tracking._runs import call

    call._PATIENCE_S = float(PATIENCE_S)  # on a busy machine the signals come long before the end
    called = []

    def handler(signum: int, _: object) -> None:
        called.append(signal.Signals(signum).name)
        if signum == signal.SIGALRM:
            raise TimeoutError("the program's own")

    for number in (signal.SIGUSR1, signal.SIGALRM):
        signal.signal(number, handler)

    def tell_closing() -> None:
        while any(signal.getsignal(number) is handler for number in (signal.SIGUSR1, signal.SIGALRM)):
            time.sleep(0.01)
        Path("closing").touch()

    @tracking_init(project="tests", id="ours")
    def train() -> None:
        get_run().log({"n": 1})
        threading.Thread(target=tell_closing, daemon=True).start()
        if case == "raises":
            raise ValueError("made to fail")

    try:
        train()
    except BaseException as error:
        print(type(error).__name__, flush=True)
        raise
    finally:
        print(*called, flush=True)


def opening(settings: str) -> None:
    """A run is opened at a service that is slow. `settings` are the decorator's arguments as JSON, and two more:

    `alarm`: after how many seconds the program's watchdog raises. `failing_rank`: raises when the file `go` is there.
    """
    arguments = json.loads(settings)
    failing_rank = arguments.pop("failing_rank", None)

    def watchdog(*_: object) -> None:
        raise TimeoutError("the program's own")

    signal.signal(signal.SIGALRM, watchdog)
    signal.alarm(arguments.pop("alarm", 0))

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


def missed() -> None:
    """The first signal that is sent again is lost, as if it came just before the main thread waits for a lock.

    On a slow machine the handler may be called with no signal that is sent again: then it is tried once more.
    """
    handled = threading.Event()
    kill, sent = signal.pthread_kill, []

    def lose_the_first(thread: int, number: int) -> None:
        sent.append(number)
        if len(sent) > 1:
            kill(thread, number)

    signal.pthread_kill = lose_the_first
    signal.signal(signal.SIGTERM, lambda *_: handled.set())

    @tracking_init(project="tests")
    def train() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        assert handled.wait(PATIENCE_S)

    while len(sent) < 2:
        sent.clear()
        handled.clear()
        train()


def many_files() -> None:
    """The signal comes in a C call, and the wakeup fd has a number that `select` does not take."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 4096), most))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]

    @tracking_init(project="tests")
    def train() -> None:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)

    train()
    assert files


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])

"""A training that ends as the variable TRAIN_SETTINGS, a JSON object, says. Each process writes down what it logs.

Keys: `tracking`: the decorator's arguments; `then`: those of a second training of the process. `config_bytes`: the
size of the run's config. `rank_in_config`: the config of each rank holds its rank. `rows`: how many rows are logged
before anything else. `with_step`: with `step=`, from `first_step` on. `step_s`: seconds between later ones. `value`:
what a row holds. `ends`: how each rank goes on, by rank, or `"*"`: a key of `ENDS`. `attempts`: `ends` holds for the
attempts below it, 1 unless given; later ones return. `handler`: a key of `HANDLERS`, installed for SIGTERM before the
function; `handler_inside`: in it; `handler_after_rows`: in it, when its first rows are logged. `nested`: another
decorated function is called. `async`: the function is async, and sleeps. `torch`: each rank imports it.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path

from flyteplugins_tracking import get_distributed_info, get_run, tracking_init

SETTINGS = json.loads(os.environ.get("TRAIN_SETTINGS", "{}"))
if "config_bytes" in SETTINGS:
    SETTINGS.setdefault("tracking", {})["config"] = {"text": "x" * SETTINGS["config_bytes"]}
DIRECTORY = Path(os.environ["TRAIN_DIR"])
# A run is claimed by project and id on the whole machine, where other jobs with the same id run at the same time.
PROJECT = f"tests-{zlib.crc32(os.fsencode(DIRECTORY)):08x}"
ATTEMPT = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) + int(os.environ.get("FLYTE_ATTEMPT_NUMBER", 0))
ENDLESS_S = 600  # longer than any test waits: what goes on for so long has to be ended
flag = threading.Event()
logged = 0


def rank() -> int:
    info = get_distributed_info()
    return info.rank if info else 0


def note(line: str) -> None:
    """Write it down, safe from any end of this process."""
    with Path(DIRECTORY, f"notes-{os.getpid()}").open("a") as file:
        file.write(f"{line}\n")


def log() -> None:
    global logged
    run = get_run()
    if run is None:
        return
    started = time.perf_counter()
    # A signal may unwind this anywhere: the next row must have another number then, whether this one was logged or not.
    number = logged
    logged += 1
    row = {"pid": os.getpid(), "n": number, "value": SETTINGS.get("value", 1.0)}
    run.log(row, step=SETTINGS.get("first_step", 0) + number) if SETTINGS.get("with_step") else run.log(row)
    note(f"logged {number} {time.perf_counter() - started:.6f} {time.monotonic():.3f}")


def loop(seconds: float = ENDLESS_S) -> None:
    until = time.monotonic() + seconds
    while not flag.is_set() and time.monotonic() < until:
        log()
        time.sleep(SETTINGS.get("step_s", 0.01))
    log()


def until_go() -> None:
    """Log until the file `go` is there."""
    while not Path(DIRECTORY, "go").exists():
        log()
        time.sleep(SETTINGS.get("step_s", 0.05))
    log()


def until_all_are_ready() -> None:
    """Log until each rank has logged its first rows."""
    while sum("\nready " in path.read_text() for path in DIRECTORY.glob("notes-*")) < int(os.environ["WORLD_SIZE"]):
        log()
        time.sleep(SETTINGS.get("step_s", 0.05))


def fast() -> None:
    """Ask for 10,000 rows a second, for 10 s."""
    for _ in range(100):
        started = time.monotonic()
        for _ in range(1000):
            if time.monotonic() - started < 0.1:
                log()
        time.sleep(max(0.0, started + 0.1 - time.monotonic()))


def in_finally() -> None:
    try:
        loop()
    finally:
        log()
        note("finally")


def note_when_blocked(main: int) -> None:
    """Note it once the main thread has stood at one instruction for a second: inside a call, not on its way there."""
    at, since = None, 0.0
    while at is None or time.monotonic() < since + 1:
        frame = sys._current_frames()[main]
        if (now := (id(frame), frame.f_lasti)) != at:
            at, since = now, time.monotonic()
        del frame
        time.sleep(0.02)
    note(f"blocked {rank()}")


def in_collective() -> None:
    import torch
    import torch.distributed as dist

    threading.Thread(target=note_when_blocked, args=(threading.get_ident(),), daemon=True).start()
    dist.all_reduce(torch.ones(1))


def together() -> None:
    """Log a row for each collective."""
    import torch
    import torch.distributed as dist

    has_come = torch.zeros(1)
    while not has_come:  # the same on all ranks: one alone that saw the file would leave the others in a collective
        log()
        has_come.fill_(Path(DIRECTORY, "go").exists())
        dist.all_reduce(has_come)
        time.sleep(SETTINGS.get("step_s", 0.05))
    dist.barrier()


def in_a_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire(timeout=ENDLESS_S)


def raises() -> None:
    raise ValueError(f"made to fail, with the key {os.environ.get('SOME_KEY')}")


def raises_at_go() -> None:
    until_go()
    raises()


def at_go(end: Callable[[], object]) -> Callable[[], object]:
    def ends() -> None:
        until_go()
        end()

    return ends


def crashes() -> None:
    import ctypes

    ctypes.string_at(0)


def hides_its_failure() -> None:
    """The peers of a collective lose this rank before its own exception leaves the function."""
    import torch.distributed as dist

    try:
        raises()
    finally:
        dist.destroy_process_group()
        time.sleep(0.5)


def catches_all() -> None:
    with contextlib.suppress(BaseException):
        time.sleep(ENDLESS_S)
    log()


ENDS: dict[str, Callable[[], object]] = {
    "catches all": catches_all,
    "return": lambda: None,
    "raise": raises,
    "raise at go": raises_at_go,
    "os._exit 7 at go": at_go(lambda: os._exit(7)),
    "segfault at go": at_go(crashes),
    "destroy, raise at go": at_go(hides_its_failure),
    "collective at go": at_go(lambda: in_collective()),
    "exit 3": lambda: sys.exit(3),
    "loop": loop,
    "loop 3 s": lambda: loop(3),
    "finally": in_finally,
    "sleep": lambda: time.sleep(ENDLESS_S),
    "lock": in_a_lock,
    "collective": in_collective,
    "together": together,
    "until go": until_go,
    "until all are ready": until_all_are_ready,
    "fast": fast,
}
HANDLERS: dict[str, Callable[[], object]] = {
    "flag": flag.set,
    "raise": raises,
    "exit 0": lambda: sys.exit(0),
    "exit 5": lambda: sys.exit(5),
    "os._exit 6": lambda: os._exit(6),
}


def handler(name: str) -> Callable[..., None]:
    def handle(*_: object) -> None:
        note("handler")
        HANDLERS[name]()

    return handle


def body() -> None:
    if "handler_inside" in SETTINGS:
        signal.signal(signal.SIGTERM, handler(SETTINGS["handler_inside"]))
    for _ in range(SETTINGS.get("rows", 50)):
        log()
    if "handler_after_rows" in SETTINGS:
        signal.signal(signal.SIGTERM, handler(SETTINGS["handler_after_rows"]))
    note(f"ready {rank()} {ATTEMPT}")
    if SETTINGS.get("attempts", 1) > ATTEMPT:
        ends = SETTINGS.get("ends", {})
        ENDS[ends.get(str(rank()), ends.get("*", "return"))]()
    note("returns")


@tracking_init(project=PROJECT, run_mode="new")
def nested() -> None:
    body()


def training() -> None:
    note(f"entered {rank()}")
    try:
        nested() if SETTINGS.get("nested") else body()
    finally:
        note("unwound")


def train(**arguments: object) -> None:
    config = {"config": {"rank": rank()}} if SETTINGS.get("rank_in_config") else {}
    tracking_init(**{"project": PROJECT, **config, **arguments})(training)()


@tracking_init(project=PROJECT)
async def train_async() -> None:
    for _ in range(50):
        log()
    note(f"ready {rank()} {ATTEMPT}")
    try:
        await asyncio.sleep(ENDLESS_S)
    finally:
        note("unwound")


def main() -> None:
    if "handler" in SETTINGS:
        signal.signal(signal.SIGTERM, handler(SETTINGS["handler"]))
    if SETTINGS.get("group") or {"collective", "together"} & set(SETTINGS.get("ends", {}).values()):
        import torch.distributed as dist

        dist.init_process_group("gloo")
    if SETTINGS.get("torch"):
        import torch.distributed  # noqa: F401
    note(f"starts {rank()}")
    try:
        asyncio.run(train_async()) if SETTINGS.get("async") else train(**SETTINGS.get("tracking", {}))
        if "then" in SETTINGS:
            train(**SETTINGS["then"])
    finally:
        note(f"held {rank()} {len(os.listdir('/proc/self/fd'))} {threading.active_count()}")


if __name__ == "__main__":
    main()

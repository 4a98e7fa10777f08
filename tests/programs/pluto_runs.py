"""Runs of Pluto that `test_pluto_jobs.py` looks at. Argument: a function below. Processes write JSON to `facts-*`."""

import contextlib
import json
import logging
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from flyteplugins_tracking import TrackingError, get_distributed_info, get_run, tracking_init

DIRECTORY = Path(os.environ["TRAIN_DIR"])
PLUTO = {"tracker": "pluto", "project": "tests"}


def key() -> str:
    """The API key with a line end, as secrets come."""
    return (DIRECTORY / "key").read_text() + "\n"


def tell(**facts: Any) -> None:
    with (DIRECTORY / f"facts-{os.getpid()}").open("a") as file:
        file.write(json.dumps(facts) + "\n")


def wait_for(name: str) -> None:
    while not (DIRECTORY / name).exists():
        time.sleep(0.02)


def command_lines() -> str:
    lines = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            lines.append((process / "cmdline").read_bytes().decode(errors="replace"))
        except OSError:
            continue
    return "\n".join(lines)


def in_pool(_: int) -> str:
    """Logs in a forked child, which has the parent's run object."""
    TAKEN[0].log({"of_the_child": 1})
    return str(get_run())


TAKEN: list[Any] = []


@tracking_init(
    **PLUTO,
    run_mode="shared",
    name="named",
    tags=["tag"],
    notes="a note",
    config={"lr": 0.1, "long": "x" * 200_000},
    secret=key,
)
def ranks() -> None:
    run, rank = get_run(), get_distributed_info()["rank"]
    TAKEN.append(run)
    for number in range(20):
        run.log({"loss": number, f"rank{rank}/new{number}": number})  # a new key in each row
    (DIRECTORY / f"logged-{rank}").touch()
    if rank == 1:
        for number in range(2):
            odd = {
                "truth": True,
                "none": None,
                "nan": float("nan"),
                "dict": {"a": 1},
                "list": [1, 2],
                "phase": "warmup",
            }
            run.log({**odd, "ä": number, "large": 10**30}, step=10_000)
        run.log({"below": 1}, step=-1)
        run.finish()  # as a framework would: the run is not its to end
    with multiprocessing.get_context("fork").Pool(2) as pool:
        in_children = pool.map(in_pool, range(4))
    print(f"said by rank {rank}", flush=True)
    tell(
        rank=rank,
        id=run.id,
        run_id=run.run_id,
        resumed=run.resumed,
        vendors=f"{type(run).__module__}.{type(run).__name__}",
        has_key=key().strip() in command_lines(),
        has_uploader=bool(psutil.Process().children(recursive=True)),
        in_children=in_children,
    )


def logging_once(**arguments: Any) -> dict[str, Any]:
    """Log one row in a run, and report its id or error."""

    @tracking_init(**{**PLUTO, **arguments})
    def train() -> str:
        run = get_run()
        run.log({"x": 1})
        return str(run.run_id)

    started = time.monotonic()
    try:
        outcome: dict[str, Any] = {"id": train()}
    except TrackingError as error:
        outcome = {"error": type(error).__name__, "text": str(error)}
    return {**outcome, "seconds": time.monotonic() - started}


def singles() -> None:
    """Single runs, in one process since each import costs a second."""
    wrong = {"PLUTO_API_KEY": "plt_s_wrong"}
    tell(what="noop", **logging_once(settings={"mode": "noop"}))
    tell(what="named again", **logging_once(id="again", name="first"))
    tell(what="named again", **logging_once(id="again", name="second"))
    for name, value in (("PLUTO_RUN_ID", "42"), ("MLOP_RUN_ID", "ABC-1"), ("MLOP_RUN_ID", "theirs")):
        tell(what=f"{name}={value}", **with_variables({name: value}))
    tell(what="wrong key", **with_variables(wrong))
    tell(what="no key", **with_variables({"PLUTO_API_KEY": ""}))
    for error in (KeyboardInterrupt, SystemExit):
        end_with(error)
    tracking_init(**PLUTO, id="inner", config={"lr": 0.1}, tags=["own"])(with_inner_init)()
    tracking_init(**PLUTO, id="told")(lambda: (get_run().log({"x": 1}), get_run().finish(1), get_run().finish()))()


def with_inner_init() -> None:
    """A script's own `pluto.init`, with which it opens its run, ends it, and opens it again."""
    import pluto
    from pluto import init

    run = init(project="elsewhere", name="given", config={"lr": 0.2, "path": Path("/data")}, tags="a")
    pluto.log({"x": 1})
    run.finish()
    again = pluto.init(project="tests", config={"depth": 2})
    again.log({"x": 2})
    tell(what="inner", joined=run is again is get_run())
    if pid := os.fork():
        assert os.waitpid(pid, 0)[1] == 0
    else:
        os._exit(int(pluto.init(project="tests", name="child", settings={"mode": "noop"}) is run))


def with_variables(variables: dict[str, str]) -> dict[str, Any]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    outcome = logging_once()
    for name, value in before.items():
        os.environ.pop(name)
        if value is not None:
            os.environ[name] = value
    return outcome


def end_with(error: type[BaseException]) -> None:
    @tracking_init(**PLUTO, id=error.__name__)
    def train() -> None:
        raise error(3)

    with contextlib.suppress(error):
        train()


def mute() -> None:
    """Meets a server that does not answer: first when a run starts, then when another run ends."""
    tell(what="start", **logging_once(id="never", init_timeout_s=2, if_unavailable="raise"))
    (DIRECTORY / "started").touch()
    wait_for("serves")

    @tracking_init(**PLUTO, id="kept", kill_after_s=6, config={"lr": 0.1})
    def train() -> float:
        run = get_run()
        log(run, range(50))
        (DIRECTORY / "logged").touch()
        wait_for("refuses")
        slowest = log(run, range(50, 100))
        (DIRECTORY / "logged-in-outage").touch()
        wait_for("mute")
        return max(slowest, log(run, range(100, 150)))

    slowest = train()
    tell(what="end", ended=time.time(), slowest=slowest)


def log(run: Any, numbers: range) -> float:
    slowest = 0.0
    for number in numbers:
        started = time.perf_counter()
        run.log({"x": number, f"new{number // 10}": 1.0})
        slowest = max(slowest, time.perf_counter() - started)
    return slowest


if __name__ == "__main__":
    logging.basicConfig()
    SCENARIOS: dict[str, Callable[[], None]] = {"ranks": ranks, "singles": singles, "mute": mute}
    SCENARIOS[sys.argv[1]]()

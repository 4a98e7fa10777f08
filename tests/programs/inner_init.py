"""Scripts with a `wandb.init` in the decorated function, for `test_inner_init.py`. Arguments: a function's name.

With `IMPORTS=early`, `wandb` is imported at the top, also as `from wandb import init`; else in the function.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flyteplugins_tracking import get_run, tracking_init

IS_EARLY = os.environ.get("IMPORTS") == "early"
if IS_EARLY:
    from wandb import init as bound_before

logging.basicConfig(format="LOG %(message)s")
RANK = int(os.environ.get("RANK", 0))
DESCRIBED = {"config": {"lr": 0.1, "seed": 3}, "name": "inner", "notes": "by the script", "tags": ["a", "b"]}
PLACED = {"project": "elsewhere", "id": "other", "group": "g", "job_type": "j", "resume": "must"}


def init(**arguments: Any) -> Any:
    """Call `wandb.init` as scripts and frameworks do."""
    import wandb

    return bound_before(**arguments) if IS_EARLY else wandb.init(**arguments)


def report(**values: Any) -> None:
    Path(f"report-{RANK}.json").write_text(json.dumps(values))


def in_function(function: Callable[[], None], **tracking: Any) -> None:
    """Call a function that is decorated."""
    tracking_init(project="tests", **tracking)(function)()


def describes() -> None:
    """A script's life: it opens its run, logs, finishes, opens it again. Then another life without the decorator."""

    def train() -> None:
        find_spec("wandb")  # a framework looks whether it is installed: transformers does
        import wandb

        with init(**DESCRIBED, **PLACED, mode="online") as run:
            run.log({"x": 1})
        again = wandb.init(config=argparse.Namespace(depth=2), settings=wandb.Settings(init_timeout=9), tags=["b", "c"])
        wandb.log({"x": 2})
        wandb.config.update({"late": True})
        run.finish()
        wandb.finish()
        wandb.setup()
        wandb.init(config={"lr": 0.2}, mode="online", name="renamed", notes="renamed")
        wandb.log({"x": 3})
        run = wandb.run
        report(is_own=run is get_run(), is_again=again is run, is_off=run.disabled, lr=run.config["lr"])

    in_function(train, id="outer")
    import wandb

    assert wandb.run is None
    with wandb.init(project="tests", id=f"later-{RANK}") as run:
        run.log({"y": RANK})


def several_runs() -> None:
    """Ranks with a run each, and ranks that share one."""

    def train() -> None:
        run = init(config={"lr": 0.1, "rank": RANK}, name="inner", id=f"mine-{RANK}", tags=["a"])
        assert run is get_run()
        with run:
            run.log({"x": RANK})

    in_function(train, id="each", run_mode="new")
    in_function(train, id="all", run_mode="shared")


def decorators_values_stay() -> None:
    import wandb

    run = wandb.init(config={"lr": 0.1, "seed": 3}, name="inner", notes="inner", tags="b")
    run.log({"x": 1})


def disabled() -> None:
    import wandb

    run = wandb.init(project="p", config={"lr": 0.1}, mode="online", name="n")
    run.log({"x": 1})
    another = wandb.init(reinit="create_new", mode="online")
    another.log({"x": 1})
    assert run is get_run()
    assert run.disabled
    assert another.disabled
    assert run.config["lr"] == 0.1


def with_others() -> None:
    import wandb

    own = get_run()
    for how in ("create_new", "finish_previous", True):
        run = wandb.init(project="tests", id=f"another-{how}", reinit=how)
        assert run is not own
        run.log({"x": how == "create_new"})
        run.finish()
        assert (wandb.run or wandb.init()) is own
        assert wandb.run is own
    assert wandb.init(config={"after": 1}) is own
    nothing = wandb.init(mode="disabled")
    nothing.log({"x": 5})
    assert nothing.disabled
    wandb.init()
    wandb.log({"x": 2})


def in_a_thread() -> None:
    import wandb

    thread = threading.Thread(target=lambda: wandb.init(name="of-thread").log({"x": 1}))
    thread.start()
    thread.join()


def nested() -> None:
    import wandb

    in_function(lambda: wandb.init(config={"of": "joined"}).log({"x": 1}))
    in_function(lambda: wandb.init(config={"of": "new"}).log({"x": 2}), id="new", run_mode="new")
    wandb.init(config={"outer": True}).log({"x": 3})


def fails() -> None:
    import wandb

    with wandb.init(config={"lr": 0.1}):
        raise ValueError("made to fail")


def forks() -> None:
    import wandb

    if pid := os.fork():
        assert os.waitpid(pid, 0)[1] == 0
    else:
        child = wandb.init(project="tests", id="child", config={"child": True})
        child.log({"x": 1})
        child.finish()
        os._exit(0)
    wandb.init(config={"parent": True})


def situations() -> None:
    """Situations in one process, each with a run of its own."""
    import wandb

    clients = wandb.init
    wandb.init = lambda **given: clients(**given)  # as Pluto's client does
    wandb.login()
    in_function(decorators_values_stay, id="kept", config={"lr": 0.2}, name="outer", notes="outer", tags=["a"])
    in_function(disabled, id="disabled", mode="disabled")
    for function in (with_others, in_a_thread, nested, forks):
        in_function(function, id=function.__name__)
    mine = wandb.init(project="tests", id="mine", config={"mine": True})
    in_function(lambda: wandb.init(config={"ours": True}).log({"x": 1}), id="beside")
    assert wandb.init() is mine
    mine.finish()
    with suppress(ValueError):
        in_function(fails, id="fails")
    wandb.init(project="tests", id="after").finish()


def writes_for_tensorboard() -> None:
    """All rows are TensorBoard's, as CleanRL's scripts have them."""

    def train() -> None:
        import wandb
        from torch.utils.tensorboard import SummaryWriter

        wandb.init(project="cleanrl", sync_tensorboard=True, config={"lr": 0.1}, name="inner", monitor_gym=False)
        writer = SummaryWriter(f"runs-{RANK}")
        for step in range(5):
            writer.add_scalar("loss", step, step)
        writer.close()

    in_function(train, id="tensorboard")


def trials() -> None:
    """Trials of a sweep: what the sweep has chosen stays, as with W&B alone."""
    import wandb

    @tracking_init(project="tests")
    def trial() -> None:
        run = wandb.init(config={"x": -1, "depth": 2})
        run.log({"x": run.config["x"]})

    sweep = wandb.sweep({"method": "grid", "parameters": {"x": {"values": [1, 2]}}}, project="tests")
    wandb.agent(sweep, trial, project="tests")


def trials_in_a_run() -> None:
    """A sweep as a script has it, in a function that is decorated: the trial's function is not."""
    import wandb

    def trial() -> None:
        with wandb.init(config={"x": -1, "depth": 2}) as run:
            wandb.log({"x": run.config["x"]})

    def search() -> None:
        get_run().log({"x": 0})
        sweep = wandb.sweep({"method": "grid", "parameters": {"x": {"values": [1]}}}, project="swept")
        wandb.agent(sweep, trial, project="swept", count=1)
        get_run().log({"x": 9})

    in_function(search, id="outer")


if __name__ == "__main__":
    globals()[sys.argv[1]]()

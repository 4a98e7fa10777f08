"""How a program gets its run: by the vendor's bare client, and by the decorator."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from parity.table import Body, Program

Opening = Callable[..., None]
# With the other trackers, what both ways leave is in one place: there this is the bare programs' project.
PROJECT, BARE_PROJECT = "parity", "bare"


def decorated(tracker: str) -> Opening:
    """The same for each tracker: the library ends the run."""

    def open_it(program: Program, body: Body, ends_itself: bool = False) -> None:
        from flyteplugins_tracking import get_run, tracking_init

        # W&B's runs are found by their ids, the others' by their names.
        named = {} if tracker == "wandb" else {"name": program.name}

        @tracking_init(tracker=tracker, project=PROJECT, id=program.name, **{**named, **program.options()})
        def train() -> None:
            body(get_run())

        train()

    return open_it


def wandb_bare(program: Program, body: Body, ends_itself: bool = False) -> None:
    """As scripts have it: the first rank has the run."""
    if os.environ.get("RANK", "0") != "0":
        body(None)
        return
    import wandb

    run = wandb.init(project=PROJECT, id=program.name, **program.options())
    body(run)
    if not ends_itself:
        wandb.finish()


def mlflow_bare(program: Program, body: Body, ends_itself: bool = False) -> None:
    import mlflow

    mlflow.set_experiment(BARE_PROJECT)
    body(mlflow.start_run(run_name=program.name, **program.options()))
    if not ends_itself:
        mlflow.end_run()


def trackio_bare(program: Program, body: Body, ends_itself: bool = False) -> None:
    import trackio

    body(trackio.init(project=BARE_PROJECT, name=program.name, **program.options()))
    if not ends_itself:
        with contextlib.suppress(RuntimeError):  # the program may have done it
            trackio.finish()


def pluto_bare(program: Program, body: Body, ends_itself: bool = False) -> None:
    import pluto

    run = pluto.init(project=BARE_PROJECT, name=program.name, run_id=program.name, **program.options())
    body(run)
    if not ends_itself:
        run.finish()


BARE: dict[str, Opening] = {"wandb": wandb_bare, "mlflow": mlflow_bare, "trackio": trackio_bare, "pluto": pluto_bare}

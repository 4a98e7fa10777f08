"""How a program gets its run: by the vendor's bare client, and by the decorator."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

from parity.table import Body, Program

Opening = Callable[..., None]
# With the other trackers, what both ways leave is in one place: there this is the bare programs' project.
PROJECT, BARE_PROJECT = "parity", "bare"


def decorated(tracker: str) -> Opening:
    """The same for each tracker: the library ends the run."""

    def open_it(program: Program, body: Body, ends_itself: bool = False) -> None:
        from flyteplugins_tracking import get_run, tracking_init

        @tracking_init(
            tracker=tracker, project=PROJECT, id=program.name, **{**_NAMED[tracker](program), **program.options()}
        )
        def train() -> None:
            body(get_run())

        train()

    return open_it


# W&B's runs are found by their ids, the others' by their names.
_NAMED: dict[str, Callable[[Program], dict[str, Any]]] = {
    "wandb": lambda program: {},
    "mlflow": lambda program: {"name": program.name},
    "trackio": lambda program: {"name": program.name},
    "pluto": lambda program: {"name": program.name},
}


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


OPENINGS: dict[str, tuple[Opening, Opening]] = {
    "wandb": (wandb_bare, decorated("wandb")),
    "mlflow": (mlflow_bare, decorated("mlflow")),
    "trackio": (trackio_bare, decorated("trackio")),
    "pluto": (pluto_bare, decorated("pluto")),
}

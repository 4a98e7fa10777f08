"""The same for MLflow, Trackio and Pluto: rows, params, tags, artifacts and status."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.backends import pluto_environment
from support.mlflow_server import MlflowServer
from support.pluto_server import PlutoServer

from parity import openings, seen
from parity.compare import WAYS, Side, Sides, check, run_both
from parity.table import table_of

PROJECTS = {"bare": openings.BARE_PROJECT, "decorated": openings.PROJECT}


@contextlib.contextmanager
def mlflow_sides(directory: Path) -> Iterator[Sides]:
    with MlflowServer(directory) as server:

        def runs(how: str, name: str) -> list[seen.Seen]:
            found = [run for run in server.runs(PROJECTS[how]) if run.name in (name, f"child-of-{name}")]
            found.sort(key=lambda run: run.name != name)
            return [seen.mlflow(run, server.artifacts(run)) for run in found]

        env = {"MLFLOW_TRACKING_URI": server.url}
        yield [Side(how, "mlflow", directory / how, env, partial(runs, how)) for how in WAYS]


@contextlib.contextmanager
def trackio_sides(directory: Path) -> Iterator[Sides]:
    def side(how: str) -> Side:
        store = directory / how / "trackio"

        def runs(name: str) -> list[seen.Seen]:
            return [run for found, run in seen.trackio(store, PROJECTS[how]) if found == name]

        return Side(how, "trackio", directory / how, {"TRACKIO_DIR": str(store)}, runs)

    yield [side(how) for how in WAYS]


@contextlib.contextmanager
def pluto_sides(directory: Path) -> Iterator[Sides]:
    def side(how: str, server: PlutoServer) -> Side:
        def runs(name: str) -> list[seen.Seen]:
            return [seen.pluto(run) for run in server.runs if run.name == name]

        return Side(how, "pluto", directory / how, pluto_environment(server), runs, lambda: server.refused)

    with PlutoServer() as first, PlutoServer() as second:
        yield [side(how, server) for how, server in zip(WAYS, (first, second), strict=True)]


SIDES: dict[str, Callable[[Path], Any]] = {"mlflow": mlflow_sides, "trackio": trackio_sides, "pluto": pluto_sides}


# Trackio has the quickest start.
@pytest.mark.parametrize(
    "name", [pytest.param("mlflow", marks=pytest.mark.wide), "trackio", pytest.param("pluto", marks=pytest.mark.wide)]
)
def test_a_run_has_what_the_bare_client_gives_it(tmp_path, name, subtests):
    with SIDES[name](tmp_path) as sides:
        run_both(sides, "run")
        for program in table_of(name).of("run"):
            with subtests.test(program.name):
                check(sides, program)


@pytest.mark.wide
@pytest.mark.parametrize("name", SIDES)
def test_a_run_ends_as_with_the_bare_client(tmp_path, name, subtests):
    with SIDES[name](tmp_path) as sides:
        for program in table_of(name).of("end"):
            with subtests.test(program.name):
                run_both(sides, "end", program.name)
                check(sides, program)

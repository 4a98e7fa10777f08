"""The same for MLflow, Trackio and Pluto: rows, params, tags, artifacts and status."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.backends import pluto_environment
from support.mlflow_server import MlflowServer
from support.pluto_server import PlutoServer

from parity import openings, seen
from parity.compare import WAYS, Kinds, Side, Sides, check, run_both
from parity.table import table_of

PROJECTS = {"bare": openings.BARE_PROJECT, "decorated": openings.PROJECT}


@contextlib.contextmanager
def mlflow_sides(directory: Path) -> Iterator[Sides]:
    with MlflowServer(directory) as server:

        def runs(how: str, name: str) -> list[seen.Seen]:
            found = [run for run in server.runs(PROJECTS[how]) if run.name in (name, f"child-of-{name}")]
            found.sort(key=lambda run: run.name != name)
            return [seen.mlflow(run, server.artifacts(run)) for run in found]

        yield tuple(  # type: ignore[misc]
            Side(
                how,
                "mlflow",
                directory / how,
                {"MLFLOW_TRACKING_URI": server.url},
                lambda name, how=how: runs(how, name),
            )
            for how in WAYS
        )


@contextlib.contextmanager
def trackio_sides(directory: Path) -> Iterator[Sides]:
    def runs(how: str, name: str) -> list[seen.Seen]:
        return [run for found, run in seen.trackio(directory / how / "trackio", PROJECTS[how]) if found == name]

    yield tuple(  # type: ignore[misc]
        Side(
            how,
            "trackio",
            directory / how,
            {"TRACKIO_DIR": str(directory / how / "trackio")},
            lambda name, how=how: runs(how, name),
        )
        for how in WAYS
    )


@contextlib.contextmanager
def pluto_sides(directory: Path) -> Iterator[Sides]:
    with PlutoServer() as first, PlutoServer() as second:
        yield tuple(  # type: ignore[misc]
            Side(
                how,
                "pluto",
                directory / how,
                pluto_environment(server),
                lambda name, server=server: [seen.pluto(run) for run in server.runs if run.name == name],
                lambda server=server: server.refused,
            )
            for how, server in zip(WAYS, (first, second), strict=True)
        )


SIDES: dict[str, Callable[[Path], Any]] = {"mlflow": mlflow_sides, "trackio": trackio_sides, "pluto": pluto_sides}


@pytest.fixture(scope="module")
def services(tmp_path_factory):
    """Each service, started when the first program asks for it."""
    with contextlib.ExitStack() as stack:

        class Services(dict[str, Kinds]):
            def __missing__(self, name: str) -> Kinds:
                sides = stack.enter_context(SIDES[name](tmp_path_factory.mktemp(name)))
                self[name] = Kinds(lambda: sides)
                return self[name]

        yield Services()


# Trackio has the quickest start.
@pytest.mark.parametrize(
    "name", [pytest.param("mlflow", marks=pytest.mark.wide), "trackio", pytest.param("pluto", marks=pytest.mark.wide)]
)
def test_a_run_has_what_the_bare_client_gives_it(services, name, subtests):
    for program in table_of(name).of("run"):
        with subtests.test(program.name):
            check(services[name]["run"], program)


@pytest.mark.wide
@pytest.mark.parametrize("name", SIDES)
def test_a_run_ends_as_with_the_bare_client(services, name, subtests):
    for program in table_of(name).of("end"):
        with subtests.test(program.name):
            run_both(services[name]["run"], "end", program.name)
            check(services[name]["run"], program)

"""The services behind the trackers, for tests that are the same for all: what to tell a job, and what arrived."""

from __future__ import annotations

import json
import re
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from support import jobs, pluto_server
from support.mlflow_server import GROUP_TAG, MlflowServer, StoredRun
from support.pluto_server import PlutoServer
from support.wandb_server import WandbServer

Status = Literal["running", "finished", "failed", "killed"]
EXAMPLES = Path(__file__).parents[2] / "examples"


@dataclass(frozen=True)
class Kept:
    """A run as its service has it.

    Attributes:
        id: The id, as plans have it.
        points: How often there is which value of which key: of the keys that `conformance_job.py` logs.
        status: What the service says of it.
        ends: How often the service was told of the run's end; None where that leaves no trace.
        config: What was passed as the run's config, and what the library adds.
    """

    id: str
    points: Counter[tuple[str, int]]
    status: Status
    ends: int | None = None
    group: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)


class Backend(Protocol):
    """One service, from `with` to the end of its block.

    Attributes:
        name: The tracker's name.
        package: What must not be imported on ranks without a run; empty for nothing.
        can_degrade: Whether a job goes on where the service is not there.
    """

    name: str
    package: str
    can_degrade: bool

    def environment(self) -> dict[str, str]:
        """Variables that lead a job's client to the service."""

    def missing(self, directory: Path) -> dict[str, str]:
        """Variables that lead it to an address without a service."""

    def runs(self, project: str) -> list[Kept]:
        """The runs that the service has."""


def points(rows: list[Mapping[str, Any]]) -> Counter[tuple[str, int]]:
    """The values of the keys that `conformance_job.py` logs, of roles and of pulses, in rows of any shape."""
    kept = re.compile(r"rank|nodes/|[\w-]+/rank\d+$").match
    return Counter((key, int(value)) for row in rows for key, value in row.items() if kept(key))


class _OfServer:
    def __init__(self, server: Any) -> None:
        self._server = server


class WandbBackend(_OfServer):
    name, package, can_degrade = "wandb", "wandb", True

    def environment(self) -> dict[str, str]:
        return self._server.environment

    def missing(self, directory: Path) -> dict[str, str]:
        return {**self._server.environment, "WANDB_BASE_URL": f"http://127.0.0.1:{jobs.free_port()}"}

    def runs(self, project: str) -> list[Kept]:
        states: dict[str, Status] = {"finished": "finished", "failed": "failed", "preempted": "killed"}
        return [
            Kept(
                run.id,
                points(run.rows),
                states.get(run.state, "running"),
                len(run.exit_codes),
                run.group,
                run.config,
            )
            for run in self._server.runs
            if run.project == project
        ]


class MlflowBackend(_OfServer):
    name, package, can_degrade = "mlflow", "mlflow", True

    def environment(self) -> dict[str, str]:
        return {"MLFLOW_TRACKING_URI": self._server.url}

    def missing(self, directory: Path) -> dict[str, str]:
        return {"MLFLOW_TRACKING_URI": f"http://127.0.0.1:{jobs.free_port()}"}

    def runs(self, project: str) -> list[Kept]:
        return [self._kept(run, str(run.id)) for run in self._server.runs(project)]

    def _kept(self, run: StoredRun, run_id: str) -> Kept:
        states: dict[str, Status] = {"FINISHED": "finished", "FAILED": "failed", "KILLED": "killed"}
        logged = points([{key: value} for key, value, *_ in run.rows])
        group = run.tags.get(GROUP_TAG, "")
        return Kept(run_id, logged, states.get(run.status, "running"), group=group, config=run.config)


class JsonlBackend:
    """The documented example of a third party's tracker, installed beside the library."""

    name, package, can_degrade = "jsonl", "", False

    def __init__(self, directory: Path) -> None:
        self._directory, self._installed = directory / "runs", directory / "installed"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
        subprocess.run([*pip, "--target", self._installed, EXAMPLES / "jsonl_tracker"], check=True, timeout=300)

    def environment(self) -> dict[str, str]:
        return {"JSONL_DIR": str(self._directory), "PYTHONPATH": jobs.search_path(self._installed)}

    def missing(self, directory: Path) -> dict[str, str]:
        (directory / "a-file").touch()
        return {**self.environment(), "JSONL_DIR": str(directory / "a-file")}

    def runs(self, project: str) -> list[Kept]:
        return [self._kept(path) for path in sorted((self._directory / project).glob("*.jsonl"))]

    def _kept(self, path: Path) -> Kept:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        codes = [line["exit_code"] for line in lines if "exit_code" in line]
        told = [line for line in lines if "config" in line]
        status: Status = "running" if not codes else {0: "finished", 143: "killed"}.get(codes[-1], "failed")
        return Kept(path.stem, points(lines), status, len(codes), told[-1]["group"] or "", told[-1]["config"])


class TrackioBackend:
    """Trackio's files, read without Trackio."""

    name, package, can_degrade = "trackio", "trackio", True

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def environment(self) -> dict[str, str]:
        return {"TRACKIO_DIR": str(self.directory)}

    def missing(self, directory: Path) -> dict[str, str]:
        (directory / "a-file").touch()
        return {"TRACKIO_DIR": str(directory / "a-file" / "trackio")}

    def runs(self, project: str) -> list[Kept]:
        path = self.directory / f"{project}.db"
        if not path.exists():
            return []
        with closing(sqlite3.connect(path)) as database:
            metrics = database.execute("SELECT run_id, metrics FROM metrics").fetchall()
            configs = database.execute("SELECT run_id, config FROM configs").fetchall()
        rows: dict[str, list[Mapping[str, Any]]] = {run_id: [] for run_id, _ in [*configs, *metrics]}
        for run_id, row in metrics:
            rows[run_id].append(json.loads(row))
        told = {run_id: json.loads(config) for run_id, config in configs}
        return [
            Kept(run_id, points(rows[run_id]), config["tracking_init"]["status"], None, config["_Group"] or "", config)
            for run_id, config in ((run_id, told[run_id]) for run_id in rows)
        ]


class PlutoBackend(_OfServer):
    name, package, can_degrade = "pluto", "pluto", True

    def environment(self) -> dict[str, str]:
        return pluto_environment(self._server)

    def missing(self, directory: Path) -> dict[str, str]:
        return {**self.environment(), **pluto_server.urls(f"http://127.0.0.1:{jobs.free_port()}")}

    def runs(self, project: str) -> list[Kept]:
        return [self._kept(run) for run in self._server.runs if run.project == project]

    def _kept(self, run: pluto_server.RecordedRun) -> Kept:
        states: dict[str, Status] = {"COMPLETED": "finished", "FAILED": "failed", "TERMINATED": "killed"}
        group = next((tag.removeprefix("group:") for tag in run.tags if tag.startswith("group:")), "")
        assert run.duplicates == 0
        status = states.get(run.status, "running")
        return Kept(run.id, points(run.rows), status, len(run.statuses), group, run.config)


def pluto_environment(server: PlutoServer) -> dict[str, str]:
    """The variables that lead a job's client to `server`; and to the client, which is installed beside the others."""
    return {**server.environment, "PYTHONPATH": jobs.search_path(Path(sys.prefix) / "pluto")}


@contextmanager
def _served(server: Any, backend: Callable[[Any], Backend]) -> Iterator[Backend]:
    with server:
        yield backend(server)


BACKENDS: dict[str, Callable[[Path], Any]] = {
    "wandb": lambda directory: _served(WandbServer(), WandbBackend),
    "pluto": lambda directory: _served(PlutoServer(), PlutoBackend),
    "mlflow": lambda directory: _served(MlflowServer(directory), MlflowBackend),
    "trackio": lambda directory: nullcontext(TrackioBackend(directory / "trackio")),
    "jsonl": lambda directory: nullcontext(JsonlBackend(directory)),
}

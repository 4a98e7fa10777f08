"""What a service has of a run, by aspects that are equal for two programs which do the same."""

from __future__ import annotations

import contextlib
import json
import re
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from support.mlflow_server import StoredRun as MlflowRun
from support.pluto_server import RecordedRun as PlutoRun
from support.wandb_store import RecordedRun

Seen = dict[str, Any]
# What W&B measures: two runs differ in it.
_MEASURED = {"_timestamp", "_runtime", "_wandb"}
# Files that tell of the process and of what is compared already. A run that ends at once may lack some of them.
_TOLD = re.compile(r"wandb-metadata\.json|config\.yaml|requirements\.txt|wandb-summary\.json|output\.log|diff\.patch")
# Pluto's metrics of the machine.
_SYSTEM = re.compile("sys/").match
# Ids of versions of artifacts, and addresses of objects.
_RANDOM = re.compile(r"(?<=wandb-client-artifact://)\w+|(?<= at 0x)[0-9a-f]+")


def wandb(run: RecordedRun) -> Seen:
    """A run that W&B has."""
    given = run.raw_config.get("_wandb", {}).get("value", {})
    return {
        "place": (run.entity, run.project),
        "name": re.sub(r"^recorded-\d+$", "generated", run.name),
        "group": run.group,
        "tags": run.tags,
        "notes": run.notes,
        "job_type": run.job_type,
        "config": run.config,
        "rows": [_without_measured(row) for row in run.rows],
        "overwritten": run.rows_overwritten + run.rows_after_completion,
        "summary": _without_measured(run.summary),
        "axes": _named_axes(given.get("m") or []),
        "charts": given.get("visualize"),
        "files": {name: content for name, content in run.files.items() if not _TOLD.fullmatch(name)},
        "artifacts": sorted(
            ({**vars(one), "aliases": sorted(one.aliases)} for one in run.versions.values()),
            key=lambda one: (one["type"], one["name"]),
        ),
        "alerts": run.alerts,
        "console": [line[line.index("SAID") :] for line in run.log if "SAID" in line],
        "state": run.state,
        "exit_codes": run.exit_codes,
    }


def mlflow(run: MlflowRun, artifacts: Path) -> Seen:
    """A run that MLflow's server has, with the folder of its artifacts."""
    files = [path for path in artifacts.rglob("*") if path.is_file()]
    return {
        "tags": {
            key: text for key, text in run.tags.items() if not key.startswith(("mlflow.", "flyteplugins_tracking."))
        },
        "notes": run.tags.get("mlflow.note.content", ""),
        "parent": "mlflow.parentRunId" in run.tags,
        "config": run.params,
        "rows": sorted((key, repr(value), step) for key, value, step, _ in run.rows),
        "files": {str(path.relative_to(artifacts)): path.read_bytes() for path in files},
        "state": run.status,
    }


def trackio(directory: Path, project: str) -> Iterator[tuple[str, Seen]]:
    """The runs in Trackio's database, by their names."""
    path = directory / f"{project}.db"
    if not path.exists():
        return
    with contextlib.closing(sqlite3.connect(path)) as database:
        configs = database.execute("SELECT run_name, config FROM configs").fetchall()
        metrics = database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id").fetchall()
        tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        alerts = (
            database.execute("SELECT run_name, title, text, level FROM alerts").fetchall() if "alerts" in tables else []
        )
    for name in {run for run, *_ in [*configs, *metrics]}:
        config = next((json.loads(text) for run, text in configs if run == name), {})
        yield (
            name,
            {
                "config": {key: value for key, value in config.items() if not key.startswith("_")},
                "group": config.get("_Group"),
                "rows": [(step, json.loads(row)) for run, step, row in metrics if run == name],
                "alerts": [alert for run, *alert in alerts if run == name],
            },
        )


def pluto(run: PlutoRun) -> Seen:
    """A run that Pluto's server has."""
    return {
        "tags": sorted(run.tags),
        "notes": run.notes,
        "config": run.config,
        "rows": [(line["step"], line["data"]) for line in run.lines if not _SYSTEM(next(iter(line["data"]), ""))],
        "names": {kind: sorted(name for name in names if not _SYSTEM(name)) for kind, names in run.names.items()},
        "data": sorted((str(one.get("logName")), str(one.get("data"))) for one in run.data),
        "state": run.status,
    }


def differences(bare: Mapping[str, Any], decorated: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What differs, and both sides of it: an aspect, or a key of one that is a mapping, as `config/lr`."""
    found = {}
    for aspect in {**bare, **decorated}:
        sides = [side.get(aspect) for side in (bare, decorated)]
        if all(isinstance(side, dict) for side in sides):
            keys = {**sides[0], **sides[1]}
            pairs = {f"{aspect}/{key}": tuple(side.get(key, "not there") for side in sides) for key in keys}
        else:
            pairs = {aspect: tuple(sides)}
        found.update({name: pair for name, pair in pairs.items() if canonical(pair[0]) != canonical(pair[1])})
    return found


def canonical(value: Any) -> str:
    """A text that is equal for equal values: NaN is equal to NaN, and 1 not to True. Mappings have no order."""
    return _RANDOM.sub("random", repr(_sorted(value)))


def _sorted(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _sorted(value[key]) for key in sorted(value, key=str)}
    return [_sorted(item) for item in value] if isinstance(value, (list, tuple)) else value


def _named_axes(axes: list[dict[str, Any]]) -> dict[str, Any]:
    """The metrics that are defined, by their names: the protocol numbers them, in an order that is no promise."""
    name = {number: axis.get("1") or axis.get("2") for number, axis in enumerate(axes, start=1)}
    return {str(name[n]): {**axis, "5": name.get(axis.get("5"))} for n, axis in enumerate(axes, start=1)}


def _without_measured(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in _MEASURED}

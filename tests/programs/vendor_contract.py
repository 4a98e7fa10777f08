"""Look up every private name that a tracker uses, with the real client and an open run. Prints what is missing as JSON.

Arguments: the tracker, and the distribution whose version is tested.
"""

from __future__ import annotations

import functools
import json
import logging
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from typing import Any

from flyteplugins_tracking import TrackerNotInstalledError, get_run, tracking_init
from flyteplugins_tracking.trackers.vendor_parts import Part, VendorParts, numbers


def pluto_objects(run: Any) -> dict[str, Any]:
    return {"op": run, "settings": run.settings}


def trackio_objects(run: Any) -> dict[str, Any]:
    return {"run": run}


def mlflow_objects(run: Any) -> dict[str, Any]:
    return {"data": run.data}


OBJECTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "pluto": pluto_objects,
    "trackio": trackio_objects,
    "mlflow": mlflow_objects,
}


def owner_of(part: Part) -> tuple[Any, str]:
    module, _, names = part.path.partition(":")
    *parents, name = names.split(".")
    return functools.reduce(getattr, parents, import_module(module)), name


def missing_names(parts: VendorParts, objects: dict[str, Any], installed: str) -> list[str]:
    """Return the names that are not there, and should be in this version."""
    missing = []
    for part in parts.parts.values():
        if part.since and numbers(installed) < numbers(part.since):
            continue
        owner, name = (
            owner_of(part) if part.is_static else (objects[part.path.partition(".")[0]], part.path.partition(".")[2])
        )
        if not hasattr(owner, name):
            missing.append(part.path)
    return missing


def without(part: Part, call: Callable[[], Any]) -> Any:
    """Call a function while a version without this name is installed, so to speak."""
    owner, name = owner_of(part)
    value = vars(owner)[name]
    delattr(owner, name)
    try:
        return call()
    finally:
        setattr(owner, name, value)


def refused(parts: VendorParts) -> list[str]:
    """Return the names without which `require` raises one error that says the name and the versions that work."""
    names = []
    for part in parts.parts.values():
        if part.is_static and not part.loss:
            try:
                without(part, parts.require)
            except TrackerNotInstalledError as error:
                if part.path.replace(":", ".") in str(error) and parts.requirement in str(error):
                    names.append(part.path)
    return names


def warned(parts: VendorParts) -> list[str]:
    """Return the optional names whose absence is one warning, which names the feature that is lost."""
    names = []
    for part in parts.parts.values():
        if part.is_static and part.loss:
            records: list[logging.LogRecord] = []
            handler = logging.Handler()
            handler.emit = records.append  # type: ignore[method-assign]
            logger = logging.getLogger("flyteplugins_tracking.trackers.vendor_parts")
            logger.addHandler(handler)
            found = [without(part, functools.partial(parts.get, part.path)) for _ in range(2)]
            logger.removeHandler(handler)
            if found == [None, None] and [part.loss in record.getMessage() for record in records] == [True]:
                names.append(part.path)
    return names


def main(tracker: str, distribution: str) -> None:
    parts: VendorParts = import_module(f"flyteplugins_tracking.trackers.{tracker}.vendor").PARTS
    result: dict[str, Any] = {"version": version(distribution)}

    @tracking_init(tracker=tracker, project="contract", init_timeout_s=120)
    def train() -> None:
        run = get_run()
        run.log({"loss": 1})
        result["missing"] = missing_names(parts, OBJECTS[tracker](run), result["version"])

    train()
    static = [part for part in parts.parts.values() if part.is_static]
    result["not refused"] = sorted({part.path for part in static if not part.loss} - set(refused(parts)))
    result["not warned"] = sorted({part.path for part in static if part.loss} - set(warned(parts)))
    print("CONTRACT", json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Find or create the run on the server. MLflow makes the ids of runs itself, so the library's ids are tags."""

from __future__ import annotations

import functools
import json
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flyteplugins_tracking._util.plain import flat
from flyteplugins_tracking.errors import TrackerUnavailableError
from flyteplugins_tracking.trackers.base import RunRequest
from flyteplugins_tracking.trackers.client import (
    ended_if_interrupted,
    run_config,
    status_of,
)
from flyteplugins_tracking.trackers.config import OWN
from flyteplugins_tracking.trackers.mlflow import GROUP_TAG, ID_TAG, vendor
from flyteplugins_tracking.trackers.mlflow.vendor import Service

logger = logging.getLogger(__name__)

# Tags with which runs are not found.
CONFIG_TAG = "flyteplugins_tracking.config"
RESUMED_TAG = "flyteplugins_tracking.resumed"
# What the tags begin with that have values of params which an earlier attempt has set otherwise.
PARAMS_TAG = f"{OWN}.params."
RUN_ID_VARIABLE = "MLFLOW_RUN_ID"
# https://mlflow.org/docs/latest/ml/tracking/#system_tags
_NOTE_TAG = "mlflow.note.content"
# The limit of servers before 2.10.
LONGEST_TAG = 5000
LONGEST_PARAM = 6000


@dataclass(frozen=True)
class Opened:
    """A run that was found or created.

    Attributes:
        run: MLflow's own object of it.
        is_resumed: Whether it existed before this attempt of the job.
    """

    run: Any
    is_resumed: bool


def open_run(request: RunRequest, service: Service, run_id: str) -> Opened:
    """Create the run with this id of the library, or resume it.

    Only one rank creates it: a new run cannot be found immediately, so several ranks would each create one.

    Raises:
        UnavailableError: The server does not answer in time.
        RejectedError: The server rejects a request.
        TrackerUnavailableError: The rank that creates the run has not created it in time.
    """
    run = _chosen(request, service)
    experiment_id = run.info.experiment_id if run is not None else _experiment_id(request, service)
    with ended_if_interrupted(request, functools.partial(_end_interrupted, request, service, experiment_id, run_id)):
        if not request.plan.ends_run:
            run = run or _awaited(request, service, experiment_id, run_id)
            return Opened(run, RESUMED_TAG in run.data.tags)
        tags, name = _tags(request, run_id), request.config.name or request.plan.run_id
        if run is None:
            run, is_new = _find_or_create(service, experiment_id, run_id, name, tags)
            if is_new:
                return Opened(run, False)
        tags[RESUMED_TAG] = "true"
        service.persist(lambda client: client.log_batch(run.info.run_id, tags=vendor.run_tags(tags), synchronous=True))
        service.persist(lambda client: client.update_run(run.info.run_id, "RUNNING", request.config.name))
        return Opened(run, True)


def _end_interrupted(
    request: RunRequest, service: Service, experiment_id: str, run_id: str, exit_code: int, limit_s: float
) -> None:
    """End the run that is being opened, if the server has it, or has been asked to create it."""
    if not request.plan.ends_run:
        return
    ending = Service(service.uri, time.monotonic() + limit_s, is_known=True)

    def find() -> Any:
        return _find(ending, experiment_id, run_id)

    run = ending.until(find) if service.creates else find()
    if run is not None:
        ending.set_status(run.info.run_id, status_of(exit_code).upper())


def end_run(request: RunRequest, uri: str, opened: Opened, exit_code: int, limit_s: float) -> None:
    """Send a run's status to the server, if this rank does.

    Raises:
        UnavailableError: The server does not answer in time.
        RejectedError: The run does not exist anymore.
    """
    if not request.plan.ends_run:
        return
    service = Service(uri, time.monotonic() + limit_s, is_known=True)
    service.set_status(opened.run.info.run_id, status_of(exit_code).upper())


def params(config: Mapping[str, Any]) -> dict[str, str]:
    """Return a config as MLflow's params: strings by flat keys."""
    return {key: str(value)[:LONGEST_PARAM] for key, value in flat(config).items()}


def _chosen(request: RunRequest, service: Service) -> Any:
    """Return the run with the server's id in MLFLOW_RUN_ID, if the request is for that one."""
    run_id = os.environ.get(RUN_ID_VARIABLE)
    if not run_id or request.plan.run_id != run_id:
        return None
    return service.persist(lambda client: client.get_run(run_id))


def _experiment_id(request: RunRequest, service: Service) -> str:
    """Return the experiment that the user asks for, or MLflow's choice by its variables or `set_experiment`."""
    options, env = request.config.options, os.environ
    name = options.get("experiment_name") or request.config.project
    if options.get("experiment_id") is not None:
        return str(options["experiment_id"])
    experiment_id = vendor.active_experiment_id() or env.get("MLFLOW_EXPERIMENT_ID")
    if name is None and experiment_id:
        return str(experiment_id)
    name = name or env.get("MLFLOW_EXPERIMENT_NAME")
    if not name:
        return "0"

    def find_or_create(client: Any) -> Any:
        found = client.get_experiment_by_name(name)
        return found or client.get_experiment(client.create_experiment(name))

    return str(service.persist(find_or_create).experiment_id)


def _awaited(request: RunRequest, service: Service, experiment_id: str, run_id: str) -> Any:
    run = service.until(lambda: _find(service, experiment_id, run_id))
    if run is None:
        raise TrackerUnavailableError(
            f"MLflow: experiment {experiment_id} has no run with the tag {ID_TAG}={run_id} after init_timeout_s="
            f"{request.config.init_timeout_s:g}: the rank that creates it has not done so."
        )
    return run


def _find_or_create(
    service: Service, experiment_id: str, run_id: str, name: str | None, tags: Mapping[str, str]
) -> tuple[Any, bool]:
    """Return the run, and whether it is new."""

    def once() -> tuple[Any, bool]:
        run = _find(service, experiment_id, run_id)
        return (run, False) if run is not None else (_create(service, experiment_id, name, tags), True)

    return service.until(once)


def _find(service: Service, experiment_id: str, run_id: str) -> Any:
    """Return the run with this id of the library; None if there is none.

    A request to create it that arrives late makes a second run. This job's is the one that was asked for last.
    """
    condition, order = f"tags.`{ID_TAG}` = '{run_id}'", ["attributes.start_time DESC"]
    runs = service.ask(lambda client: client.search_runs([experiment_id], condition, max_results=1, order_by=order))
    return next(iter(runs), None)


def _create(service: Service, experiment_id: str, name: str | None, tags: Mapping[str, str]) -> Any:
    """Create a run as `mlflow.start_run` does, with tags that say where it comes from."""
    known = vendor.tags_of_start_run(tags)
    if name:
        known["mlflow.runName"] = name
    service.creates = True
    return service.ask(lambda client: client.create_run(experiment_id, tags=known, run_name=name))


def _tags(request: RunRequest, run_id: str) -> dict[str, str]:
    config = request.config
    tags = dict(tag.partition("=")[::2] for tag in config.tags or ())
    # The whole config as JSON. If that is too long for a tag, without the user's config, which is in the params.
    text = json.dumps(run_config(request))
    if len(text) > LONGEST_TAG:
        text = json.dumps(dict(request.run_metadata))[:LONGEST_TAG]
    own_tags = {
        ID_TAG: run_id,
        GROUP_TAG: request.group,
        CONFIG_TAG: text,
        _NOTE_TAG: config.notes,
    }
    return {**tags, **{key: value for key, value in own_tags.items() if value is not None}}

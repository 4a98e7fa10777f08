"""Which of an MLflow server's runs is meant. It makes the ids of runs itself: ours are tags."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flyteplugins_tracking.errors import ConfigError, TrackerUnavailableError
from flyteplugins_tracking.trackers.base import RunRequest
from flyteplugins_tracking.trackers.client import run_config
from flyteplugins_tracking.trackers.mlflow.links import GROUP_TAG, ID_TAG
from flyteplugins_tracking.trackers.mlflow.service import RefusedError, Service, entities

logger = logging.getLogger(__name__)

# What else than the tags that runs are found by is said of a run by tags.
PARENT_TAG = "flyteplugins_tracking.parent_of"
CONFIG_TAG = "flyteplugins_tracking.config"
ATTEMPTS_TAG = "flyteplugins_tracking.attempts"
RUN_ID_VARIABLE = "MLFLOW_RUN_ID"
# https://mlflow.org/docs/latest/ml/tracking/#system_tags
_PARENT_ID_TAG, _NOTE_TAG = "mlflow.parentRunId", "mlflow.note.content"
# Servers before 2.10 keep no more in a tag.
_LONGEST_TAG = 5000
_LONGEST_PARAM = 6000
_ENDED_BADLY = ("FAILED", "KILLED")


@dataclass(frozen=True)
class Opened:
    """A run that has been found or made.

    Attributes:
        run: MLflow's own description of it.
        is_resumed: Whether it was there before this attempt of the job.
        parent_id: The server's id of the run that stands for its group; None where there is none.
    """

    run: Any
    is_resumed: bool
    parent_id: str | None = None


def open_run(request: RunRequest, service: Service, run_id: str) -> Opened:
    """Make the run with this id of ours, or go on with it.

    One rank makes it: several that ask for it at once would each make one, since a new run is not found at once.

    Raises:
        UnavailableError: The server does not answer in time.
        RefusedError: It does not take what is asked of it.
        TrackerUnavailableError: The rank that makes the run has not made it in time.
        ConfigError: The experiment or the run cannot be logged to.
    """
    chosen = _chosen(request, service)
    experiment_id = chosen.info.experiment_id if chosen is not None else _experiment_id(request, service)
    parent = _parent(request, service, experiment_id)
    parent_id = None if parent is None else parent.info.run_id
    if not request.plan.primary:
        run = chosen or _awaited(request, service, experiment_id, ID_TAG, run_id)
        return Opened(run, ATTEMPTS_TAG in run.data.tags, parent_id)
    tags, name = _tags(request, run_id, parent_id), request.config.name or request.plan.run_id
    found = chosen
    if found is None:
        found, is_new = _found_or_made(service, experiment_id, (ID_TAG, run_id), name, tags)
        if is_new:
            return Opened(found, False, parent_id)
    attempts = found.data.tags.get(ATTEMPTS_TAG, "1")
    tags[ATTEMPTS_TAG] = str(int(attempts) + 1 if attempts.isdecimal() else 2)
    service.persist("log_batch", found.info.run_id, [], [], entities("RunTag", tags))
    _set_status(service, found, "RUNNING", request.config.name)
    return Opened(found, True, parent_id)


def end_run(service: Service, opened: Opened, exit_code: int) -> None:
    """Tell the server how a run has ended; and its group, where it was the last of it.

    Raises:
        UnavailableError: The server does not answer in time.
        RefusedError: The run is not there any more.
    """
    status = "FINISHED" if exit_code == 0 else "KILLED" if exit_code in (130, 143) else "FAILED"
    _set_status(service, opened.run, status)
    if opened.parent_id is not None:
        _end_parent(service, opened.parent_id, opened.run.info.experiment_id)


def params(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """A config as MLflow's params: texts by keys without levels."""
    flat: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            flat.update(params(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = str(value)[:_LONGEST_PARAM]
    return flat


def new_params(request: RunRequest, opened: Opened) -> dict[str, str]:
    """The params that the run gains: MLflow keeps the first value of each."""
    config = request.config.config
    wanted = params(config) if isinstance(config, Mapping) else {}
    there = opened.run.data.params
    changed = sorted(key for key, value in wanted.items() if there.get(key, value) != value)
    if changed:
        logger.warning(
            "MLflow: run %s goes on, and a param keeps its first value: that of %s is another one now. The tag %s "
            "has the new config",
            request.plan.run_id,
            ", ".join(changed),
            CONFIG_TAG,
        )
    return {key: value for key, value in wanted.items() if key not in there}


def next_step(run: Any, prefix: str = "") -> int:
    """The step behind the largest one that the run has, of keys that begin with `prefix`."""
    steps = [metric.step for metric in getattr(run.data, "_metric_objs", ()) if metric.key.startswith(prefix)]
    return max(steps, default=-1) + 1


def _chosen(request: RunRequest, service: Service) -> Any:
    """The very run that MLFLOW_RUN_ID names, if it is that one that is asked for."""
    run_id = os.environ.get(RUN_ID_VARIABLE)
    if not run_id or request.plan.run_id != run_id:
        return None
    try:
        run = service.persist("get_run", run_id)
    except RefusedError as error:
        raise ConfigError(f"{RUN_ID_VARIABLE}={run_id} is no run of this server: {error}") from None
    if run.info.lifecycle_stage == "deleted":
        raise ConfigError(f"{RUN_ID_VARIABLE}={run_id} is a deleted run: restore it, or unset the variable")
    return run


def _experiment_id(request: RunRequest, service: Service) -> str:
    """The experiment that was asked for; else MLflow's own choice, by its variables or `set_experiment`."""
    from mlflow.tracking import fluent

    options, env = request.config.options, os.environ
    name = options.get("experiment_name") or request.config.project
    if options.get("experiment_id") is not None:
        return str(options["experiment_id"])
    if name is None and (fluent._active_experiment_id or env.get("MLFLOW_EXPERIMENT_ID")):
        return str(fluent._active_experiment_id or env["MLFLOW_EXPERIMENT_ID"])
    name = name or env.get("MLFLOW_EXPERIMENT_NAME")
    if not name:
        return "0"
    experiment = service.until(lambda: service.call("get_experiment_by_name", name) or _new_experiment(service, name))
    if experiment.lifecycle_stage == "deleted":
        raise ConfigError(f"the experiment {name!r} is deleted: restore it, or choose another one")
    return str(experiment.experiment_id)


def _new_experiment(service: Service, name: str) -> Any:
    try:
        service.call("create_experiment", name, None, [])
    except RefusedError as error:
        if error.code != "RESOURCE_ALREADY_EXISTS":  # another rank's
            raise
    return service.call("get_experiment_by_name", name)


def _parent(request: RunRequest, service: Service, experiment_id: str) -> Any:
    """In "new", the run that stands for the group. Its first rank makes it."""
    group = request.config.group or request.plan.group
    if request.config.run_mode != "new" or group is None:
        return None
    if group == os.environ.get(RUN_ID_VARIABLE):
        parent = service.persist("get_run", group)
    elif _is_first(request):
        parent, _ = _found_or_made(service, experiment_id, (PARENT_TAG, group), group, {PARENT_TAG: group})
    else:
        parent = _awaited(request, service, experiment_id, PARENT_TAG, group)
    if parent.info.status != "RUNNING":
        _set_status(service, parent, "RUNNING")
    return parent


def _is_first(request: RunRequest) -> bool:
    info = request.info
    return info is None or (info.local_rank if request.config.rank_scope == "worker" else info.rank) == 0


def _end_parent(service: Service, parent_id: str, experiment_id: str) -> None:
    """The last of a group ends it, as badly as the worst of it has ended.

    Two that end at once both find that all have ended, and say the same.
    """
    children = f"tags.`{_PARENT_ID_TAG}` = '{parent_id}' and attributes.status = "

    def has(status: str) -> bool:
        (runs,) = service.until(lambda: (_search(service, experiment_id, f"{children}'{status}'"),))
        return bool(runs)

    if has("RUNNING"):
        return
    worst = (status for status in _ENDED_BADLY if has(status))
    _set_status(service, service.persist("get_run", parent_id), next(worst, "FINISHED"))


def _awaited(request: RunRequest, service: Service, experiment_id: str, tag: str, value: str) -> Any:
    run = service.until(lambda: _find(service, experiment_id, tag, value))
    if run is None:
        raise TrackerUnavailableError(
            f"MLflow: experiment {experiment_id} has no run with the tag {tag}={value} after init_timeout_s="
            f"{request.config.init_timeout_s:g}: the rank that makes it has not done so."
        )
    return run


def _found_or_made(
    service: Service, experiment_id: str, tag: tuple[str, str], name: str | None, tags: Mapping[str, str]
) -> tuple[Any, bool]:
    """The run, and whether it is new."""

    def attempt() -> tuple[Any, bool]:
        found = _find(service, experiment_id, *tag)
        return (found, False) if found is not None else (_create(service, experiment_id, name, tags), True)

    run_and_is_new: tuple[Any, bool] = service.until(attempt)
    return run_and_is_new


def _find(service: Service, experiment_id: str, tag: str, value: str) -> Any:
    return next(iter(_search(service, experiment_id, f"tags.`{tag}` = '{value}'")), None)


def _search(service: Service, experiment_id: str, condition: str) -> Any:
    from mlflow.entities import ViewType

    # Where a request to create it has arrived late, after it was made again, there are two: the last asked for is ours.
    newest_first = ["attributes.start_time DESC"]
    return service.call("search_runs", [experiment_id], condition, ViewType.ACTIVE_ONLY, 1, newest_first, None)


def _create(service: Service, experiment_id: str, name: str | None, tags: Mapping[str, str]) -> Any:
    """As `mlflow.start_run`, which says where a run comes from by tags."""
    from mlflow.tracking.context.registry import resolve_tags

    known = resolve_tags(dict(tags))
    if name:
        known["mlflow.runName"] = name
    user = known.get("mlflow.user", "unknown")
    now_ms = time.time_ns() // 1_000_000
    return service.call("create_run", experiment_id, user, now_ms, entities("RunTag", known), name)


def _set_status(service: Service, run: Any, status: str, name: str | None = None) -> None:
    from mlflow.entities import RunStatus

    is_running = status == "RUNNING"
    # Of a run that goes on, MLflow wants an end all the same.
    end_ms = run.info.end_time if is_running else time.time_ns() // 1_000_000
    service.persist("update_run_info", run.info.run_id, RunStatus.from_string(status), end_ms, name)


def _tags(request: RunRequest, run_id: str, parent_id: str | None) -> dict[str, str]:
    config = request.config
    tags = dict(tag.partition("=")[::2] for tag in config.tags or ())
    group = config.group or request.plan.group
    ours = {
        ID_TAG: run_id,
        GROUP_TAG: group,
        CONFIG_TAG: _config_tag(request),
        _PARENT_ID_TAG: parent_id,
        _NOTE_TAG: config.notes,
    }
    return {**tags, **{key: value for key, value in ours.items() if value is not None}}


def _config_tag(request: RunRequest) -> str:
    """The whole config, as it is now. Where that is too much for a tag, the user's part is in the params alone."""
    whole = json.dumps(run_config(request))
    return whole if len(whole) <= _LONGEST_TAG else json.dumps(dict(request.facts))[:_LONGEST_TAG]

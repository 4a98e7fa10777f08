"""MLflow. The vendor's package is imported when a run is opened, and only then."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flyteplugins_tracking._rank.info import DistributedInfo
from flyteplugins_tracking._rank.plan import Page, has_primary, primary_rank_of
from flyteplugins_tracking._util.checks import check_flag, check_text
from flyteplugins_tracking._util.text import has_credentials
from flyteplugins_tracking.errors import ConfigError, TrackerUnavailableError
from flyteplugins_tracking.trackers.base import Handle, RunRequest, Tracker
from flyteplugins_tracking.trackers.config import TrackingConfig
from flyteplugins_tracking.trackers.diagnostics import Diagnosis

_TEXTS = ("tracking_uri", "experiment_name", "link_host")
# These characters would end the text in a condition of MLflow's search.
_NOT_IN_AN_ID = "'\"`\\%"


class MlflowTracker(Tracker):
    """Opens MLflow runs."""

    name = "mlflow"
    title = "MLflow"
    package = "mlflow"
    distribution = '"flyteplugins-tracking[mlflow]"'
    run_id_variables = ("MLFLOW_RUN_ID",)
    arguments = frozenset({*_TEXTS, "experiment_id", "log_system_metrics"})
    unsupported = {  # noqa: RUF012 as the protocol has it
        "media": "its metrics are numbers; files and figures are artifacts: mlflow.log_figure, mlflow.log_artifact",
        "sweeps": "it has none; nested runs of mlflow.start_run(nested=True) are children of the function's run",
        "config file": "its params are values: pass a mapping, or the file to mlflow.log_artifact",
        "download_logs": "its runs have no local files; artifacts are on the server",
    }

    def check(self, config: TrackingConfig) -> None:
        options = config.options
        for name in _TEXTS:
            check_text(name, options.get(name))
        if options.get("log_system_metrics") is not None:
            check_flag("log_system_metrics", options["log_system_metrics"])
        _check_addresses(options)
        _check_experiment(options)
        _check_id(config.id)
        _check_id(config.group)

    def page(self, config: TrackingConfig, page: Page | None) -> str | None:
        from flyteplugins_tracking.trackers.mlflow import links

        return links.page(config, page)

    def link(self, config: TrackingConfig, pages: Sequence[Page] | None) -> Mapping[str, str]:
        from flyteplugins_tracking.trackers.mlflow import links

        return links.link(config, pages)

    def export_run(self, run: Any) -> Mapping[str, Any] | None:
        from flyteplugins_tracking.trackers.mlflow.run import MlflowHandle

        handle = run._handle
        return {"id": handle.id, **handle.place} if isinstance(handle, MlflowHandle) else None

    def on_inactive_rank(self, config: TrackingConfig, info: DistributedInfo | None) -> Callable[[], object] | None:
        from flyteplugins_tracking.trackers.mlflow.vendor import await_first_run

        # On another node, the file may be another one, to which nobody writes.
        primary = primary_rank_of(info, config.run_mode, config.rank_scope, config.primary_rank)
        if info is not None and has_primary(info, config.rank_scope, primary, os.environ):
            await_first_run(config.options, config.init_timeout_s)
        if "mlflow" not in sys.modules:
            return None
        from flyteplugins_tracking.trackers.mlflow import vendor

        return vendor.without_autologging()

    def diagnose(self) -> Diagnosis:
        from flyteplugins_tracking.trackers.mlflow.diagnose import diagnose

        return diagnose()

    def open(self, request: RunRequest) -> Handle:
        # Imported here, so that a rank without a run does not load it.
        from flyteplugins_tracking.trackers.journal.local import LocalHandle, open_or_keep
        from flyteplugins_tracking.trackers.mlflow import fluent, vendor
        from flyteplugins_tracking.trackers.mlflow.run import to_be_sent

        _check_id(request.plan.run_id)
        vendor.PARTS.require()
        uri, place = _place(request.config.options.get("tracking_uri"))
        undo = fluent.use_credentials(request.read_secret())
        try:
            handle = open_or_keep(to_be_sent(request, place), self, lambda: self._open(request, uri, undo))
        except BaseException:
            undo()
            raise
        if isinstance(handle, LocalHandle):
            undo()
        return handle

    def _open(self, request: RunRequest, uri: str, undo: Callable[[], object]) -> Any:
        from flyteplugins_tracking.trackers.client import LOCAL_FILES, new_id
        from flyteplugins_tracking.trackers.mlflow.open import open_run
        from flyteplugins_tracking.trackers.mlflow.run import MlflowHandle
        from flyteplugins_tracking.trackers.mlflow.vendor import (
            RejectedError,
            Service,
            UnauthorizedError,
            UnavailableError,
        )

        run_id = request.plan.run_id or new_id()
        try:
            opened = open_run(request, Service(uri, request.deadline), run_id)
        except UnauthorizedError as error:
            raise TrackerUnavailableError(
                f"MLflow cannot be used: {error}. Set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or "
                "MLFLOW_TRACKING_TOKEN; or pass secret= to tracking_init."
            ) from None
        except UnavailableError as error:
            raise TrackerUnavailableError(
                f"MLflow cannot be used: {error}. Check tracking_uri= or MLFLOW_TRACKING_URI, and the network.",
                LOCAL_FILES,
            ) from None
        except RejectedError as error:
            raise TrackerUnavailableError(
                f"MLflow does not open the run: {error}. Check tracking_uri=, experiment_id= and the MLFLOW_* "
                "variables."
            ) from None
        return MlflowHandle(request, self, uri, opened, run_id, undo)


def _place(argument: str | None) -> tuple[str, dict[str, str]]:
    """Return the tracking URI; and as an argument too if the program has set it, and no argument or variable has."""
    import mlflow

    from flyteplugins_tracking.trackers.mlflow import vendor

    uri = str(mlflow.get_tracking_uri())
    is_set = argument is None and vendor.uri_set_by_program() is not None and not has_credentials(uri)
    return argument or uri, {"tracking_uri": uri} if is_set else {}


def _check_addresses(options: Mapping[str, Any]) -> None:
    host = options.get("link_host")
    if host is not None and not host.startswith(("https://", "http://")):
        raise ConfigError(f"link_host={host!r} must begin with https:// or http://, as in 'https://mlflow.example.com'")
    for name in ("tracking_uri", "link_host"):
        if options.get(name) and has_credentials(options[name]):
            raise ConfigError(
                f"{name}= holds a password, which would be pickled with the task: pass secret=..., or set "
                "MLFLOW_TRACKING_URI where the task runs"
            )


def _check_experiment(options: Mapping[str, Any]) -> None:
    experiment_id = options.get("experiment_id")
    if experiment_id is not None and (isinstance(experiment_id, bool) or not isinstance(experiment_id, (str, int))):
        raise ConfigError(f"experiment_id={experiment_id!r} must be a string or an integer")
    if experiment_id is not None and options.get("experiment_name") is not None:
        raise ConfigError("experiment_id= and experiment_name= name the experiment twice: pass one of them")


def _check_id(run_id: str | None) -> None:
    if run_id is not None and any(character in run_id for character in _NOT_IN_AN_ID):
        raise ConfigError(f"the id {run_id!r} must not contain any of {_NOT_IN_AN_ID}: it is a tag of the MLflow run")


TRACKER = MlflowTracker()

"""MLflow. The vendor's package is imported when a run is opened, and only then."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote, urlsplit

from flyteplugins_tracking._rank.info import DistributedInfo
from flyteplugins_tracking._rank.plan import Page
from flyteplugins_tracking._util.checks import check_flag, check_no_password, check_text
from flyteplugins_tracking._util.record import replace
from flyteplugins_tracking._util.text import has_credentials, without_credentials
from flyteplugins_tracking.errors import ConfigError
from flyteplugins_tracking.trackers.base import Handle, RunRequest, Tracker
from flyteplugins_tracking.trackers.config import TrackingConfig
from flyteplugins_tracking.trackers.diagnostics import Diagnosis
from flyteplugins_tracking.trackers.idle import keep_idle

# The tags by which runs are found.
ID_TAG = "flyteplugins_tracking.run_id"
GROUP_TAG = "flyteplugins_tracking.group"
_TEXTS = ("tracking_uri", "experiment_name", "link_host")
# https://mlflow.org/docs/latest/ml/tracking/#tracking-uri
SERVERS = ("http", "https", "databricks", "databricks-uc")


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
        if options.get("experiment_id") is not None and options.get("experiment_name") is not None:
            raise ConfigError("experiment_id= and experiment_name= name the experiment twice: pass one of them")
        for name in ("tracking_uri", "link_host"):
            fix = "pass secret=..., or set MLFLOW_TRACKING_URI where the task runs"
            check_no_password(f"{name}=", options.get(name), fix)

    def page(self, config: TrackingConfig, page: Page | None) -> str | None:
        # The server makes the ids of runs, so a run's own page is not known before the run exists. Its address is the
        # experiment's list of runs, filtered by the tag.
        host, experiment_id = _host(config), _experiment_id(config)
        if host is None or experiment_id is None:
            return host
        address = f"{host}/#/experiments/{_quoted(experiment_id)}/runs"
        if page is None:
            return address
        tag, value = (GROUP_TAG, config.group or page.id) if page.kind == "group" else (ID_TAG, page.id)
        return f"{address}?searchFilter={_quoted(f'tags.`{tag}` = ')}{_quoted(f'{chr(39)}{value}{chr(39)}')}"

    def place(self, config: TrackingConfig) -> Mapping[str, str | None]:
        name = config.options.get("experiment_name") or config.project or os.environ.get("MLFLOW_EXPERIMENT_NAME")
        return {"experiment": _experiment_id(config) or name, "server": _host(config)}

    def export_run(self, run: Any) -> Mapping[str, Any] | None:
        from flyteplugins_tracking.trackers.mlflow.run import MlflowHandle

        handle = run._handle
        return {"id": handle.id, **handle.arguments} if isinstance(handle, MlflowHandle) else None

    def on_inactive_rank(self, config: TrackingConfig, info: DistributedInfo | None) -> Callable[[], object]:
        from flyteplugins_tracking.trackers.mlflow import vendor

        # On another node, the file may be another one, to which nobody writes.
        is_of_node = config.rank_scope == "worker" or (info is not None and info.num_workers == 1)
        if info is not None and (is_of_node or config.primary_rank == info.worker_index == 0):
            vendor.await_first_run(config.options, config.init_timeout_s)
        undo = [vendor.without_autologging(), keep_idle(self.name, config, info)]
        return lambda: [step() for step in undo]

    def diagnose(self) -> Diagnosis:
        from flyteplugins_tracking.trackers.mlflow.diagnose import diagnose

        return diagnose()

    def open(self, request: RunRequest) -> Handle:
        # Imported here, so that a rank without a run does not load it.
        from contextlib import ExitStack
        from functools import partial

        from flyteplugins_tracking.trackers.client import ended_if_interrupted, new_id
        from flyteplugins_tracking.trackers.kept import open_or_keep
        from flyteplugins_tracking.trackers.mlflow import vendor
        from flyteplugins_tracking.trackers.mlflow.open import end_run, open_run
        from flyteplugins_tracking.trackers.mlflow.run import MlflowHandle, to_be_sent, use_credentials

        vendor.require()
        import mlflow

        uri, place = str(request.config.options.get("tracking_uri") or mlflow.get_tracking_uri()), {}
        if not request.config.options.get("tracking_uri") and vendor.uri_set_by_program() and not has_credentials(uri):
            place = {"tracking_uri": uri}  # no argument and no variable tells it to the process that sends rows later

        def open_handle() -> MlflowHandle:
            run_id = request.plan.run_id or new_id()
            opened = open_run(request, vendor.Service(uri, request.deadline), run_id)
            of_run = replace(request, plan=replace(request.plan, run_id=run_id))
            with ended_if_interrupted(of_run, partial(end_run, of_run, uri, opened)):
                return MlflowHandle(of_run, self, uri, opened, undo)

        with ExitStack() as undo:
            undo.callback(use_credentials(request.read_secret()))
            return open_or_keep(to_be_sent(request, place), self, open_handle)


def kind_of(uri: str) -> str:
    """Return what a tracking URI is of: one of `SERVERS`, "file" for a directory, or a database's name."""
    return urlsplit(uri).scheme.partition("+")[0] or (uri if uri in SERVERS else "file")


def run_page(config: TrackingConfig, uri: str, experiment_id: str, run_id: str) -> str | None:
    """Return the page of a run by the server's id; None if the address of the UI is not known."""
    host = _host(config, uri)
    return None if host is None else f"{host}/#/experiments/{experiment_id}/runs/{run_id}"


def _host(config: TrackingConfig, uri: str | None = None) -> str | None:
    """Return the address of the web pages: `link_host=`, or the tracking server."""
    server = uri or config.options.get("tracking_uri") or os.environ.get("MLFLOW_TRACKING_URI") or ""
    address = str(config.options.get("link_host") or server).rstrip("/")
    return without_credentials(address) if address.startswith(("https://", "http://")) else None


def _experiment_id(config: TrackingConfig) -> str | None:
    """Return the experiment's id if it is known. The UI has no pages by name."""
    options = config.options
    if options.get("experiment_id") is not None:
        return str(options["experiment_id"])
    is_named = options.get("experiment_name") or config.project or os.environ.get("MLFLOW_EXPERIMENT_NAME")
    return None if is_named else os.environ.get("MLFLOW_EXPERIMENT_ID")


def _quoted(text: str) -> str:
    """Quote a string for an address. Braces stay: Flyte replaces templates in them."""
    return quote(text, safe="{}")


TRACKER = MlflowTracker()

"""Trackio: runs in files of this machine, or on a server of one's own.

A run's key in Trackio is its id, which we give, so that ranks need not look for a run that another one has made. Its
name is only what Trackio shows. Trackio knows no status: it is in the run's config.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from flyteplugins_tracking._config.config import TrackingConfig
from flyteplugins_tracking._job.plan import Page
from flyteplugins_tracking.errors import ConfigError
from flyteplugins_tracking.trackers.base import Feature, Handle, RunRequest, Tracker
from flyteplugins_tracking.trackers.diagnostics import Examination
from flyteplugins_tracking.trackers.trackio.options import (
    EXIT_CODE,
    SPACE,
    STATUS,
    check_project,
    check_server,
    page_address,
    without_token,
)

# The parameters of trackio.init that the decorator does not take by name. A test compares.
INIT_ARGUMENTS = frozenset(
    {
        "auto_log_cpu",
        "auto_log_gpu",
        "bucket_id",
        "cpu_log_interval",
        "dataset_id",
        "embed",
        "gpu_log_interval",
        "private",
        "resume",
        "server_url",
        "settings",
        "space_id",
        "webhook_min_level",
        "webhook_url",
    }
)
# What of them is refused, whatever its value, and what is refused but for one value.
_REFUSED = dict.fromkeys(("space_id", "bucket_id", "dataset_id", "private"), SPACE)
_ONLY = {
    "embed": (False, "no dashboard is started by a training: run `trackio show`"),
    "resume": ("allow", "a run goes on where its id is there, and another id= is another run"),
}
# Trackio does nothing with it, and for W&B's it would be an error here.
_UNUSED = "settings"


class TrackioTracker(Tracker):
    """Opens Trackio runs.

    Attributes:
        came_here: When this process may first have logged, or has last ended a run, in seconds of `time.time`: rows
            before that are an earlier attempt's, and rows since then may be those that other ranks have just logged.
    """

    name = "trackio"
    title = "Trackio"
    package = "trackio"
    distribution = '"flyteplugins-tracking[trackio]"'
    arguments = INIT_ARGUMENTS - {_UNUSED}
    lacks: Mapping[Feature, str] = MappingProxyType(
        {
            "sweeps": "it has none",
            "config file": "trackio.init reads none",
            "allow_config": "a run has one config, and who writes it last replaces all of it",
            "download_logs": "the files of its runs are those of the whole project",
        }
    )

    def __init__(self) -> None:
        self.come()

    def come(self) -> None:
        """What is logged from now on may be of this attempt."""
        self.came_here = time.time()

    def check(self, config: TrackingConfig) -> None:
        """See `Tracker.check`."""
        for name, value in config.options.items():
            wanted, reason = _ONLY.get(name, (None, _REFUSED.get(name)))
            if reason is not None and value is not None and value != wanted:
                raise ConfigError(f"{name}={value!r} cannot be had with Trackio: {reason}")
        check_server(config.options.get("server_url"))
        check_project(config.project)
        if config.id is not None and "," in config.id:
            raise ConfigError(f"id={config.id!r}: Trackio's pages take a comma for the end of an id")
        for key in config.config if isinstance(config.config, Mapping) else ():
            if key.startswith("_") or key in (STATUS, EXIT_CODE):
                whose = "Trackio's own" if key.startswith("_") else "where the end of the run is told"
                raise ConfigError(f"config= has the key {key!r}, which is {whose}")

    def page(self, config: TrackingConfig, page: Page | None) -> str | None:
        """See `Tracker.page`."""
        url = config.options.get("server_url") or os.environ.get("TRACKIO_SERVER_URL")
        if not url:
            return None
        return page_address(without_token(url)[0], config.project, page.id if page and page.kind == "run" else None)

    def pass_on(self, run: Any) -> Mapping[str, Any] | None:
        """See `Tracker.pass_on`. A task in another pod has other files."""
        if not isinstance(getattr(run, "url", None), str):
            return None
        return {"id": run.id, "name": run.name, "project": run.project, "server_url": run.url}

    def examine(self) -> Examination:
        """See `Tracker.examine`."""
        from flyteplugins_tracking.trackers.trackio.diagnose import examine

        return examine()

    def open(self, request: RunRequest) -> Handle:
        """See `Tracker.open`."""
        from flyteplugins_tracking.trackers.journal import open_or_keep
        from flyteplugins_tracking.trackers.trackio.open import open_run

        return open_or_keep(request, self, lambda: open_run(request, self))


TRACKER = TrackioTracker()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=TRACKER.come)  # Elastic forks workers anew for each attempt

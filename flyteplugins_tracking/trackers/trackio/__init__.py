"""Trackio: runs in local files, or on a self-hosted server.

Trackio finds a run by an id that we choose, so no rank has to search for the run. The name is for people only. Trackio
has no status of runs: the run's config has it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from flyteplugins_tracking._config.config import TrackingConfig
from flyteplugins_tracking._rank.plan import Page
from flyteplugins_tracking._util.fork import after_fork_in_child
from flyteplugins_tracking.errors import ConfigError
from flyteplugins_tracking.trackers.base import Feature, Handle, RunRequest, Tracker
from flyteplugins_tracking.trackers.diagnostics import Diagnosis
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
# Arguments that are refused with any value, and those that are refused with all values but one.
_REFUSED = dict.fromkeys(("space_id", "bucket_id", "dataset_id", "private"), SPACE)
_ONLY = {
    "embed": (False, "a training starts no dashboard: run `trackio show`"),
    "resume": ("allow", "a run is resumed if its id exists, and another id= is another run"),
}
# Trackio ignores this argument. With W&B's settings in it, ignoring would hide a mistake.
_UNUSED = "settings"


class TrackioTracker(Tracker):
    """Opens Trackio runs.

    Attributes:
        started_at: When this attempt may have begun to log, in seconds of `time.time`: when this module was imported,
            when the process was forked, or when the last run ended. Older rows are an earlier attempt's. Newer ones may
            be those of other ranks.
    """

    name = "trackio"
    title = "Trackio"
    package = "trackio"
    distribution = '"flyteplugins-tracking[trackio]"'
    arguments = INIT_ARGUMENTS - {_UNUSED}
    unsupported: Mapping[Feature, str] = MappingProxyType(
        {
            "sweeps": "it has none",
            "config file": "trackio.init reads none",
            "download_logs": "the files of its runs are those of the whole project",
        }
    )

    def __init__(self) -> None:
        self.reset_start()

    def reset_start(self) -> None:
        """Count rows from now on as rows of this attempt."""
        self.started_at = time.time()

    def check(self, config: TrackingConfig) -> None:
        for name, value in config.options.items():
            only_value, reason = _ONLY.get(name, (None, _REFUSED.get(name)))
            if reason is not None and value is not None and value != only_value:
                raise ConfigError(f"Trackio does not support {name}={value!r}: {reason}")
        check_server(config.options.get("server_url"))
        check_project(config.project)
        if config.id is not None and "," in config.id:
            raise ConfigError(
                f"id={config.id!r} must not contain a comma: it would end the id in the address of Trackio's page"
            )
        for key in config.config if isinstance(config.config, Mapping) else ():
            if key.startswith("_") or key in (STATUS, EXIT_CODE):
                use = "by Trackio itself" if key.startswith("_") else "for the status of the run"
                raise ConfigError(f"config= has the key {key!r}, which is used {use}: choose another key")

    def page(self, config: TrackingConfig, page: Page | None) -> str | None:
        url = config.options.get("server_url") or os.environ.get("TRACKIO_SERVER_URL")
        if not url:
            return None
        return page_address(without_token(url)[0], config.project, page.id if page and page.kind == "run" else None)

    def export_run(self, run: Any) -> Mapping[str, Any] | None:
        if not isinstance(getattr(run, "url", None), str):
            return None  # a task in another pod has other files
        return {"id": run.id, "name": run.name, "project": run.project, "server_url": run.url}

    def diagnose(self) -> Diagnosis:
        from flyteplugins_tracking.trackers.trackio.diagnose import diagnose

        return diagnose()

    def open(self, request: RunRequest) -> Handle:
        from flyteplugins_tracking.trackers.journal.local import open_or_keep
        from flyteplugins_tracking.trackers.trackio.open import open_run

        return open_or_keep(request, self, lambda: open_run(request, self))


TRACKER = TrackioTracker()

after_fork_in_child(TRACKER.reset_start)  # Elastic forks new workers for each attempt

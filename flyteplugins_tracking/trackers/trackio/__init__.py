"""Trackio: runs in local files, or on a self-hosted server.

Trackio finds a run by an id that we choose, so no rank has to search for the run. The name is for people only. Trackio
has no status of runs: the run's config has it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from flyteplugins_tracking._rank.info import DistributedInfo
from flyteplugins_tracking._rank.plan import Page
from flyteplugins_tracking._util.text import has_credentials, without_credentials
from flyteplugins_tracking.errors import ConfigError
from flyteplugins_tracking.trackers.base import Feature, Handle, RunRequest, Tracker
from flyteplugins_tracking.trackers.config import TrackingConfig
from flyteplugins_tracking.trackers.diagnostics import Diagnosis, Diagnostic, check_directory, find_key, server
from flyteplugins_tracking.trackers.idle import keep_idle

# The keys of the run's config that hold its status. The user's config must not have them.
STATUS, EXIT_CODE = "status", "exit_code"
SPACE = (
    "runs cannot be logged to a Hugging Face Space: several ranks would create it together, and rows would wait until "
    "it is built. Log to files, and publish them: trackio sync --project ... --space-id ..."
)
# Arguments that are refused with any value, and those that are refused with all values but one.
_REFUSED = dict.fromkeys(("space_id", "bucket_id", "dataset_id", "private"), SPACE)
_ONLY = {
    "embed": (False, "a training job starts no dashboard: run `trackio show`"),
    "resume": ("allow", "a run is resumed if its id exists, and another id= is another run"),
}
# The parameters of trackio.init that the decorator does not take by name, without `settings`, which Trackio ignores:
# with W&B's settings in it, ignoring would hide a mistake. A test compares.
INIT_ARGUMENTS = frozenset(
    {
        *(*_REFUSED, *_ONLY, "server_url", "webhook_url", "webhook_min_level"),
        *("auto_log_cpu", "cpu_log_interval", "auto_log_gpu", "gpu_log_interval"),
    }
)


class TrackioTracker(Tracker):
    """Opens Trackio runs."""

    name = "trackio"
    title = "Trackio"
    package = "trackio"
    distribution = '"flyteplugins-tracking[trackio]"'
    arguments = INIT_ARGUMENTS
    unsupported: Mapping[Feature, str] = MappingProxyType(
        {
            "sweeps": "it has none",
            "config file": "trackio.init reads none",
            "download_logs": "the files of its runs are those of the whole project",
        }
    )

    def check(self, config: TrackingConfig) -> None:
        for name, value in config.options.items():
            only_value, reason = _ONLY.get(name, (None, _REFUSED.get(name)))
            if reason is not None and value is not None and value != only_value:
                raise ConfigError(f"Trackio does not support {name}={value!r}: {reason}")
        for key in config.config if isinstance(config.config, Mapping) else ():
            if key.startswith("_"):
                raise ConfigError(
                    f"config= has the key {key!r}, and Trackio itself uses those that begin with _: rename it"
                )
        url = config.options.get("server_url")
        if url is not None:
            check_address(url)
            if "write_token" in url or has_credentials(url):
                raise ConfigError(
                    "server_url= holds a token, which would be pickled with the task: pass secret=..., or set "
                    "TRACKIO_WRITE_TOKEN or TRACKIO_SERVER_URL where the task runs"
                )

    def page(self, config: TrackingConfig, page: Page | None) -> str | None:
        url = config.options.get("server_url") or os.environ.get("TRACKIO_SERVER_URL")
        if not url:
            return None
        return page_address(without_token(url)[0], config.project, page.id if page and page.kind == "run" else None)

    def export_run(self, run: Any) -> Mapping[str, Any] | None:
        if not isinstance(getattr(run, "url", None), str):
            return None  # a task in another pod has other files
        return {"id": run.id, "name": run.name, "project": run.project, "server_url": run.url}

    def on_inactive_rank(self, config: TrackingConfig, info: DistributedInfo | None) -> Callable[[], object]:
        return keep_idle(self.name, config, info)

    def diagnose(self) -> Diagnosis:
        url, folder = os.environ.get("TRACKIO_SERVER_URL"), default_directory()
        if not url:
            text, fix = f"Trackio keeps runs in {folder}", "export TRACKIO_DIR=/a/directory"
            is_chosen = any(name.startswith("TRACKIO_") for name in os.environ)
            return Diagnosis(folder, None, is_chosen, None, tuple(check_directory(folder, "error", text, fix)))
        address, name = without_credentials(url), "TRACKIO_WRITE_TOKEN"
        key = find_key(name, elsewhere={"TRACKIO_SERVER_URL": without_token(url)[1]})
        text = f"Trackio: {address} wants a write token, and {name} is not set"
        fix = f"export {name}=..., or secret= of tracking_init; `trackio show` prints it"
        return Diagnosis(
            place=address,
            credentials=key,
            is_chosen=True,
            reach=server("a Trackio", f"{address}/version", '200 .*"api_version"'),
            diagnostics=() if key else (Diagnostic("error", text, fix),),
        )

    def open(self, request: RunRequest) -> Handle:
        from flyteplugins_tracking.trackers.kept import open_or_keep
        from flyteplugins_tracking.trackers.trackio.open import open_run

        self.check(request.config)  # a script's own arguments, under `run`
        return open_or_keep(request, self, lambda: open_run(request, self))


def default_directory() -> str:
    """Return the directory of all projects in this environment."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")
    home = os.environ.get("HF_HOME") or os.path.join(cache, "huggingface")
    return os.path.expanduser(os.environ.get("TRACKIO_DIR") or os.path.join(home, "trackio"))


def page_address(address: str, project: str | None, run_id: str | None) -> str:
    """Return the dashboard's address for a project or a run. https://huggingface.co/docs/trackio has its parameters."""
    if project is None:
        return address
    query = {"project": project, **({} if run_id is None else {"run_ids": run_id})}
    return f"{address}/?{urlencode(query, safe='{}', quote_via=quote)}"


def without_token(url: str) -> tuple[str, str | None]:
    """Split an address into the part that may be shown, and the write token in its query."""
    return without_credentials(url), dict(parse_qsl(urlsplit(url.strip()).query)).get("write_token")


def check_address(url: object) -> None:
    """Refuse an address that is not a server's. The error does not show it: it may hold a token.

    Raises:
        ConfigError: The address cannot be used.
    """
    if not isinstance(url, str) or not url.startswith(("https://", "http://")) or not urlsplit(url).netloc:
        raise ConfigError(
            "server_url= or TRACKIO_SERVER_URL must be an address that begins with https:// or http://, as in "
            "server_url='https://trackio.example.com'"
        )


TRACKER = TrackioTracker()

"""The addresses of MLflow's pages."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from urllib.parse import quote

from flyteplugins_tracking._rank.plan import Page
from flyteplugins_tracking._util.text import without_credentials
from flyteplugins_tracking.trackers.base import link_types
from flyteplugins_tracking.trackers.config import TrackingConfig

# The tags by which runs are found.
ID_TAG = "flyteplugins_tracking.run_id"
GROUP_TAG = "flyteplugins_tracking.group"


def run_page(config: TrackingConfig, uri: str | None, experiment_id: str, run_id: str) -> str | None:
    """Return the page of a run by the server's id; None if the address of the UI is not known."""
    host = host_of(config, uri)
    return None if host is None else f"{host}/#/experiments/{experiment_id}/runs/{run_id}"


def page(config: TrackingConfig, page: Page | None) -> str | None:
    """Return the address of a run or a group: the experiment's list of runs, filtered by the tag.

    The server makes the ids of runs, so a run's own page is not known before the run exists.
    """
    host, experiment_id = host_of(config), _experiment_id(config)
    if host is None or experiment_id is None:
        return host
    address = f"{host}/#/experiments/{_quoted(experiment_id)}/runs"
    if page is None:
        return address
    is_group = page.kind == "group"
    tag, value = (GROUP_TAG, config.group or page.id) if is_group else (ID_TAG, page.id)
    return f"{address}?searchFilter={_quoted(f'tags.`{tag}` = ')}{_quoted(f'{chr(39)}{value}{chr(39)}')}"


def link(config: TrackingConfig, pages: Sequence[Page] | None) -> Mapping[str, str]:
    """Return the values for flytekit's task template, as `Tracker.link` describes them."""
    host = host_of(config)
    if host is None:
        return {}
    types = list(dict.fromkeys(_link_types(config, pages)))
    of_known_group = any(kind.startswith("tracking-mlflow-group-id") for kind in types)
    values = {
        "host": host,
        "experiment_id": _experiment_id(config),
        "id": config.id,
        "group": config.group or config.id if of_known_group else None,
    }
    return {
        "link_type": ",".join(types),
        **{f"mlflow_{name}": str(value) for name, value in values.items() if value is not None},
    }


def host_of(config: TrackingConfig, uri: str | None = None) -> str | None:
    """Return the address of the web pages: `link_host=`, or the tracking server."""
    server = uri or config.options.get("tracking_uri") or os.environ.get("MLFLOW_TRACKING_URI") or ""
    address = str(config.options.get("link_host") or server).rstrip("/")
    return without_credentials(address) if address.startswith(("https://", "http://")) else None


def _link_types(config: TrackingConfig, pages: Sequence[Page] | None) -> Iterator[str]:
    """Yield the names of the backend's link templates: for a run, a group, the experiment or the host."""
    if _experiment_id(config) is None:
        yield "tracking-mlflow-host"
    elif pages is None:
        yield "tracking-mlflow-experiment"
    else:
        yield from link_types("mlflow", config, pages)


def _experiment_id(config: TrackingConfig) -> str | None:
    """Return the experiment's id if it is known. The UI has no pages by name."""
    options = config.options
    if options.get("experiment_id") is not None:
        return str(options["experiment_id"])
    is_named = options.get("experiment_name") or config.project or os.environ.get("MLFLOW_EXPERIMENT_NAME")
    return None if is_named else os.environ.get("MLFLOW_EXPERIMENT_ID")


def _quoted(text: str) -> str:
    """Quote a text for an address. Braces stay: Flyte replaces templates in them."""
    return quote(text, safe="{}")

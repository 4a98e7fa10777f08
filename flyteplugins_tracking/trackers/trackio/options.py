"""Trackio's names: of keys, of projects, of its directory, and the addresses of servers and pages."""

from __future__ import annotations

import os
from urllib.parse import parse_qsl, quote, urlencode, urlsplit, urlunsplit

from flyteplugins_tracking.errors import ConfigError

# The keys of the run's config that hold its status. The user's config must not have them.
STATUS, EXIT_CODE = "status", "exit_code"
SPACE = (
    "runs cannot be logged to a Hugging Face Space: several ranks would create it at once, and rows would wait until "
    "it is built. Log to files, and publish them: trackio sync --project ... --space-id ..."
)
# https://github.com/gradio-app/trackio, SQLiteStorage.validate_project_name. A test compares.
_RESERVED_PREFIX = "registry-"
_RESERVED_SUFFIXES = (
    "_system",
    "_configs",
    "_traces",
    "_artifacts",
    "_artifact_versions",
    "_artifact_aliases",
    "_run_artifact_links",
    "_external_run_artifact_links",
)


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
    parts = urlsplit(url.strip())
    query = dict(parse_qsl(parts.query))
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path.rstrip("/"), "", "")), query.get("write_token")


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


def check_server(url: object) -> None:
    """Refuse a `server_url=` that is not an address, or holds a token.

    Raises:
        ConfigError: The address cannot be used.
    """
    if url is None:
        return
    check_address(url)
    if "write_token" in str(url) or "@" in urlsplit(str(url)).netloc:
        raise ConfigError(
            "server_url= holds a token, which would be pickled with the task: pass secret=..., or set "
            "TRACKIO_WRITE_TOKEN or TRACKIO_SERVER_URL where the task runs"
        )


def check_project(project: str | None) -> None:
    """Refuse a project whose name Trackio needs for its own files.

    Raises:
        ConfigError: Trackio needs the name.
    """
    if project is None:
        return
    kept_as = "".join(c for c in project if c.isalnum() or c in "-_")
    if kept_as.startswith(_RESERVED_PREFIX) or any(kept_as.endswith(s) and kept_as != s for s in _RESERVED_SUFFIXES):
        raise ConfigError(
            f"project={project!r} is a name that Trackio needs for files of another project: choose another name"
        )

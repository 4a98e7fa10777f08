"""Trackio's names: of keys, of projects, and the addresses of servers and pages."""

from __future__ import annotations

from urllib.parse import parse_qsl, quote, urlencode, urlsplit, urlunsplit

from flyteplugins_tracking.errors import ConfigError

# What the status is told by: no key of the user's config.
STATUS, EXIT_CODE = "status", "exit_code"
SPACE = (
    "a Hugging Face Space is not logged to: several ranks would make it at once, and rows wait for it to be built. Log "
    "to files, and publish them: trackio sync --project ... --space-id ..."
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


def page_address(address: str, project: str | None, run_id: str | None) -> str:
    """https://huggingface.co/docs/trackio: what the dashboard reads of its address."""
    if project is None:
        return address
    query = {"project": project, **({} if run_id is None else {"run_ids": run_id})}
    return f"{address}/?{urlencode(query, safe='{}', quote_via=quote)}"


def without_token(url: str) -> tuple[str, str | None]:
    """The address that may be shown, and what Trackio puts behind it as its write token."""
    parts = urlsplit(url.strip())
    query = dict(parse_qsl(parts.query))
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path.rstrip("/"), "", "")), query.get("write_token")


def check_address(url: object) -> None:
    """Refuse what is no address of a server. Its text is not shown: it may hold a token.

    Raises:
        ConfigError: It cannot be used.
    """
    if not isinstance(url, str) or not url.startswith(("https://", "http://")) or not urlsplit(url).netloc:
        raise ConfigError(
            "server_url= or TRACKIO_SERVER_URL is no address: write it as server_url='https://trackio.example.com'"
        )


def check_server(url: object) -> None:
    """Refuse a `server_url=` that is no address, or holds a token.

    Raises:
        ConfigError: It cannot be used.
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
        ConfigError: It cannot be used.
    """
    if project is None:
        return
    kept_as = "".join(c for c in project if c.isalnum() or c in "-_")
    if kept_as.startswith(_RESERVED_PREFIX) or any(kept_as.endswith(s) and kept_as != s for s in _RESERVED_SUFFIXES):
        raise ConfigError(f"project={project!r}: Trackio needs this name for its own files of another project")

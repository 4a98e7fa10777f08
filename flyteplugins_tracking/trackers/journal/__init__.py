"""Journals: what a writer has logged and its service may not have received, on the local disk.

In the room: the journal itself (`files`), runs that are logged to files while their service cannot be used (`local`),
what earlier attempts have left (`earlier`), logging lines anew (`relog`), and sending what a directory has (`replay`).
A journal has one contract: its writer adds each record once the vendor's client has it, and acknowledges what the
service has. Who reads it later gets the pending records: the next attempt of the job, or
`flyteplugins-tracking send`.
It may import `base`, `client` and `registry` of `trackers`. A tracker's own way to send is in the tracker's folder.
"""

import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from flyteplugins_tracking._util.text import without_credentials
from flyteplugins_tracking.errors import TrackerUnavailableError

# The arguments that are addresses of servers.
_ADDRESSES = ("host", "tracking_uri", "registry_uri", "server_url", "url_app", "url_api", "url_ingest", "url_py")


def how_to_send(directory: str, arguments: Mapping[str, Any] | None = None) -> str:
    """Return the command that sends what a directory has and its service has not.

    Args:
        directory: The directory.
        arguments: The run's arguments, if they may name servers: the command says that these may get a key.
    """
    servers = "".join(f"--server {shlex.quote(without_credentials(one))} " for one in addresses_in(arguments or {}))
    return f"flyteplugins-tracking send {servers}{directory}"


def what_is_kept(count: int, lost: int) -> str:
    """Return the sentence on records that a service has not taken: how many of them the files have.

    Args:
        count: How many records the service has not taken.
        lost: How many of them are in no file.
    """
    if not lost:
        return "They are kept in files."
    return f"{count - lost} of them are kept in files, and {lost} are lost: the files could not be written."


def addresses_in(arguments: Mapping[str, Any]) -> list[str]:
    """Return the servers that a run's arguments name."""
    found = map(arguments.get, _ADDRESSES)
    return [address for address in found if isinstance(address, str) and "://" in address]


def require_server(directory: Path, address: str, allowed: Iterable[str]) -> None:
    """Refuse to send the key of this process to an address that only the data names.

    Args:
        directory: The directory with the data.
        address: The server that it names.
        allowed: The servers that this process is set up for, or was told.

    Raises:
        TrackerUnavailableError: The address is none of them.
    """
    if _origin(address) not in map(_origin, allowed):
        shown = without_credentials(address)
        raise TrackerUnavailableError(
            f"{directory} is of the server {shown}, for which this process is not set up: it gets no key of this "
            f"process. If the server is right: {how_to_send(str(directory), {'host': shown})}"
        )


def _origin(address: str) -> tuple[str, str | None, int | None]:
    try:
        parts = urlsplit(address)
        return parts.scheme, parts.hostname, parts.port
    except ValueError:  # no address
        return "", address, None
